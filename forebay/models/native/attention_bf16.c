/* Attention of activations that are bfloat16, where those are multiplied as they are. */
#include "engine.h"
#include "pages.h"

#if MULTIPLIES_BF16
#define N(name) name##_bf16
#define IS_PAIR
#define A bf16
#define U uint32_t
#define UV u32v
#define PER 2
#define OWN_FORMAT KV_BF16
#define STORE_A store_bf16
#define SET_A set_bf16
#include "tile.h"

#include "attention.h"
#endif
