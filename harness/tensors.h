/* Everything a layer computes, tensor by tensor, on the host: what the library gave (with its bits) or what
 * the oracle expects; and how the two are judged. */
#ifndef HARNESS_TENSORS_H
#define HARNESS_TENSORS_H

#include <smoe.h>
#include <stdbool.h>

/* In the order of the stages. */
typedef enum tensor_id {
    TENSOR_LOGITS,         // (T, E)
    TENSOR_TOPK_IDS,       // (T, K)
    TENSOR_TOPK_WEIGHTS,   // (T, K)
    TENSOR_TOPK_COUNTS,    // (E)
    TENSOR_LOSSES,         // (2)
    TENSOR_COUNTS,         // (E)
    TENSOR_OFFSETS,        // (E+1)
    TENSOR_BLOCK_OFFSETS,  // (E+1)
    TENSOR_ORDER,          // (E)
    TENSOR_ROW_TOKEN,      // (padded_rows)
    TENSOR_ROW_WEIGHT,     // (padded_rows)
    TENSOR_TOKEN_OFFSETS,  // (T+1)
    TENSOR_TOKEN_ROWS,     // (R)
    TENSOR_H,              // (R, w): without pad rows
    TENSOR_OUT,            // (T, d)
    TENSOR_DX,             // (T, d)
    TENSOR_DW1,            // as w1
    TENSOR_DB1,            // as b1
    TENSOR_DW2,            // as w2
    TENSOR_DB2,            // as b2
    TENSOR_DLOGITS,        // (T, E)
    TENSOR_DROUTER_WEIGHT, // (E, d)
    TENSOR_DROUTER_BIAS,   // (E)
    TENSOR_DTOPK_WEIGHTS,  // (T, K)
    TENSOR_DROW_WEIGHTS,   // (T), or (padded_rows) from logits
    TENSORS
} tensor_id;

extern const char *const tensor_names[TENSORS];

typedef struct tensor {
    double *values; // NULL: this layer has no such tensor
    void *bits;     // as the library stored it; NULL for the oracle's
    int64_t count;
    smoe_type type;
} tensor;

typedef struct tensors {
    tensor at[TENSORS];
} tensors;

void tensors_free(tensors *freed);

/* The values of every tensor that has bits. */
void tensors_load_values(tensors *loaded);

/* Is this tensor compared element by element? Then its error is the number of elements that differ. */
bool tensor_exact(tensor_id id);

typedef struct verdict {
    double error, limit;
    bool ok;
} verdict;

/* got against want. `stored` is want with every stored tensor rounded: what storage alone costs bounds the
 * relative Frobenius error at 1.5 times, and `cap` (for
 * drouter_bias, whose sums cancel, 4 times that) bounds it in any case. */
verdict tensor_judge(tensor_id id, const tensor *got, const tensor *want, const tensor *stored, double cap);

/* Does storage alone leave room under the cap everywhere? Where sums cancel (a few values of drouter_bias,
 * the one row of a single token) it may not: then draw other inputs. */
bool tensors_conditioned(const tensors *want, const tensors *stored, double cap);

/* Elements whose bits differ between two runs; -1 when only one run has the tensor. */
int64_t tensor_differing_bits(const tensor *a, const tensor *b);

#endif
