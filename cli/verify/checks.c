/* The library against the oracle, tensor by tensor: within the limits of storage, or element by element. */
#include "cli/verify/checks.h"

#include "cli/verify/expect.h"
#include "oracle/compare.h"

#include <math.h>
#include <stdio.h>

enum { DRAWS = 40 }; /* of inputs, until no decision is too close to call and no sum cancels */

bool check_run(verify *v, smoe_context *context, const smoe_layer *layer, const oracle_drawn *drawn,
               const run_options *options, tensors *got)
{
    char text[RUN_TEXT];
    smoe_context *used = context ? context : v->context;
    const run_outcome outcome = run_library(v->on, used, layer, drawn, options, got, text);
    if (outcome == RUN_UNSUPPORTED) report_skip(&v->report, text);
    if (outcome == RUN_FAILED) report_line(&v->report, (verify_line){NULL, INFINITY, 0.0, false, text});
    return outcome == RUN_OK;
}

smoe_context *check_context(verify *v, int32_t threads)
{
    char text[RUN_TEXT] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = v->on->backend;
    options.threads = threads;
    options.error_text = text;
    options.error_size = sizeof text;
    smoe_context *context;
    if (smoe_create(&context, &options) != SMOE_OK)
        report_line(&v->report, (verify_line){NULL, INFINITY, 0.0, false, text});
    return context;
}

void check_zero(verify *v, const char *name, int64_t count, const char *note)
{
    report_line(&v->report, (verify_line){name, (double)count, 0.0, count == 0, note});
}

typedef void judge_tensors(verify *v, const smoe_layer *layer, const tensors *got, const tensors *want,
                           const tensors *stored);

static void judge_errors(verify *v, const smoe_layer *layer, const tensors *got, const tensors *want,
                         const tensors *stored)
{
    for (int i = 0; i < TENSORS; i++) {
        if (!got->at[i].values && !want->at[i].values) continue;
        const verdict judged =
            tensor_judge((tensor_id)i, &got->at[i], &want->at[i], &stored->at[i], verify_cap(layer));
        report_line(&v->report, (verify_line){tensor_names[i], judged.error, judged.limit, judged.ok, NULL});
    }
}

/* Integers: nothing is rounded but what does not fit the storage type of the result. */
static void judge_elements(verify *v, const smoe_layer *layer, const tensors *got, const tensors *want,
                           const tensors *stored)
{
    (void)layer, (void)want;
    for (int i = 0; i < TENSORS; i++) {
        const tensor *a = &got->at[i], *b = &stored->at[i];
        if (!a->values && !b->values) continue;
        const bool same_shape = a->values && b->values && a->count == b->count;
        const size_t count = (size_t)a->count;
        check_zero(v, tensor_names[i],
                   same_shape ? (int64_t)oracle_differing(a->values, b->values, count) : -1,
                   "differing elements");
    }
}

static void check_with(verify *v, const verify_case *c, const smoe_layer *layer, judge_tensors *judge)
{
    const run_options options = {.stages = c->stages,
                                 .forward_only = !run_has_backward(v->context, layer),
                                 .inside_16 = v->on->backend == SMOE_BACKEND_CUDA,
                                 .backwards = layer->accumulate ? 2 : 1};
    for (int draw = 0; draw < DRAWS; draw++) {
        oracle_drawn drawn;
        tensors got, want, stored;
        oracle_draw_inputs(layer, &c->draw, v->seed + 7919 * (uint64_t)draw, &drawn);
        const bool ran = check_run(v, NULL, layer, &drawn, &options, &got);
        bool redraw = false;
        if (ran) {
            redraw = expect_tensors(layer, &drawn, &options, &got, &want, &stored) > 0 ||
                     !tensors_conditioned(&want, &stored, verify_cap(layer));
            if (!redraw || draw + 1 == DRAWS) judge(v, layer, &got, &want, &stored);
            tensors_free(&got);
            tensors_free(&want);
            tensors_free(&stored);
        }
        oracle_drawn_free(&drawn);
        if (!redraw) return;
    }
}

void check_against_oracle(verify *v, const verify_case *c, const smoe_layer *layer)
{
    check_with(v, c, layer, judge_errors);
}

void check_exact(verify *v, const verify_case *c, const smoe_layer *layer)
{
    check_with(v, c, layer, judge_elements);
}
