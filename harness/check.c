/* See check.h. */
#include "harness/check.h"

#include "harness/expect.h"
#include "oracle/compare.h"

#include <math.h>
#include <string.h>

enum { DRAWS = 40 };

double check_cap(const smoe_layer *layer)
{
    const bool logits_bf16 = layer->entry == SMOE_ENTRY_FROM_LOGITS && layer->logits_type == SMOE_TYPE_BF16;
    if (layer->compute != SMOE_COMPUTE_STORAGE) return 0.02;
    if (layer->dtype == SMOE_TYPE_BF16 || logits_bf16) return 5e-3;
    return layer->dtype == SMOE_TYPE_F16 ? 1e-3 : 5e-6;
}

static double cap_of(const smoe_layer *layer, const check_options *options)
{
    return check_cap(layer) * (options->looser > 0.0 ? options->looser : 1.0);
}

/* Integers: nothing is rounded but what does not fit the storage type of the result. */
static verdict judge_elements(const tensor *got, const tensor *stored)
{
    const bool same_shape = got->values && stored->values && got->count == stored->count;
    const double error =
        same_shape ? (double)oracle_differing(got->values, stored->values, (size_t)got->count) : INFINITY;
    return (verdict){error, 0.0, error == 0.0};
}

/* fp8: against the oracle that quantises too. They differ where sums in f32 and in fp64 are quantised to
 * different numbers. */
static verdict judge_f8(tensor_id id, const tensor *got, const tensor *stored, double cap)
{
    if (tensor_exact(id) || !got->values || !stored->values || got->count != stored->count)
        return judge_elements(got, stored);
    const double error = oracle_relative_error(got->values, stored->values, (size_t)stored->count);
    return (verdict){error, cap, error <= cap};
}

verdict check_judge(const smoe_layer *layer, tensor_id id, const tensor *got, const tensor *want,
                    const tensor *stored, double cap)
{
    return layer->compute ? judge_f8(id, got, stored, cap) : tensor_judge(id, got, want, stored, cap);
}

typedef struct comparison {
    tensors got, want, stored;
} comparison;

static void judge_all(const smoe_layer *layer, const check_options *options, const comparison *c,
                      check_report *report, void *user)
{
    for (int i = 0; i < TENSORS; i++) {
        const tensor *got = &c->got.at[i], *want = &c->want.at[i], *stored = &c->stored.at[i];
        if (!got->values && !stored->values) continue;
        const verdict judged =
            options->exact ? judge_elements(got, stored)
                           : check_judge(layer, (tensor_id)i, got, want, stored, cap_of(layer, options));
        report(user, (tensor_id)i, &judged);
    }
}

/* Are these inputs good to judge by? */
static bool expect_all(const device *on, const smoe_layer *layer, const oracle_drawn *drawn,
                       const check_options *options, comparison *c)
{
    const bool stored_only = options->exact || layer->compute != SMOE_COMPUTE_STORAGE;
    const int64_t undecided =
        expect_tensors(on, layer, drawn, &options->run, &c->got, stored_only ? NULL : &c->want, &c->stored);
    if (undecided) return false;
    return stored_only || tensors_conditioned(&c->want, &c->stored, cap_of(layer, options));
}

run_outcome check_layer(const device *on, smoe_context *context, const smoe_layer *layer,
                        const oracle_draw *draw, const check_options *options, check_report *report,
                        void *user, char text[RUN_TEXT])
{
    check_options of_context = *options;
    of_context.run.exact_da = strncmp(smoe_kernels_string(context), "portable", 8) == 0;
    options = &of_context;
    for (uint64_t attempt = 0; attempt < DRAWS; attempt++) {
        oracle_drawn drawn;
        comparison c = {0};
        bool good = false;
        oracle_draw_inputs(layer, draw, options->seed + 7919 * attempt, &drawn);
        const run_outcome outcome = run_library(on, context, layer, &drawn, &options->run, &c.got, text);
        if (outcome == RUN_OK) {
            good = expect_all(on, layer, &drawn, options, &c) || attempt + 1 == DRAWS;
            if (good) judge_all(layer, options, &c, report, user);
            tensors_free(&c.got);
            tensors_free(&c.want);
            tensors_free(&c.stored);
        }
        oracle_drawn_free(&drawn);
        if (good || outcome != RUN_OK) return outcome;
    }
    return RUN_OK;
}
