/* Which of the GEMM cores multiplies rows by an expert's weights (gemm_*.cuh). */
#ifndef MOE_CUDA_GEMM_CHOICE_H
#define MOE_CUDA_GEMM_CHOICE_H

#include "schedule/scheduler.h"

enum { MOE_PING_PONG_COLUMNS = 192 }; /* of a tile */

typedef enum moe_gemm {
    MOE_GEMM_COOPERATIVE = 0, /* 128 x 256 tiles, any shape, bias */
    MOE_GEMM_PING_PONG = 1,   /* 128 x 192 tiles, the last one may be narrower; warpgroups take turns */
    MOE_GEMM_STATIONARY = 2,  /* 256 columns of weights stay in shared memory; K <= 256 */
} moe_gemm;

/* Relative speed on full tiles times the share of columns that is real if every tile is full; 0: not to be
 * used. k: the GEMM's K, which is n for down and the width of H for dx_rows. columns: of the chunk.
 * - The speeds are measured (docs/log, 21 and 26 November), with the cooperative core as 1.
 * - The last tile of the ping-pong core may be narrower than counted here, so it is at least as fast.
 * - The stationary core multiplies 64, 128 or 256 columns of K, so it cannot run above 256. From 129 to 192
 * the other cores multiply only 192 columns. Its tensor map of the result counts columns in units of 64. */
static inline double moe_gemm_merit(moe_gemm kind, int64_t k, int64_t columns)
{
    const int64_t width = kind == MOE_GEMM_PING_PONG ? MOE_PING_PONG_COLUMNS : 256;
    const double real = (double)columns / (double)(moe_divide_up(columns, width) * width);
    switch (kind) {
    case MOE_GEMM_COOPERATIVE: return real;
    case MOE_GEMM_PING_PONG: return real * (k <= 512 ? 1.06 : k <= 1024 ? 1.05 : 0.99);
    case MOE_GEMM_STATIONARY: break;
    }
    if (columns % 64 != 0) return 0.0;
    return k <= 128 || (k > 192 && k <= 256) ? real * 1.13 : 0.0;
}

/* The core that is expected to be the fastest: for down. */
static inline moe_gemm moe_gemm_choose(int64_t k, int64_t columns, int bias)
{
    moe_gemm best = MOE_GEMM_COOPERATIVE;
    if (bias) return best;
    for (int kind = MOE_GEMM_PING_PONG; kind <= MOE_GEMM_STATIONARY; kind++)
        if (moe_gemm_merit((moe_gemm)kind, k, columns) > moe_gemm_merit(best, k, columns))
            best = (moe_gemm)kind;
    return best;
}

/* For dx_rows. With K = 1024 the ping-pong core makes the backward about 1 % shorter where column tiles are
 * equal (d = 768, 1536) and up to 2 % longer where the last one is smaller (d = 4096). With 2 % less merit it
 * wins only at the former. */
static inline moe_gemm moe_gemm_choose_dx(int64_t k, int64_t columns)
{
    const moe_gemm best = moe_gemm_choose(k, columns, 0);
    if (best != MOE_GEMM_PING_PONG || k <= 512 || k > 1024) return best;
    return 0.98 * moe_gemm_merit(best, k, columns) > moe_gemm_merit(MOE_GEMM_COOPERATIVE, k, columns)
               ? best
               : MOE_GEMM_COOPERATIVE;
}

/* Slices of 64 columns of K for which the weight-stationary core has a kernel: at least `steps`. */
static inline int moe_stationary_slices(int64_t steps)
{
    return steps <= 2 ? (int)steps : 4;
}

#endif
