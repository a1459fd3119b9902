/* Attention of activations that are float32. */
#include "engine.h"
#include "pages.h"

#define N(name) name##_f32
#define A float
#define U float
#define UV f32v
#define PER 1
#define OWN_FORMAT KV_F32
#define STORE_A store_f32
#define SET_A set_f32
#include "tile.h"

#include "attention.h"
