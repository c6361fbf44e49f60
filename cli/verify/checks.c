/* Compares the library with the oracle, tensor by tensor: within the error limits of the storage type, or
 * exactly. */
#include "cli/verify/checks.h"

#include "harness/check.h"

#include <math.h>

static void report_outcome(verify *v, run_outcome outcome, const char *text)
{
    if (outcome == RUN_UNSUPPORTED) report_skip(&v->report, text);
    if (outcome == RUN_FAILED) report_line(&v->report, (verify_line){NULL, INFINITY, 0.0, false, text});
}

bool check_run(verify *v, smoe_context *context, const smoe_layer *layer, const oracle_drawn *drawn,
               const run_options *options, tensors *got)
{
    char text[RUN_TEXT];
    smoe_context *used = context ? context : v->context;
    const run_outcome outcome = run_library(v->on, used, layer, drawn, options, got, text);
    report_outcome(v, outcome, text);
    return outcome == RUN_OK;
}

smoe_context *check_context(verify *v, int32_t threads, smoe_stage_callback on_stage, void *user)
{
    char text[RUN_TEXT] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = v->on->backend;
    options.threads = threads;
    options.kernels = v->kernels;
    options.device = v->gpu;
    options.on_stage = on_stage;
    options.on_stage_user = user;
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

typedef struct line_user {
    verify *v;
    const char *note;
} line_user;

static void report_verdict(void *given, tensor_id id, const verdict *judged)
{
    const line_user *user = given;
    report_line(&user->v->report,
                (verify_line){tensor_names[id], judged->error, judged->limit, judged->ok, user->note});
}

/* The tensors with other bits in a run that was repeated. */
static void report_again(verify *v, const int64_t differing[TENSORS])
{
    int64_t sum = 0;
    for (int i = 0; i < TENSORS; i++) {
        sum += differing[i];
        if (differing[i]) check_zero(v, tensor_names[i], differing[i], "differing bits, again");
    }
    if (sum == 0) check_zero(v, "all", 0, "differing bits, again");
}

void check_compare(verify *v, const layer_case *c, const smoe_layer *layer)
{
    int64_t differing[TENSORS] = {0};
    /* in kernel cases Y and dX~ need not fit 16 bits: the oracle rounds them, the CPU backend keeps them in
     * f32 */
    const bool exact =
        c->draw.integers > 0 && !c->inexact && !(c->kernel && v->on->backend == SMOE_BACKEND_CPU);
    const check_options options = {.run = {.stages = c->stages,
                                           .forward_only = c->forward_only,
                                           .backwards = layer->accumulate ? 2 : 1,
                                           .repeats = v->again,
                                           .differing = differing},
                                   .exact = exact,
                                   .seed = v->seed};
    line_user user = {v, exact ? "differing elements" : NULL};
    char text[RUN_TEXT];
    const run_outcome outcome =
        check_layer(v->on, v->context, layer, &c->draw, &options, report_verdict, &user, text);
    report_outcome(v, outcome, text);
    if (outcome == RUN_OK && v->again) report_again(v, differing);
    if (c->other_ways) check_other_ways(v, c, layer);
}

void check_support(verify *v, const layer_case *c, const smoe_layer *layer)
{
    smoe_sizes sizes = SMOE_SIZES_INIT;
    (void)c;
    const smoe_status asked = smoe_supports(v->context, layer),
                      sized = smoe_query_sizes(v->context, layer, &sizes);
    check_zero(v, NULL, asked != sized || sizes.rows <= 0,
               asked == sized ? "taken" : "smoe_supports and smoe_query_sizes disagree");
}
