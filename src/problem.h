/* A checked layer description and everything that follows from it: row bounds, element sizes and the layout
 * of `saved`. It is built on the host at every call, and both backends read it. */
#ifndef MOE_PROBLEM_H
#define MOE_PROBLEM_H

#include <smoe.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MOE_BLOCK_ROWS = 64,   /* of a block: every expert's rows are padded to a multiple of this */
    MOE_BUFFER_ALIGN = 64, /* of saved and scratch: the allocators of PyTorch and XLA give at least this */
    MOE_PART_ALIGN = 256,  /* of every part inside them, counted from their first byte */
    MOE_TENSOR_ALIGN = 16, /* of every tensor the caller gives */
    MOE_MAX_EXPERTS = 4096,
    MOE_MAX_TOPK = 64,
    MOE_MAX_TILE = 4096,
    MOE_MAX_CHUNKS = 64,
    MOE_MAX_LORA_RANK = 256,
    MOE_MAX_THREADS = 512
};

/* The plan's arrays, in saved (for inference: at the start of scratch). Shapes as in smoe_plan_view. */
typedef struct moe_plan_arrays {
    void *h;             /* (kept_rows, h_width) dtype; NULL for inference and with ranks */
    void *p1, *p2;       /* (padded_rows, lora_rank1), (padded_rows, lora_rank2) dtype; NULL without LoRA */
    int32_t *row_token;  /* (padded_rows) */
    float *row_weight;   /* (padded_rows) */
    int32_t *token_rows; /* (rows) */
    int32_t *token_offsets; /* (T+1) */
    int32_t *counts;        /* (E) */
    int32_t *offsets;       /* (E+1) */
    int32_t *block_offsets; /* (E+1) */
    int32_t *order;         /* (E) */
    int32_t *topk_ids;      /* (T, K); this and the next two: FROM_LOGITS only, else NULL */
    float *topk_weights;    /* (T, K) */
    int32_t *topk_counts;   /* (E) */
} moe_plan_arrays;

typedef struct moe_problem {
    smoe_layer layer;            /* with defaults for what the caller's struct_size did not cover */
    int gated;                   /* the activation has a gate */
    int64_t h_width;             /* columns of H and rows of W1[e]: 2n gated, n otherwise */
    int64_t element;             /* bytes of dtype */
    int64_t experts_here;        /* of W1, b1, W2, b2 and their gradients: E, with ranks E / ranks */
    int64_t rows;                /* bound on R */
    int64_t padded_rows;         /* moe_padded_rows */
    int64_t kept_rows;           /* padded rows whose H is in saved: whole blocks, or all */
    int recomputes;              /* with ranks: fewer than all, so the backward may compute H again */
    int64_t chunk_columns;       /* 64 ceil(d / (64 chunks)): columns of a chunk of Y or dX~; the last may be
                                    narrower */
    uint64_t metadata_bytes;     /* of the plan, unpadded */
    uint64_t saved_bytes;        /* X, H, P1, P2 and metadata, unpadded */
    uint64_t plan_bytes;         /* of P1, P2 and the plan without H, as laid out */
    uint64_t saved_buffer_bytes; /* H and plan as laid out; 0 for inference */
    uint64_t received_at; /* with ranks: the size of the plan of this rank's tokens. The rest of plan_bytes
                             and of saved is the received part (ep.h) */
} moe_problem;

/* The next multiple of MOE_PART_ALIGN. */
static inline uint64_t moe_align_up(uint64_t bytes)
{
    return (bytes + MOE_PART_ALIGN - 1) / MOE_PART_ALIGN * MOE_PART_ALIGN;
}

/* A bound on rows and pad rows: an expert with rows has at most 63 pad rows, and `rows` rows have at most as
 * many experts. */
static inline int64_t moe_padded_rows(int64_t rows, int64_t experts)
{
    return rows + (MOE_BLOCK_ROWS - 1) * (rows < experts ? rows : experts);
}

int64_t moe_type_bytes(smoe_type type);

/* indices[at] of topk_ids or of offsets, in host memory. If they cannot have this type: -1, which is not an
 * expert. */
int64_t moe_load_index(const void *indices, smoe_type type, int64_t at);

/* Fills *problem from a layer whose enumerators and sizes have been checked. */
void moe_problem_init(moe_problem *problem, const smoe_layer *layer);

/* The same for a layer without ranks that has at most `rows` rows, in `runs` runs that begin at a block each,
 * and that keeps H of at most `kept` padded rows. */
void moe_problem_of_runs(moe_problem *problem, const smoe_layer *layer, int64_t rows, int64_t runs,
                         int64_t kept);

/* saved_buffer_bytes is at most *constant + T *of_a_token for every T. Both are 0 if nothing is saved, and
 * for layers with ranks. */
void moe_saved_bound(const moe_problem *problem, uint64_t *constant, uint64_t *of_a_token);

/* The plan's pointers inside a buffer: `saved` (H first), or for inference the start of scratch. */
moe_plan_arrays moe_plan_at(const moe_problem *problem, void *buffer);

#ifdef __cplusplus
}
#endif
#endif
