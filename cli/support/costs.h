/* The computed costs of a problem: model FLOPs, compulsory bytes, arithmetic intensity, and the bytes that
 * ScatterMoE would keep. T tokens, d hidden size, n intermediate size, E experts, K experts of a token; R = T
 * K; w columns of H (2n with a gate, n without); e bytes an element. */
#ifndef CLI_COSTS_H
#define CLI_COSTS_H

#include "cli/support/shapes.h"

#include <smoe.h>
#include <stdbool.h>

int64_t dtype_bytes(smoe_type dtype);

/* up 2Rwd, down 2Rnd, dh 2Rnd, dw2 2Rnd, dx_rows 2Rwd, dw1 2Rwd, router_gemm 2TEd, router_bwd 2 x 2TEd;
 * NaN for stages without matrix work. */
double stage_flops(const smoe_layer *layer, smoe_stage stage);

/* Bytes of every tensor that the stage must read or write, each counted once. All weights count. For the
 * GEMMs X and dO count with R gathered rows. */
double stage_bytes(const smoe_layer *layer, smoe_stage stage);

/* 6 T K n d forward and 12 T K n d backward with a gate; 4 and 8 without. */
double flops_forward(const smoe_layer *layer);
double flops_backward(const smoe_layer *layer);

/* FLOPs for each element moved: 3 / (2/d + 2/n + 3/Te) with Te = T K / E (SonicMoE, section 3). */
double arithmetic_intensity(const smoe_layer *layer);

/* Bytes that ScatterMoE keeps from forward to backward for such a layer: X, H, A and Y, and the id and weight
 * (4 bytes each) of every row: e (T d + R w + R n + R d) + 8 R. */
double scatter_bytes(const smoe_layer *layer);

/* The memory that a pass needs at once for `saved`, scratch, logits and outputs (see docs/benchmarks.md). */
typedef struct pass_bytes {
    double forward;  // saved, scratch, O
    double backward; // saved, scratch, dX, dW1, dW2
    double layer; // the larger of the forward, and of the backward with O: gradients and the scratch of the
                  // backward need not be there while the forward runs
} pass_bytes;

/* saved, scratch_forward, scratch_backward: predicted or measured. with_router: the logits (T, E), and dWr
 * among the gradients; without it dlogits (T, E), or for given top-K the weights' gradient (T, K). */
pass_bytes pass_peaks(const smoe_layer *layer, bool with_router, double saved, double scratch_forward,
                      double scratch_backward);

#endif
