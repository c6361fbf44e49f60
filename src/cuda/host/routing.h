/* Routing on the device: what route writes to scratch for round and plan, and the launch functions of the
 * kernels. Each launch function enqueues on the stream and returns the runtime's status. */
#ifndef MOE_CUDA_ROUTING_H
#define MOE_CUDA_ROUTING_H

#include "backend.h"
#include "host/launch.h"
#include "routing_decisions.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MOE_ROUTE_PANEL = 256, /* tokens of a panel of scores and losses; the mask is padded to whole panels */
    MOE_ROUTE_PANEL_WORDS = MOE_ROUTE_PANEL / 32
};

/* The softmax of a token: p[e] = term(l[e] - max) / sum. */
typedef struct moe_token_softmax {
    float max, sum;
} moe_token_softmax;

/* The arguments of the kernels: device pointers, NULL if the layer does not need them. There are P panels,
 * and W = 8 P words of 32 tokens. */
typedef struct moe_cuda_routing {
    smoe_layer layer;
    /* from the caller */
    const void *logits;          /* (T, E) logits_type */
    const float *selection_bias; /* (E) or NULL */
    float *losses;               /* (2) or NULL */
    const uint8_t *token_mask;   /* (T) or NULL: losses and topk_counts count all tokens */
    uint64_t step;
    /* the plan's */
    int32_t *topk_ids;    /* (T, K) */
    float *topk_weights;  /* (T, K) */
    int32_t *topk_counts; /* (E) */
    int32_t *counts;      /* (E) */
    /* scratch */
    uint32_t *mask;      /* (E, W): bit t % 32 of word t / 32 is set when token t has expert e; rounding,
                            losses or token_mask */
    int32_t *all_counts; /* (E) counts of all tokens: topk_counts, or with token_mask other memory;
                            rounding */
    int32_t *word_rows;  /* (E, W): padded row of the word's first token; rounding */
    void *keys;          /* (E, 256 P) moe_score_key, uint16 (its high half) with bf16 logits,
                            else uint32; rounding */
    moe_token_softmax *softmax; /* (T); rounding by softmax scores, or losses */
    double *panel_probability;  /* (P, E) sums of p; losses */
    double *panel_z;            /* (P) sums of logsumexp^2; losses */
    double *expert_balance;     /* (E) count[e] sum_t p[t,e]; losses */
    void *plan_work;            /* work space of the plan from top-K; without rounding */
    uint16_t *segment_counts;   /* at its start: counts (segments, E), if the top-K kernel makes them */
    int32_t plan_segment;       /* tokens of each of its segments */
    int64_t panels, words;
    uint64_t bytes;
} moe_cuda_routing;

static inline int moe_routing_rounded(const moe_cuda_routing *r)
{
    return r->layer.rounding != SMOE_ROUNDING_NONE;
}

/* Does a later stage read every token's softmax? */
static inline int moe_routing_needs_softmax(const moe_cuda_routing *r)
{
    return r->losses || (moe_routing_rounded(r) && !moe_score_has_curve(r->layer.score));
}

/* To be called once for each device: raises the limits of shared memory. */
cudaError_t moe_cuda_routing_init(const moe_device *device);
cudaError_t moe_cuda_topk_fast_init(const moe_device *device);
cudaError_t moe_cuda_topk_general_init(const moe_device *device);
cudaError_t moe_cuda_rounding_init(const moe_device *device);
cudaError_t moe_cuda_plan_rounded_init(const moe_device *device);
cudaError_t moe_cuda_router_gemm_init(const moe_device *device);

/* logits = x router_weight^T + bias; x (T, d), router_weight (E, d), bias (E) or NULL, all of dtype. */
cudaError_t moe_cuda_router_gemm(const moe_launch *on, const smoe_layer *layer, const void *x,
                                 const void *router_weight, const void *bias, void *logits);

/* Writes topk_ids and topk_weights, and mask and softmax if they are needed. The fast kernel also writes
 * segment_counts and, by softmax scores, keys. */
cudaError_t moe_cuda_topk(const moe_launch *on, const moe_cuda_routing *routing);

/* The general kernel can run every layer. The fast kernel is for E a multiple of 8 up to 512 and K <= 16,
 * with up to 16 groups if E >= 128. Returns the number of tokens of a CTA of the fast kernel, 0 for all other
 * layers. */
int32_t moe_cuda_topk_segment(const moe_device *device, const smoe_layer *layer);

static inline int moe_cuda_topk_writes_keys(const moe_device *device, const smoe_layer *layer)
{
    return moe_cuda_topk_segment(device, layer) && !moe_score_has_curve(layer->score);
}

cudaError_t moe_cuda_topk_general(const moe_launch *on, const moe_cuda_routing *routing);

/* Writes keys if they are needed, and the panels' sums if there are losses. */
cudaError_t moe_cuda_scores(const moe_launch *on, const moe_cuda_routing *routing);

/* Writes topk_counts and all_counts from the mask, for calls with losses, balance rounding or token_mask. */
cudaError_t moe_cuda_count(const moe_launch *on, const moe_cuda_routing *routing);

/* Writes losses, from the sums that scores has written. */
cudaError_t moe_cuda_losses(const moe_launch *on, const moe_cuda_routing *routing);

/* Changes the mask so that it has the rule's counts. Writes these to `counts`, and all_counts. */
cudaError_t moe_cuda_rounding(const moe_launch *on, const moe_cuda_routing *routing);

/* Makes the plan from the mask. Of `plan` it reads the outputs, tokens, experts, padded_rows and lists. */
cudaError_t moe_cuda_plan_rounded(const moe_launch *on, const moe_cuda_routing *routing,
                                  const moe_cuda_plan *plan);

cudaError_t moe_cuda_selection_bias(const moe_launch *on, const int32_t *counts, float *bias, int64_t experts,
                                    float gamma);

/* ---- routing.c: functions that the backend calls ---- */

/* Where the parts of the scratch that route, round and plan share begin. UINT64_MAX: the layer has none. */
typedef struct moe_routing_layout {
    uint64_t mask, all_counts, word_rows, keys, softmax, panel_probability, panel_z, expert_balance,
        plan_work;
    uint64_t bytes;
    int32_t plan_segment;
    int32_t topk_counts_segments; /* the top-K kernel counts the pairs of each segment of the plan */
} moe_routing_layout;

/* Sizes never depend on the call's arguments. */
moe_routing_layout moe_cuda_lay_out_routing(const moe_device *device, const moe_problem *problem);

/* The arguments of all kernels of one call. */
moe_cuda_routing moe_cuda_routing_of(const moe_problem *problem, const moe_routing_layout *layout,
                                     const smoe_forward_args *args, const moe_plan_arrays *plan,
                                     void *scratch);

/* Of the context only its stage callback is used. */
cudaError_t moe_cuda_route(const smoe_context *context, const moe_launch *on, const moe_cuda_routing *routing,
                           const smoe_forward_args *args);
cudaError_t moe_cuda_plan_from_logits(const moe_launch *on, const moe_problem *problem,
                                      const moe_cuda_routing *routing, const moe_plan_arrays *plan,
                                      const moe_cuda_lists *lists);

#ifdef __cplusplus
}
#endif
#endif
