/* Brings the results of a run to the host: the plan and H, outputs, gradients. */
#include "harness/slots.h"

#include "oracle/number.h"

#include <string.h>

static bool fetch(run *r, tensors *got, tensor_id id, const void *from, int64_t count, smoe_type type)
{
    if (!from) return true;
    tensor *t = &got->at[id];
    const size_t bytes = (size_t)count * oracle_type_bytes(type);
    *t = (tensor){.bits = oracle_alloc(bytes, 1), .count = count, .type = type};
    return r->on->download(t->bits, from, bytes) || run_refuse(r, "download of %s failed", tensor_names[id]);
}

static bool fetch_slot(run *r, tensors *got, tensor_id id, slot_id from)
{
    const extent x = slot_extent(r, from);
    return fetch(r, got, id, slot_data(r, from), x.count, x.type);
}

/* H (padded_rows, width) has rows up to the end of the last expert's last block. No stage computes those
 * after it, so they still hold the poison. */
static bool check_h_past_rows(run *r, const void *h, int64_t blocks, size_t row_bytes)
{
    const unsigned char *bytes = h;
    for (size_t i = (size_t)blocks * 64 * row_bytes; i < (size_t)r->sizes.padded_rows * row_bytes; i++)
        if (bytes[i] != BUFFER_POISON)
            return run_refuse(r, "the library wrote row %lld of h, and the experts' blocks end at row %lld",
                              (long long)(i / row_bytes), (long long)blocks * 64);
    return true;
}

/* H without its pad rows. */
static bool fetch_h(run *r, tensors *got, const smoe_plan_view *view)
{
    const int64_t width = oracle_h_width(&r->layer), experts = r->layer.experts;
    tensor *t = &got->at[TENSOR_H];
    const int32_t *offsets = got->at[TENSOR_OFFSETS].bits, *blocks = got->at[TENSOR_BLOCK_OFFSETS].bits;
    if (!view->h) return true;
    if (!fetch(r, got, TENSOR_H, view->h, r->sizes.padded_rows * width, r->layer.dtype)) return false;
    const size_t row_bytes = (size_t)width * oracle_type_bytes(t->type);
    if (!check_h_past_rows(r, t->bits, blocks[experts], row_bytes)) return false;
    for (int64_t e = 0; e < experts; e++) {
        for (int64_t row = offsets[e]; row < offsets[e + 1]; row++) {
            const int64_t padded = (int64_t)blocks[e] * 64 + row - offsets[e];
            memmove((char *)t->bits + (size_t)row * row_bytes, (char *)t->bits + (size_t)padded * row_bytes,
                    row_bytes);
        }
    }
    t->count = offsets[experts] * width;
    return true;
}

/* Are the offsets valid, so that rows may be looked up by them? */
static bool check_offsets(run *r, const tensors *got)
{
    const int32_t *offsets = got->at[TENSOR_OFFSETS].bits, *blocks = got->at[TENSOR_BLOCK_OFFSETS].bits;
    for (int64_t e = 0; e < r->layer.experts; e++) {
        const int64_t rows = (int64_t)offsets[e + 1] - offsets[e];
        if (rows < 0 || blocks[e] < 0 || (int64_t)blocks[e] * 64 + rows > r->sizes.padded_rows)
            return run_refuse(r, "the plan's offsets are broken at expert %lld", (long long)e);
    }
    return offsets[r->layer.experts] <= r->sizes.rows || run_refuse(r, "more rows than the bound");
}

static bool fetch_plan(run *r, tensors *got, const smoe_plan_view *view)
{
    const smoe_layer *l = &r->layer;
    const int64_t tk = l->tokens * l->topk, padded = r->sizes.padded_rows, e = l->experts;
    if (!fetch(r, got, TENSOR_OFFSETS, view->offsets, e + 1, SMOE_TYPE_I32) ||
        !fetch(r, got, TENSOR_BLOCK_OFFSETS, view->block_offsets, e + 1, SMOE_TYPE_I32) ||
        !check_offsets(r, got))
        return false;
    const int64_t rows = ((const int32_t *)got->at[TENSOR_OFFSETS].bits)[e];
    return fetch(r, got, TENSOR_TOPK_IDS, view->topk_ids, tk, SMOE_TYPE_I32) &&
           fetch(r, got, TENSOR_TOPK_WEIGHTS, view->topk_weights, tk, SMOE_TYPE_F32) &&
           fetch(r, got, TENSOR_TOPK_COUNTS, view->topk_counts, e, SMOE_TYPE_I32) &&
           fetch(r, got, TENSOR_COUNTS, view->counts, e, SMOE_TYPE_I32) &&
           fetch(r, got, TENSOR_ORDER, view->order, e, SMOE_TYPE_I32) &&
           fetch(r, got, TENSOR_ROW_TOKEN, view->row_token, padded, SMOE_TYPE_I32) &&
           fetch(r, got, TENSOR_ROW_WEIGHT, view->row_weight, padded, SMOE_TYPE_F32) &&
           fetch(r, got, TENSOR_TOKEN_OFFSETS, view->token_offsets, l->tokens + 1, SMOE_TYPE_I32) &&
           fetch(r, got, TENSOR_TOKEN_ROWS, view->token_rows, rows, SMOE_TYPE_I32) && fetch_h(r, got, view);
}

bool run_fetch_forward(run *r, const smoe_plan_view *view, tensors *got)
{
    return fetch_plan(r, got, view) && fetch_slot(r, got, TENSOR_LOGITS, SLOT_LOGITS) &&
           fetch_slot(r, got, TENSOR_LOSSES, SLOT_LOSSES) && fetch_slot(r, got, TENSOR_OUT, SLOT_OUT);
}

bool run_fetch_backward(run *r, tensors *got)
{
    const struct {
        tensor_id id;
        slot_id from;
    } all[] = {{TENSOR_DX, SLOT_DX},
               {TENSOR_DW1, SLOT_DW1},
               {TENSOR_DB1, SLOT_DB1},
               {TENSOR_DW2, SLOT_DW2},
               {TENSOR_DB2, SLOT_DB2},
               {TENSOR_DLOGITS, SLOT_DLOGITS},
               {TENSOR_DROUTER_WEIGHT, SLOT_DROUTER_WEIGHT},
               {TENSOR_DROUTER_BIAS, SLOT_DROUTER_BIAS},
               {TENSOR_DTOPK_WEIGHTS, SLOT_DTOPK_WEIGHTS},
               {TENSOR_DROW_WEIGHTS, SLOT_DROW_WEIGHTS}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (!fetch_slot(r, got, all[i].id, all[i].from)) return false;
    return true;
}
