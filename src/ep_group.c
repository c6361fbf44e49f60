/* Groups of ranks: creation, the order of calls, and the text of a failure. The backend moves the rows. */
#include "check.h"
#include "ep.h"
#include "routing_decisions.h"
#include "wanted.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

static_assert(MOE_EXPERTS == 2 * MOE_DISPATCH && MOE_COLLECT == 2 * MOE_EXPERTS,
              "the next stage is the next bit");

enum { DEFAULT_TIMEOUT_MS = 120000, MOE_WANTS_DW1 = 4, MOE_WANTS_DB2 = 32 /* of moe_ep_wanted */ };

/* In the order of moe_ep_group_values and moe_ep_call_values. */
static const char *const group_names[MOE_EP_GROUP_VALUES] = {
    "version of the protocol",
    "ranks",
    "max_tokens",
    "bytes of a row of X",
    "experts of each rank",
    "most rows from one rank to another",
    "training (not inference)",
};
static const char *const call_names[MOE_EP_CALL_VALUES] = {
    "pass (0 forward, 1 backward)",
    "dtype",
    "hidden",
    "intermediate",
    "experts",
    "topk",
    "activation",
    "entry",
    "waves",
    "inference",
    "wanted gradients",
    "rows that are kept (row_capacity)",
    "gate_limit",
    "up_limit",
    "gate_alpha",
    "up_offset",
};
static const char *const flag_names[MOE_EP_FLAGS] = {
    [MOE_EP_FAULT] = "a fault",
    [MOE_EP_HELLO] = "the group",
    [MOE_EP_HEADER] = "the start of the call",
    [MOE_EP_INPUT] = "X or dO",
    [MOE_EP_AGAIN] = "X of the backward",
    [MOE_EP_RETURN] = "the sums",
    [MOE_EP_FREE] = "the end of an earlier call",
};

void moe_ep_group_values(const smoe_ep *ep, int64_t values[MOE_EP_GROUP_VALUES])
{
    const moe_ep_window *w = &ep->window;
    const int64_t all[MOE_EP_GROUP_VALUES] = {MOE_EP_VERSION, ep->ranks, w->max_tokens, w->row_bytes,
                                              w->experts,     w->pairs,  w->training};
    for (int i = 0; i < MOE_EP_GROUP_VALUES; i++) values[i] = all[i];
}

void moe_ep_call_values(const moe_problem *problem, int backward, int wanted,
                        int64_t values[MOE_EP_CALL_VALUES])
{
    const smoe_layer *l = &problem->layer;
    moe_ep_problem ep;
    moe_ep_problem_init(&ep, l);
    const int limited = l->activation == SMOE_ACTIVATION_SWIGLU_CLAMPED ||
                        l->activation == SMOE_ACTIVATION_SWIGLU_CAPPED; /* others ignore the floats */
    const int64_t all[MOE_EP_CALL_VALUES] = {backward,
                                             l->dtype,
                                             l->hidden,
                                             l->intermediate,
                                             l->experts,
                                             l->topk,
                                             l->activation,
                                             l->entry,
                                             ep.parts,
                                             l->inference,
                                             wanted,
                                             l->inference ? 0 : ep.received.kept_rows,
                                             limited ? moe_bits_of(l->gate_limit) : 0,
                                             limited ? moe_bits_of(l->up_limit) : 0,
                                             limited ? moe_bits_of(l->gate_alpha) : 0,
                                             limited ? moe_bits_of(l->up_offset) : 0};
    for (int i = 0; i < MOE_EP_CALL_VALUES; i++) values[i] = all[i];
}

int moe_ep_wanted(const smoe_layer *layer, const smoe_backward_args *a, int with_router)
{
    return (a->dx != NULL) | moe_wants_ds(layer, a, with_router) << 1 | (a->dw1 ? MOE_WANTS_DW1 : 0) |
           (a->db1 != NULL) << 3 | (a->dw2 != NULL) << 4 | (a->db2 ? MOE_WANTS_DB2 : 0);
}

int moe_ep_sends_x(const moe_ep_problem *ep, int wanted)
{
    return wanted & MOE_WANTS_DW1 || (ep->b1_bytes && wanted & ~MOE_WANTS_DB2);
}

/* The lower rank first, because either may have found it. */
static void note_difference(smoe_ep *ep, const moe_ep_fault *f)
{
    const int swap = f->origin > f->other, of_call = f->reason == MOE_EP_MISMATCH;
    const int32_t low = swap ? f->other : f->origin, high = swap ? f->origin : f->other;
    const int64_t at = f->values[0], lows = f->values[1 + swap], highs = f->values[2 - swap];
    const unsigned long long call = f->call;
    if (of_call && at >= MOE_EP_FLOATS)
        snprintf(ep->error, sizeof ep->error, "call %llu: %s is %g on rank %d and %g on rank %d", call,
                 call_names[at], (double)moe_float_of((uint32_t)lows), low,
                 (double)moe_float_of((uint32_t)highs), high);
    else
        snprintf(ep->error, sizeof ep->error, "call %llu: %s is %lld on rank %d and %lld on rank %d", call,
                 of_call ? call_names[at] : group_names[at], (long long)lows, low, (long long)highs, high);
}

void moe_ep_note(smoe_ep *ep, const moe_ep_fault *f)
{
    const unsigned long long call = f->call;
    const long long a = f->values[0], b = f->values[1];
    char *text = ep->error;
    const size_t size = sizeof ep->error;
    ep->fault = *f;
    switch ((moe_ep_reason)f->reason) {
    case MOE_EP_LATE:
        snprintf(text, size, "call %llu: rank %d waited %lld ms for %s of rank %d", call, f->origin, b,
                 flag_names[a], f->other);
        break;
    case MOE_EP_ABORTED:
        snprintf(text, size, "call %llu: rank %d was stopped by smoe_ep_abort", call, f->origin);
        break;
    case MOE_EP_MISMATCH:
    case MOE_EP_STRANGER: note_difference(ep, f); break;
    }
}

smoe_status moe_ep_outcome(smoe_context *context, smoe_ep *ep)
{
    if (ep->table->look && !ep->fault.reason) ep->table->look(ep);
    if (!ep->fault.reason) return SMOE_OK;
    return moe_fail(context, SMOE_ERROR_PEER, "%s: %s", context->function, ep->error);
}

/* ---- The order of calls ---- */

static smoe_status check_fits(smoe_context *context, const char *function, const smoe_layer *layer,
                              const smoe_ep *ep)
{
    moe_ep_window need;
    moe_ep_window_init(&need, layer);
    const moe_ep_window *has = &ep->window;
    const struct {
        const char *name;
        int64_t needed, there;
        int equal;
    } sizes[] = {
        {"ranks", layer->ranks, ep->ranks, 1},
        {"max_tokens", need.max_tokens, has->max_tokens, 1},
        {"the bytes of a row of X", need.row_bytes, has->row_bytes, 0},
        {"experts / ranks", need.experts, has->experts, 0},
        {"the most rows from one rank to another", need.pairs, has->pairs, 0},
        {"training", need.training, has->training, 0},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].needed > sizes[i].there || (sizes[i].equal && sizes[i].needed < sizes[i].there))
            return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: %s is %lld, the group was made for %lld",
                            function, sizes[i].name, (long long)sizes[i].needed, (long long)sizes[i].there);
    return SMOE_OK;
}

static const char *expected_call(const smoe_ep *ep)
{
    if (ep->next == MOE_DISPATCH) return "smoe_ep_dispatch or smoe_ep_dispatch_backward";
    if (ep->next == MOE_EXPERTS) return ep->in_backward ? "smoe_experts_backward" : "smoe_experts_forward";
    return ep->in_backward ? "smoe_ep_collect_backward" : "smoe_ep_collect";
}

smoe_status moe_ep_begin(smoe_context *context, const moe_problem *problem, smoe_ep *ep, int stages,
                         int backward)
{
    const char *function = context->function;
    if (!ep)
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: args->ep is NULL, but layer->ranks is %d",
                        function, (int)problem->layer.ranks);
    if (ep->context != context)
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: args->ep was made with another context", function);
    const smoe_status status = check_fits(context, function, &problem->layer, ep);
    if (status != SMOE_OK) return status;
    const int first = stages & -stages;
    if (ep->next != first || (first != MOE_DISPATCH && ep->in_backward != backward))
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: call %llu of the group has to go on with %s",
                        function, (unsigned long long)ep->call, expected_call(ep));
    if (first == MOE_DISPATCH) ep->call++;
    ep->in_backward = backward;
    ep->next = stages & MOE_COLLECT ? MOE_DISPATCH : 2 * first;
    return SMOE_OK;
}

/* ---- Public calls ---- */

static smoe_status check_windows(smoe_context *context, const smoe_ep_options *options, int32_t ranks)
{
    if (options->rank < 0 || options->rank >= ranks)
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "smoe_ep_create: rank is %d, the range is 0 to %d",
                        (int)options->rank, (int)ranks - 1);
    if (!options->windows) return moe_fail(context, SMOE_ERROR_ARGUMENT, "smoe_ep_create: windows is NULL");
    for (int r = 0; r < ranks; r++) {
        const void *window = options->windows[r];
        if (!window) return moe_fail(context, SMOE_ERROR_ARGUMENT, "smoe_ep_create: windows[%d] is NULL", r);
        if ((uintptr_t)window % MOE_EP_LINE)
            return moe_fail(context, SMOE_ERROR_ALIGNMENT,
                            "smoe_ep_create: windows[%d] is %p, it must be aligned to %d bytes", r, window,
                            MOE_EP_LINE);
        for (int s = 0; s < r; s++)
            if (window == options->windows[s])
                return moe_fail(context, SMOE_ERROR_ARGUMENT,
                                "smoe_ep_create: windows[%d] and windows[%d] are the same", s, r);
    }
    return SMOE_OK;
}

smoe_status smoe_ep_create(smoe_ep **ep, smoe_context *context, const smoe_layer *layer,
                           const smoe_ep_options *given)
{
    const char *function = "smoe_ep_create";
    if (ep) *ep = NULL;
    if (!context) return SMOE_ERROR_ARGUMENT;
    if (!ep) return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: ep is NULL", function);
    moe_problem problem;
    smoe_status status = moe_take_layer(context, function, layer, &problem);
    if (status != SMOE_OK) return status;
    if (!problem.layer.ranks)
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: layer->ranks is 0, a group needs ranks", function);
    smoe_ep_options options = SMOE_EP_OPTIONS_INIT;
    status = moe_check_struct(context, function, "options", "SMOE_EP_OPTIONS_INIT", given, sizeof options);
    if (status != SMOE_OK) return status;
    moe_take_struct(&options, sizeof options, given);
    status = check_windows(context, &options, problem.layer.ranks);
    if (status != SMOE_OK) return status;
    smoe_ep *made = calloc(1, sizeof *made);
    if (!made) return moe_fail(context, SMOE_ERROR_MEMORY, "%s: no memory for a group", function);
    made->context = context;
    made->table = context->backend->ep;
    made->ranks = problem.layer.ranks;
    made->rank = options.rank;
    made->next = MOE_DISPATCH;
    made->timeout_ms = options.timeout_ms ? options.timeout_ms : DEFAULT_TIMEOUT_MS;
    moe_ep_window_init(&made->window, &problem.layer);
    for (int r = 0; r < made->ranks; r++) made->windows[r] = options.windows[r];
    status = made->table->open(made);
    if (status != SMOE_OK) smoe_ep_destroy(made);
    if (status == SMOE_OK) *ep = made;
    return status;
}

void smoe_ep_destroy(smoe_ep *ep)
{
    if (ep && ep->table->close) ep->table->close(ep);
    free(ep);
}

smoe_status smoe_ep_status(smoe_ep *ep)
{
    if (!ep) return SMOE_ERROR_ARGUMENT;
    ep->context->function = "smoe_ep_status";
    return moe_ep_outcome(ep->context, ep);
}

void smoe_ep_abort(smoe_ep *ep)
{
    if (!ep) return;
    atomic_store(&ep->aborted, 1);
    if (ep->table->abort) ep->table->abort(ep);
}
