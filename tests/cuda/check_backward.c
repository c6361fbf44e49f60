/* The cuda backend's backward of the experts on a GPU against the fp64 oracle.
 *
 * Exact cases: sparse small integers, an activation that keeps them integers, integer weights: every gradient
 * is compared value for value. Rounded cases: normal data, relative Frobenius error. Every buffer is poisoned
 * and stands between canaries, the forward's scratch is poisoned before the backward reads, every backward is
 * repeated and has to give the same bits. Then NaN isolation between experts, and repeats beside a second
 * stream that copies memory.
 *
 *   check_backward [NAME]          cases whose name contains NAME, or isolation
 *   check_backward --shard I N     every N-th case from I on
 *
 * Exit 0 all right, 1 something wrong, 77 no device. */
#define _GNU_SOURCE
#include "gpu.h"
#include "open_cuda.h"
#include "oracle/compare.h"
#include "oracle/number.h"
#include "oracle/oracle.h"

#include <math.h>

typedef enum routing { RANDOM, ONE_EXPERT, HALF_EMPTY, EDGES, BROKEN, ROWS } routing;

typedef struct test_case {
    const char *name;
    int64_t tokens, hidden, intermediate, experts, topk;
    smoe_activation activation;
    routing routing;
    smoe_type dtype, gradient_type;
    smoe_layout layout;
    int bias, chunks, accumulate, reuse_saved, wide, rounded;
} test_case;

static int wrong_total;
static int repeats = 3; /* of every case; REPEATS in the environment */

static void wrong(const char *name, const char *what, double amount)
{
    printf("WRONG %-28s %-14s %g\n", name, what, amount);
    wrong_total++;
}

/* ---- Inputs, as the oracle reads them and on the device */

typedef struct inputs {
    double *x, *w1, *b1, *w2, *b2, *dout, *topk_weights, *row_weights;
    int64_t *topk_ids, *offsets;
} inputs;

static double *draw(oracle_random *random, int64_t count, double scale, int rounded, smoe_type type)
{
    double *v = oracle_alloc((size_t)count, sizeof *v);
    for (int64_t i = 0; i < count; i++) {
        if (rounded)
            v[i] = oracle_round_to(scale * oracle_random_normal(random), type);
        else
            v[i] = oracle_random_integer(random, 0, 7) ? 0.0 : (double)oracle_random_integer(random, -1, 1);
    }
    return v;
}

static int64_t draw_expert(const test_case *c, oracle_random *random, int64_t t)
{
    static const int edges[] = {0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320};
    const int64_t e = oracle_random_integer(random, 0, c->experts - 1);
    if (c->routing == ONE_EXPERT) return c->experts / 2;
    if (c->routing == HALF_EMPTY) return e / 2 * 2;
    if (c->routing != EDGES) return e;
    int64_t edge = 0, left = t;
    while (edge < 15 && edge < c->experts - 1 && left >= edges[edge]) left -= edges[edge++];
    return edge;
}

static void route(const test_case *c, oracle_random *random, inputs *in)
{
    const int64_t T = c->tokens, E = c->experts, K = c->topk;
    if (c->routing == ROWS) {
        in->offsets = oracle_alloc((size_t)E + 1, 8);
        in->row_weights = oracle_alloc((size_t)T, 8);
        for (int64_t t = 0; t < T - T / 9; t++)
            in->offsets[oracle_random_integer(random, 0, E - 1) / 3 * 3 % E + 1]++;
        for (int64_t e = 0; e < E; e++) in->offsets[e + 1] += in->offsets[e];
    } else {
        in->topk_ids = oracle_alloc((size_t)(T * K), 8);
        in->topk_weights = oracle_alloc((size_t)(T * K), 8);
    }
    double *weights = c->routing == ROWS ? in->row_weights : in->topk_weights;
    for (int64_t t = 0; t < T; t++)
        for (int64_t k = 0; k < K; k++) {
            int64_t *ids = in->topk_ids ? in->topk_ids + t * K : NULL;
            weights[t * K + k] = c->rounded ? (double)(float)(0.1 + oracle_random_uniform(random))
                                            : (double)oracle_random_integer(random, 1, 2);
            for (int again = ids != NULL; again;) {
                ids[k] = draw_expert(c, random, t);
                again = 0;
                for (int64_t j = 0; j < k && c->routing != BROKEN; j++) again |= ids[j] == ids[k];
            }
            if (c->routing == BROKEN && oracle_random_integer(random, 0, 5) == 0) ids[k] = t % 2 ? -1 : E;
        }
}

static inputs draw_inputs(const test_case *c, uint64_t seed)
{
    const int64_t T = c->tokens, d = c->hidden, n = c->intermediate, E = c->experts;
    const int64_t width = oracle_gated(c->activation) ? 2 * n : n;
    oracle_random random = {seed};
    inputs in = {0};
    route(c, &random, &in);
    in.x = draw(&random, T * d, 1, c->rounded, c->dtype);
    in.w1 = draw(&random, E * width * d, 1 / sqrt((double)d), c->rounded, c->dtype);
    in.w2 = draw(&random, E * d * n, 1 / sqrt((double)n), c->rounded, c->dtype);
    in.dout = draw(&random, T * d, 1, c->rounded, c->dtype);
    if (c->bias) in.b1 = draw(&random, E * width, 0.5, c->rounded, c->dtype);
    if (c->bias) in.b2 = draw(&random, E * d, 0.5, c->rounded, c->dtype);
    return in;
}

static void free_inputs(inputs *in)
{
    free(in->x), free(in->w1), free(in->b1), free(in->w2), free(in->b2), free(in->dout);
    free(in->topk_weights), free(in->row_weights), free(in->topk_ids), free(in->offsets);
}

static gpu_buffer upload(const double *v, int64_t count, smoe_type type)
{
    if (!v) return (gpu_buffer){0};
    const size_t bytes = (size_t)count * oracle_type_bytes(type);
    void *host = malloc(bytes ? bytes : 1);
    oracle_store(host, type, v, (size_t)count);
    const gpu_buffer b = gpu_copy(host, bytes);
    free(host);
    return b;
}

static gpu_buffer upload_indices(const int64_t *v, int64_t count, int wide)
{
    if (!v) return (gpu_buffer){0};
    int64_t *host = malloc((size_t)count * 8);
    for (int64_t i = 0; i < count; i++)
        if (wide)
            host[i] = v[i];
        else
            ((int32_t *)host)[i] = (int32_t)v[i];
    const gpu_buffer b = gpu_copy(host, (size_t)count * (wide ? 8 : 4));
    free(host);
    return b;
}

/* ---- A layer on the device */

enum { IN_X, IN_W1, IN_B1, IN_W2, IN_B2, IN_DOUT, IN_WEIGHTS, IN_INDICES, INPUTS };
enum { DX, DW1, DW2, DB1, DB2, DWEIGHTS, GRADIENTS };
static const char *const gradient_names[GRADIENTS] = {"dx", "dw1", "dw2", "db1", "db2", "dweights"};

typedef struct device_run {
    smoe_layer layer;
    gpu_buffer in[INPUTS], out, saved, scratch_forward, scratch, gradient[GRADIENTS];
    size_t count[GRADIENTS];
    smoe_type type[GRADIENTS];
    smoe_forward_args forward;
    smoe_backward_args backward;
} device_run;

static void must(smoe_context *context, smoe_status status, const char *what)
{
    if (status == SMOE_OK) return;
    printf("%s: %s: %s\n", what, smoe_status_string(status), smoe_last_error(context));
    exit(3);
}

static smoe_layer layer_of(const test_case *c)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = c->tokens;
    layer.hidden = c->hidden;
    layer.intermediate = c->intermediate;
    layer.experts = c->experts;
    layer.topk = c->topk;
    layer.dtype = c->dtype;
    layer.gradient_type = c->gradient_type;
    layer.activation = c->activation;
    layer.layout = c->layout;
    layer.entry = c->routing == ROWS ? SMOE_ENTRY_FROM_ROWS : SMOE_ENTRY_FROM_TOPK;
    layer.index_type = c->wide ? SMOE_TYPE_I64 : SMOE_TYPE_I32;
    layer.chunks = c->chunks ? c->chunks : 1;
    layer.accumulate = c->accumulate;
    layer.reuse_saved = c->reuse_saved;
    return layer;
}

static device_run make_run(smoe_context *context, const test_case *c, const inputs *in)
{
    const int64_t T = c->tokens, d = c->hidden, n = c->intermediate, E = c->experts, K = c->topk;
    const int64_t width = oracle_gated(c->activation) ? 2 * n : n;
    const int rows = c->routing == ROWS;
    device_run r = {.layer = layer_of(c)};
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(context, smoe_query_sizes(context, &r.layer, &sizes), c->name);
    r.in[IN_X] = upload(in->x, T * d, c->dtype);
    r.in[IN_W1] = upload(in->w1, E * width * d, c->dtype);
    r.in[IN_B1] = upload(in->b1, E * width, c->dtype);
    r.in[IN_W2] = upload(in->w2, E * d * n, c->dtype);
    r.in[IN_B2] = upload(in->b2, E * d, c->dtype);
    r.in[IN_DOUT] = upload(in->dout, T * d, c->dtype);
    r.in[IN_WEIGHTS] = upload(rows ? in->row_weights : in->topk_weights, T * K, SMOE_TYPE_F32);
    r.in[IN_INDICES] =
        rows ? upload_indices(in->offsets, E + 1, c->wide) : upload_indices(in->topk_ids, T * K, c->wide);
    const int64_t counts[GRADIENTS] = {
        T * d, E * width * d, E * d * n, in->b1 ? E * width : 0, in->b2 ? E * d : 0, T * K};
    for (int i = 0; i < GRADIENTS; i++) {
        r.type[i] = i == DX ? c->dtype : i == DWEIGHTS ? SMOE_TYPE_F32 : c->gradient_type;
        r.count[i] = (size_t)counts[i];
        if (counts[i]) r.gradient[i] = gpu_alloc(r.count[i] * oracle_type_bytes(r.type[i]));
    }
    r.out = gpu_alloc((size_t)(T * d * 2));
    r.saved = gpu_alloc(sizes.saved_buffer_bytes);
    r.scratch_forward = gpu_alloc(sizes.scratch_forward_bytes);
    r.scratch = gpu_alloc(sizes.scratch_backward_bytes);

    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.x = r.in[IN_X].memory, f.w1 = r.in[IN_W1].memory, f.w2 = r.in[IN_W2].memory;
    f.b1 = r.in[IN_B1].memory, f.b2 = r.in[IN_B2].memory;
    f.out = r.out.memory, f.saved = r.saved.memory, f.saved_size = sizes.saved_buffer_bytes;
    f.scratch = r.scratch_forward.memory, f.scratch_size = sizes.scratch_forward_bytes;
    smoe_backward_args b = SMOE_BACKWARD_ARGS_INIT;
    b.x = f.x, b.w1 = f.w1, b.w2 = f.w2, b.b1 = f.b1, b.b2 = f.b2;
    b.saved = f.saved, b.saved_size = f.saved_size, b.dout = r.in[IN_DOUT].memory;
    b.scratch = r.scratch.memory, b.scratch_size = sizes.scratch_backward_bytes;
    b.dx = r.gradient[DX].memory, b.dw1 = r.gradient[DW1].memory, b.dw2 = r.gradient[DW2].memory;
    b.db1 = r.gradient[DB1].memory, b.db2 = r.gradient[DB2].memory;
    float *weights = (float *)r.in[IN_WEIGHTS].memory, *dweights = (float *)r.gradient[DWEIGHTS].memory;
    if (rows) {
        f.offsets = b.offsets = r.in[IN_INDICES].memory;
        f.row_weights = b.row_weights = weights;
        b.drow_weights = dweights;
    } else {
        f.topk_ids = b.topk_ids = r.in[IN_INDICES].memory;
        f.topk_weights = b.topk_weights = weights;
        b.dtopk_weights = dweights;
    }
    r.forward = f, r.backward = b;
    return r;
}

static void free_run(device_run *r, const char *name)
{
    int touched = gpu_free(r->out) + gpu_free(r->saved) + gpu_free(r->scratch_forward) + gpu_free(r->scratch);
    for (int i = 0; i < INPUTS; i++) touched += gpu_free(r->in[i]);
    for (int i = 0; i < GRADIENTS; i++) touched += gpu_free(r->gradient[i]);
    if (touched) wrong(name, "canaries", touched);
}

static void poison(gpu_buffer b, int value)
{
    if (b.memory) CHECK_CUDA(cudaMemset(b.memory, value, b.bytes));
}

/* Forward, then backward into poisoned gradients (accumulated: into zeros, twice). */
static void run_both(smoe_context *context, device_run *r, const char *name)
{
    must(context, smoe_layer_forward(context, &r->layer, &r->forward, NULL), name);
    CHECK_CUDA(cudaDeviceSynchronize());
    poison(r->scratch_forward, 0xFF), poison(r->scratch, 0xFF);
    for (int i = 0; i < GRADIENTS; i++)
        poison(r->gradient[i], r->layer.accumulate && i != DX && i != DWEIGHTS ? 0 : 0xFF);
    for (int pass = 0; pass <= r->layer.accumulate; pass++) {
        if (pass && r->layer.reuse_saved)
            must(context, smoe_layer_forward(context, &r->layer, &r->forward, NULL), name);
        must(context, smoe_layer_backward(context, &r->layer, &r->backward, NULL), name);
    }
    const cudaError_t status = cudaDeviceSynchronize();
    if (status != cudaSuccess) {
        printf("WRONG %s: %s\n", name, cudaGetErrorString(status));
        exit(1);
    }
}

static void *read_gradient(const device_run *r, int i)
{
    return r->count[i] ? gpu_read(r->gradient[i].memory, r->count[i] * oracle_type_bytes(r->type[i])) : NULL;
}

/* ---- Against the oracle */

static void compare(const test_case *c, const device_run *r, int which, void *bits, const double *want,
                    char *note)
{
    const size_t count = r->count[which];
    if (!count) return;
    double *got = oracle_alloc(count, sizeof *got), *twice = oracle_alloc(count, sizeof *twice);
    oracle_load(got, r->type[which], bits, count);
    const int passes = c->accumulate && which != DX && which != DWEIGHTS ? 2 : 1;
    for (size_t i = 0; i < count; i++) twice[i] = passes * want[i];
    if (c->rounded) {
        const double error = oracle_relative_error(got, twice, count);
        sprintf(note + strlen(note), " %s %.1e", gradient_names[which], error);
        if (!(error <= (c->dtype == SMOE_TYPE_BF16 ? 6e-3 : 1.2e-3)))
            wrong(c->name, gradient_names[which], error);
    } else {
        const size_t differing = oracle_differing(got, twice, count);
        if (differing) {
            wrong(c->name, gradient_names[which], (double)differing);
            size_t shown = 0;
            for (size_t i = 0; i < count && shown < 4; i++)
                if (!(got[i] == twice[i])) {
                    const int64_t width =
                        which == DX || which == DW1 || which == DB2 ? c->hidden : c->intermediate;
                    printf("      of %zu: row %zu column %zu got %g want %g\n", count, i / (size_t)width,
                           i % (size_t)width, got[i], twice[i]);
                    shown++;
                }
        }
    }
    free(got), free(twice);
}

static void check_case(smoe_context *context, const test_case *c)
{
    const int before = wrong_total;
    char note[256] = "";
    inputs in = draw_inputs(c, 7 + (uint64_t)(c->tokens * 31 + c->hidden));
    device_run r = make_run(context, c, &in);
    run_both(context, &r, c->name);
    void *first[GRADIENTS];
    for (int i = 0; i < GRADIENTS; i++) first[i] = read_gradient(&r, i);
    for (int again = 0; again < repeats; again++) {
        run_both(context, &r, c->name);
        for (int i = 0; i < GRADIENTS; i++) {
            void *bits = read_gradient(&r, i);
            if (bits && memcmp(bits, first[i], r.count[i] * oracle_type_bytes(r.type[i])) != 0)
                wrong(c->name, "repeat", i);
            free(bits);
        }
    }
    const oracle_input input = {.topk_ids = in.topk_ids,
                                .topk_weights = in.topk_weights,
                                .offsets = in.offsets,
                                .row_weights = in.row_weights,
                                .x = in.x,
                                .w1 = in.w1,
                                .b1 = in.b1,
                                .w2 = in.w2,
                                .b2 = in.b2,
                                .dout = in.dout,
                                .round_stores = !c->rounded,
                                .round_inside = true};
    oracle_forward f;
    oracle_backward b;
    oracle_forward_run(&r.layer, &input, &f);
    oracle_backward_run(&r.layer, &input, &f, false, &b);
    const double *want[GRADIENTS] = {b.dx,  b.dw1, b.dw2,
                                     b.db1, b.db2, c->routing == ROWS ? b.drow_weights : b.dtopk_weights};
    for (int i = 0; i < GRADIENTS; i++) compare(c, &r, i, first[i], want[i], note);
    oracle_forward_free(&f), oracle_backward_free(&b);
    free_run(&r, c->name);
    printf("%-28s %s%s\n", c->name, wrong_total == before ? "ok" : "WRONG", note);
    fflush(stdout);
    for (int i = 0; i < GRADIENTS; i++) free(first[i]);
    free_inputs(&in);
}

/* ---- NaN isolation: K = 1; NaN in one expert's weights and in its tokens' X and dO */

static void check_isolation(smoe_context *context, int64_t d, int64_t n)
{
    const test_case c = {"isolation",
                         700,
                         d,
                         n,
                         6,
                         1,
                         SMOE_ACTIVATION_SWIGLU,
                         RANDOM,
                         SMOE_TYPE_BF16,
                         SMOE_TYPE_BF16,
                         SMOE_LAYOUT_CONCATENATED,
                         1,
                         1,
                         0,
                         0,
                         0,
                         1};
    const int64_t sick = 2, each[GRADIENTS] = {d, 2 * n * d, d * n, 2 * n, d, 1};
    const int before = wrong_total;
    inputs in = draw_inputs(&c, 5);
    void *bits[2][GRADIENTS];
    size_t bytes[GRADIENTS];
    for (int ill = 0; ill < 2; ill++) {
        for (int64_t t = 0; ill && t < c.tokens; t++)
            if (in.topk_ids[t] == sick) in.x[t * d + t % d] = in.dout[t * d + 3 * t % d] = NAN;
        for (int64_t i = 0; ill && i < d * n; i++)
            in.w1[sick * 2 * n * d + 2 * i] = in.w2[sick * d * n + i] = NAN;
        device_run r = make_run(context, &c, &in);
        run_both(context, &r, c.name);
        for (int i = 0; i < GRADIENTS; i++) {
            bits[ill][i] = read_gradient(&r, i);
            bytes[i] = oracle_type_bytes(r.type[i]);
        }
        free_run(&r, c.name);
    }
    for (int i = 0; i < GRADIENTS; i++) {
        const int by_token = i == DX || i == DWEIGHTS;
        for (int64_t j = 0; j < (by_token ? c.tokens : c.experts); j++) {
            if ((by_token ? in.topk_ids[j] : j) == sick) continue;
            const size_t from = (size_t)(j * each[i]) * bytes[i];
            if (memcmp((char *)bits[0][i] + from, (char *)bits[1][i] + from, (size_t)each[i] * bytes[i]) !=
                0) {
                wrong(c.name, gradient_names[i], (double)j);
                break;
            }
        }
        free(bits[0][i]), free(bits[1][i]);
    }
    free_inputs(&in);
    printf("isolation d %lld n %lld %s\n", (long long)d, (long long)n,
           wrong_total == before ? "ok" : "WRONG");
}

/* ---- Repeats beside a stream that copies memory about */

static void check_repeats(smoe_context *context, int64_t d, int64_t n, int launches)
{
    const test_case c = {"repeats",
                         2048,
                         d,
                         n,
                         16,
                         4,
                         SMOE_ACTIVATION_SWIGLU,
                         RANDOM,
                         SMOE_TYPE_BF16,
                         SMOE_TYPE_BF16,
                         SMOE_LAYOUT_CONCATENATED,
                         0,
                         1,
                         0,
                         0,
                         0,
                         1};
    const int before = wrong_total;
    inputs in = draw_inputs(&c, 9);
    device_run r = make_run(context, &c, &in);
    run_both(context, &r, c.name);
    void *first[GRADIENTS];
    for (int i = 0; i < GRADIENTS; i++) first[i] = read_gradient(&r, i);
    cudaStream_t one, other;
    CHECK_CUDA(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    CHECK_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    gpu_buffer load = gpu_alloc(256 << 20);
    for (int launch = 0; launch < launches; launch++) {
        CHECK_CUDA(cudaMemcpyAsync(load.memory, load.memory + (128 << 20), 128 << 20,
                                   cudaMemcpyDeviceToDevice, other));
        must(context, smoe_layer_backward(context, &r.layer, &r.backward, one), c.name);
        if (launch % 50 != 49) continue;
        CHECK_CUDA(cudaDeviceSynchronize());
        for (int i = 0; i < GRADIENTS; i++) {
            void *bits = read_gradient(&r, i);
            if (bits && memcmp(bits, first[i], r.count[i] * oracle_type_bytes(r.type[i])) != 0)
                wrong(c.name, gradient_names[i], launch);
            free(bits);
        }
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaStreamDestroy(one));
    CHECK_CUDA(cudaStreamDestroy(other));
    gpu_free(load);
    free_run(&r, c.name);
    free_inputs(&in);
    for (int i = 0; i < GRADIENTS; i++) free(first[i]);
    printf("repeats d %lld n %lld, %d launches %s\n", (long long)d, (long long)n, launches,
           wrong_total == before ? "ok" : "WRONG");
}

#define B   SMOE_TYPE_BF16
#define H   SMOE_TYPE_F16
#define F   SMOE_TYPE_F32
#define CAT SMOE_LAYOUT_CONCATENATED
#define INT SMOE_LAYOUT_INTERLEAVED

/* name, T, d, n, E, K, activation, routing, dtype, gradients, layout, bias, chunks, accumulate, reuse, wide,
 * rounded */
static const test_case cases[] = {
    {"plain relu", 200, 128, 128, 2, 1, SMOE_ACTIVATION_RELU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"gated", 300, 128, 256, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"f32 gradients", 300, 256, 128, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, F, CAT, 0, 1, 0, 0, 0, 0},
    {"interleaved", 300, 320, 192, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, INT, 0, 1, 0, 0, 0, 0},
    {"interleaved f32", 300, 192, 320, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, F, INT, 0, 1, 0, 0, 0, 0},
    {"relu2", 300, 192, 320, 3, 2, SMOE_ACTIVATION_RELU2, RANDOM, B, F, CAT, 0, 1, 0, 0, 0, 0},
    {"accumulate", 300, 192, 192, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, F, CAT, 1, 1, 1, 0, 0, 0},
    {"accumulate bf16", 120, 192, 192, 5, 1, SMOE_ACTIVATION_REGLU, HALF_EMPTY, B, B, INT, 1, 1, 1, 0, 0, 0},
    {"reuse", 300, 192, 256, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 1, 0, 0},
    {"edges", 2241, 128, 64, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"edges n 320", 2241, 192, 320, 16, 1, SMOE_ACTIVATION_RELU, EDGES, B, F, CAT, 0, 1, 0, 0, 0, 0},
    {"half empty", 600, 192, 128, 12, 3, SMOE_ACTIVATION_REGLU, HALF_EMPTY, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"one expert", 2400, 128, 64, 4, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"one expert f32 inter", 2400, 192, 136, 4, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, F, INT, 0, 1, 1, 0,
     0, 0},
    {"broken ids", 500, 128, 128, 7, 4, SMOE_ACTIVATION_REGLU, BROKEN, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"broken ids int64", 500, 128, 128, 7, 4, SMOE_ACTIVATION_REGLU, BROKEN, B, B, CAT, 1, 1, 0, 0, 1, 0},
    {"rows", 700, 256, 192, 9, 1, SMOE_ACTIVATION_REGLU, ROWS, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"rows int64 bias", 700, 192, 128, 9, 1, SMOE_ACTIVATION_REGLU, ROWS, B, F, INT, 1, 1, 0, 1, 1, 0},
    {"ping-pong", 400, 384, 256, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"ping-pong inter edges", 1400, 192, 256, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, B, INT, 0, 1, 0, 0, 0,
     0},
    {"long K", 300, 320, 640, 2, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"many steps", 300, 256, 792, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"bands", 3300, 2312, 24, 1, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"chunks 2", 300, 384, 192, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 2, 0, 0, 0, 0},
    {"chunks 4", 300, 768, 128, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 4, 0, 0, 0, 0},
    {"chunks 64 d 200", 300, 200, 256, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 64, 0, 1, 0, 0},
    {"eights d 72 n 40", 500, 72, 40, 7, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"eights d 8 n 8", 500, 8, 8, 7, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, B, INT, 1, 1, 0, 0, 0, 0},
    {"eights d 136 n 24 f32", 500, 136, 24, 7, 3, SMOE_ACTIVATION_RELU, RANDOM, B, F, CAT, 0, 1, 0, 0, 0, 0},
    {"eights d 200 n 328", 300, 200, 328, 5, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, INT, 1, 1, 0, 0, 0, 0},
    {"bias", 400, 200, 136, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 1, 1, 0, 0, 0, 0},
    {"bias relu", 400, 256, 192, 6, 2, SMOE_ACTIVATION_RELU, RANDOM, B, B, CAT, 1, 1, 0, 0, 0, 0},
    {"fp16", 400, 256, 256, 4, 2, SMOE_ACTIVATION_REGLU, RANDOM, H, H, CAT, 0, 1, 0, 0, 0, 0},
    {"fp16 f32 inter bias", 400, 320, 192, 4, 2, SMOE_ACTIVATION_REGLU, RANDOM, H, F, INT, 1, 1, 0, 0, 0, 0},
    {"fp16 accumulate ping-pong", 300, 384, 256, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, H, H, CAT, 0, 1, 1, 0,
     0, 0},
    {"one token", 1, 64, 64, 8, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 1, 1, 0, 0, 0, 0},
    {"experts 1", 300, 64, 64, 1, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, F, CAT, 0, 1, 0, 0, 0, 0},
    {"experts 4096 topk 64", 100, 16, 8, 4096, 64, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 1, 1, 0, 0, 0,
     0},
    {"experts 1001 topk 9", 3000, 16, 8, 1001, 9, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"swiglu", 500, 256, 256, 4, 2, SMOE_ACTIVATION_SWIGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 1},
    {"swiglu bias inter", 500, 256, 320, 4, 2, SMOE_ACTIVATION_SWIGLU, RANDOM, B, F, INT, 1, 1, 1, 1, 0, 1},
    {"geglu", 400, 256, 192, 4, 2, SMOE_ACTIVATION_GEGLU, RANDOM, B, F, CAT, 1, 1, 0, 0, 0, 1},
    {"geglu_tanh", 400, 256, 256, 4, 2, SMOE_ACTIVATION_GEGLU_TANH, RANDOM, B, F, INT, 0, 1, 0, 0, 0, 1},
    {"swiglu_oai", 400, 200, 200, 4, 2, SMOE_ACTIVATION_SWIGLU_OAI, RANDOM, B, F, INT, 1, 1, 0, 0, 0, 1},
    {"silu", 400, 256, 256, 4, 2, SMOE_ACTIVATION_SILU, RANDOM, B, F, CAT, 0, 1, 0, 0, 0, 1},
    {"gelu", 400, 256, 256, 4, 2, SMOE_ACTIVATION_GELU, RANDOM, B, F, CAT, 1, 1, 0, 0, 0, 1},
    {"fp16 swiglu", 400, 256, 256, 4, 2, SMOE_ACTIVATION_SWIGLU, RANDOM, H, F, CAT, 0, 1, 0, 0, 0, 1},
    {"fp16 geglu_tanh", 400, 256, 192, 4, 2, SMOE_ACTIVATION_GEGLU_TANH, RANDOM, H, F, INT, 0, 1, 0, 0, 0, 1},
    {"fp16 swiglu_oai", 400, 200, 136, 4, 2, SMOE_ACTIVATION_SWIGLU_OAI, RANDOM, H, H, CAT, 1, 1, 0, 0, 0, 1},
    {"fp16 gelu one expert", 2000, 192, 128, 4, 1, SMOE_ACTIVATION_GELU, ONE_EXPERT, H, F, CAT, 0, 1, 0, 0, 0,
     1},
};

int main(int argc, char **argv)
{
    smoe_context *context = open_cuda();
    const int sharded = argc == 4 && strcmp(argv[1], "--shard") == 0;
    const size_t shard = sharded ? (size_t)atoi(argv[2]) : 0, shards = sharded ? (size_t)atoi(argv[3]) : 1;
    const char *only = argc == 2 ? argv[1] : NULL;
    if (getenv("REPEATS")) repeats = atoi(getenv("REPEATS"));
    for (size_t i = shard; i < sizeof cases / sizeof cases[0]; i += shards)
        if (!only || strstr(cases[i].name, only)) check_case(context, &cases[i]);
    if (shard == 0 && (!only || strcmp(only, "isolation") == 0)) {
        check_isolation(context, 256, 320);
        check_isolation(context, 192, 256);
        check_isolation(context, 72, 40);
    }
    if (shard == 0 && !only) {
        const int launches = getenv("LAUNCHES") ? atoi(getenv("LAUNCHES")) : 1000;
        check_repeats(context, 768, 256, launches);
        check_repeats(context, 512, 1024, launches);
    }
    smoe_destroy(context);
    printf("%d wrong\n", wrong_total);
    return wrong_total != 0;
}
