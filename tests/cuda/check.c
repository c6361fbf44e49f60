/* The cuda backend's forward on a GPU, against plain loops on the host.
 *
 * Exact cases: small integers, an activation that keeps them integers, weights that are powers of two: H and
 * O are compared bit for bit, the plan array for array. Rounded cases: normal data, relative Frobenius error.
 * Every buffer is poisoned and stands between canaries. Then: NaN isolation between experts, chunks, repeats
 * beside a second stream that hammers memory. Exit 0 all right, 1 something wrong, 77 no device. */
#define _GNU_SOURCE
#include "forward_host.h"
#include "gpu.h"
#include "open_cuda.h"

#include <math.h>
#include <smoe.h>

static int wrong_total;

static int report(const char *name, const char *what, int64_t wrong, int64_t of, int64_t first)
{
    if (!wrong) return 0;
    printf("WRONG %-28s %-14s %lld of %lld, first at %lld\n", name, what, (long long)wrong, (long long)of,
           (long long)first);
    wrong_total++;
    return 1;
}

static void compare_words(const char *name, const char *what, const void *device, const void *want,
                          int64_t count)
{
    const uint32_t *got = gpu_read(device, count * 4), *expected = want;
    int64_t wrong = 0, first = -1;
    for (int64_t i = 0; i < count; i++)
        if (got[i] != expected[i]) {
            if (first < 0) first = i;
            wrong++;
        }
    if (report(name, what, wrong, count, first))
        printf("      got %d want %d\n", (int)got[first], (int)expected[first]);
    free((void *)got);
}

static void compare_halves(const char *name, const char *what, smoe_type type, const uint16_t *got,
                           const uint16_t *want, int64_t rows, int64_t columns)
{
    int64_t wrong = 0, first = -1;
    for (int64_t i = 0; i < rows * columns; i++)
        if (got[i] != want[i] && !(to_float(type, got[i]) == 0 && to_float(type, want[i]) == 0)) {
            if (first < 0) first = i;
            wrong++;
        }
    if (report(name, what, wrong, rows * columns, first))
        printf("      row %lld column %lld: got %g want %g\n", (long long)(first / columns),
               (long long)(first % columns), to_float(type, got[first]), to_float(type, want[first]));
}

static void must(smoe_context *context, smoe_status status, const char *what)
{
    if (status == SMOE_OK) return;
    printf("%s: %s: %s\n", what, smoe_status_string(status), smoe_last_error(context));
    exit(3);
}

static smoe_layer layer_of(const test_case *c)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = c->rows ? c->tokens * c->topk : c->tokens;
    layer.hidden = c->hidden;
    layer.intermediate = c->intermediate;
    layer.experts = c->experts;
    layer.topk = c->rows ? 1 : c->topk;
    layer.dtype = c->dtype;
    layer.activation = c->activation;
    layer.layout = c->layout;
    layer.entry = c->rows ? SMOE_ENTRY_FROM_ROWS : SMOE_ENTRY_FROM_TOPK;
    layer.index_type = c->wide ? SMOE_TYPE_I64 : SMOE_TYPE_I32;
    layer.inference = c->inference;
    layer.chunks = c->chunks ? c->chunks : 1;
    return layer;
}

static void *widen(const int32_t *from, int64_t count, int wide)
{
    int64_t *to = malloc(count * 8);
    for (int64_t i = 0; i < count; i++)
        if (wide)
            to[i] = from[i];
        else
            ((int32_t *)to)[i] = from[i];
    return to;
}

static void check_case(smoe_context *context, const test_case *given)
{
    /* For FROM_ROWS the case is a way-2 case with K = 1 whose tokens are sorted by expert. */
    test_case c = *given;
    if (c.rows) c.tokens *= c.topk, c.topk = 1;
    const int64_t T = c.tokens, d = c.hidden, n = c.intermediate, E = c.experts, K = c.topk;
    const int gated = c.activation < SMOE_ACTIVATION_SILU;
    const int64_t width = gated ? 2 * n : n;
    smoe_layer layer = layer_of(given);
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(context, smoe_query_sizes(context, &layer, &sizes), c.name);

    int32_t *ids = malloc(T * K * 4), *offsets = calloc(E + 1, 4);
    float *weights = malloc(T * K * 4);
    route(&c, ids, weights);
    const int64_t live = c.rows ? T - T / 7 : T; /* FROM_ROWS: rows past offsets[E] */
    if (c.rows) {
        for (int64_t t = 0; t < live; t++)
            ids[t] = (int32_t)(t * E / live / 2 * 2 % E); /* sorted, some empty */
        for (int64_t t = live; t < T; t++) ids[t] = -1;
        for (int64_t t = 0; t < live; t++) offsets[ids[t] + 1]++;
        for (int64_t e = 0; e < E; e++) offsets[e + 1] += offsets[e];
    }
    const host_plan p = plan_on_host(&c, ids, weights, sizes.padded_rows);
    const int integers = !c.rounded;
    uint16_t *x = fill(c.dtype, T * d, 1, integers, 1),
             *w1 = fill(c.dtype, E * width * d, 2, integers, 1 / sqrt(d));
    uint16_t *w2 = fill(c.dtype, E * d * n, 3, integers, 1 / sqrt(n));
    uint16_t *b1 = c.bias ? fill(c.dtype, E * width, 4, integers, 1) : NULL;
    uint16_t *b2 = c.bias ? fill(c.dtype, E * d, 5, integers, 1) : NULL;
    uint16_t *h = calloc(p.padded * width + 1, 2), *want = malloc(T * d * 2);
    double *out = malloc(T * d * 8);
    forward_on_host(&c, &p, x, w1, b1, w2, b2, h, out);
    for (int64_t i = 0; i < T * d; i++) want[i] = from_double(c.dtype, out[i]);

    void *given_ids = widen(ids, T * K, c.wide), *given_offsets = widen(offsets, E + 1, c.wide);
    gpu_buffer buffers[12] = {
        gpu_copy(x, T * d * 2),
        gpu_copy(w1, E * width * d * 2),
        gpu_copy(w2, E * d * n * 2),
        b1 ? gpu_copy(b1, E * width * 2) : (gpu_buffer){0},
        b2 ? gpu_copy(b2, E * d * 2) : (gpu_buffer){0},
        gpu_copy(given_ids, T * K * (c.wide ? 8 : 4)),
        gpu_copy(weights, T * K * 4),
        gpu_copy(given_offsets, (E + 1) * (c.wide ? 8 : 4)),
        gpu_alloc(T * d * 2),
        gpu_alloc(sizes.saved_buffer_bytes),
        gpu_alloc(sizes.scratch_forward_bytes),
    };
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.x = buffers[0].memory, args.w1 = buffers[1].memory, args.w2 = buffers[2].memory;
    args.b1 = buffers[3].memory, args.b2 = buffers[4].memory;
    if (c.rows)
        args.offsets = buffers[7].memory, args.row_weights = (const float *)buffers[6].memory;
    else
        args.topk_ids = buffers[5].memory, args.topk_weights = (const float *)buffers[6].memory;
    args.out = buffers[8].memory;
    if (!c.inference) args.saved = buffers[9].memory, args.saved_size = sizes.saved_buffer_bytes;
    args.scratch = buffers[10].memory, args.scratch_size = sizes.scratch_forward_bytes;
    const int before = wrong_total;
    must(context, smoe_layer_forward(context, &layer, &args, NULL), c.name);
    CHECK_CUDA(cudaDeviceSynchronize());

    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    must(context, smoe_view_plan(context, &layer, &args, &view), c.name);
    compare_words(c.name, "counts", view.counts, p.counts, E);
    compare_words(c.name, "offsets", view.offsets, p.offsets, E + 1);
    compare_words(c.name, "block_offsets", view.block_offsets, p.blocks, E + 1);
    compare_words(c.name, "order", view.order, p.order, E);
    compare_words(c.name, "row_token", view.row_token, p.row_token, p.padded);
    compare_words(c.name, "row_weight", view.row_weight, p.row_weight, p.padded);
    compare_words(c.name, "token_offsets", view.token_offsets, p.token_offsets, T + 1);
    compare_words(c.name, "token_rows", view.token_rows, p.token_rows, p.rows);

    uint16_t *got = gpu_read(args.out, T * d * 2);
    const char *note = "";
    char text[64];
    if (integers) {
        if (!c.inference) {
            uint16_t *got_h = gpu_read(view.h, p.padded * width * 2);
            compare_halves(c.name, "h", c.dtype, got_h, h, (int64_t)p.blocks[E] * 64, width);
            int64_t touched = 0;
            for (int64_t i = (int64_t)p.blocks[E] * 64 * width; i < p.padded * width; i++)
                touched += got_h[i] != 0xFFFF;
            report(c.name, "h past rows", touched, p.padded * width, 0);
            free(got_h);
        }
        compare_halves(c.name, "out", c.dtype, got, want, T, d);
    } else {
        double error = 0, size = 0;
        for (int64_t i = 0; i < T * d; i++) {
            const double e = to_float(c.dtype, got[i]) - out[i];
            error += e * e;
            size += out[i] * out[i];
        }
        const double relative = sqrt(error / size), limit = c.dtype == SMOE_TYPE_BF16 ? 5e-3 : 1e-3;
        report(c.name, "relative error", !(relative <= limit), 1, 0);
        snprintf(text, sizeof text, "relative error %.2e", relative);
        note = text;
    }
    int canaries = 0;
    for (int i = 0; i < 11; i++) canaries += gpu_free(buffers[i]);
    report(c.name, "canaries", canaries, 11, 0);
    printf("%-28s %s %s\n", c.name, wrong_total == before ? "ok" : "WRONG", note);
    fflush(stdout);
    free(ids), free(offsets), free(weights), free(x), free(w1), free(w2), free(b1), free(b2), free(h),
        free(want);
    free(out), free(got), free(given_ids), free(given_offsets);
    free(p.counts), free(p.offsets), free(p.blocks), free(p.order), free(p.row_token), free(p.token_offsets);
    free(p.token_rows), free(p.row_weight);
}

/* Launches again and again beside a stream that copies memory about; every output must repeat the first. */
static void check_repeats(smoe_context *context, int64_t d, int64_t n, int launches, int chunks)
{
    const int64_t T = 2048, E = 16, K = 4;
    test_case c = {"repeats",
                   T,
                   d,
                   n,
                   E,
                   K,
                   SMOE_ACTIVATION_SWIGLU,
                   RANDOM,
                   SMOE_TYPE_BF16,
                   SMOE_LAYOUT_CONCATENATED,
                   0,
                   0,
                   0,
                   chunks,
                   0,
                   1};
    smoe_layer layer = layer_of(&c);
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(context, smoe_query_sizes(context, &layer, &sizes), c.name);
    int32_t *ids = malloc(T * K * 4);
    float *weights = malloc(T * K * 4);
    route(&c, ids, weights);
    uint16_t *x = fill(c.dtype, T * d, 1, 0, 1), *w1 = fill(c.dtype, E * 2 * n * d, 2, 0, 1 / sqrt(d));
    uint16_t *w2 = fill(c.dtype, E * d * n, 3, 0, 1 / sqrt(n));
    gpu_buffer b[] = {gpu_copy(x, T * d * 2),
                      gpu_copy(w1, E * 2 * n * d * 2),
                      gpu_copy(w2, E * d * n * 2),
                      gpu_copy(ids, T * K * 4),
                      gpu_copy(weights, T * K * 4),
                      gpu_alloc(T * d * 2),
                      gpu_alloc(sizes.saved_buffer_bytes),
                      gpu_alloc(sizes.scratch_forward_bytes),
                      gpu_alloc(256 << 20)};
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.x = b[0].memory, args.w1 = b[1].memory, args.w2 = b[2].memory, args.topk_ids = b[3].memory;
    args.topk_weights = (const float *)b[4].memory, args.out = b[5].memory;
    args.saved = b[6].memory, args.saved_size = sizes.saved_buffer_bytes;
    args.scratch = b[7].memory, args.scratch_size = sizes.scratch_forward_bytes;
    cudaStream_t work, hammer;
    CHECK_CUDA(cudaStreamCreateWithFlags(&work, cudaStreamNonBlocking));
    CHECK_CUDA(cudaStreamCreateWithFlags(&hammer, cudaStreamNonBlocking));
    uint16_t *first = NULL, *h = NULL;
    int64_t differing = 0;
    const size_t h_bytes = (size_t)(sizes.padded_rows * 2 * n * 2);
    for (int i = 0; i < launches; i++) {
        if (i % 8 == 0)
            CHECK_CUDA(cudaMemcpyAsync(b[8].memory, b[8].memory + (128 << 20), 128 << 20,
                                       cudaMemcpyDeviceToDevice, hammer));
        CHECK_CUDA(cudaMemsetAsync(args.out, 0xFF, T * d * 2, work));
        must(context, smoe_layer_forward(context, &layer, &args, work), c.name);
        if (i % 20 && i != launches - 1) continue;
        CHECK_CUDA(cudaStreamSynchronize(work));
        uint16_t *got = gpu_read(args.out, T * d * 2), *got_h = gpu_read(args.saved, h_bytes);
        if (!first)
            first = got, h = got_h;
        else {
            differing += memcmp(first, got, T * d * 2) != 0;
            differing += memcmp(h, got_h, h_bytes) != 0;
            free(got), free(got_h);
        }
    }
    char name[64];
    snprintf(name, sizeof name, "repeats d %d n %d", (int)d, (int)n);
    report(name, "differing", differing, launches / 20, 0);
    printf("%-28s %d launches, %d compared, %lld differ\n", name, launches, launches / 20,
           (long long)differing);
    int canaries = 0;
    for (size_t i = 0; i < sizeof b / sizeof b[0]; i++) canaries += gpu_free(b[i]);
    report(name, "canaries", canaries, 9, 0);
    CHECK_CUDA(cudaStreamDestroy(work));
    CHECK_CUDA(cudaStreamDestroy(hammer));
    free(ids), free(weights), free(x), free(w1), free(w2), free(first), free(h);
}

/* K = 1: NaN in one expert's weights or tokens changes no bit of any other token's output. */
static void check_isolation(smoe_context *context, int64_t d, int64_t n)
{
    const int64_t T = 1000, E = 7, bad = 3;
    test_case c = {
        "isolation", T, d, n, E, 1, SMOE_ACTIVATION_SWIGLU, RANDOM, SMOE_TYPE_BF16, SMOE_LAYOUT_CONCATENATED,
        0,           0, 0, 1, 0, 1};
    smoe_layer layer = layer_of(&c);
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(context, smoe_query_sizes(context, &layer, &sizes), c.name);
    int32_t *ids = malloc(T * 4);
    float *weights = malloc(T * 4);
    route(&c, ids, weights);
    uint16_t *x = fill(c.dtype, T * d, 1, 0, 1), *w1 = fill(c.dtype, E * 2 * n * d, 2, 0, 1 / sqrt(d));
    uint16_t *w2 = fill(c.dtype, E * d * n, 3, 0, 1 / sqrt(n));
    uint16_t *out[2];
    for (int turn = 0; turn < 2; turn++) {
        if (turn == 1) {
            for (int64_t t = 0; t < T; t++)
                if (ids[t] == bad)
                    for (int64_t i = 0; i < d; i++) x[t * d + i] = 0x7fff;
            memset(w1 + bad * 2 * n * d, 0x7f, 2 * n * d * 2);
            memset(w2 + bad * n * d, 0x7f, n * d * 2);
        }
        gpu_buffer b[] = {gpu_copy(x, T * d * 2),
                          gpu_copy(w1, E * 2 * n * d * 2),
                          gpu_copy(w2, E * d * n * 2),
                          gpu_copy(ids, T * 4),
                          gpu_copy(weights, T * 4),
                          gpu_alloc(T * d * 2),
                          gpu_alloc(sizes.saved_buffer_bytes),
                          gpu_alloc(sizes.scratch_forward_bytes)};
        smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
        args.x = b[0].memory, args.w1 = b[1].memory, args.w2 = b[2].memory, args.topk_ids = b[3].memory;
        args.topk_weights = (const float *)b[4].memory, args.out = b[5].memory;
        args.saved = b[6].memory, args.saved_size = sizes.saved_buffer_bytes;
        args.scratch = b[7].memory, args.scratch_size = sizes.scratch_forward_bytes;
        must(context, smoe_layer_forward(context, &layer, &args, NULL), c.name);
        CHECK_CUDA(cudaDeviceSynchronize());
        out[turn] = gpu_read(args.out, T * d * 2);
        for (size_t i = 0; i < sizeof b / sizeof b[0]; i++) gpu_free(b[i]);
    }
    int64_t leaked = 0, clean = 0;
    for (int64_t t = 0; t < T; t++)
        if (ids[t] != bad)
            leaked += memcmp(out[0] + t * d, out[1] + t * d, d * 2) != 0;
        else
            for (int64_t i = 0; i < d; i++) clean += !isnan(to_float(SMOE_TYPE_BF16, out[1][t * d + i]));
    char name[64];
    snprintf(name, sizeof name, "isolation d %d n %d", (int)d, (int)n);
    report(name, "tokens changed", leaked, T, 0);
    report(name, "values not NaN", clean, T * d, 0);
    printf("%-28s %lld tokens changed\n", name, (long long)leaked);
    free(ids), free(weights), free(x), free(w1), free(w2), free(out[0]), free(out[1]);
}

#define B   SMOE_TYPE_BF16
#define F   SMOE_TYPE_F16
#define CAT SMOE_LAYOUT_CONCATENATED
#define INT SMOE_LAYOUT_INTERLEAVED
/* name, T, d, n, E, K, activation, routing, dtype, layout, rows, bias, inference, chunks, wide, rounded */
static const test_case cases[] = {
    {"tiny", 64, 64, 64, 2, 1, SMOE_ACTIVATION_REGLU, UNIFORM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"plain relu tiny", 64, 64, 64, 2, 1, SMOE_ACTIVATION_RELU, UNIFORM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"general", 700, 256, 320, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"interleaved", 700, 320, 192, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, INT, 0, 0, 0, 1, 0, 0},
    {"relu2", 700, 192, 320, 5, 2, SMOE_ACTIVATION_RELU2, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"stationary", 900, 512, 256, 5, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"stationary d 768", 3000, 768, 256, 8, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"stationary n 200", 900, 512, 200, 5, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"stationary one expert", 5000, 512, 256, 9, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, CAT, 0, 0, 0, 1, 0,
     0},
    {"stationary edges", 3000, 512, 256, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, CAT, 0, 0, 0, 1, 0, 0},
    {"ping-pong", 900, 768, 512, 5, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"ping-pong edges", 3000, 384, 512, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, CAT, 0, 0, 0, 1, 0, 0},
    {"half empty d 200 n 328", 600, 200, 328, 16, 2, SMOE_ACTIVATION_REGLU, HALF_EMPTY, B, CAT, 0, 0, 0, 1, 0,
     0},
    {"edges", 3000, 256, 320, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, CAT, 0, 0, 0, 1, 0, 0},
    {"half empty", 1000, 192, 128, 32, 4, SMOE_ACTIVATION_REGLU, HALF_EMPTY, B, CAT, 0, 0, 0, 1, 0, 0},
    {"one expert", 3000, 192, 128, 32, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, CAT, 0, 0, 0, 1, 0, 0},
    {"eights d 72 n 40", 500, 72, 40, 7, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"eights d 8 n 8", 500, 8, 8, 7, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, INT, 0, 0, 0, 1, 0, 0},
    {"eights relu d 136 n 24", 500, 136, 24, 7, 3, SMOE_ACTIVATION_RELU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"wide d 1040 topk 2", 150, 1040, 16, 5, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"wide d 1040 topk 3", 150, 1040, 16, 5, 3, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"wide d 1040 topk 5", 150, 1040, 16, 7, 5, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"wide d 1032 topk 3", 150, 1032, 16, 5, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"wide d 8224 topk 4", 40, 8224, 8, 5, 4, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"many steps up", 700, 1608, 320, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"many steps down", 500, 256, 1608, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"bands", 3300, 64, 1160, 1, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"topk 2 d 72 lost", 500, 72, 24, 5, 2, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"topk 2 d 12312 lost", 20, 12312, 8, 5, 2, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"topk 2 d 12312", 20, 12312, 8, 5, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"topk 1 d 136", 500, 136, 24, 5, 1, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"topk 1 d 7168", 70, 7168, 8, 5, 1, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"bias", 700, 200, 136, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 1, 0, 1, 0, 0},
    {"bias interleaved", 700, 256, 256, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, INT, 0, 1, 0, 1, 0, 0},
    {"bias relu", 700, 256, 192, 6, 2, SMOE_ACTIVATION_RELU, RANDOM, B, CAT, 0, 1, 0, 1, 0, 0},
    {"invalid ids", 900, 128, 128, 10, 5, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"repeated ids int64", 900, 128, 128, 10, 5, SMOE_ACTIVATION_REGLU, REPEATED, B, CAT, 0, 0, 0, 1, 1, 0},
    {"rows", 500, 256, 192, 9, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 1, 0, 0, 1, 0, 0},
    {"rows int64", 300, 256, 256, 70, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 1, 0, 0, 1, 1, 0},
    {"inference", 700, 256, 256, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 1, 1, 0, 0},
    {"chunks 2", 700, 768, 256, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 2, 0, 0},
    {"chunks 4", 700, 768, 256, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 4, 0, 0},
    {"chunks 64 d 200", 700, 200, 512, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 1, 64, 0, 0},
    {"fp16", 700, 256, 256, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, F, CAT, 0, 0, 0, 1, 0, 0},
    {"fp16 general bias", 700, 320, 192, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, F, INT, 0, 1, 0, 1, 0, 0},
    {"fp16 ping-pong", 700, 384, 512, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, F, CAT, 0, 0, 0, 1, 0, 0},
    {"one token", 1, 64, 64, 8, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"experts 1", 300, 64, 64, 1, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"experts 4096 topk 64", 300, 64, 16, 4096, 64, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"experts 1001 topk 9", 9000, 16, 8, 1001, 9, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"tokens 100001", 100001, 16, 8, 24, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"tokens 70000 E 300", 70000, 8, 8, 300, 3, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"swiglu", 800, 512, 256, 6, 2, SMOE_ACTIVATION_SWIGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 1},
    {"geglu", 800, 512, 320, 6, 2, SMOE_ACTIVATION_GEGLU, RANDOM, B, CAT, 0, 1, 0, 1, 0, 1},
    {"geglu_tanh", 800, 512, 512, 6, 2, SMOE_ACTIVATION_GEGLU_TANH, RANDOM, B, INT, 0, 0, 0, 1, 0, 1},
    {"swiglu_oai", 800, 360, 360, 6, 2, SMOE_ACTIVATION_SWIGLU_OAI, RANDOM, B, INT, 0, 1, 0, 1, 0, 1},
    {"silu", 800, 512, 256, 6, 2, SMOE_ACTIVATION_SILU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 1},
    {"gelu", 800, 512, 256, 6, 2, SMOE_ACTIVATION_GELU, RANDOM, B, CAT, 0, 1, 0, 1, 0, 1},
    {"fp16 swiglu", 800, 512, 256, 6, 2, SMOE_ACTIVATION_SWIGLU, RANDOM, F, CAT, 0, 0, 0, 1, 0, 1},
    {"fp16 geglu_tanh", 800, 512, 512, 6, 2, SMOE_ACTIVATION_GEGLU_TANH, RANDOM, F, INT, 0, 0, 0, 1, 0, 1},
    {"fp16 silu", 800, 512, 320, 6, 2, SMOE_ACTIVATION_SILU, RANDOM, F, CAT, 0, 1, 0, 1, 0, 1},
};

int main(int argc, char **argv)
{
    smoe_context *context = open_cuda();
    const char *only = argc > 1 ? argv[1] : NULL;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (!only || strstr(cases[i].name, only)) check_case(context, &cases[i]);
    if (!only) {
        check_isolation(context, 256, 320);
        check_isolation(context, 512, 256);
        check_isolation(context, 384, 512);
        const int launches = getenv("LAUNCHES") ? atoi(getenv("LAUNCHES")) : 1000;
        check_repeats(context, 768, 256, launches, 1);
        check_repeats(context, 768, 512, launches, 1);
        check_repeats(context, 512, 1024, launches, 2);
    }
    smoe_destroy(context);
    printf("%d wrong\n", wrong_total);
    return wrong_total != 0;
}
