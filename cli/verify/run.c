/* Runs the library between canaries. The slots are the buffers of one run; what they hold when it begins is
 * remembered, to see that inputs stay as they were and to begin again. */
#include "cli/verify/run.h"

#include "cli/common/buffer.h"
#include "oracle/number.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum slot_id {
    SLOT_X,
    SLOT_ROUTER_WEIGHT,
    SLOT_ROUTER_BIAS,
    SLOT_LOGITS,
    SLOT_SELECTION_BIAS,
    SLOT_LOSSES,
    SLOT_TOPK_IDS,
    SLOT_TOPK_WEIGHTS,
    SLOT_OFFSETS,
    SLOT_ROW_WEIGHTS,
    SLOT_W1,
    SLOT_B1,
    SLOT_W2,
    SLOT_B2,
    SLOT_OUT,
    SLOT_SAVED,
    SLOT_SCRATCH_FORWARD,
    SLOT_SCRATCH_BACKWARD,
    SLOT_DOUT,
    SLOT_DX,
    SLOT_DW1,
    SLOT_DW2,
    SLOT_DB1,
    SLOT_DB2,
    SLOT_DROUTER_WEIGHT,
    SLOT_DROUTER_BIAS,
    SLOT_DLOGITS,
    SLOT_DTOPK_WEIGHTS,
    SLOT_DROW_WEIGHTS,
    SLOTS
} slot_id;

static const char *const slot_names[SLOTS] = {"x",
                                              "router_weight",
                                              "router_bias",
                                              "logits",
                                              "selection_bias",
                                              "losses",
                                              "topk_ids",
                                              "topk_weights",
                                              "offsets",
                                              "row_weights",
                                              "w1",
                                              "b1",
                                              "w2",
                                              "b2",
                                              "out",
                                              "saved",
                                              "scratch (forward)",
                                              "scratch (backward)",
                                              "dout",
                                              "dx",
                                              "dw1",
                                              "dw2",
                                              "db1",
                                              "db2",
                                              "drouter_weight",
                                              "drouter_bias",
                                              "dlogits",
                                              "dtopk_weights",
                                              "drow_weights"};

typedef struct slot {
    buffer memory;
    void *start; // what it holds when a run begins; NULL: poison
    bool input;  // and must still hold at the end
} slot;

typedef struct run {
    const device *on;
    smoe_context *context;
    const smoe_layer *layer;
    const oracle_drawn *drawn;
    const run_options *options;
    smoe_sizes sizes;
    smoe_forward_args forward;
    smoe_backward_args backward;
    slot slots[SLOTS];
    tensors *got;
    char *text;
} run;

double run_initial_gradient(int64_t i)
{
    return (double)(i % 7 - 3) / 4.0;
}

static bool refuse(run *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool refuse(run *r, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(r->text, RUN_TEXT, format, arguments);
    va_end(arguments);
    return false;
}

/* ---- Buffers ---- */

static bool make_slot(run *r, slot_id id, uint64_t bytes)
{
    if (buffer_make(&r->slots[id].memory, r->on, bytes)) return true;
    return refuse(r, "out of memory: %s, %llu bytes", slot_names[id], (unsigned long long)bytes);
}

static bool upload_values(run *r, slot_id id, const double *values, int64_t count, smoe_type type)
{
    const size_t bytes = (size_t)count * oracle_type_bytes(type);
    void *stored = oracle_alloc(bytes, 1);
    oracle_store(stored, type, values, (size_t)count);
    const bool done = make_slot(r, id, bytes) && buffer_write(&r->slots[id].memory, stored, bytes);
    r->slots[id].start = stored;
    r->slots[id].input = true;
    return done;
}

/* Values that may be absent. */
static bool make_input(run *r, slot_id id, const double *values, int64_t count, smoe_type type)
{
    return !values || upload_values(r, id, values, count, type);
}

static bool make_integers(run *r, slot_id id, const int64_t *values, int64_t count)
{
    if (!values) return true;
    double *as_double = oracle_alloc((size_t)count, sizeof *as_double);
    for (int64_t i = 0; i < count; i++) as_double[i] = (double)values[i];
    const bool done = upload_values(r, id, as_double, count, r->layer->index_type);
    free(as_double);
    return done;
}

static bool make_inputs(run *r)
{
    const smoe_layer *l = r->layer;
    const oracle_drawn *d = r->drawn;
    const int64_t width = oracle_h_width(l), td = l->tokens * l->hidden, te = l->tokens * l->experts;
    const bool computed = l->entry == SMOE_ENTRY_FROM_LOGITS && d->router_weight;
    return make_input(r, SLOT_X, d->x, td, l->dtype) &&
           make_input(r, SLOT_ROUTER_WEIGHT, d->router_weight, l->experts * l->hidden, l->dtype) &&
           make_input(r, SLOT_ROUTER_BIAS, d->router_bias, l->experts, l->dtype) &&
           make_input(r, SLOT_LOGITS, d->logits, te, l->logits_type) &&
           (!computed || make_slot(r, SLOT_LOGITS, (uint64_t)te * oracle_type_bytes(l->logits_type))) &&
           make_input(r, SLOT_SELECTION_BIAS, d->selection_bias, l->experts, SMOE_TYPE_F32) &&
           make_integers(r, SLOT_TOPK_IDS, d->topk_ids, l->tokens * l->topk) &&
           make_input(r, SLOT_TOPK_WEIGHTS, d->topk_weights, l->tokens * l->topk, SMOE_TYPE_F32) &&
           make_integers(r, SLOT_OFFSETS, d->offsets, l->experts + 1) &&
           make_input(r, SLOT_ROW_WEIGHTS, d->row_weights, l->tokens, SMOE_TYPE_F32) &&
           make_input(r, SLOT_W1, d->w1, l->experts * width * l->hidden, l->dtype) &&
           make_input(r, SLOT_B1, d->b1, l->experts * width, l->dtype) &&
           make_input(r, SLOT_W2, d->w2, l->experts * l->hidden * l->intermediate, l->dtype) &&
           make_input(r, SLOT_B2, d->b2, l->experts * l->hidden, l->dtype) &&
           make_input(r, SLOT_DOUT, d->dout, td, l->dtype);
}

/* Poisoned, or holding something to add to. */
static bool make_gradient(run *r, slot_id id, bool wanted, int64_t count)
{
    if (!wanted) return true;
    if (!r->layer->accumulate)
        return make_slot(r, id, (uint64_t)count * oracle_type_bytes(r->layer->gradient_type));
    double *initial = oracle_alloc((size_t)count, sizeof *initial);
    for (int64_t i = 0; i < count; i++) initial[i] = run_initial_gradient(i);
    const bool done = upload_values(r, id, initial, count, r->layer->gradient_type);
    free(initial);
    r->slots[id].input = false;
    return done;
}

static bool make_outputs(run *r)
{
    const smoe_layer *l = r->layer;
    const oracle_drawn *d = r->drawn;
    const int64_t width = oracle_h_width(l);
    const uint64_t td_bytes = (uint64_t)(l->tokens * l->hidden) * oracle_type_bytes(l->dtype);
    const bool logits = l->entry == SMOE_ENTRY_FROM_LOGITS, router = logits && !r->options->stages;
    const uint64_t ds = 4 * (uint64_t)(logits ? r->sizes.padded_rows : l->tokens);
    const bool forward_only = r->options->forward_only || !r->sizes.scratch_backward_bytes;
    return (!logits || make_slot(r, SLOT_LOSSES, 8)) && make_slot(r, SLOT_OUT, td_bytes) &&
           (!r->sizes.saved_buffer_bytes || make_slot(r, SLOT_SAVED, r->sizes.saved_buffer_bytes)) &&
           make_slot(r, SLOT_SCRATCH_FORWARD, r->sizes.scratch_forward_bytes) &&
           (forward_only ||
            (make_slot(r, SLOT_SCRATCH_BACKWARD, r->sizes.scratch_backward_bytes) &&
             make_slot(r, SLOT_DX, td_bytes) &&
             make_gradient(r, SLOT_DW1, true, l->experts * width * l->hidden) &&
             make_gradient(r, SLOT_DW2, true, l->experts * l->hidden * l->intermediate) &&
             make_gradient(r, SLOT_DB1, d->b1, l->experts * width) &&
             make_gradient(r, SLOT_DB2, d->b2, l->experts * l->hidden) &&
             make_gradient(r, SLOT_DROUTER_WEIGHT, router && d->router_weight, l->experts * l->hidden) &&
             make_gradient(r, SLOT_DROUTER_BIAS, router && d->router_bias, l->experts) &&
             (!router || make_slot(r, SLOT_DLOGITS,
                                   (uint64_t)(l->tokens * l->experts) * oracle_type_bytes(l->logits_type))) &&
             (l->entry != SMOE_ENTRY_FROM_TOPK ||
              make_slot(r, SLOT_DTOPK_WEIGHTS, 4 * (uint64_t)(l->tokens * l->topk))) &&
             (l->entry == SMOE_ENTRY_FROM_TOPK || make_slot(r, SLOT_DROW_WEIGHTS, ds))));
}

static void *at(const run *r, slot_id id)
{
    return r->slots[id].memory.data;
}

static void fill_forward(run *r)
{
    r->forward = (smoe_forward_args){.struct_size = sizeof(smoe_forward_args),
                                     .x = at(r, SLOT_X),
                                     .router_weight = at(r, SLOT_ROUTER_WEIGHT),
                                     .router_bias = at(r, SLOT_ROUTER_BIAS),
                                     .logits = at(r, SLOT_LOGITS),
                                     .selection_bias = at(r, SLOT_SELECTION_BIAS),
                                     .step = r->drawn->input.step,
                                     .losses = at(r, SLOT_LOSSES),
                                     .topk_ids = at(r, SLOT_TOPK_IDS),
                                     .topk_weights = at(r, SLOT_TOPK_WEIGHTS),
                                     .offsets = at(r, SLOT_OFFSETS),
                                     .row_weights = at(r, SLOT_ROW_WEIGHTS),
                                     .w1 = at(r, SLOT_W1),
                                     .b1 = at(r, SLOT_B1),
                                     .w2 = at(r, SLOT_W2),
                                     .b2 = at(r, SLOT_B2),
                                     .out = at(r, SLOT_OUT),
                                     .saved = at(r, SLOT_SAVED),
                                     .saved_size = r->slots[SLOT_SAVED].memory.bytes,
                                     .scratch = at(r, SLOT_SCRATCH_FORWARD),
                                     .scratch_size = r->slots[SLOT_SCRATCH_FORWARD].memory.bytes};
}

static void fill_backward(run *r)
{
    const oracle_input *input = &r->drawn->input;
    const bool router = r->layer->entry == SMOE_ENTRY_FROM_LOGITS && !r->options->stages;
    r->backward =
        (smoe_backward_args){.struct_size = sizeof(smoe_backward_args),
                             .x = at(r, SLOT_X),
                             .router_weight = at(r, SLOT_ROUTER_WEIGHT),
                             .logits = at(r, SLOT_LOGITS),
                             .selection_bias = at(r, SLOT_SELECTION_BIAS),
                             .topk_ids = at(r, SLOT_TOPK_IDS),
                             .topk_weights = at(r, SLOT_TOPK_WEIGHTS),
                             .offsets = at(r, SLOT_OFFSETS),
                             .row_weights = at(r, SLOT_ROW_WEIGHTS),
                             .w1 = at(r, SLOT_W1),
                             .b1 = at(r, SLOT_B1),
                             .w2 = at(r, SLOT_W2),
                             .b2 = at(r, SLOT_B2),
                             .saved = at(r, SLOT_SAVED),
                             .saved_size = r->slots[SLOT_SAVED].memory.bytes,
                             .dout = at(r, SLOT_DOUT),
                             .balance_coefficient = router ? (float)input->balance_coefficient : 0.0f,
                             .z_coefficient = router ? (float)input->z_coefficient : 0.0f,
                             .dx = at(r, SLOT_DX),
                             .dw1 = at(r, SLOT_DW1),
                             .dw2 = at(r, SLOT_DW2),
                             .db1 = at(r, SLOT_DB1),
                             .db2 = at(r, SLOT_DB2),
                             .drouter_weight = at(r, SLOT_DROUTER_WEIGHT),
                             .drouter_bias = at(r, SLOT_DROUTER_BIAS),
                             .dlogits = at(r, SLOT_DLOGITS),
                             .dtopk_weights = at(r, SLOT_DTOPK_WEIGHTS),
                             .drow_weights = at(r, SLOT_DROW_WEIGHTS),
                             .scratch = at(r, SLOT_SCRATCH_BACKWARD),
                             .scratch_size = r->slots[SLOT_SCRATCH_BACKWARD].memory.bytes};
}

/* ---- Calls ---- */

static bool call(run *r, const char *name, smoe_status status)
{
    if (status != SMOE_OK)
        return refuse(r, "%s: %s", smoe_status_string(status), smoe_last_error(r->context));
    return r->on->sync() || refuse(r, "%s: the work on the device failed", name);
}

/* The passes wait for all work on the device, copies too, so each needs its own. */
static bool disturb(run *r)
{
    void *traffic = r->options->traffic;
    return !traffic || r->on->drive_traffic(traffic) || refuse(r, "no copies could be put beside it");
}

static bool run_forward(run *r)
{
    smoe_context *c = r->context;
    const smoe_layer *l = r->layer;
    const smoe_forward_args *f = &r->forward;
    if (!disturb(r)) return false;
    if (!r->options->stages) return call(r, "smoe_layer_forward", smoe_layer_forward(c, l, f, NULL));
    return (l->entry != SMOE_ENTRY_FROM_LOGITS || call(r, "smoe_route", smoe_route(c, l, f, NULL))) &&
           (l->entry != SMOE_ENTRY_FROM_LOGITS || l->rounding == SMOE_ROUNDING_NONE ||
            call(r, "smoe_round", smoe_round(c, l, f, NULL))) &&
           call(r, "smoe_plan", smoe_plan(c, l, f, NULL)) &&
           call(r, "smoe_experts_forward", smoe_experts_forward(c, l, f, NULL));
}

static bool run_backward(run *r)
{
    for (int i = 0; i < r->options->backwards || i == 0; i++) {
        if (!buffer_poison(&r->slots[SLOT_SCRATCH_BACKWARD].memory)) return refuse(r, "poison failed");
        if (!disturb(r)) return false;
        const smoe_status status = r->options->stages
                                       ? smoe_experts_backward(r->context, r->layer, &r->backward, NULL)
                                       : smoe_layer_backward(r->context, r->layer, &r->backward, NULL);
        if (!call(r, "backward", status)) return false;
    }
    return true;
}

/* Nothing may live on here but X, the weights, the logits and saved. */
static bool poison_between(run *r)
{
    const slot_id gone[] = {SLOT_OUT, SLOT_LOSSES, SLOT_SCRATCH_FORWARD, SLOT_ROUTER_BIAS};
    for (size_t i = 0; i < sizeof gone / sizeof gone[0]; i++) {
        slot *s = &r->slots[gone[i]];
        if (s->memory.device && !buffer_poison(&s->memory)) return refuse(r, "poison failed");
        s->input = false;
    }
    return true;
}

/* Everything but inputs, which stayed, as before the first pass. */
static bool begin_again(run *r)
{
    for (int i = 0; i < SLOTS; i++) {
        const slot *s = &r->slots[i];
        if (!s->memory.device || s->input) continue;
        if (!(s->start ? buffer_write(&s->memory, s->start, s->memory.bytes) : buffer_poison(&s->memory)))
            return refuse(r, "%s could not be filled again", slot_names[i]);
    }
    return true;
}

/* ---- Results ---- */

static bool fetch(run *r, tensor_id id, const void *from, int64_t count, smoe_type type)
{
    if (!from) return true;
    tensor *t = &r->got->at[id];
    const size_t bytes = (size_t)count * oracle_type_bytes(type);
    *t = (tensor){.bits = oracle_alloc(bytes, 1), .count = count, .type = type};
    return r->on->download(t->bits, from, bytes) || refuse(r, "download of %s failed", tensor_names[id]);
}

static const int32_t *fetched_integers(const run *r, tensor_id id)
{
    return r->got->at[id].bits;
}

/* H without its pad rows. */
static bool fetch_h(run *r, const smoe_plan_view *view)
{
    const int64_t width = oracle_h_width(r->layer), experts = r->layer->experts;
    tensor *t = &r->got->at[TENSOR_H];
    const int32_t *offsets = fetched_integers(r, TENSOR_OFFSETS);
    const int32_t *blocks = fetched_integers(r, TENSOR_BLOCK_OFFSETS);
    if (!view->h) return true;
    if (!fetch(r, TENSOR_H, view->h, r->sizes.padded_rows * width, r->layer->dtype)) return false;
    const size_t row_bytes = (size_t)width * oracle_type_bytes(t->type);
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

/* Do the offsets make sense, so that rows may be looked up by them? */
static bool check_offsets(run *r)
{
    const int32_t *offsets = fetched_integers(r, TENSOR_OFFSETS);
    const int32_t *blocks = fetched_integers(r, TENSOR_BLOCK_OFFSETS);
    for (int64_t e = 0; e < r->layer->experts; e++) {
        const int64_t rows = (int64_t)offsets[e + 1] - offsets[e];
        if (rows < 0 || blocks[e] < 0 || (int64_t)blocks[e] * 64 + rows > r->sizes.padded_rows)
            return refuse(r, "the plan's offsets are broken at expert %lld", (long long)e);
    }
    return offsets[r->layer->experts] <= r->sizes.rows || refuse(r, "more rows than the bound");
}

static bool fetch_forward(run *r)
{
    const smoe_layer *l = r->layer;
    const int64_t tk = l->tokens * l->topk, padded = r->sizes.padded_rows;
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    if (!call(r, "smoe_view_plan", smoe_view_plan(r->context, l, &r->forward, &view))) return false;
    if (!fetch(r, TENSOR_OFFSETS, view.offsets, l->experts + 1, SMOE_TYPE_I32) ||
        !fetch(r, TENSOR_BLOCK_OFFSETS, view.block_offsets, l->experts + 1, SMOE_TYPE_I32) ||
        !check_offsets(r))
        return false;
    const int64_t rows = fetched_integers(r, TENSOR_OFFSETS)[l->experts];
    return fetch(r, TENSOR_LOGITS, at(r, SLOT_LOGITS), l->tokens * l->experts, l->logits_type) &&
           fetch(r, TENSOR_TOPK_IDS, view.topk_ids, tk, SMOE_TYPE_I32) &&
           fetch(r, TENSOR_TOPK_WEIGHTS, view.topk_weights, tk, SMOE_TYPE_F32) &&
           fetch(r, TENSOR_TOPK_COUNTS, view.topk_counts, l->experts, SMOE_TYPE_I32) &&
           fetch(r, TENSOR_LOSSES, at(r, SLOT_LOSSES), 2, SMOE_TYPE_F32) &&
           fetch(r, TENSOR_COUNTS, view.counts, l->experts, SMOE_TYPE_I32) &&
           fetch(r, TENSOR_ORDER, view.order, l->experts, SMOE_TYPE_I32) &&
           fetch(r, TENSOR_ROW_TOKEN, view.row_token, padded, SMOE_TYPE_I32) &&
           fetch(r, TENSOR_ROW_WEIGHT, view.row_weight, padded, SMOE_TYPE_F32) &&
           fetch(r, TENSOR_TOKEN_OFFSETS, view.token_offsets, l->tokens + 1, SMOE_TYPE_I32) &&
           fetch(r, TENSOR_TOKEN_ROWS, view.token_rows, rows, SMOE_TYPE_I32) && fetch_h(r, &view) &&
           fetch(r, TENSOR_OUT, at(r, SLOT_OUT), l->tokens * l->hidden, l->dtype);
}

static bool fetch_backward(run *r)
{
    const smoe_layer *l = r->layer;
    const int64_t width = oracle_h_width(l), ed = l->experts * l->hidden;
    const int64_t ds = l->entry == SMOE_ENTRY_FROM_LOGITS ? r->sizes.padded_rows : l->tokens;
    const smoe_type gradient = l->gradient_type;
    return fetch(r, TENSOR_DX, at(r, SLOT_DX), l->tokens * l->hidden, l->dtype) &&
           fetch(r, TENSOR_DW1, at(r, SLOT_DW1), ed * width, gradient) &&
           fetch(r, TENSOR_DB1, at(r, SLOT_DB1), l->experts * width, gradient) &&
           fetch(r, TENSOR_DW2, at(r, SLOT_DW2), ed * l->intermediate, gradient) &&
           fetch(r, TENSOR_DB2, at(r, SLOT_DB2), ed, gradient) &&
           fetch(r, TENSOR_DLOGITS, at(r, SLOT_DLOGITS), l->tokens * l->experts, l->logits_type) &&
           fetch(r, TENSOR_DROUTER_WEIGHT, at(r, SLOT_DROUTER_WEIGHT), ed, gradient) &&
           fetch(r, TENSOR_DROUTER_BIAS, at(r, SLOT_DROUTER_BIAS), l->experts, gradient) &&
           fetch(r, TENSOR_DTOPK_WEIGHTS, at(r, SLOT_DTOPK_WEIGHTS), l->tokens * l->topk, SMOE_TYPE_F32) &&
           fetch(r, TENSOR_DROW_WEIGHTS, at(r, SLOT_DROW_WEIGHTS), ds, SMOE_TYPE_F32);
}

static bool check_slots(run *r)
{
    for (int i = 0; i < SLOTS; i++) {
        const slot *s = &r->slots[i];
        if (!buffer_intact(&s->memory)) return refuse(r, "the library wrote outside %s", slot_names[i]);
        if (!s->input) continue;
        void *now = oracle_alloc(s->memory.bytes, 1);
        const bool same =
            buffer_read(now, &s->memory, s->memory.bytes) && memcmp(now, s->start, s->memory.bytes) == 0;
        free(now);
        if (!same) return refuse(r, "the library changed its input %s", slot_names[i]);
    }
    return true;
}

static bool run_passes(run *r)
{
    if (!run_forward(r) || !fetch_forward(r)) return false;
    if (r->options->forward_only || !r->sizes.scratch_backward_bytes) return true;
    return check_slots(r) && poison_between(r) && run_backward(r) && fetch_backward(r);
}

/* Both passes once more, with the same buffers; differing: elements of each tensor. */
static bool repeat(run *r, int64_t *differing)
{
    tensors *const first = r->got, again = {0};
    r->got = &again;
    const bool done = begin_again(r) && run_passes(r);
    for (int i = 0; done && i < TENSORS; i++)
        differing[i] += llabs(tensor_differing_bits(&first->at[i], &again.at[i]));
    tensors_free(&again);
    r->got = first;
    return done;
}

static bool run_all(run *r)
{
    if (!make_inputs(r) || !make_outputs(r)) return false;
    fill_forward(r);
    fill_backward(r);
    if (!run_passes(r)) return false;
    for (int64_t i = 0; i < r->options->repeats; i++)
        if (!repeat(r, r->options->differing)) return false;
    tensors_load_values(r->got);
    return check_slots(r);
}

bool run_has_backward(smoe_context *context, const smoe_layer *layer)
{
    smoe_sizes sizes = SMOE_SIZES_INIT;
    return smoe_query_sizes(context, layer, &sizes) == SMOE_OK && sizes.scratch_backward_bytes > 0;
}

run_outcome run_library(const device *on, smoe_context *context, const smoe_layer *layer,
                        const oracle_drawn *drawn, const run_options *options, tensors *got,
                        char text[RUN_TEXT])
{
    *got = (tensors){0};
    run r = {.on = on,
             .context = context,
             .layer = layer,
             .drawn = drawn,
             .options = options,
             .got = got,
             .text = text};
    r.sizes = (smoe_sizes)SMOE_SIZES_INIT;
    const smoe_status status = smoe_query_sizes(context, layer, &r.sizes);
    bool done = false;
    if (status != SMOE_OK) {
        refuse(&r, "%s: %s", smoe_status_string(status), smoe_last_error(context));
    } else {
        done = run_all(&r);
    }
    for (int i = 0; i < SLOTS; i++) {
        buffer_free(&r.slots[i].memory);
        free(r.slots[i].start);
    }
    if (done) return RUN_OK;
    tensors_free(got);
    return status == SMOE_ERROR_UNSUPPORTED ? RUN_UNSUPPORTED : RUN_FAILED;
}
