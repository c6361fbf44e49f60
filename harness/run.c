/* Runs the library between canaries. The contents of every buffer at the start of a run are kept, to check
 * that inputs stay as they were and to run again. */
#include "harness/run.h"
#include "harness/slots.h"

#include "oracle/number.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

double run_initial_gradient(int64_t i)
{
    return (double)(i % 7 - 3) / 4.0;
}

bool run_refuse(run *r, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(r->text, RUN_TEXT, format, arguments);
    va_end(arguments);
    return false;
}

/* ---- Slots ---- */

void *slot_read(const run *r, slot_id id)
{
    const buffer *from = &r->slots[id].memory;
    void *to = oracle_alloc(from->bytes, 1);
    if (from->device && !buffer_read(to, from, from->bytes)) memset(to, 0xff, from->bytes);
    return to;
}

bool slot_keep(run *r, slot_id id)
{
    free(r->slots[id].start);
    r->slots[id].start = slot_read(r, id);
    r->slots[id].input = true;
    return true;
}

/* `values` rounded to the slot's type and put there. */
static bool give(run *r, slot_id id, const double *values, bool input)
{
    slot *s = &r->slots[id];
    const extent x = slot_extent(r, id);
    s->start = oracle_alloc(s->memory.bytes, 1);
    s->input = input;
    oracle_store(s->start, x.type, values, (size_t)x.count);
    return buffer_write(&s->memory, s->start, s->memory.bytes) ||
           run_refuse(r, "%s could not be filled", slot_name(id));
}

static bool give_integers(run *r, slot_id id, const int64_t *values)
{
    const int64_t count = slot_extent(r, id).count;
    double *as_double = oracle_alloc((size_t)count, sizeof *as_double);
    for (int64_t i = 0; i < count; i++) as_double[i] = (double)values[i];
    const bool done = give(r, id, as_double, true);
    free(as_double);
    return done;
}

/* One byte for each value; a token that counts may have any byte but 0. */
static bool give_mask(run *r, slot_id id, const int64_t *values)
{
    slot *s = &r->slots[id];
    unsigned char *bytes = oracle_alloc(s->memory.bytes, 1);
    for (uint64_t i = 0; i < s->memory.bytes; i++) bytes[i] = (unsigned char)(values[i] ? 1 + i % 255 : 0);
    s->start = bytes;
    s->input = true;
    return buffer_write(&s->memory, bytes, s->memory.bytes) ||
           run_refuse(r, "%s could not be filled", slot_name(id));
}

static bool is_weight_gradient(slot_id id)
{
    return id >= SLOT_DW1 && id <= SLOT_DROUTER_BIAS;
}

/* Something to add to. */
static bool give_initial_gradient(run *r, slot_id id)
{
    const int64_t count = slot_extent(r, id).count;
    double *initial = oracle_alloc((size_t)count, sizeof *initial);
    for (int64_t i = 0; i < count; i++) initial[i] = run_initial_gradient(i);
    const bool done = give(r, id, initial, false);
    free(initial);
    return done;
}

static bool has_losses(const run *r)
{
    return r->backward.balance_coefficient != 0.0f || r->backward.z_coefficient != 0.0f ||
           r->wanted[SLOT_LOSS_GRADIENTS];
}

/* Does the backward read the logits? What it does not read it has to take as NULL. */
static bool reads_logits(const run *r)
{
    return has_losses(r) || r->sizes.backward_reads_logits;
}

/* The coefficients of the losses. With loss_gradients that of the balance loss is given there alone, and half
 * of that of the z-loss. */
static bool give_coefficients(run *r, const oracle_drawn *d)
{
    double balance = d->input.balance_coefficient, z = d->input.z_coefficient;
    if (r->wanted[SLOT_LOSS_GRADIENTS]) {
        const double gradients[] = {balance, z / 2};
        if (!give(r, SLOT_LOSS_GRADIENTS, gradients, true)) return false;
        balance = 0.0, z -= z / 2;
    }
    const bool router = r->wanted[SLOT_DLOGITS] || r->wanted[SLOT_DROUTER_WEIGHT];
    r->backward.balance_coefficient = router ? (float)balance : 0.0f;
    r->backward.z_coefficient = router ? (float)z : 0.0f;
    return true;
}

bool run_inputs(run *r, const oracle_drawn *d)
{
    const struct {
        slot_id id;
        const double *values;
    } inputs[] = {{SLOT_X, d->x},
                  {SLOT_ROUTER_WEIGHT, d->router_weight},
                  {SLOT_ROUTER_BIAS, d->router_bias},
                  {SLOT_LOGITS, d->logits},
                  {SLOT_SELECTION_BIAS, d->selection_bias},
                  {SLOT_TOPK_WEIGHTS, d->topk_weights},
                  {SLOT_ROW_WEIGHTS, d->row_weights},
                  {SLOT_W1, d->w1},
                  {SLOT_B1, d->b1},
                  {SLOT_W2, d->w2},
                  {SLOT_B2, d->b2},
                  {SLOT_DOUT, d->dout}};
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++)
        if (r->wanted[inputs[i].id] && inputs[i].values && !give(r, inputs[i].id, inputs[i].values, true))
            return false;
    if (d->topk_ids && !give_integers(r, SLOT_TOPK_IDS, d->topk_ids)) return false;
    if (d->offsets && !give_integers(r, SLOT_OFFSETS, d->offsets)) return false;
    if (d->token_mask && !give_mask(r, SLOT_TOKEN_MASK, d->token_mask)) return false;
    for (int i = 0; r->layer.accumulate && i < SLOTS; i++)
        if (r->wanted[i] && is_weight_gradient((slot_id)i) && !give_initial_gradient(r, (slot_id)i))
            return false;
    r->forward.step = d->input.step;
    if (!give_coefficients(r, d)) return false;
    r->backward.logits = reads_logits(r) ? slot_data(r, SLOT_LOGITS) : NULL;
    r->backward.token_mask = has_losses(r) ? slot_data(r, SLOT_TOKEN_MASK) : NULL;
    return true;
}

void run_wanted(const smoe_layer *l, const oracle_drawn *d, const run_options *options, bool wanted[SLOTS])
{
    const bool logits = l->entry == SMOE_ENTRY_FROM_LOGITS, topk = l->entry == SMOE_ENTRY_FROM_TOPK;
    const bool backward = !options->forward_only, router = backward && logits && !options->stages;
    const bool all[SLOTS] = {[SLOT_X] = true,
                             [SLOT_ROUTER_WEIGHT] = d->router_weight,
                             [SLOT_ROUTER_BIAS] = d->router_bias,
                             [SLOT_LOGITS] = logits,
                             [SLOT_SELECTION_BIAS] = d->selection_bias,
                             [SLOT_LOSSES] = logits,
                             [SLOT_TOPK_IDS] = topk,
                             [SLOT_TOPK_WEIGHTS] = topk,
                             [SLOT_OFFSETS] = d->offsets,
                             [SLOT_ROW_WEIGHTS] = d->row_weights,
                             [SLOT_W1] = true,
                             [SLOT_B1] = d->b1,
                             [SLOT_W2] = true,
                             [SLOT_B2] = d->b2,
                             [SLOT_WEIGHTS_F8] = l->compute != SMOE_COMPUTE_STORAGE,
                             [SLOT_OUT] = true,
                             [SLOT_SAVED] = true,
                             [SLOT_SCRATCH_FORWARD] = true,
                             [SLOT_TOKEN_MASK] = d->token_mask,
                             [SLOT_SCRATCH_BACKWARD] = backward,
                             [SLOT_DOUT] = backward,
                             [SLOT_DX] = backward,
                             [SLOT_DW1] = backward,
                             [SLOT_DW2] = backward,
                             [SLOT_DB1] = backward && d->b1,
                             [SLOT_DB2] = backward && d->b2,
                             [SLOT_DROUTER_WEIGHT] = router && d->router_weight,
                             [SLOT_DROUTER_BIAS] = router && d->router_bias && !options->less_router,
                             [SLOT_DLOGITS] = router && !options->less_router,
                             [SLOT_DTOPK_WEIGHTS] = backward && topk,
                             [SLOT_DROW_WEIGHTS] = backward && !topk,
                             [SLOT_LOSS_GRADIENTS] = router && d->loss_gradients};
    memcpy(wanted, all, sizeof all);
}

bool run_open(run *r, const device *on, smoe_context *context, const smoe_layer *layer,
              const bool wanted[SLOTS])
{
    *r = (run){.on = on, .context = context, .layer = *layer, .sizes = SMOE_SIZES_INIT};
    memcpy(r->wanted, wanted, sizeof r->wanted);
    r->status = smoe_query_sizes(context, layer, &r->sizes);
    return r->status == SMOE_OK ||
           run_refuse(r, "%s: %s", smoe_status_string(r->status), smoe_last_error(context));
}

/* With fp8 the calls read weights_f8 alone. */
static void *weights_of(const run *r, slot_id id)
{
    return r->layer.compute == SMOE_COMPUTE_STORAGE ? slot_data(r, id) : NULL;
}

static void fill_forward(run *r)
{
    r->forward = (smoe_forward_args){.struct_size = sizeof(smoe_forward_args),
                                     .x = slot_data(r, SLOT_X),
                                     .router_weight = slot_data(r, SLOT_ROUTER_WEIGHT),
                                     .router_bias = slot_data(r, SLOT_ROUTER_BIAS),
                                     .logits = slot_data(r, SLOT_LOGITS),
                                     .selection_bias = slot_data(r, SLOT_SELECTION_BIAS),
                                     .losses = slot_data(r, SLOT_LOSSES),
                                     .topk_ids = slot_data(r, SLOT_TOPK_IDS),
                                     .topk_weights = slot_data(r, SLOT_TOPK_WEIGHTS),
                                     .offsets = slot_data(r, SLOT_OFFSETS),
                                     .row_weights = slot_data(r, SLOT_ROW_WEIGHTS),
                                     .w1 = weights_of(r, SLOT_W1),
                                     .b1 = slot_data(r, SLOT_B1),
                                     .w2 = weights_of(r, SLOT_W2),
                                     .b2 = slot_data(r, SLOT_B2),
                                     .out = slot_data(r, SLOT_OUT),
                                     .saved = slot_data(r, SLOT_SAVED),
                                     .saved_size = r->slots[SLOT_SAVED].memory.bytes,
                                     .scratch = slot_data(r, SLOT_SCRATCH_FORWARD),
                                     .scratch_size = r->slots[SLOT_SCRATCH_FORWARD].memory.bytes,
                                     .token_mask = slot_data(r, SLOT_TOKEN_MASK),
                                     .weights_f8 = slot_data(r, SLOT_WEIGHTS_F8),
                                     .weights_f8_size = r->slots[SLOT_WEIGHTS_F8].memory.bytes};
}

static void fill_backward(run *r)
{
    r->backward = (smoe_backward_args){.struct_size = sizeof(smoe_backward_args),
                                       .x = slot_data(r, SLOT_X),
                                       .router_weight = slot_data(r, SLOT_ROUTER_WEIGHT),
                                       .logits = slot_data(r, SLOT_LOGITS),
                                       .topk_ids = slot_data(r, SLOT_TOPK_IDS),
                                       .w1 = weights_of(r, SLOT_W1),
                                       .w2 = weights_of(r, SLOT_W2),
                                       .b2 = slot_data(r, SLOT_B2),
                                       .saved = slot_data(r, SLOT_SAVED),
                                       .saved_size = r->slots[SLOT_SAVED].memory.bytes,
                                       .dout = slot_data(r, SLOT_DOUT),
                                       .dx = slot_data(r, SLOT_DX),
                                       .dw1 = slot_data(r, SLOT_DW1),
                                       .dw2 = slot_data(r, SLOT_DW2),
                                       .db1 = slot_data(r, SLOT_DB1),
                                       .db2 = slot_data(r, SLOT_DB2),
                                       .drouter_weight = slot_data(r, SLOT_DROUTER_WEIGHT),
                                       .drouter_bias = slot_data(r, SLOT_DROUTER_BIAS),
                                       .dlogits = slot_data(r, SLOT_DLOGITS),
                                       .dtopk_weights = slot_data(r, SLOT_DTOPK_WEIGHTS),
                                       .drow_weights = slot_data(r, SLOT_DROW_WEIGHTS),
                                       .loss_gradients = slot_data(r, SLOT_LOSS_GRADIENTS),
                                       .scratch = slot_data(r, SLOT_SCRATCH_BACKWARD),
                                       .scratch_size = r->slots[SLOT_SCRATCH_BACKWARD].memory.bytes,
                                       .weights_f8 = slot_data(r, SLOT_WEIGHTS_F8),
                                       .weights_f8_size = r->slots[SLOT_WEIGHTS_F8].memory.bytes};
}

bool run_make(run *r)
{
    for (int i = 0; i < SLOTS; i++) {
        const uint64_t bytes = slot_bytes(r, (slot_id)i);
        if (bytes && !buffer_make(&r->slots[i].memory, r->on, bytes))
            return run_refuse(r, "out of memory for %s (%llu bytes)", slot_name((slot_id)i),
                              (unsigned long long)bytes);
    }
    fill_forward(r);
    fill_backward(r);
    return true;
}

void run_close(run *r)
{
    for (int i = 0; i < SLOTS; i++) {
        buffer_free(&r->slots[i].memory);
        free(r->slots[i].start);
        r->slots[i] = (slot){0};
    }
}

/* ---- Calls ---- */

static bool call(run *r, const char *name, smoe_status status)
{
    r->status = status;
    if (status != SMOE_OK)
        return run_refuse(r, "%s: %s", smoe_status_string(status), smoe_last_error(r->context));
    return r->on->sync() || run_refuse(r, "%s: the work on the device failed", name);
}

/* The passes wait for all work on the device, copies too, so each needs its own. */
static bool disturb(run *r, const run_options *options)
{
    return !options->traffic || r->on->drive_traffic(options->traffic) ||
           run_refuse(r, "no copies could be put beside it");
}

static bool poison(run *r, slot_id id)
{
    const buffer *memory = &r->slots[id].memory;
    return !memory->device || buffer_poison(memory) ||
           run_refuse(r, "%s could not be poisoned", slot_name(id));
}

bool run_forward(run *r, const run_options *options)
{
    smoe_context *c = r->context;
    const smoe_layer *l = &r->layer;
    const smoe_forward_args *f = &r->forward;
    if (!poison(r, SLOT_SCRATCH_FORWARD) || !disturb(r, options)) return false;
    if (!options->stages) return call(r, "smoe_layer_forward", smoe_layer_forward(c, l, f, NULL));
    const bool logits = l->entry == SMOE_ENTRY_FROM_LOGITS;
    return (!logits || call(r, "smoe_route", smoe_route(c, l, f, NULL))) &&
           (!logits || l->rounding == SMOE_ROUNDING_NONE ||
            call(r, "smoe_round", smoe_round(c, l, f, NULL))) &&
           call(r, "smoe_plan", smoe_plan(c, l, f, NULL)) &&
           call(r, "smoe_experts_forward", smoe_experts_forward(c, l, f, NULL));
}

bool run_backward(run *r, const run_options *options)
{
    if (!poison(r, SLOT_SCRATCH_BACKWARD) || !disturb(r, options)) return false;
    if (options->stages)
        return call(r, "smoe_experts_backward",
                    smoe_experts_backward(r->context, &r->layer, &r->backward, NULL));
    return call(r, "smoe_layer_backward", smoe_layer_backward(r->context, &r->layer, &r->backward, NULL));
}

bool run_intact(run *r)
{
    for (int i = 0; i < SLOTS; i++)
        if (!buffer_intact(&r->slots[i].memory))
            return run_refuse(r, "the library wrote outside %s", slot_name((slot_id)i));
    return true;
}

bool run_check(run *r)
{
    if (!run_intact(r)) return false;
    for (int i = 0; i < SLOTS; i++) {
        const slot *s = &r->slots[i];
        if (!s->input) continue;
        void *now = slot_read(r, (slot_id)i);
        const bool same = memcmp(now, s->start, s->memory.bytes) == 0;
        free(now);
        if (!same) return run_refuse(r, "the library changed its input %s", slot_name((slot_id)i));
    }
    return true;
}

/* ---- Whole runs ---- */

/* The forward's results except saved, its scratch, and the input that the backward does not read. */
static bool poison_between(run *r)
{
    const slot_id gone[] = {SLOT_OUT, SLOT_LOSSES, SLOT_SCRATCH_FORWARD, SLOT_ROUTER_BIAS};
    for (size_t i = 0; i < sizeof gone / sizeof gone[0]; i++) {
        if (!poison(r, gone[i])) return false;
        r->slots[gone[i]].input = false;
    }
    return true;
}

/* Without reuse_saved the backward must leave `saved` as it is. */
static bool keep_saved(run *r)
{
    return r->layer.reuse_saved || slot_keep(r, SLOT_SAVED);
}

/* Everything but inputs, which stayed, as before the first pass. */
static bool begin_again(run *r)
{
    free(r->slots[SLOT_SAVED].start);
    r->slots[SLOT_SAVED].start = NULL, r->slots[SLOT_SAVED].input = false;
    for (int i = 0; i < SLOTS; i++) {
        const slot *s = &r->slots[i];
        if (!s->memory.device || s->input) continue;
        if (!(s->start ? buffer_write(&s->memory, s->start, s->memory.bytes) : buffer_poison(&s->memory)))
            return run_refuse(r, "%s could not be filled again", slot_name((slot_id)i));
    }
    return true;
}

/* For another backward on the same forward, where the first destroyed the saved H. The router's bias,
 * poisoned since, is needed again. */
static bool run_forward_again(run *r, const run_options *options)
{
    const slot *bias = &r->slots[SLOT_ROUTER_BIAS];
    return (!bias->start || buffer_write(&bias->memory, bias->start, bias->memory.bytes)) &&
           run_forward(r, options) && poison_between(r);
}

/* What a graph runs: the calls of run_passes. */
typedef struct passes {
    run *r;
    const run_options *options;
} passes;

static bool enqueue_passes(void *user, void *stream)
{
    const passes *p = user;
    run *r = p->r;
    r->status = smoe_layer_forward(r->context, &r->layer, &r->forward, stream);
    const int backwards = p->options->forward_only ? 0 : p->options->backwards;
    for (int i = 0; i < backwards && r->status == SMOE_OK; i++)
        r->status = smoe_layer_backward(r->context, &r->layer, &r->backward, stream);
    return r->status == SMOE_OK || run_refuse(r, "%s", smoe_last_error(r->context));
}

/* Twice, unless gradients accumulate: a graph must not depend on what an earlier launch left. */
static bool fetch_forward(run *r, tensors *got)
{
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    return call(r, "smoe_view_plan", smoe_view_plan(r->context, &r->layer, &r->forward, &view)) &&
           run_fetch_forward(r, &view, got);
}

static bool run_graph(run *r, const run_options *options, tensors *got)
{
    passes all = {r, options};
    if (!poison(r, SLOT_SCRATCH_FORWARD) || !poison(r, SLOT_SCRATCH_BACKWARD)) return false;
    if (!r->on->replay(enqueue_passes, &all, r->layer.accumulate ? 1 : 2))
        return r->status == SMOE_OK ? run_refuse(r, "the graph failed") : false;
    return fetch_forward(r, got) && (options->forward_only || run_fetch_backward(r, got));
}

static bool run_passes(run *r, const run_options *options, tensors *got)
{
    if (options->graph) return run_graph(r, options, got);
    if (!run_forward(r, options) || !fetch_forward(r, got)) return false;
    if (options->forward_only) return true;
    if (!run_check(r) || !poison_between(r) || !keep_saved(r)) return false;
    for (int i = 0; i < options->backwards || i == 0; i++) {
        /* a backward that may destroy the saved H needs another forward before the next */
        if (i && r->layer.reuse_saved && !run_forward_again(r, options)) return false;
        if (!run_backward(r, options)) return false;
    }
    return run_fetch_backward(r, got);
}

/* Both passes once more, with the same buffers; differing: elements of each tensor. */
static bool repeat(run *r, const run_options *options, const tensors *first, int64_t *differing)
{
    tensors again = {0};
    const bool done = begin_again(r) && run_passes(r, options, &again);
    for (int i = 0; done && i < TENSORS; i++)
        differing[i] += llabs(tensor_differing_bits(&first->at[i], &again.at[i]));
    tensors_free(&again);
    return done;
}

/* In two parts, the later experts first. */
bool run_quantize(run *r)
{
    if (r->layer.compute == SMOE_COMPUTE_STORAGE) return true;
    const int64_t e = r->layer.experts, parts[] = {e / 2, e, 0, e / 2};
    const size_t element = oracle_type_bytes(r->layer.dtype);
    const size_t w1 = (size_t)(oracle_h_width(&r->layer) * r->layer.hidden) * element;
    const size_t w2 = (size_t)(r->layer.intermediate * r->layer.hidden) * element;
    for (int i = 0; i < 4; i += 2) {
        if (parts[i] == parts[i + 1]) continue;
        const smoe_quantize_args q = {sizeof q,
                                      (const char *)slot_data(r, SLOT_W1) + (size_t)parts[i] * w1,
                                      (const char *)slot_data(r, SLOT_W2) + (size_t)parts[i] * w2,
                                      r->layer.dtype,
                                      parts[i],
                                      parts[i + 1] - parts[i],
                                      slot_data(r, SLOT_WEIGHTS_F8),
                                      r->sizes.weights_f8_bytes};
        if (!call(r, "smoe_quantize_weights", smoe_quantize_weights(r->context, &r->layer, &q, NULL)))
            return false;
    }
    return true;
}

/* Afterwards weights_f8 is an input. */
static bool quantize_weights(run *r)
{
    return run_quantize(r) && (!r->wanted[SLOT_WEIGHTS_F8] || slot_keep(r, SLOT_WEIGHTS_F8));
}

static bool run_all(run *r, const oracle_drawn *drawn, const run_options *options, tensors *got)
{
    if (!run_make(r) || !run_inputs(r, drawn) || !quantize_weights(r) || !run_passes(r, options, got))
        return false;
    for (int64_t i = 0; i < options->repeats; i++)
        if (!repeat(r, options, got, options->differing)) return false;
    tensors_load_values(got);
    return run_check(r);
}

run_outcome run_library(const device *on, smoe_context *context, const smoe_layer *layer,
                        const oracle_drawn *drawn, const run_options *options, tensors *got,
                        char text[RUN_TEXT])
{
    bool wanted[SLOTS];
    run r;
    *got = (tensors){0};
    run_wanted(layer, drawn, options, wanted);
    const bool done = run_open(&r, on, context, layer, wanted) && run_all(&r, drawn, options, got);
    run_close(&r);
    memcpy(text, r.text, RUN_TEXT);
    if (done) return RUN_OK;
    tensors_free(got);
    return r.status == SMOE_ERROR_UNSUPPORTED ? RUN_UNSUPPORTED : RUN_FAILED;
}
