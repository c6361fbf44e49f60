/* See bench_case.h. */
#include "cli/bench/case.h"

#include "cli/bench/yardstick.h"
#include "cli/bench/yardstick_cuda.h"
#include "cli/common/costs.h"

#include "src/activations.h"

#include <inttypes.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

/* A buffer of the case: its name in messages, its bytes, and whether it starts as poison. */
typedef struct part {
    const char *name;
    buffer *buffer;
    uint64_t bytes;
} part;

enum { PARTS = 18 };

static bool from_logits(const bench_case *c)
{
    return c->layer.entry == SMOE_ENTRY_FROM_LOGITS;
}

static bool with_router(const bench_case *c)
{
    return c->settings.scope == SCOPE_LAYER;
}

static void list_parts(bench_case *c, part parts[PARTS])
{
    const smoe_layer *l = &c->layer;
    const uint64_t element = (uint64_t)dtype_bytes(l->dtype);
    const uint64_t tokens = (uint64_t)l->tokens, d = (uint64_t)l->hidden, experts = (uint64_t)l->experts;
    const uint64_t n = (uint64_t)l->intermediate, pairs = tokens * (uint64_t)l->topk;
    const uint64_t x = element * tokens * d, w2 = element * experts * d * n;
    const uint64_t w1 = element * experts * (uint64_t)moe_h_width(l) * d;
    const uint64_t router = with_router(c) ? element * experts * d : 0;
    const uint64_t logits = from_logits(c) ? (uint64_t)dtype_bytes(l->logits_type) * tokens * experts : 0;
    const uint64_t given = from_logits(c) ? 0 : 4 * pairs;
    const uint64_t back = c->settings.backward;
    const part all[PARTS] = {
        {"x", &c->x, x},
        {"router_weight", &c->router_weight, router},
        {"logits", &c->logits, logits},
        {"topk_ids", &c->topk_ids, given},
        {"topk_weights", &c->topk_weights, given},
        {"w1", &c->w1, w1},
        {"w2", &c->w2, w2},
        {"dout", &c->dout, back * x},
        {"out", &c->out, x},
        {"saved", &c->saved, c->sizes.saved_buffer_bytes},
        {"scratch of the forward", &c->scratch_forward, c->sizes.scratch_forward_bytes},
        {"scratch of the backward", &c->scratch_backward, back * c->sizes.scratch_backward_bytes},
        {"dx", &c->dx, back * x},
        {"dw1", &c->dw1, back * w1},
        {"dw2", &c->dw2, back * w2},
        {"drouter_weight", &c->drouter_weight, back * router},
        {"dlogits", &c->dlogits, with_router(c) ? 0 : back * logits},
        {"dtopk_weights", &c->dtopk_weights, back * given}};
    memcpy(parts, all, sizeof all);
}

static bool library_failed(const bench_case *c, smoe_status status, error *err)
{
    const bool usage = status == SMOE_ERROR_SHAPE || status == SMOE_ERROR_ARGUMENT;
    return fail(err, usage ? ERROR_USAGE : ERROR_RUNTIME, "%s", smoe_last_error(c->context));
}

static bool open_context(bench_case *c, error *err)
{
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    char text[400] = "";
    options.backend = c->settings.device->backend;
    options.threads = c->settings.threads;
    options.on_stage = stage_clock_on_stage;
    options.on_stage_user = &c->clock;
    options.error_text = text;
    options.error_size = sizeof text;
    if (smoe_create(&c->context, &options) != SMOE_OK) return fail(err, ERROR_RUNTIME, "%s", text);
    const smoe_status status = smoe_query_sizes(c->context, &c->layer, &c->sizes);
    if (status != SMOE_OK) return library_failed(c, status, err);
    if (!c->settings.device->open_stream(&c->stream) ||
        !stage_clock_open(&c->clock, clock_of(c->settings.device)))
        return fail(err, ERROR_RUNTIME, "no stream or clock on the device");
    return true;
}

/* A backend says that it has no backward by asking for no scratch. */
static void check_backward(bench_case *c)
{
    if (!c->settings.backward || c->sizes.scratch_backward_bytes > 0) return;
    c->settings.backward = false;
    c->no_backward = "the backend has no backward for this layer";
}

static uint64_t yardstick_needs(const bench_case *c)
{
    if (c->settings.no_bound) return 0;
    if (c->settings.device->backend == SMOE_BACKEND_CPU) return yardstick_bytes(&c->layer, c->sizes.rows);
    return cuda_yardstick_bytes(&c->layer, c->sizes.rows, c->settings.backward);
}

static bool check_memory(bench_case *c, error *err)
{
    part parts[PARTS];
    list_parts(c, parts);
    uint64_t needed = 0;
    for (int i = 0; i < PARTS; i++) needed += parts[i].bytes;
    needed += yardstick_needs(c);
    const uint64_t available = c->settings.device->available();
    const double mib = 1024.0 * 1024.0;
    if (needed <= available) return true;
    return fail(err, ERROR_RUNTIME,
                "the buffers of this problem take %.0f MiB, but %.0f MiB of memory are free",
                (double)needed / mib, (double)available / mib);
}

static bool make_buffers(bench_case *c, error *err)
{
    part parts[PARTS];
    list_parts(c, parts);
    for (int i = 0; i < PARTS; i++)
        if (parts[i].bytes && !buffer_make(parts[i].buffer, c->settings.device, parts[i].bytes))
            return fail(err, ERROR_RUNTIME, "out of memory for %s (%" PRIu64 " bytes)", parts[i].name,
                        parts[i].bytes);
    return true;
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
    const smoe_layer *l = &c->layer;
    const uint64_t seed = problem->seed * SEED_STEP;
    const int64_t w2_count = l->experts * l->hidden * l->intermediate;
    const int64_t w1_count = l->experts * moe_h_width(l) * l->hidden;
    const bool cpu = c->settings.device->backend == SMOE_BACKEND_CPU;
    fill_function *fill = cpu ? fill_normal : fill_tiled; // a GPU's memory holds more than a host soon makes
    bool good = with_router(c)
                    ? fill_steered(&c->x, l, ids, seed + SEED_X) && fill_router(&c->router_weight, l)
                    : fill(&c->x, l->dtype, l->tokens * l->hidden, 1, seed + SEED_X);
    if (from_logits(c) && !with_router(c))
        good = good && fill_logits(&c->logits, l, ids, seed + SEED_WEIGHTS);
    if (!from_logits(c))
        good = good && buffer_write(&c->topk_ids, ids, c->topk_ids.bytes) &&
               fill_weights(&c->topk_weights, l, seed + SEED_WEIGHTS);
    good = good && fill(&c->w1, l->dtype, w1_count, 1 / sqrt((double)l->hidden), seed + SEED_W1) &&
           fill(&c->w2, l->dtype, w2_count, 1 / sqrt((double)l->intermediate), seed + SEED_W2);
    if (c->settings.backward)
        good = good && fill(&c->dout, l->dtype, l->tokens * l->hidden, 1, seed + SEED_DOUT);
    return good;
}

static bool make_inputs(const bench_case *c, const problem_options *problem, error *err)
{
    const smoe_layer *l = &c->layer;
    int32_t *ids = malloc((size_t)(l->tokens * l->topk) * sizeof *ids);
    const bool good = ids &&
                      make_routing(problem->routing, l->tokens, l->experts, l->topk,
                                   problem->seed * SEED_STEP + SEED_ROUTING, ids) &&
                      fill_inputs(c, problem, ids);
    free(ids);
    return good || fail(err, ERROR_RUNTIME, "the inputs could not be made: out of memory");
}

static void set_args(bench_case *c)
{
    c->forward = (smoe_forward_args)SMOE_FORWARD_ARGS_INIT;
    c->forward.x = c->x.data;
    c->forward.router_weight = c->router_weight.data;
    c->forward.logits = c->logits.data;
    c->forward.topk_ids = c->topk_ids.data;
    c->forward.topk_weights = c->topk_weights.data;
    c->forward.w1 = c->w1.data;
    c->forward.w2 = c->w2.data;
    c->forward.out = c->out.data;
    c->forward.saved = c->saved.data;
    c->forward.saved_size = c->saved.bytes;
    c->forward.scratch = c->scratch_forward.data;
    c->forward.scratch_size = c->scratch_forward.bytes;

    c->backward = (smoe_backward_args)SMOE_BACKWARD_ARGS_INIT;
    c->backward.x = c->x.data;
    c->backward.router_weight = c->router_weight.data;
    c->backward.logits = c->logits.data;
    c->backward.topk_ids = c->topk_ids.data;
    c->backward.topk_weights = c->topk_weights.data;
    c->backward.w1 = c->w1.data;
    c->backward.w2 = c->w2.data;
    c->backward.saved = c->saved.data;
    c->backward.saved_size = c->saved.bytes;
    c->backward.dout = c->dout.data;
    c->backward.dx = c->dx.data;
    c->backward.dw1 = c->dw1.data;
    c->backward.dw2 = c->dw2.data;
    c->backward.drouter_weight = c->drouter_weight.data;
    c->backward.dlogits = c->dlogits.data;
    c->backward.dtopk_weights = c->dtopk_weights.data;
    c->backward.scratch = c->scratch_backward.data;
    c->backward.scratch_size = c->scratch_backward.bytes;
}

static bool check_scope(const bench_case *c, error *err)
{
    if (!with_router(c) || c->layer.experts <= c->layer.hidden) return true;
    return fail(err, ERROR_USAGE,
                "--scope layer: the router's columns need E <= d, but E = %" PRId64 " and d = %" PRId64
                "; take --scope experts",
                c->layer.experts, c->layer.hidden);
}

bool bench_case_make(bench_case *made, const bench_settings *settings, const problem_options *problem,
                     const bench_shape *shape, error *err)
{
    *made = (bench_case){.settings = *settings, .layer = problem_layer(problem, shape)};
    made->sizes = (smoe_sizes)SMOE_SIZES_INIT;
    made->threads = settings->threads > 0 ? settings->threads : omp_get_max_threads();
    if (settings->scope == SCOPE_EXPERTS && problem->rounding == SMOE_ROUNDING_NONE)
        made->layer.entry = settings->entry;
    bool good = check_scope(made, err) && open_context(made, err);
    if (good) check_backward(made);
    if (!good || !check_memory(made, err) || !make_buffers(made, err) || !make_inputs(made, problem, err)) {
        bench_case_free(made);
        return false;
    }
    set_args(made);
    return true;
}

void bench_case_free(bench_case *freed)
{
    part parts[PARTS];
    list_parts(freed, parts);
    for (int i = 0; i < PARTS; i++) buffer_free(parts[i].buffer);
    stage_clock_close(&freed->clock);
    freed->settings.device->close_stream(freed->stream);
    freed->stream = NULL;
    smoe_destroy(freed->context);
    freed->context = NULL;
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
    smoe_status status = smoe_route(c->context, &c->layer, &c->forward, c->stream);
    if (status == SMOE_OK && c->layer.rounding != SMOE_ROUNDING_NONE)
        status = smoe_round(c->context, &c->layer, &c->forward, c->stream);
    return status == SMOE_OK || library_failed(c, status, err);
}

bool bench_enqueue_forward(bench_case *c, error *err)
{
    smoe_status status;
    if (bench_prepared_apart(c)) {
        status = smoe_plan(c->context, &c->layer, &c->forward, c->stream);
        if (status == SMOE_OK) status = smoe_experts_forward(c->context, &c->layer, &c->forward, c->stream);
    } else {
        status = smoe_layer_forward(c->context, &c->layer, &c->forward, c->stream);
    }
    return status == SMOE_OK || library_failed(c, status, err);
}

bool bench_enqueue_backward(bench_case *c, error *err)
{
    const smoe_status status = smoe_layer_backward(c->context, &c->layer, &c->backward, c->stream);
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

bool bench_read_counts(bench_case *c, int32_t *counts, error *err)
{
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    const smoe_status status = smoe_view_plan(c->context, &c->layer, &c->forward, &view);
    if (status != SMOE_OK) return library_failed(c, status, err);
    if (c->settings.device->download(counts, view.counts, (size_t)c->layer.experts * sizeof *counts))
        return true;
    return fail(err, ERROR_RUNTIME, "the plan could not be read back");
}

/* ---- Poison, high-water marks, canaries ---- */

bool bench_poison(bench_case *c, error *err)
{
    const buffer *working[] = {&c->saved, &c->scratch_forward, &c->scratch_backward};
    const buffer none = {0};
    const buffer *outputs[] = {&c->out,
                               &c->dx,
                               &c->dw1,
                               &c->dw2,
                               &c->drouter_weight,
                               &c->dlogits,
                               &c->dtopk_weights,
                               with_router(c) ? &c->logits : &none};
    bool good = true;
    for (size_t i = 0; i < sizeof working / sizeof working[0]; i++)
        if (working[i]->data)
            good = good && working[i]->device->set(working[i]->data, BENCH_POISON, working[i]->bytes);
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++)
        if (outputs[i]->data) good = good && buffer_poison(outputs[i]);
    return good || fail(err, ERROR_RUNTIME, "the device's memory could not be filled");
}

bool bench_touched(const buffer *looked_at, uint64_t *bytes, error *err)
{
    enum { PIECE = 1 << 20 };
    *bytes = 0;
    if (!looked_at->data) return true;
    unsigned char *piece = malloc(PIECE);
    bool good = piece != NULL;
    for (size_t end = looked_at->bytes; good && *bytes == 0 && end > 0;) {
        const size_t length = end < PIECE ? end : PIECE;
        end -= length;
        good = looked_at->device->download(piece, (const char *)looked_at->data + end, length);
        size_t last = length;
        while (good && last > 0 && piece[last - 1] == BENCH_POISON) last--;
        if (last > 0) *bytes = end + last;
    }
    free(piece);
    return good || fail(err, ERROR_RUNTIME, "a buffer could not be read back");
}

bool bench_canaries(const bench_case *c, error *err)
{
    part parts[PARTS];
    bench_case copy = *c; // the list has pointers to buffers that may change; these do not
    list_parts(&copy, parts);
    for (int i = 0; i < PARTS; i++)
        if (!buffer_intact(parts[i].buffer))
            return fail(err, 1, "the library wrote outside of %s (%" PRIu64 " bytes)", parts[i].name,
                        parts[i].bytes);
    return true;
}
