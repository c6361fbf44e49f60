/* The kernels that a generation of GPUs has in a version of its own, as one table of functions. A context
 * takes the best table that serves its device (device.c). The host code passes pointers and sizes; only the
 * kernel knows tile shapes, shared memory and tensor maps. Kernels that run on any GPU are launched by the
 * functions of launch.h and launch_backward.h. */
#ifndef MOE_CUDA_KERNEL_TABLE_H
#define MOE_CUDA_KERNEL_TABLE_H

#include "activations.h"
#include "host/launch_backward.h"

#ifdef __cplusplus
extern "C" {
#endif

/* LoRA's term of a GEMM: low[r] factor[e] is added to its sums, as more steps of K. */
typedef struct moe_low_rank {
    const void *low; /* P1, P2, Q2 or Q1: (rows, rank) */
    const void
        *factor;  /* B1 (experts, 2 or 1 times intermediate, rank), gate rows first in both layouts; B2
                     (experts, hidden, rank); A2 (experts, rank, intermediate); A1 (experts, rank, hidden) */
    int64_t rank; /* 0: there is no term */
} moe_low_rank;

/* H = X W1^T + b1, A = act(H). The rows are sorted by expert, and every expert is padded to blocks of 64
 * rows. */
typedef struct moe_up {
    const void *x;                /* (T, hidden) */
    const void *w1;               /* (experts, 2 or 1 times intermediate, hidden) */
    const void *b1;               /* (experts, 2 or 1 times intermediate) or NULL */
    void *h;                      /* (rows, 2 or 1 times intermediate), or NULL: not stored */
    void *a;                      /* (rows, intermediate) */
    const int32_t *row_token;     /* (rows) */
    const int32_t *block_offsets; /* the tiles of the lists for expert e are those of the blocks from number
                                     e block_stride up to the next number */
    int32_t block_stride;
    moe_cuda_lists lists;
    int64_t rows, hidden, intermediate, experts;
    int64_t h_rows;         /* H has so many rows, whole blocks; the rows behind them are not stored */
    int gated, interleaved; /* interleaved: gate and up rows of W1 alternate */
    smoe_activation activation;
    moe_gate_values values;
    moe_low_rank lora; /* P1, B1 */
} moe_up;

/* Y = A W2^T + b2 for columns first_column to first_column + columns - 1 of d. */
typedef struct moe_down {
    const void *a;                /* (rows, intermediate) */
    const void *w2;               /* (experts, hidden, intermediate) */
    const void *b2;               /* (experts, hidden) or NULL */
    void *y;                      /* (rows, columns) */
    const int32_t *row_token;     /* (rows) */
    const int32_t *block_offsets; /* as in moe_up */
    int32_t block_stride;
    moe_cuda_lists lists;
    int64_t rows, hidden, intermediate, experts;
    int64_t first_column, columns;
    moe_low_rank lora; /* P2, B2 */
} moe_down;

/* dA' = dO W2; and from dA' and H: dS, dH, A'. */
typedef struct moe_dh {
    const void *dout; /* (T, hidden) */
    const void *w2;   /* (experts, hidden, intermediate) */
    const void *h;    /* (padded_rows, 2 or 1 times intermediate) */
    void *dh;         /* the same shape; may be h */
    void *a;          /* A' (padded_rows, intermediate) */
    float *ds;        /* (parts, padded_rows): parts of dS, one for every ds_columns columns of dA' */
    const int32_t *row_token;
    const float *row_weight;
    moe_cuda_backward_lists lists;
    int64_t padded_rows, hidden, intermediate, experts;
    int gated;
    smoe_activation activation;
    moe_gate_values values;
    moe_low_rank lora; /* Q2, A2 */
} moe_dh;

/* dW2[e] = sum_r tokens[t(r)]^T features[r], or transposed dW1[e] and dWr = sum_r features[r]^T tokens[t(r)].
 */
typedef struct moe_dw {
    const void *features; /* A', dH or dlogits (rows, halves, row_width); reads `intermediate` of row_width */
    const void *tokens;   /* dO or X (T, hidden) */
    void *gradient;       /* (experts, hidden, intermediate), transposed (experts, halves x intermediate,
                             hidden) */
    float *parts;         /* (bound on parts, weight tiles) tiles of split experts; NULL: none is split */
    const int32_t *row_token; /* NULL: row r is token r */
    moe_cuda_backward_lists lists;
    int64_t rows, hidden, intermediate, row_width, experts;
    int halves, interleaved, accumulate, transposed;
    smoe_type gradient_type; /* F32 or dtype */
} moe_dw;

/* dX~ = dH W1 for columns first_column to first_column + columns - 1 of d. Also used for dlogits Wr, with all
 * tokens as the rows of one expert and E as its width. */
typedef struct moe_dx_rows {
    const void *dh;               /* (rows, halves, row_width) */
    const void *w1;               /* (experts, halves x intermediate, hidden); intermediate <= row_width */
    void *dx;                     /* (rows, columns) */
    const int32_t *block_offsets; /* as in moe_up, or NULL: one expert */
    int32_t block_stride;
    moe_cuda_backward_lists lists;
    int64_t rows, hidden, intermediate, row_width, experts;
    int halves, interleaved;
    int64_t first_column, columns;
    moe_low_rank lora; /* Q1, A1 */
} moe_dx_rows;

typedef struct moe_kernels {
    const char *name;    /* smoe_kernels_string */
    const char *devices; /* the compute capabilities that it serves, for error texts */
    int (*serves)(int major, int minor);
    size_t state_bytes; /* of what the generation keeps for a device; launches get it as moe_launch.state */
    /* To be called once for each device. Fills the state and allows the kernels their shared memory. */
    cudaError_t (*init)(const moe_device *device, void *state);
    int (*stores)(smoe_type dtype);
    int64_t gathered_bytes; /* the largest X or dO whose rows the kernels can gather; 0: any */
    int (*few_rows)(int64_t rows, int64_t experts); /* do the kernels for few rows compute up and down? */
    /* What the kernels need in scratch. */
    int32_t ds_columns;         /* columns of dA' for each part of dS */
    uint64_t weight_tile_bytes; /* bytes of a tile of a weight gradient in the f32 sums of a split expert */
    int32_t (*weight_tiles)(int32_t hidden, int32_t intermediate, int32_t halves); /* of one expert */
    /* Each enqueues on the stream and returns the runtime's status. */
    cudaError_t (*up)(moe_launch *on, const moe_up *up);
    cudaError_t (*down)(moe_launch *on, const moe_down *down);
    /* For few rows, without LoRA. tiles: a bound on the row tiles. The pad rows of A and Y are not written.
     */
    cudaError_t (*up_few_rows)(moe_launch *on, const moe_up *up, int64_t tiles);
    cudaError_t (*down_few_rows)(moe_launch *on, const moe_down *down, int64_t tiles);
    cudaError_t (*dh)(moe_launch *on, const moe_dh *dh);
    cudaError_t (*dw)(moe_launch *on, const moe_dw *dw);
    cudaError_t (*dx_rows)(moe_launch *on, const moe_dx_rows *dx);
    const struct moe_f8_kernels *f8; /* host/f8_table.h; NULL: no fp8 */
} moe_kernels;

/* The best first. */
extern const moe_kernels moe_sm90_kernels; /* Hopper */
extern const moe_kernels moe_sm80_kernels; /* portable: any GPU from 8.0 on */

#ifdef __cplusplus
}
#endif
#endif
