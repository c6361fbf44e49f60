/* See costs.h. */
#include "cli/support/costs.h"

#include "src/activations.h"

#include <math.h>

int64_t dtype_bytes(smoe_type dtype)
{
    return dtype == SMOE_TYPE_F32 ? 4 : 2;
}

/* The sizes of a layer as doubles, under the names of the equations. */
typedef struct sizes {
    double tokens, d, n, experts, rows, w, element;
} sizes;

static sizes sizes_of(const smoe_layer *l)
{
    const double n = (double)l->intermediate;
    return (sizes){.tokens = (double)l->tokens,
                   .d = (double)l->hidden,
                   .n = n,
                   .experts = (double)l->experts,
                   .rows = (double)l->tokens * (double)l->topk,
                   .w = (double)moe_h_width(l),
                   .element = (double)dtype_bytes(l->dtype)};
}

double stage_flops(const smoe_layer *layer, smoe_stage stage)
{
    const sizes s = sizes_of(layer);
    switch (stage) {
    case SMOE_STAGE_UP:
    case SMOE_STAGE_DX_ROWS:
    case SMOE_STAGE_DW1: return 2 * s.rows * s.w * s.d;
    case SMOE_STAGE_DOWN:
    case SMOE_STAGE_DH:
    case SMOE_STAGE_DW2: return 2 * s.rows * s.n * s.d;
    case SMOE_STAGE_ROUTER_GEMM: return 2 * s.tokens * s.experts * s.d;
    case SMOE_STAGE_ROUTER_BWD: return 4 * s.tokens * s.experts * s.d;
    default: return NAN;
    }
}

double stage_bytes(const smoe_layer *layer, smoe_stage stage)
{
    const sizes s = sizes_of(layer);
    const double w1 = s.experts * s.w * s.d, w2 = s.experts * s.n * s.d, router = s.experts * s.d;
    const double f32 = 4, pair = 8;
    const double logits = (double)dtype_bytes(layer->logits_type) * s.tokens * s.experts;
    switch (stage) {
    case SMOE_STAGE_ROUTER_GEMM: return s.element * (s.tokens * s.d + router) + logits;
    case SMOE_STAGE_TOPK: return logits + pair * s.rows;
    case SMOE_STAGE_ROUND: return logits + pair * s.rows;
    case SMOE_STAGE_PLAN:
        return pair * s.rows + (pair + f32) * s.rows; // ids, weights; row token, weight, map
    case SMOE_STAGE_UP: return s.element * (s.rows * s.d + w1 + s.rows * s.w);
    case SMOE_STAGE_DOWN: return s.element * (s.rows * s.w + w2 + s.rows * s.d);
    case SMOE_STAGE_COMBINE:
    case SMOE_STAGE_DX: return s.element * (s.rows * s.d + s.tokens * s.d);
    case SMOE_STAGE_DH: return s.element * (s.rows * s.d + w2 + 2 * s.rows * s.w + s.rows * s.n);
    case SMOE_STAGE_DW2: return s.element * (s.rows * s.d + s.rows * s.n + w2);
    case SMOE_STAGE_DX_ROWS: return s.element * (s.rows * s.w + w1 + s.rows * s.d);
    case SMOE_STAGE_DW1: return s.element * (s.rows * s.w + s.rows * s.d + w1);
    case SMOE_STAGE_ROUTER_BWD: return logits + s.element * (2 * s.tokens * s.d + 2 * router);
    case SMOE_STAGE_DISPATCH: // of layers with ranks, which the tool does not run
    case SMOE_STAGE_COLLECT:
    case SMOE_STAGE_DISPATCH_BWD:
    case SMOE_STAGE_COLLECT_BWD: break;
    }
    return NAN;
}

double flops_forward(const smoe_layer *layer)
{
    return stage_flops(layer, SMOE_STAGE_UP) + stage_flops(layer, SMOE_STAGE_DOWN);
}

double flops_backward(const smoe_layer *layer)
{
    return 2 * flops_forward(layer);
}

double arithmetic_intensity(const smoe_layer *layer)
{
    const sizes s = sizes_of(layer);
    return 3 / (2 / s.d + 2 / s.n + 3 * s.experts / s.rows);
}

double scatter_bytes(const smoe_layer *layer)
{
    const sizes s = sizes_of(layer);
    const double id_and_gate = 8;
    return s.element * (s.tokens * s.d + s.rows * (s.w + s.n + s.d)) + id_and_gate * s.rows;
}

pass_bytes pass_peaks(const smoe_layer *layer, bool with_router, double saved, double scratch_forward,
                      double scratch_backward)
{
    const sizes s = sizes_of(layer);
    const double logits = (double)dtype_bytes(layer->logits_type) * s.tokens * s.experts, f32 = 4;
    const double held = with_router ? logits : 0;
    const double out = s.element * s.tokens * s.d;
    const double routing = with_router                              ? s.element * s.experts * s.d
                           : layer->entry == SMOE_ENTRY_FROM_LOGITS ? logits
                                                                    : f32 * s.rows;
    const double gradients = out + s.element * s.experts * s.d * (s.w + s.n) + routing;
    const double forward = saved + scratch_forward + held + out;
    const double backward = saved + scratch_backward + held + gradients;
    return (pass_bytes){.forward = forward, .backward = backward, .layer = fmax(forward, backward + out)};
}
