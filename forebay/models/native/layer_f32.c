/* Layers whose weights are float32. */
#include "engine.h"
#include "pages.h"

#define N(name) name##_f32
#define W float
#define A float
#define U float
#define UV f32v
#define PER 1
#define LOAD_W load_f32
#define STORE_W store_f32
#define LOAD_A load_f32
#define STORE_A store_f32
#define ROUND_A rounded_f32
#define NUMBER_A number_f32
#define ATTENTION attention_f32
#include "tile.h"

#include "layer.h"
