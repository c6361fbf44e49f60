/* See tensors.h. */
#include "harness/tensors.h"

#include "oracle/compare.h"
#include "oracle/number.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What f32 arithmetic may cost where storage costs less. */
static const double f32_floor = 5e-6;

const char *const tensor_names[TENSORS] = {"logits",       "topk_ids",
                                           "topk_weights", "topk_counts",
                                           "losses",       "counts",
                                           "offsets",      "block_offsets",
                                           "order",        "row_token",
                                           "row_weight",   "token_offsets",
                                           "token_rows",   "h",
                                           "out",          "dx",
                                           "dw1",          "db1",
                                           "dw2",          "db2",
                                           "dlogits",      "drouter_weight",
                                           "drouter_bias", "dtopk_weights",
                                           "drow_weights"};

void tensors_free(tensors *freed)
{
    for (int i = 0; i < TENSORS; i++) {
        free(freed->at[i].values);
        free(freed->at[i].bits);
    }
    *freed = (tensors){0};
}

void tensors_load_values(tensors *loaded)
{
    for (int i = 0; i < TENSORS; i++) {
        tensor *t = &loaded->at[i];
        if (!t->bits) continue;
        t->values = oracle_alloc((size_t)t->count, sizeof *t->values);
        oracle_load(t->values, t->type, t->bits, (size_t)t->count);
    }
}

bool tensor_exact(tensor_id id)
{
    switch (id) {
    case TENSOR_TOPK_IDS:
    case TENSOR_TOPK_COUNTS:
    case TENSOR_COUNTS:
    case TENSOR_OFFSETS:
    case TENSOR_BLOCK_OFFSETS:
    case TENSOR_ORDER:
    case TENSOR_ROW_TOKEN:
    case TENSOR_TOKEN_OFFSETS:
    case TENSOR_TOKEN_ROWS: return true;
    default: return false;
    }
}

/* drouter_bias is E sums over all tokens of terms of both signs: what is left of the sum may be small beside
 * the error that storage leaves in it, so its cap is wider. */
static double own_cap(tensor_id id, double cap)
{
    return id == TENSOR_DROUTER_BIAS ? 4.0 * cap : cap;
}

verdict tensor_judge(tensor_id id, const tensor *got, const tensor *want, const tensor *stored, double cap)
{
    if (got->count != want->count || !got->values != !want->values) return (verdict){INFINITY, 0.0, false};
    const size_t count = (size_t)want->count;
    if (tensor_exact(id)) {
        const double differing = (double)oracle_differing(got->values, want->values, count);
        return (verdict){differing, 0.0, differing == 0.0};
    }
    const double storage = oracle_relative_error(stored->values, want->values, count);
    const double error = oracle_relative_error(got->values, want->values, count);
    const double limit = fmin(own_cap(id, cap), fmax(1.5 * storage, f32_floor));
    return (verdict){error, limit, error <= limit};
}

bool tensors_conditioned(const tensors *want, const tensors *stored, double cap)
{
    for (int i = 0; i < TENSORS; i++) {
        const tensor *w = &want->at[i], *s = &stored->at[i];
        if (!w->values || tensor_exact((tensor_id)i)) continue;
        if (oracle_relative_error(s->values, w->values, (size_t)w->count) > 0.85 * own_cap((tensor_id)i, cap))
            return false;
    }
    return true;
}

int64_t tensor_differing_bits(const tensor *a, const tensor *b)
{
    if (!a->bits && !b->bits) return 0;
    if (!a->bits || !b->bits || a->count != b->count || a->type != b->type) return -1;
    const size_t element = oracle_type_bytes(a->type);
    if (memcmp(a->bits, b->bits, (size_t)a->count * element) == 0) return 0;
    int64_t differing = 0;
    for (int64_t i = 0; i < a->count; i++) {
        const size_t at = (size_t)i * element;
        differing += memcmp((const char *)a->bits + at, (const char *)b->bits + at, element) != 0;
    }
    return differing;
}
