/* The plan: rows sorted by expert with tokens ascending, their padded indices, and the map from tokens to
 * rows. */
#include "oracle/number.h"
#include "oracle/oracle.h"

static const int64_t row_block = 64; /* every expert's rows are padded to a multiple of this */

/* counts (E), from the pairs or from the given offsets. */
static void count_rows(const smoe_layer *layer, const oracle_input *input, oracle_forward *f)
{
    for (int64_t e = 0; e < layer->experts; e++) {
        if (layer->entry == SMOE_ENTRY_FROM_ROWS) {
            f->counts[e] = input->offsets[e + 1] - input->offsets[e];
            continue;
        }
        for (int64_t t = 0; t < layer->tokens; t++)
            f->counts[e] += f->pair[t * layer->experts + e] != ORACLE_OUT;
    }
}

static void place_experts(const smoe_layer *layer, oracle_forward *f)
{
    const int64_t experts = layer->experts;
    for (int64_t e = 0; e < experts; e++) {
        f->offsets[e + 1] = f->offsets[e] + f->counts[e];
        f->block_offsets[e + 1] = f->block_offsets[e] + (f->counts[e] + row_block - 1) / row_block;
        int64_t before = 0;
        for (int64_t other = 0; other < experts; other++)
            before += f->counts[other] > f->counts[e] || (f->counts[other] == f->counts[e] && other < e);
        f->order[before] = e;
    }
    f->rows = f->offsets[experts];
}

static void add_row(oracle_forward *f, int64_t *next, int64_t expert, int64_t token, double weight)
{
    const int64_t r = (*next)++;
    f->row_expert[r] = expert;
    f->row_token[r] = token;
    f->row_weight[r] = weight;
    f->row_padded[r] = f->block_offsets[expert] * row_block + (r - f->offsets[expert]);
}

static void fill_rows(const smoe_layer *layer, const oracle_input *input, oracle_forward *f)
{
    int64_t next = 0;
    for (int64_t e = 0; e < layer->experts; e++) {
        if (layer->entry == SMOE_ENTRY_FROM_ROWS) {
            for (int64_t r = input->offsets[e]; r < input->offsets[e + 1]; r++)
                add_row(f, &next, e, r, input->row_weights ? input->row_weights[r] : 1.0);
            continue;
        }
        for (int64_t t = 0; t < layer->tokens; t++) {
            const int64_t pair = t * layer->experts + e;
            if (f->pair[pair] != ORACLE_OUT) add_row(f, &next, e, t, f->pair_weight[pair]);
        }
    }
}

static void map_tokens(const smoe_layer *layer, oracle_forward *f)
{
    int64_t next = 0;
    for (int64_t t = 0; t < layer->tokens; t++) {
        for (int64_t r = 0; r < f->rows; r++)
            if (f->row_token[r] == t) f->token_rows[next++] = f->row_padded[r];
        f->token_offsets[t + 1] = next;
    }
}

void oracle_plan(const smoe_layer *layer, const oracle_input *input, oracle_forward *f)
{
    const size_t experts = (size_t)layer->experts;
    f->counts = oracle_alloc(experts, sizeof(int64_t));
    f->offsets = oracle_alloc(experts + 1, sizeof(int64_t));
    f->block_offsets = oracle_alloc(experts + 1, sizeof(int64_t));
    f->order = oracle_alloc(experts, sizeof(int64_t));
    count_rows(layer, input, f);
    place_experts(layer, f);
    const size_t rows = (size_t)f->rows;
    f->row_token = oracle_alloc(rows, sizeof(int64_t));
    f->row_expert = oracle_alloc(rows, sizeof(int64_t));
    f->row_padded = oracle_alloc(rows, sizeof(int64_t));
    f->row_weight = oracle_alloc(rows, sizeof(double));
    f->token_rows = oracle_alloc(rows, sizeof(int64_t));
    f->token_offsets = oracle_alloc((size_t)layer->tokens + 1, sizeof(int64_t));
    fill_rows(layer, input, f);
    map_tokens(layer, f);
}
