/* Layers whose weights are bfloat16. */
#include "engine.h"
#include "pages.h"

#define N(name) name##_bf16
#define W bf16
#define LOAD_W load_bf16
#define STORE_W store_bf16
#if MULTIPLIES_BF16
#define IS_PAIR
#define A bf16
#define U uint32_t
#define UV u32v
#define PER 2
#define LOAD_A load_bf16
#define STORE_A store_bf16
#define ROUND_A rounded_bf16
#define NUMBER_A number_bf16
#define ATTENTION attention_bf16
#else
#define IS_WIDENED
#define A float
#define U float
#define UV f32v
#define PER 1
#define LOAD_A load_f32
#define STORE_A store_f32
#define ROUND_A rounded_f32
#define NUMBER_A number_f32
#define ATTENTION attention_f32
#endif
#include "tile.h"

#include "layer.h"
