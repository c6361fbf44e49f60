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

smoe_context *check_context(verify *v, int32_t threads)
{
    char text[RUN_TEXT] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = v->on->backend;
    options.threads = threads;
    options.kernels = v->kernels;
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

static void check_with(verify *v, const verify_case *c, const smoe_layer *layer, bool exact)
{
    const check_options options = {.run = {.stages = c->stages, .backwards = layer->accumulate ? 2 : 1},
                                   .exact = exact,
                                   .seed = v->seed};
    line_user user = {v, exact ? "differing elements" : NULL};
    char text[RUN_TEXT];
    report_outcome(v, check_layer(v->on, v->context, layer, &c->draw, &options, report_verdict, &user, text),
                   text);
}

void check_against_oracle(verify *v, const verify_case *c, const smoe_layer *layer)
{
    check_with(v, c, layer, false);
}

void check_exact(verify *v, const verify_case *c, const smoe_layer *layer)
{
    check_with(v, c, layer, true);
}
