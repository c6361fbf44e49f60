/* What a generation of GPUs has for fp8, as one table of functions: the kernels that quantise, and the
 * experts' GEMMs in e4m3. src/f8.h has the numerics. Buffers are device memory. Each function enqueues on the
 * stream and returns the runtime's status. */
#ifndef MOE_CUDA_F8_TABLE_H
#define MOE_CUDA_F8_TABLE_H

#include "f8.h"
#include "host/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of X or dO. */
typedef struct moe_f8_rows {
    const void *x;  /* (rows, columns) dtype */
    uint8_t *bytes; /* (rows, columns) */
    float *scale;   /* (rows) */
    int64_t rows, columns;
} moe_f8_rows;

/* moe_f8_weights.work, of an expert: the largest magnitudes of W1 and W2, how many of their tiles have been
 * read, and the call's counter of tiles, which is that of its first expert. Behind it are the largest
 * magnitudes of W1's groups, then of W2's. */
typedef struct moe_f8_work {
    uint32_t amax[2], read[2], turn, unused[3];
} moe_f8_work;
static_assert(sizeof(moe_f8_work) == MOE_F8_WORK_BYTES, "the layout has room for it");

/* The weights of experts first to first + count - 1. */
typedef struct moe_f8_quantized {
    const void *w1, *w2; /* of expert `first`: (count, h_width, hidden), (count, hidden, intermediate) */
    smoe_type type;      /* of w1 and w2: BF16, F16 or F32 */
    moe_f8_weights to;
    int64_t first, count, hidden, intermediate, h_width;
    int interleaved; /* rows of w1 */
} moe_f8_quantized;

/* The expected exponents of the copies for dw (f8.h), before dh. C starts as what is expected. [0]: of dH_w,
 * [1]: of A'_w. */
typedef struct moe_f8_expect {
    const float *x_scale, *do_scale;       /* (T) */
    const int32_t *row_token;              /* (padded_rows) */
    const float *row_weight;               /* (padded_rows) */
    const int32_t *counts, *block_offsets; /* (experts), (experts + 1): the plan's */
    const float *group1, *group2;          /* (experts, groups): moe_f8_weights */
    int32_t *expected[2], *largest[2];     /* out: (experts, groups) */
    int32_t experts, groups;               /* groups: of MOE_F8_DH_FEATURES */
    int32_t degree, of_size;               /* moe_f8_degree, moe_f8_expected_of_size */
} moe_f8_expect;

/* up: x is X8, w1 is W1_8 with gate rows before up rows, a is A8; `interleaved` is the order of b1. Without
 * LoRA. */
typedef struct moe_f8_up {
    moe_up up;
    const float *x_scale; /* (T) */
    const float *w_scale; /* (experts) */
    float *a_scale;       /* out: (rows, ceil(n / 128)) */
} moe_f8_up;

/* down: a is A8, w2 is W2_8. Without LoRA. */
typedef struct moe_f8_down {
    moe_down down;
    const float *a_scale; /* (rows, ceil(n / 128)) */
    const float *w_scale; /* (experts) */
} moe_f8_down;

/* What dh writes for one of dw1 and dw2 in e4m3. */
typedef struct moe_f8_dw_rows {
    uint8_t *rows;            /* out: dH_w or A'_w, in groups of 16 rows (moe_f8_dw_byte) */
    int32_t *exponent;        /* out: w (padded_rows, ceil(n / 256)) */
    int32_t *largest;         /* in: as expected; out: C */
    const int32_t *expected;  /* (experts, ceil(n / 256)) */
    const float *token_scale; /* (T) of X or dO */
} moe_f8_dw_rows;

/* dh: dout is dO8, w2 is W2_8 transposed (experts, intermediate, hidden), dh and a are in dtype. Without
 * LoRA. */
typedef struct moe_f8_dh {
    moe_dh dh;
    const float *do_scale;    /* (T) */
    const float *w_scale;     /* (experts) */
    uint8_t *dh8;             /* out: (padded_rows, halves, intermediate), for dx_rows */
    float *dh_scale;          /* out: (padded_rows, ceil(n / 256)) */
    moe_f8_dw_rows for_dw[2]; /* dH_w, A'_w; rows NULL: dh.dh and dh.a are written instead */
} moe_f8_dh;

/* dx_rows: dh is dH8 with gate columns before up columns, w1 is W1_8 transposed (experts, hidden, halves x
 * intermediate) in that order; row_width is `intermediate`. Without LoRA. */
typedef struct moe_f8_dx_rows {
    moe_dx_rows dx;
    const float *dh_scale; /* (rows, ceil(n / 256)) */
    const float *w_scale;  /* (experts) */
} moe_f8_dx_rows;

/* dw: features is dH_w or A'_w in groups of 16 rows (f8.h), tokens X8 or dO8; row_width is not read. With
 * row_token. */
typedef struct moe_f8_dw {
    moe_dw dw;
    const int32_t *exponent; /* w of every row and group: (rows, ceil(n / 256)) */
    const int32_t *expected; /* moe_f8_expected: (experts, ceil(n / 256)) */
    const int32_t *largest;  /* C, the same shape */
} moe_f8_dw;

/* db1 of dH8, on any GPU: the values are its bytes, row_weight its scales (rows, ceil(half / 256)). */
cudaError_t moe_cuda_db_f8_launch(const moe_launch *on, const moe_cuda_db *db, smoe_type gradient_type);

typedef struct moe_f8_kernels {
    cudaError_t (*rows)(const moe_launch *on, const moe_f8_rows *rows);
    cudaError_t (*weights)(const moe_launch *on, const moe_f8_quantized *weights);
    cudaError_t (*expect)(const moe_launch *on, const moe_f8_expect *expect);
    cudaError_t (*up)(moe_launch *on, const moe_f8_up *up);
    cudaError_t (*down)(moe_launch *on, const moe_f8_down *down);
    cudaError_t (*dh)(moe_launch *on, const moe_f8_dh *dh);
    cudaError_t (*dx_rows)(moe_launch *on, const moe_f8_dx_rows *dx);
    int32_t (*weight_tiles)(int32_t hidden, int32_t intermediate, int32_t halves); /* of one expert, in dw */
    cudaError_t (*dw)(moe_launch *on, const moe_f8_dw *dw);
} moe_f8_kernels;

#ifdef __cplusplus
}
#endif
#endif
