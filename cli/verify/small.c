/* Checks the aux-free bias update, and the formula for the bytes kept. */
#include "cli/verify/checks.h"

#include "harness/buffer.h"
#include "oracle/number.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* bias[e] += gamma sign(mean count - counts[e]) on the device. */
static bool update_bias(verify *v, const smoe_layer *layer, const int32_t *counts, float *bias, float gamma)
{
    const size_t bytes = 4 * (size_t)layer->experts;
    buffer counts_buffer = {0}, bias_buffer = {0};
    bool done = buffer_make(&counts_buffer, v->on, bytes) && buffer_make(&bias_buffer, v->on, bytes) &&
                buffer_write(&counts_buffer, counts, bytes) && buffer_write(&bias_buffer, bias, bytes);
    done = done && smoe_update_selection_bias(v->context, layer, counts_buffer.data, bias_buffer.data, gamma,
                                              NULL) == SMOE_OK;
    done = done && v->on->sync() && buffer_read(bias, &bias_buffer, bytes) && buffer_intact(&bias_buffer);
    buffer_free(&counts_buffer);
    buffer_free(&bias_buffer);
    return done;
}

void check_bias_update(verify *v, const layer_case *c, const smoe_layer *given)
{
    (void)c;
    smoe_layer layer = *given;
    layer.score = SMOE_SCORE_SIGMOID;
    const int32_t counts[] = {10, 12, 12, 12, 14, 0, 24, 12}; /* mean 12 */
    const double sign[] = {1, 0, 0, 0, -1, 1, -1, 0};
    float bias[8];
    for (int e = 0; e < 8; e++) bias[e] = 0.5f * (float)e;
    int64_t wrong = 0;
    const bool done = update_bias(v, &layer, counts, bias, 0.25f);
    for (int e = 0; e < 8; e++) wrong += (double)bias[e] != 0.5 * e + 0.25 * sign[e];
    check_zero(v, "selection_bias", done ? wrong : -1,
               done ? "differing elements" : smoe_last_error(v->context));
}

/* Exactly 2 T d + 4 n R + metadata bytes (bf16, gated), with R the bound on rows. */
void check_saved_bytes(verify *v, const layer_case *c, const smoe_layer *layer)
{
    (void)c;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    if (smoe_query_sizes(v->context, layer, &sizes) != SMOE_OK) {
        report_line(&v->report,
                    (verify_line){"saved_bytes", INFINITY, 0.0, false, smoe_last_error(v->context)});
        return;
    }
    const int64_t tokens = layer->tokens, experts = layer->experts,
                  element = (int64_t)oracle_type_bytes(layer->dtype);
    const bool router = layer->entry == SMOE_ENTRY_FROM_LOGITS;
    const int64_t rounded = layer->rounding == SMOE_ROUNDING_UP ? experts * (layer->tile - 1) : 0;
    const int64_t rows = tokens * layer->topk + rounded;
    const int64_t metadata = 4 * (3 * rows + (tokens + 1) + 2 * experts + 2 * (experts + 1) +
                                  (router ? 2 * tokens * layer->topk + experts : 0));
    const int64_t saved = element * (tokens * layer->hidden + oracle_h_width(layer) * rows) + metadata;
    check_zero(v, "rows", sizes.rows - rows, "off the formula");
    check_zero(v, "padded_rows", sizes.padded_rows - rows - 63 * (rows < experts ? rows : experts),
               "off the formula");
    check_zero(v, "metadata_bytes", (int64_t)sizes.metadata_bytes - metadata, "off the formula");
    check_zero(v, "saved_bytes", (int64_t)sizes.saved_bytes - saved, "off the formula");
}
