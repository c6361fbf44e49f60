/* See report.h. */
#include "cli/bench/report.h"

#include "base/blas_core.h"
#include "build_info.h"
#include "cli/bench/samples.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const table_column columns[] = {
    {"commit", COLUMN_TEXT, 0, true, NULL},
    {"device", COLUMN_TEXT, 0, true, NULL},
    {"backend", COLUMN_TEXT, 0, true, NULL},
    {"suite", COLUMN_TEXT, 0, true, NULL},
    {"shape", COLUMN_TEXT, 0, true, NULL},
    {"T", COLUMN_INTEGER, 0, true, NULL},
    {"d", COLUMN_INTEGER, 0, true, NULL},
    {"n", COLUMN_INTEGER, 0, true, NULL},
    {"E", COLUMN_INTEGER, 0, true, NULL},
    {"K", COLUMN_INTEGER, 0, true, NULL},
    {"dtype", COLUMN_TEXT, 0, true, NULL},
    {"compute", COLUMN_TEXT, 0, true, NULL},
    {"routing", COLUMN_TEXT, 0, true, NULL},
    {"rounding", COLUMN_TEXT, 0, true, NULL},
    {"tile", COLUMN_INTEGER, 0, true, NULL},
    {"pass", COLUMN_TEXT, 0, false, NULL},
    {"kernel", COLUMN_TEXT, 0, false, NULL},
    {"scope", COLUMN_TEXT, 0, true, NULL},
    {"ms_median", COLUMN_NUMBER, 4, false, NULL},
    {"ms_min", COLUMN_NUMBER, 4, false, NULL},
    {"ms_p99", COLUMN_NUMBER, 4, false, NULL},
    {"tflops", COLUMN_NUMBER, 4, false, NULL},
    {"gbps", COLUMN_NUMBER, 1, false, NULL},
    {"bound_ms", COLUMN_NUMBER, 4, false, NULL},
    {"ratio", COLUMN_NUMBER, 3, false, NULL},
    {"chunks", COLUMN_INTEGER, 0, true, NULL},
    {"saved_bytes", COLUMN_BYTES, 0, true, NULL},
    {"peak_bytes", COLUMN_BYTES, 0, true, NULL},
    {"predicted_bytes", COLUMN_BYTES, 0, true, NULL},
    {"max_rel_err", COLUMN_NUMBER, 2, true, NULL},
    {"reuse_saved", COLUMN_INTEGER, 0, true, NULL},
    {"launches", COLUMN_NUMBER, 0, true, NULL},
    {"alone_ms", COLUMN_NUMBER, 4, true, NULL},
    {"alone_copy_ms", COLUMN_NUMBER, 4, true, NULL},
    {"host_ms", COLUMN_NUMBER, 4, true, NULL},
};

/* A table for people has GFLOP/s on the CPU, where all would be far below 1 TFLOP/s. Records have TFLOP/s. */
static bool in_gflops(table_format format, const device *on)
{
    return format == TABLE_ALIGNED && on->backend == SMOE_BACKEND_CPU;
}

table *bench_table(table_format format, const device *on)
{
    enum { COLUMNS = sizeof columns / sizeof columns[0] };
    table_column shown[COLUMNS];
    memcpy(shown, columns, sizeof columns);
    for (int i = 0; i < COLUMNS && in_gflops(format, on); i++)
        if (strcmp(shown[i].name, "tflops") == 0)
            shown[i] = (table_column){"gflops", COLUMN_NUMBER, 2, false, NULL};
    return table_open(stdout, format, shown, COLUMNS);
}

/* ---- Sums over stages ---- */

/* A set of stages: bit i is stage_at(i). */
typedef unsigned stage_set;

#define STAGE_BIT(stage) (1U << ((stage) / 10))
static const stage_set routing_stages = STAGE_BIT(SMOE_STAGE_ROUTER_GEMM) | STAGE_BIT(SMOE_STAGE_TOPK) |
                                        STAGE_BIT(SMOE_STAGE_ROUND) | STAGE_BIT(SMOE_STAGE_PLAN);
static const stage_set forward_gemms = STAGE_BIT(SMOE_STAGE_UP) | STAGE_BIT(SMOE_STAGE_DOWN);
static const stage_set backward_gemms = STAGE_BIT(SMOE_STAGE_DH) | STAGE_BIT(SMOE_STAGE_DW2) |
                                        STAGE_BIT(SMOE_STAGE_DX_ROWS) | STAGE_BIT(SMOE_STAGE_DW1);

static double sum_stages(const double *values, stage_set stages)
{
    double sum = 0;
    for (int i = 0; i < STAGE_COUNT; i++)
        if (stages >> i & 1) sum += values[i];
    return sum;
}

/* What a row measures: the pass as a whole, or some of its stages; none: the weights are quantised. */
typedef struct row {
    bench_pass pass;
    const char *kernel;
    bool whole;
    stage_set stages; // of the row; for a whole pass those of the pass
} row;

static stage_set stages_of(bench_pass pass)
{
    const stage_set forward = STAGE_BIT(SMOE_STAGE_DH) - 1, all = (1U << STAGE_COUNT) - 1;
    return pass == PASS_FORWARD ? forward : pass == PASS_BACKWARD ? all & ~forward : all;
}

static double row_ms(const row *r, const bench_times *times)
{
    if (!r->stages) return times->quantize;
    if (!r->whole) return sum_stages(times->stage, r->stages);
    return r->pass == PASS_FORWARD    ? times->forward
           : r->pass == PASS_BACKWARD ? times->backward
                                      : times->layer;
}

static double combine_bytes(const smoe_layer *layer, stage_set stages)
{
    double bytes = 0;
    if (stages & STAGE_BIT(SMOE_STAGE_COMBINE)) bytes += stage_bytes(layer, SMOE_STAGE_COMBINE);
    if (stages & STAGE_BIT(SMOE_STAGE_DX)) bytes += stage_bytes(layer, SMOE_STAGE_DX);
    return bytes;
}

/* The yardstick of the row in one repeat: its dense GEMMs, and the combines' traffic at the speed of a copy.
 */
static double row_bound(const bench_result *result, const row *r, const bench_times *times)
{
    return sum_stages(times->dense, r->stages & (forward_gemms | backward_gemms)) +
           combine_bytes(&result->c->run.layer, r->stages) * times->copy;
}

static bool has_bound(const row *r)
{
    return (r->stages &
            (forward_gemms | backward_gemms | STAGE_BIT(SMOE_STAGE_COMBINE) | STAGE_BIT(SMOE_STAGE_DX))) != 0;
}

static summary row_summary(const bench_result *result, const row *r, bool bound)
{
    double *values = malloc(result->repeats * sizeof *values);
    if (!values) return (summary){NAN, NAN, NAN};
    for (size_t i = 0; i < result->repeats; i++)
        values[i] = bound ? row_bound(result, r, &result->times[i]) : row_ms(r, &result->times[i]);
    const summary s = summarize(values, result->repeats);
    free(values);
    return s;
}

/* In scope experts the router's backward ends at dlogits: no matrix work, and dlogits to be written. */
static double flops_of_stage(const bench_result *result, smoe_stage stage)
{
    const bool ends = stage == SMOE_STAGE_ROUTER_BWD && result->c->settings.scope == SCOPE_EXPERTS;
    return ends ? NAN : stage_flops(&result->c->run.layer, stage);
}

static double bytes_of_stage(const bench_result *result, smoe_stage stage)
{
    const smoe_layer *l = &result->c->run.layer;
    if (stage == SMOE_STAGE_ROUTER_BWD && result->c->settings.scope == SCOPE_EXPERTS)
        return (double)dtype_bytes(l->logits_type) * (double)l->tokens * (double)l->experts;
    return stage_bytes(l, stage);
}

/* Model FLOPs of a whole pass; those of the stages otherwise. NaN where there is no matrix work. */
static double row_flops(const bench_result *result, const row *r)
{
    double sum = 0;
    const stage_set counted = r->whole ? r->stages & (forward_gemms | backward_gemms) : r->stages;
    for (int i = 0; i < STAGE_COUNT; i++) {
        const double flops = counted >> i & 1 ? flops_of_stage(result, stage_at(i)) : NAN;
        if (!isnan(flops)) sum += flops;
    }
    return sum > 0 ? sum : NAN;
}

/* Did this stage run at all? */
static bool stage_ran(const bench_result *result, int stage)
{
    return result->repeats > 0 && result->times[0].stage[stage] > 0;
}

static double row_bytes(const bench_result *result, const row *r)
{
    const run *of = &result->c->run;
    double bytes =
        r->stages ? 0
                  : (double)(of->sizes.weights_f8_bytes + slot_bytes(of, SLOT_W1) + slot_bytes(of, SLOT_W2));
    for (int i = 0; i < STAGE_COUNT; i++)
        if (r->stages >> i & 1 && stage_ran(result, i)) bytes += bytes_of_stage(result, stage_at(i));
    return bytes;
}

static double row_launches(const bench_result *result, const row *r)
{
    double count = 0;
    for (int i = 0; i < STAGE_COUNT; i++)
        if (r->stages >> i & 1) count += result->launches[i];
    return result->counted && r->stages ? count : NAN;
}

static double row_alone(const bench_result *result, const row *r)
{
    return result->timed_alone && r->stages ? sum_stages(result->alone, r->stages) : NAN;
}

static double row_alone_copy(const bench_result *result, const row *r)
{
    const double ms = r->whole ? 0 : sum_stages(result->alone_copy, r->stages);
    return ms > 0 ? ms : NAN;
}

/* ---- Rows ---- */

static const char *pass_name(bench_pass pass)
{
    return pass == PASS_FORWARD ? "forward" : pass == PASS_BACKWARD ? "backward" : "layer";
}

static double of_pass(const pass_bytes *bytes, bench_pass pass)
{
    return pass == PASS_FORWARD ? bytes->forward : pass == PASS_BACKWARD ? bytes->backward : bytes->layer;
}

static double error_of_pass(const bench_errors *errors, bench_pass pass)
{
    return pass == PASS_FORWARD    ? errors->forward
           : pass == PASS_BACKWARD ? errors->backward
                                   : fmax(errors->forward, errors->backward);
}

/* The reference computes with the same OpenBLAS, so ratios do not show that its kernels are slow. */
static void describe_device(const bench_case *c, char *text, size_t size)
{
    c->settings.device->describe(text, size, c->threads);
    const size_t length = strlen(text);
    if (c->settings.device->backend == SMOE_BACKEND_CPU && blas_core_fault())
        snprintf(text + length, size - length, ", slow OpenBLAS kernels (%s)", blas_core());
}

static void put_problem(table *t, const bench_result *result)
{
    const smoe_layer *l = &result->c->run.layer;
    char device_text[160];
    describe_device(result->c, device_text, sizeof device_text);
    table_text(t, BUILD_COMMIT);
    table_text(t, device_text);
    table_text(t, result->c->settings.device->name);
    table_text(t, result->shape->suite);
    table_text(t, result->shape->name);
    table_integer(t, l->tokens);
    table_integer(t, l->hidden);
    table_integer(t, l->intermediate);
    table_integer(t, l->experts);
    table_integer(t, l->topk);
    table_text(t, dtype_name(l->dtype));
    table_text(t, layer_compute_name(l));
    table_text(t, routing_name(result->problem->routing));
    table_text(t, rounding_name(l->rounding));
    table_integer(t, l->tile);
}

static double host_ms(const bench_result *result, const row *r)
{
    const double *ms = result->host_ms;
    if (!r->whole || !result->counted) return NAN;
    return (r->pass & ~PASS_BACKWARD ? ms[0] : 0) + (r->pass & ~PASS_FORWARD ? ms[1] : 0);
}

static void put_row(table *t, const bench_result *result, const row *r)
{
    if (result->stage && strcmp(result->stage, r->kernel) != 0) return;
    const smoe_layer *l = &result->c->run.layer;
    const summary time = row_summary(result, r, false);
    const double bound = has_bound(r) ? row_summary(result, r, true).median : NAN;
    put_problem(t, result);
    table_text(t, pass_name(r->pass));
    table_text(t, r->kernel);
    table_text(t, result->c->settings.scope == SCOPE_LAYER ? "layer" : "experts");
    table_number(t, time.median);
    table_number(t, time.least);
    table_number(t, time.p99);
    const double flops = row_flops(result, r) / time.median * 1e3; // a second
    table_number(t, flops / (in_gflops(result->format, result->c->settings.device) ? 1e9 : 1e12));
    table_number(t, row_bytes(result, r) / time.median * 1e-6);
    table_number(t, bound);
    table_number(t, bound / time.median);
    table_integer(t, l->chunks);
    table_integer(t, (int64_t)result->c->run.sizes.saved_bytes);
    table_integer(t, (int64_t)of_pass(&result->peak, r->pass));
    table_integer(t, (int64_t)of_pass(&result->predicted, r->pass));
    table_number(t, r->whole ? error_of_pass(&result->errors, r->pass) : NAN);
    table_integer(t, l->reuse_saved);
    table_number(t, row_launches(result, r));
    table_number(t, row_alone(result, r));
    table_number(t, row_alone_copy(result, r));
    table_number(t, host_ms(result, r));
    table_end_row(t);
}

static void put_pass(table *t, const bench_result *result, bench_pass pass)
{
    const stage_set stages = stages_of(pass);
    const row whole = {pass, "all", true, stages};
    put_row(t, result, &whole);
    for (int i = 0; i < STAGE_COUNT && pass != PASS_LAYER; i++) {
        const row stage = {pass, smoe_stage_string(stage_at(i)), false, 1U << i};
        if (stages >> i & 1 && stage_ran(result, i)) put_row(t, result, &stage);
    }
    const row routing = {pass, "routing", false, stages & routing_stages};
    const row gemms = {pass, "gemms", false, stages & (forward_gemms | backward_gemms)};
    if (pass == PASS_FORWARD) put_row(t, result, &routing);
    put_row(t, result, &gemms);
}

/* ---- For people ---- */

static void put_caption(const bench_result *result)
{
    const smoe_layer *l = &result->c->run.layer;
    char device_text[160];
    describe_device(result->c, device_text, sizeof device_text);
    printf("%s %s: T %" PRId64 ", d %" PRId64 ", n %" PRId64 ", E %" PRId64 ", K %" PRId64
           "; %s, %s, %s routing, rounding %s",
           result->shape->suite, result->shape->name, l->tokens, l->hidden, l->intermediate, l->experts,
           l->topk, dtype_name(l->dtype), activation_name(l->activation),
           routing_name(result->problem->routing), rounding_name(l->rounding));
    if (l->rounding != SMOE_ROUNDING_NONE) printf(" (tile %" PRId32 ")", l->tile);
    if (l->compute) printf(", experts' GEMMs in %s", layer_compute_name(l));
    if (l->chunks > 1) printf(", %" PRId32 " chunks", l->chunks);
    if (l->reuse_saved) printf(", dH in H's place");
    if (result->c->settings.scope == SCOPE_EXPERTS) printf(", from given routing");
    printf("\n%s on %s, %zu repeats, commit %s\n", result->c->settings.device->name, device_text,
           result->repeats, BUILD_COMMIT);
}

static void put_memory(const bench_result *result, bench_pass pass)
{
    const double mib = 1024.0 * 1024.0;
    if (!(result->passes & (int)pass)) return;
    printf("  %-8s  peak %.1f MiB (predicted %.1f), max_rel_err %.1e\n", pass_name(pass),
           of_pass(&result->peak, pass) / mib, of_pass(&result->predicted, pass) / mib,
           error_of_pass(&result->errors, pass));
}

/* How much of the pass is gaps between its kernels. */
static void put_launches(const bench_result *result, bench_pass pass)
{
    const row whole = {pass, "", true, stages_of(pass)};
    if (!(result->passes & (int)pass) || !result->counted) return;
    printf("  %-8s  %.0f launches, enqueued by the host in %.4f ms", pass_name(pass),
           row_launches(result, &whole), host_ms(result, &whole));
    if (result->timed_alone) {
        const double ms = row_summary(result, &whole, false).median, alone = row_alone(result, &whole);
        printf(", %.4f ms in one graph, %.4f ms each by itself: %.3f", ms, alone, ms / alone);
    }
    printf("\n");
}

static void put_verdict(const bench_result *result)
{
    const row gemms = {PASS_LAYER, "", false,
                       (result->passes & ~PASS_FORWARD ? backward_gemms : 0) |
                           (result->passes & ~PASS_BACKWARD ? forward_gemms : 0)};
    const row routing = {PASS_FORWARD, "", false, routing_stages};
    const row forward = {PASS_FORWARD, "", true, stages_of(PASS_FORWARD)};
    printf("\nsaved %.1f MiB from forward to backward\n",
           (double)result->c->run.sizes.saved_bytes / 1048576.0);
    put_memory(result, PASS_FORWARD);
    put_memory(result, PASS_BACKWARD);
    put_memory(result, PASS_LAYER);
    put_launches(result, PASS_FORWARD);
    put_launches(result, PASS_BACKWARD);
    put_launches(result, PASS_LAYER);
    const bool cpu = result->c->settings.device->backend == SMOE_BACKEND_CPU;
    const double ratio = row_summary(result, &gemms, true).median / row_summary(result, &gemms, false).median;
    if (!isnan(ratio))
        printf("expert GEMMs together: %.3f of %s\n", ratio,
               cpu ? "dense OpenBLAS" : "cuBLAS's batched GEMMs of equal counts");
    if (result->passes & PASS_FORWARD)
        printf("routing (route + round + plan): %.2f %% of the forward\n",
               100 * row_summary(result, &routing, false).median /
                   row_summary(result, &forward, false).median);
    printf("\n");
}

void bench_report(table *t, const bench_result *result)
{
    static const bench_pass passes[] = {PASS_FORWARD, PASS_BACKWARD, PASS_LAYER};
    if (result->format == TABLE_ALIGNED) put_caption(result);
    for (size_t i = 0; i < sizeof passes / sizeof passes[0]; i++)
        if (result->passes & (int)passes[i]) put_pass(t, result, passes[i]);
    const row quantize = {PASS_LAYER, "weights_f8", false, 0};
    if (result->c->run.layer.compute != SMOE_COMPUTE_STORAGE) put_row(t, result, &quantize);
    table_flush(t);
    if (result->format == TABLE_ALIGNED) put_verdict(result);
}
