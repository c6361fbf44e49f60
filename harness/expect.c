/* Converts the oracle's structs to tensors. */
#include "harness/expect.h"

#include "oracle/number.h"
#include "oracle/oracle.h"

#include <stdlib.h>

static void put(tensors *want, tensor_id id, const double *values, int64_t count)
{
    if (!values) return;
    double *copy = oracle_alloc((size_t)count, sizeof *copy);
    for (int64_t i = 0; i < count; i++) copy[i] = values[i];
    want->at[id] = (tensor){.values = copy, .count = count};
}

static void put_integers(tensors *want, tensor_id id, const int64_t *values, int64_t count)
{
    if (!values) return;
    double *copy = oracle_alloc((size_t)count, sizeof *copy);
    for (int64_t i = 0; i < count; i++) copy[i] = (double)values[i];
    want->at[id] = (tensor){.values = copy, .count = count};
}

/* Row values (R) at their padded places, `pad` elsewhere. */
static void put_padded(tensors *want, tensor_id id, const oracle_forward *f, const double *rows, double pad,
                       int64_t padded_rows)
{
    double *values = oracle_alloc((size_t)padded_rows, sizeof *values);
    for (int64_t i = 0; i < padded_rows; i++) values[i] = pad;
    for (int64_t row = 0; row < f->rows; row++) values[f->row_padded[row]] = rows[row];
    want->at[id] = (tensor){.values = values, .count = padded_rows};
}

/* A gradient after all backward calls, each of which rounds what it added to where stores are rounded. */
static void put_gradient(tensors *want, tensor_id id, const smoe_layer *layer, const run_options *options,
                         bool round_stores, const double *values, int64_t count)
{
    put(want, id, values, count);
    if (!values || !layer->accumulate) return;
    for (int64_t i = 0; i < count; i++) {
        double *sum = &want->at[id].values[i];
        *sum = run_initial_gradient(i);
        for (int call = 0; call < options->backwards || call == 0; call++) {
            *sum += values[i];
            if (round_stores) *sum = oracle_round_to(*sum, layer->gradient_type);
        }
    }
}

static void put_forward(const smoe_layer *layer, const oracle_forward *f, int64_t padded_rows, tensors *want)
{
    const int64_t tk = layer->tokens * layer->topk, experts = layer->experts;
    put_integers(want, TENSOR_TOPK_IDS, f->topk_ids, tk);
    put(want, TENSOR_TOPK_WEIGHTS, f->topk_weights, tk);
    put_integers(want, TENSOR_TOPK_COUNTS, f->topk_counts, experts);
    if (layer->entry == SMOE_ENTRY_FROM_LOGITS) put(want, TENSOR_LOSSES, f->losses, 2);
    put_integers(want, TENSOR_COUNTS, f->counts, experts);
    put_integers(want, TENSOR_OFFSETS, f->offsets, experts + 1);
    put_integers(want, TENSOR_BLOCK_OFFSETS, f->block_offsets, experts + 1);
    put_integers(want, TENSOR_ORDER, f->order, experts);
    double *tokens = oracle_alloc((size_t)f->rows, sizeof *tokens);
    for (int64_t row = 0; row < f->rows; row++) tokens[row] = (double)f->row_token[row];
    put_padded(want, TENSOR_ROW_TOKEN, f, tokens, -1.0, padded_rows);
    free(tokens);
    put_padded(want, TENSOR_ROW_WEIGHT, f, f->row_weight, 0.0, padded_rows);
    put_integers(want, TENSOR_TOKEN_OFFSETS, f->token_offsets, layer->tokens + 1);
    put_integers(want, TENSOR_TOKEN_ROWS, f->token_rows, f->rows);
    if (!layer->inference) put(want, TENSOR_H, f->h, f->rows * oracle_h_width(layer));
    put(want, TENSOR_OUT, f->out, layer->tokens * layer->hidden);
}

static void put_backward(const smoe_layer *layer, const oracle_drawn *drawn, const run_options *options,
                         bool round_stores, const oracle_forward *f, const oracle_backward *b,
                         int64_t padded_rows, tensors *want)
{
    const int64_t ed = layer->experts * layer->hidden, width = oracle_h_width(layer);
    put(want, TENSOR_DX, b->dx, layer->tokens * layer->hidden);
    put_gradient(want, TENSOR_DW1, layer, options, round_stores, b->dw1, ed * width);
    put_gradient(want, TENSOR_DW2, layer, options, round_stores, b->dw2, ed * layer->intermediate);
    if (drawn->b1)
        put_gradient(want, TENSOR_DB1, layer, options, round_stores, b->db1, layer->experts * width);
    if (drawn->b2) put_gradient(want, TENSOR_DB2, layer, options, round_stores, b->db2, ed);
    put(want, TENSOR_DLOGITS, b->dlogits, layer->tokens * layer->experts);
    if (drawn->router_weight)
        put_gradient(want, TENSOR_DROUTER_WEIGHT, layer, options, round_stores, b->drouter_weight, ed);
    if (drawn->router_bias)
        put_gradient(want, TENSOR_DROUTER_BIAS, layer, options, round_stores, b->drouter_bias,
                     layer->experts);
    put(want, TENSOR_DTOPK_WEIGHTS, b->dtopk_weights, layer->tokens * layer->topk);
    put(want, TENSOR_DROW_WEIGHTS, b->drow_weights, layer->tokens);
    if (layer->entry == SMOE_ENTRY_FROM_LOGITS)
        put_padded(want, TENSOR_DROW_WEIGHTS, f, b->ds, 0.0, padded_rows);
}

static oracle_compute compute_of(smoe_compute compute)
{
    switch (compute) {
    case SMOE_COMPUTE_STORAGE: return ORACLE_COMPUTE_STORAGE;
    case SMOE_COMPUTE_F8: return ORACLE_COMPUTE_F8;
    case SMOE_COMPUTE_F8_DGRAD: return ORACLE_COMPUTE_F8_DGRAD;
    }
    return ORACLE_COMPUTE_STORAGE;
}

static int64_t expect_once(const device *on, const smoe_layer *layer, const oracle_drawn *drawn,
                           const run_options *options, const tensors *got, bool round_stores, tensors *want)
{
    *want = (tensors){0};
    const int64_t padded_rows = got->at[TENSOR_ROW_TOKEN].count, pairs = layer->tokens * layer->experts;
    oracle_input input = drawn->input;
    input.round_stores = round_stores;
    input.round_inside = on->backend == SMOE_BACKEND_CUDA; // oracle.h says what that backend keeps in 16 bits
    input.exact_da = options->exact_da;
    input.compute = compute_of(layer->compute);
    input.short_sums = input.compute != ORACLE_COMPUTE_STORAGE && on->backend == SMOE_BACKEND_CUDA;
    if (layer->entry == SMOE_ENTRY_FROM_LOGITS) {
        oracle_forward logits = {0};
        oracle_logits(layer, &input, &logits);
        put(want, TENSOR_LOGITS, logits.logits, pairs);
        oracle_forward_free(&logits);
        input.logits = got->at[TENSOR_LOGITS].values;
    }
    oracle_forward f;
    oracle_forward_run(layer, &input, &f);
    put_forward(layer, &f, padded_rows, want);
    if (!options->forward_only) {
        oracle_backward b;
        oracle_backward_run(layer, &input, &f, !options->stages, &b);
        put_backward(layer, drawn, options, round_stores, &f, &b, padded_rows, want);
        oracle_backward_free(&b);
    }
    const int64_t undecided = f.undecided;
    oracle_forward_free(&f);
    return undecided;
}

int64_t expect_tensors(const device *on, const smoe_layer *layer, const oracle_drawn *drawn,
                       const run_options *options, const tensors *got, tensors *want, tensors *stored)
{
    const int64_t undecided = want ? expect_once(on, layer, drawn, options, got, false, want) : 0;
    return undecided + expect_once(on, layer, drawn, options, got, true, stored);
}
