/* What route, round and plan share: the scratch in which one stage leaves results to the next, and the scores
 * and weights of one token.
 *
 * Tokens are cut into fixed panels of 256. The selection has one bit for every (token, expert): four 64-bit
 * words for each panel and expert. So panels do not share words, a repeated id sets the same bit again, and
 * the set bits of an expert, in order, are its tokens in ascending order. */
#ifndef MOE_CPU_ROUTING_H
#define MOE_CPU_ROUTING_H

#include "cpu.h"
#include "routing_decisions.h"

enum { MOE_TOKEN_PANEL = 256, MOE_PANEL_WORDS = MOE_TOKEN_PANEL / 64 };

/* P is the number of panels. Parts that a layer does not need are NULL. */
typedef struct moe_routing_scratch {
    uint64_t *mask;   /* (P, E, 4): bit t % 64 of word t % 256 / 64 is set when token t has expert e */
    uint32_t *keys;   /* (E, key_stride): moe_score_key of every token; rounding */
    float *token_max; /* (T) of the logits, and ... */
    float *token_sum; /* (T) ... the sum of the softmax's terms; rounding by softmax scores */
    double *panel_probability; /* (P, E) sums of p; losses */
    double *panel_z;           /* (P) sums of logsumexp^2; losses */
    int32_t *panel_counts;     /* (P, E) */
    int32_t *panel_rows;       /* (P) */
    int32_t *targets;          /* (E) counts that rounding aims at, then work space of the order */
    float *router_weight;      /* (E, d) f32; bf16 router */
    float *thread_x;           /* (threads, 256, d) f32; bf16 router */
    float *thread_logits;      /* (threads, 256, E) f32; bf16 logits */
    int64_t panels;
    int64_t key_stride;
    int64_t bytes;
} moe_routing_scratch;

/* The parts at `scratch`; with NULL only the sizes. */
moe_routing_scratch moe_routing_scratch_at(const smoe_context *context, const moe_problem *problem,
                                           void *scratch);

static inline uint64_t *moe_mask_words(const moe_routing_scratch *s, int64_t panel, int64_t expert,
                                       int64_t experts)
{
    return s->mask + (panel * experts + expert) * MOE_PANEL_WORDS;
}

/* Is token t in the losses and in topk_counts? */
static inline int moe_token_counts(const uint8_t *token_mask, int64_t t)
{
    return !token_mask || token_mask[t];
}

/* How many tokens are. Each of them has K pairs in topk_counts. */
static inline int64_t moe_counted_tokens(const smoe_layer *layer, const int32_t *topk_counts)
{
    int64_t pairs = 0;
    for (int64_t e = 0; e < layer->experts; e++) pairs += topk_counts[e];
    return pairs / layer->topk;
}

/* Clears the lowest set bit and returns its index. */
static inline int moe_next_bit(uint64_t *word)
{
    const int bit = __builtin_ctzll(*word);
    *word &= *word - 1;
    return bit;
}

/* From one token's logits (E): their max (without NaNs; -inf if there is no number), the terms exp(logit -
 * max) (E), and the sum of the terms. */
void moe_softmax_of(const float *logits, int64_t experts, float *terms, float *max, float *sum);

/* Weights of the K kept experts before the route scale, from logits (E); max and sum are read for
 * SOFTMAX_TOPK. If a kept logit is NaN, all weights are NaN. Returns the sum by which the weights were
 * divided if they are renormalised, else 1. If this sum is 0 (every sigmoid is below 1e-38), the weights are
 * 0. */
float moe_kept_weights(const smoe_layer *layer, const float *logits, float max, float sum, const int32_t *ids,
                       float *weights);

/* ---- plan.c: the parts of a plan that follow from its counts (E) ---- */

/* offsets and block_offsets */
void moe_place_experts(const moe_plan_arrays *plan, int64_t experts);

/* order: experts by descending count, equal counts by ascending id; work (E) */
void moe_order_experts(const moe_plan_arrays *plan, int32_t *work, int64_t experts);

/* token -1 and weight 0 in pad rows and behind the last row */
void moe_write_pads(const moe_plan_arrays *plan, int64_t experts, int64_t padded_rows);

#endif
