/* See case.h. */
#include "cli/bench/case.h"

#include "cli/bench/yardstick.h"
#include "cli/bench/yardstick_cuda.h"
#include "cli/support/costs.h"

#include "src/activations.h"

#include <inttypes.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

static bool from_logits(const bench_case *c)
{
    return c->run.layer.entry == SMOE_ENTRY_FROM_LOGITS;
}

static bool with_router(const bench_case *c)
{
    return c->settings.scope == SCOPE_LAYER;
}

/* Without biases and losses, and with at most one of dlogits and dtopk_weights. */
static void list_wanted(const bench_case *c, smoe_entry entry, bool wanted[SLOTS])
{
    const bool back = c->settings.backward, router = with_router(c), logits = entry == SMOE_ENTRY_FROM_LOGITS;
    const bool all[SLOTS] = {[SLOT_X] = true,
                             [SLOT_ROUTER_WEIGHT] = router,
                             [SLOT_LOGITS] = logits,
                             [SLOT_TOPK_IDS] = !logits,
                             [SLOT_TOPK_WEIGHTS] = !logits,
                             [SLOT_W1] = true,
                             [SLOT_W2] = true,
                             [SLOT_WEIGHTS_F8] = c->settings.compute != SMOE_COMPUTE_STORAGE,
                             [SLOT_DOUT] = back,
                             [SLOT_OUT] = true,
                             [SLOT_SAVED] = true,
                             [SLOT_SCRATCH_FORWARD] = true,
                             [SLOT_SCRATCH_BACKWARD] = back,
                             [SLOT_DX] = back,
                             [SLOT_DW1] = back,
                             [SLOT_DW2] = back,
                             [SLOT_DROUTER_WEIGHT] = back && router,
                             [SLOT_DLOGITS] = back && logits && !router,
                             [SLOT_DTOPK_WEIGHTS] = back && !logits};
    memcpy(wanted, all, sizeof all);
}

static bool library_failed(const bench_case *c, smoe_status status, error *err)
{
    const bool usage = status == SMOE_ERROR_SHAPE || status == SMOE_ERROR_ARGUMENT;
    return fail(err, usage ? ERROR_USAGE : ERROR_RUNTIME, "%s", smoe_last_error(c->run.context));
}

static bool open_run(bench_case *c, const smoe_layer *layer, error *err)
{
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    char text[400] = "";
    bool wanted[SLOTS];
    smoe_context *context;
    options.backend = c->settings.device->backend;
    options.threads = c->settings.threads;
    options.kernels = c->settings.kernels;
    options.on_stage = stage_clock_on_stage;
    options.on_stage_user = &c->clock;
    options.error_text = text;
    options.error_size = sizeof text;
    if (smoe_create(&context, &options) != SMOE_OK) return fail(err, ERROR_RUNTIME, "%s", text);
    list_wanted(c, layer->entry, wanted);
    if (!run_open(&c->run, c->settings.device, context, layer, wanted))
        return library_failed(c, c->run.status, err);
    if (!c->settings.device->open_stream(&c->stream) ||
        !stage_clock_open(&c->clock, clock_of(c->settings.device)))
        return fail(err, ERROR_RUNTIME, "no stream or clock on the device");
    return true;
}

static uint64_t yardstick_needs(const bench_case *c)
{
    if (c->settings.no_bound) return 0;
    if (c->settings.device->backend == SMOE_BACKEND_CPU)
        return yardstick_bytes(&c->run.layer, c->run.sizes.rows);
    return cuda_yardstick_bytes(&c->run.layer, c->run.sizes.rows, c->settings.backward);
}

static bool check_memory(const bench_case *c, error *err)
{
    uint64_t needed = yardstick_needs(c);
    for (int i = 0; i < SLOTS; i++) needed += slot_bytes(&c->run, (slot_id)i);
    const uint64_t available = c->settings.device->available();
    const double mib = 1024.0 * 1024.0;
    if (needed <= available) return true;
    return fail(err, ERROR_RUNTIME,
                "the buffers of this problem take %.0f MiB, but %.0f MiB of memory are free",
                (double)needed / mib, (double)available / mib);
}

/* The streams of random numbers; each tensor has its own. */
enum {
    SEED_X = 10,
    SEED_W1 = 20,
    SEED_W2 = 30,
    SEED_DOUT = 40,
    SEED_ROUTING = 50,
    SEED_WEIGHTS = 60,
    SEED_STEP = 100
};

static bool fill_inputs(const bench_case *c, const problem_options *problem, const int32_t *ids)
{
    const smoe_layer *l = &c->run.layer;
    const uint64_t seed = problem->seed * SEED_STEP;
    const int64_t w2_count = l->experts * l->hidden * l->intermediate;
    const int64_t w1_count = l->experts * moe_h_width(l) * l->hidden;
    const bool cpu = c->settings.device->backend == SMOE_BACKEND_CPU;
    fill_function *fill =
        cpu ? fill_normal
            : fill_tiled; // tensors in a GPU's memory can be larger than what a host can draw in a short time
    bool good = with_router(c)
                    ? fill_steered(slot_memory(&c->run, SLOT_X), l, ids, seed + SEED_X) &&
                          fill_router(slot_memory(&c->run, SLOT_ROUTER_WEIGHT), l)
                    : fill(slot_memory(&c->run, SLOT_X), l->dtype, l->tokens * l->hidden, 1, seed + SEED_X);
    if (from_logits(c) && !with_router(c))
        good = good && fill_logits(slot_memory(&c->run, SLOT_LOGITS), l, ids, seed + SEED_WEIGHTS);
    if (!from_logits(c))
        good = good &&
               buffer_write(slot_memory(&c->run, SLOT_TOPK_IDS), ids,
                            slot_memory(&c->run, SLOT_TOPK_IDS)->bytes) &&
               fill_weights(slot_memory(&c->run, SLOT_TOPK_WEIGHTS), l, seed + SEED_WEIGHTS);
    good = good &&
           fill(slot_memory(&c->run, SLOT_W1), l->dtype, w1_count, 1 / sqrt((double)l->hidden),
                seed + SEED_W1) &&
           fill(slot_memory(&c->run, SLOT_W2), l->dtype, w2_count, 1 / sqrt((double)l->intermediate),
                seed + SEED_W2);
    if (c->settings.backward)
        good = good &&
               fill(slot_memory(&c->run, SLOT_DOUT), l->dtype, l->tokens * l->hidden, 1, seed + SEED_DOUT);
    return good;
}

static bool make_inputs(const bench_case *c, const problem_options *problem, error *err)
{
    const smoe_layer *l = &c->run.layer;
    int32_t *ids = malloc((size_t)(l->tokens * l->topk) * sizeof *ids);
    const bool good = ids &&
                      make_routing(problem->routing, l->tokens, l->experts, l->topk,
                                   problem->seed * SEED_STEP + SEED_ROUTING, ids) &&
                      fill_inputs(c, problem, ids);
    free(ids);
    return good || fail(err, ERROR_RUNTIME, "the inputs could not be made: out of memory");
}

static bool check_scope(const bench_case *c, const smoe_layer *layer, error *err)
{
    if (!with_router(c) || layer->experts <= layer->hidden) return true;
    return fail(err, ERROR_USAGE,
                "--scope layer: the router's columns need E <= d, but E = %" PRId64 " and d = %" PRId64
                "; take --scope experts",
                layer->experts, layer->hidden);
}

bool bench_case_make(bench_case *made, const bench_settings *settings, const problem_options *problem,
                     const bench_shape *shape, error *err)
{
    smoe_layer layer = problem_layer(problem, shape);
    layer.compute = settings->compute;
    if (settings->scope == SCOPE_EXPERTS && problem->rounding == SMOE_ROUNDING_NONE)
        layer.entry = settings->entry;
    *made = (bench_case){.settings = *settings};
    made->threads = settings->threads > 0 ? settings->threads : omp_get_max_threads();
    bool good = check_scope(made, &layer, err) && open_run(made, &layer, err) && check_memory(made, err);
    if (good && !run_make(&made->run)) good = fail(err, ERROR_RUNTIME, "%s", made->run.text);
    if (good && make_inputs(made, problem, err) && bench_quantize(made, NULL, err)) return true;
    bench_case_free(made);
    return false;
}

void bench_case_free(bench_case *freed)
{
    run_close(&freed->run);
    stage_clock_close(&freed->clock);
    freed->settings.device->close_stream(freed->stream);
    freed->stream = NULL;
    smoe_destroy(freed->run.context);
    freed->run.context = NULL;
}

/* ---- The calls ---- */

bool bench_prepared_apart(const bench_case *c)
{
    return from_logits(c) && !with_router(c);
}

static bool synchronize(const bench_case *c, error *err)
{
    return c->settings.device->sync() || fail(err, ERROR_RUNTIME, "the device reported an error");
}

bool bench_enqueue_prepare(bench_case *c, error *err)
{
    if (!bench_prepared_apart(c)) return true;
    smoe_status status = smoe_route(c->run.context, &c->run.layer, &c->run.forward, c->stream);
    if (status == SMOE_OK && c->run.layer.rounding != SMOE_ROUNDING_NONE)
        status = smoe_round(c->run.context, &c->run.layer, &c->run.forward, c->stream);
    return status == SMOE_OK || library_failed(c, status, err);
}

bool bench_enqueue_forward(bench_case *c, error *err)
{
    smoe_status status;
    if (bench_prepared_apart(c)) {
        status = smoe_plan(c->run.context, &c->run.layer, &c->run.forward, c->stream);
        if (status == SMOE_OK)
            status = smoe_experts_forward(c->run.context, &c->run.layer, &c->run.forward, c->stream);
    } else {
        status = smoe_layer_forward(c->run.context, &c->run.layer, &c->run.forward, c->stream);
    }
    return status == SMOE_OK || library_failed(c, status, err);
}

bool bench_enqueue_backward(bench_case *c, error *err)
{
    const smoe_status status =
        smoe_layer_backward(c->run.context, &c->run.layer, &c->run.backward, c->stream);
    return status == SMOE_OK || library_failed(c, status, err);
}

bool bench_enqueue_quantize(bench_case *c, error *err)
{
    const run *r = &c->run;
    smoe_quantize_args args = SMOE_QUANTIZE_ARGS_INIT;
    args.w1 = slot_data(r, SLOT_W1), args.w2 = slot_data(r, SLOT_W2);
    args.weight_type = r->layer.dtype;
    args.experts = r->layer.experts;
    args.weights_f8 = slot_data(r, SLOT_WEIGHTS_F8), args.weights_f8_size = r->sizes.weights_f8_bytes;
    const smoe_status status = smoe_quantize_weights(r->context, &r->layer, &args, c->stream);
    return status == SMOE_OK || library_failed(c, status, err);
}

bool bench_prepare(bench_case *c, error *err)
{
    if (!bench_prepared_apart(c)) return true;
    const bool good = bench_enqueue_prepare(c, err);
    stage_clock_reset(&c->clock);
    return good && synchronize(c, err);
}

static bool timed(bench_case *c, bool (*enqueue)(bench_case *, error *), double *ms, error *err)
{
    const int from = stage_clock_mark(&c->clock, c->stream);
    const bool good = enqueue(c, err);
    const int to = stage_clock_mark(&c->clock, c->stream);
    if (!good || !synchronize(c, err)) return false;
    if (c->clock.full) return fail(err, ERROR_RUNTIME, "more than %d stages in a step", CLOCK_SPANS);
    if (c->clock.failed) return fail(err, ERROR_RUNTIME, "the device could not set a mark of time");
    if (ms) *ms = stage_clock_ms(&c->clock, from, to);
    return true;
}

bool bench_forward(bench_case *c, double *ms, error *err)
{
    return timed(c, bench_enqueue_forward, ms, err);
}

bool bench_backward(bench_case *c, double *ms, error *err)
{
    return timed(c, bench_enqueue_backward, ms, err);
}

bool bench_quantize(bench_case *c, double *ms, error *err)
{
    return c->run.layer.compute == SMOE_COMPUTE_STORAGE || timed(c, bench_enqueue_quantize, ms, err);
}

bool bench_read_counts(bench_case *c, int32_t *counts, error *err)
{
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    const smoe_status status = smoe_view_plan(c->run.context, &c->run.layer, &c->run.forward, &view);
    if (status != SMOE_OK) return library_failed(c, status, err);
    if (c->settings.device->download(counts, view.counts, (size_t)c->run.layer.experts * sizeof *counts))
        return true;
    return fail(err, ERROR_RUNTIME, "the plan could not be read back");
}

/* ---- Poison, high-water marks, canaries ---- */

static bool is_working(slot_id id)
{
    return id == SLOT_SAVED || id == SLOT_SCRATCH_FORWARD || id == SLOT_SCRATCH_BACKWARD;
}

static bool is_output(const bench_case *c, slot_id id)
{
    return id == SLOT_OUT || id >= SLOT_DX || (id == SLOT_LOGITS && with_router(c));
}

bool bench_poison(bench_case *c, error *err)
{
    bool good = true;
    for (int i = 0; i < SLOTS; i++) {
        const buffer *b = slot_memory(&c->run, (slot_id)i);
        if (!b->data) continue;
        if (is_working((slot_id)i)) good = good && b->device->set(b->data, BENCH_POISON, b->bytes);
        if (is_output(c, (slot_id)i)) good = good && buffer_poison(b);
    }
    return good || fail(err, ERROR_RUNTIME, "the device's memory could not be filled");
}

bool bench_touched(const buffer *looked_at, uint64_t *bytes, error *err)
{
    enum { WINDOW = 1 << 20 };
    *bytes = 0;
    if (!looked_at->data) return true;
    unsigned char *window = malloc(WINDOW);
    bool good = window != NULL;
    for (size_t end = looked_at->bytes; good && *bytes == 0 && end > 0;) {
        const size_t length = end < WINDOW ? end : WINDOW;
        end -= length;
        good = looked_at->device->download(window, (const char *)looked_at->data + end, length);
        size_t last = length;
        while (good && last > 0 && window[last - 1] == BENCH_POISON) last--;
        if (last > 0) *bytes = end + last;
    }
    free(window);
    return good || fail(err, ERROR_RUNTIME, "a buffer could not be read back");
}

bool bench_canaries(bench_case *c, error *err)
{
    return run_intact(&c->run) || fail(err, 1, "%s", c->run.text);
}
