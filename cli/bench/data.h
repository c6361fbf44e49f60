/* Seeded data of a benchmark, made on the host a part at a time and sent to the device: normal numbers, and
 * the routing of tokens to experts with inputs that make the library's own router choose it. */
#ifndef CLI_BENCH_DATA_H
#define CLI_BENCH_DATA_H

#include "cli/support/problem.h"
#include "harness/buffer.h"

/* Fills with N(0, scale^2) rounded to the type (F32, BF16 or F16). The same numbers whatever the threads. */
bool fill_normal(const buffer *to, smoe_type type, int64_t count, double scale, uint64_t seed);

/* The same from one pattern of TILED_VALUES such numbers, which is copied again and again on the device, each
 * time from another start. It serves tensors of billions of values, of which only one thing is required: no
 * two experts have the same weights. */
enum { TILED_VALUES = 1 << 22 };
bool fill_tiled(const buffer *to, smoe_type type, int64_t count, double scale, uint64_t seed);

typedef bool fill_function(const buffer *to, smoe_type type, int64_t count, double scale, uint64_t seed);

/* ids (T, K): distinct experts of every token.
 *   uniform  every expert gets T K / E tokens (within one)
 *   random   K distinct experts at random
 *   skewed   K distinct experts drawn by Zipf weights 1 / rank, ranks shuffled over the experts */
bool make_routing(routing_kind kind, int64_t tokens, int64_t experts, int64_t topk, uint64_t seed,
                  int32_t *ids);

/* X (T, d), normal, so that with Wr of fill_router the top K of X Wr^T are the given ids: the E values of a
 * token that the router reads are put in another order, nothing else. Needs E <= d. */
bool fill_steered(const buffer *x, const smoe_layer *layer, const int32_t *ids, uint64_t seed);

/* Wr (E, d): row e has one 1, in the column that carries expert e's logit. */
bool fill_router(const buffer *router_weight, const smoe_layer *layer);

/* logits (T, E), normal, whose top K are the given ids. */
bool fill_logits(const buffer *logits, const smoe_layer *layer, const int32_t *ids, uint64_t seed);

/* weights (T, K) f32, positive, summing to one over a token. */
bool fill_weights(const buffer *weights, const smoe_layer *layer, uint64_t seed);

#endif
