/* The whole layer from logits, forward and back on the cuda backend, against the fp64 oracle: every score
 * function, rounding, losses, both gradient types, accumulated, by chunks, odd E and K. A tensor passes
 * within 1.5 times what storage alone costs (the oracle rounding what an implementation stores), as in `smoe
 * verify`. Every buffer is poisoned and stands between canaries, scratch is poisoned before the backward,
 * every case is run again, with other chunks and without dlogits and dbr too, and has to give the same bits.
 *
 *   check_layer_backward [NAME]          cases whose name contains NAME
 *   check_layer_backward --shard I N     every N-th case from I on
 *
 * Exit 0 all right, 1 something wrong, 77 no device. */
#include "gpu.h"
#include "open_cuda.h"
#include "oracle/compare.h"
#include "oracle/draw.h"
#include "oracle/number.h"

#include <math.h>

typedef struct test_case {
    const char *name;
    smoe_layer layer; /* what is 0 takes its default, see complete */
    oracle_draw draw;
} test_case;

#define ROUTER .router = true
#define BIASES .router_bias = true, .b1 = true, .b2 = true
/* Large enough to be a good part of dlogits. */
#define LOSSES .balance_coefficient = 40, .z_coefficient = 20

static const test_case cases[] = {
    /* sparse dlogits: the router's term comes with dX's rows */
    {"topk-softmax", {.score = SMOE_SCORE_TOPK_SOFTMAX}, {ROUTER}},
    {"renormalised, scaled, biases", {.renormalize = 1, .route_scale = 2.5f}, {ROUTER, BIASES}},
    {"sigmoid", {.score = SMOE_SCORE_SIGMOID}, {ROUTER, .selection_bias = true}},
    {"sigmoid groups",
     {.score = SMOE_SCORE_SIGMOID, .renormalize = 1, .experts = 16, .topk = 4, .groups = 4, .groups_kept = 2},
     {ROUTER, BIASES, .selection_bias = true}},
    {"sparse E 13 K 7 f16",
     {.score = SMOE_SCORE_TOPK_SOFTMAX, .experts = 13, .topk = 7, .dtype = SMOE_TYPE_F16},
     {ROUTER}},
    {"sparse E 7 K 5 bf16 gradients",
     {.renormalize = 1,
      .experts = 7,
      .topk = 5,
      .gradient_type = SMOE_TYPE_BF16,
      .logits_type = SMOE_TYPE_BF16},
     {ROUTER, BIASES}},
    {"sparse d 200 chunks accumulated",
     {.score = SMOE_SCORE_TOPK_SOFTMAX, .hidden = 200, .chunks = 4, .accumulate = 1},
     {ROUTER, BIASES}},
    {"sparse, 6 parts of dS",
     {.score = SMOE_SCORE_TOPK_SOFTMAX, .tokens = 40, .hidden = 16, .intermediate = 1032},
     {ROUTER, BIASES}},
    {"sparse K 1", {.score = SMOE_SCORE_SIGMOID, .topk = 1, .tokens = 301}, {ROUTER}},
    {"sparse K 40 E 100", {.renormalize = 1, .topk = 40, .experts = 100, .tokens = 37}, {ROUTER, BIASES}},
    {"sparse given logits", {.renormalize = 1, .experts = 9, .topk = 3}, {.selection_bias = false}},
    /* dense */
    {"softmax", {.topk = 3}, {ROUTER, BIASES}},
    {"softmax losses f16", {.dtype = SMOE_TYPE_F16, .route_scale = 1.5f}, {ROUTER, BIASES, LOSSES}},
    {"sigmoid losses", {.score = SMOE_SCORE_SIGMOID, .renormalize = 1}, {ROUTER, LOSSES}},
    {"dense E 13 K 5 bf16 logits",
     {.experts = 13, .topk = 5, .logits_type = SMOE_TYPE_BF16, .gradient_type = SMOE_TYPE_BF16},
     {ROUTER, BIASES, LOSSES}},
    {"dense d 200 chunks accumulated, reuse",
     {.hidden = 200, .chunks = 2, .accumulate = 1, .reuse_saved = 1, .topk = 3},
     {ROUTER, BIASES, LOSSES}},
    {"dense given logits", {.experts = 11, .topk = 3}, {LOSSES}},
    {"dense E 1", {.experts = 1, .topk = 1}, {ROUTER, LOSSES}},
    {"one token", {.tokens = 1, .experts = 10, .topk = 3}, {ROUTER, BIASES, LOSSES}},
    {"experts 1100 topk 9",
     {.experts = 1100, .topk = 9, .tokens = 130, .hidden = 16, .intermediate = 8},
     {ROUTER}},
    {"experts 4096 topk 64",
     {.experts = 4096, .topk = 64, .tokens = 70, .hidden = 16, .intermediate = 8, .renormalize = 1},
     {ROUTER, BIASES}},
    {"many tokens, odd E",
     {.tokens = 2500, .experts = 13, .hidden = 72, .intermediate = 16},
     {ROUTER, BIASES}},
    /* rounding */
    {"nr-f", {.rounding = SMOE_ROUNDING_NR_F}, {ROUTER, BIASES}},
    {"up, renormalised",
     {.rounding = SMOE_ROUNDING_UP, .renormalize = 1, .route_scale = 2.0f},
     {ROUTER, LOSSES}},
    {"down, topk-softmax",
     {.rounding = SMOE_ROUNDING_DOWN, .score = SMOE_SCORE_TOPK_SOFTMAX, .topk = 3},
     {ROUTER}},
    {"nr-s, sigmoid",
     {.rounding = SMOE_ROUNDING_NR_S, .score = SMOE_SCORE_SIGMOID},
     {ROUTER, .selection_bias = true}},
    {"up, sigmoid renormalised, losses f16",
     {.rounding = SMOE_ROUNDING_UP, .score = SMOE_SCORE_SIGMOID, .renormalize = 1, .dtype = SMOE_TYPE_F16},
     {ROUTER, LOSSES, .selection_bias = true}},
    {"balance-f E 13 bf16 logits",
     {.rounding = SMOE_ROUNDING_BALANCE_F, .experts = 13, .topk = 3, .logits_type = SMOE_TYPE_BF16},
     {ROUTER, LOSSES}},
    {"sr-f given logits", {.rounding = SMOE_ROUNDING_SR_F, .seed = 99}, {LOSSES, .step = 5}},
};

static smoe_layer complete(const test_case *c)
{
    smoe_layer l = c->layer;
    l.struct_size = sizeof l;
    if (l.dtype == SMOE_TYPE_F32) l.dtype = SMOE_TYPE_BF16;
    if (l.gradient_type == SMOE_TYPE_BF16) l.gradient_type = l.dtype;
    if (!l.tokens) l.tokens = 157;
    if (!l.hidden) l.hidden = 64;
    if (!l.intermediate) l.intermediate = 32;
    if (!l.experts) l.experts = 8;
    if (!l.topk) l.topk = 2;
    if (!l.chunks) l.chunks = 1;
    if (!l.groups) l.groups = l.groups_kept = 1;
    if (l.route_scale == 0.0f) l.route_scale = 1.0f;
    if (!l.tile) l.tile = 16;
    l.index_type = SMOE_TYPE_I32;
    return l;
}

static int wrong_total;
static int repeats = 2; /* of every case; REPEATS in the environment */

static void wrong(const char *name, const char *what, double amount)
{
    printf("WRONG %-28s %-14s %g\n", name, what, amount);
    wrong_total++;
}

static void must(smoe_context *context, smoe_status status, const char *what)
{
    if (status == SMOE_OK) return;
    printf("%s: %s: %s\n", what, smoe_status_string(status), smoe_last_error(context));
    exit(3);
}

/* ---- A layer on the device */

enum { DX, DW1, DW2, DB1, DB2, DWR, DBR, DLOGITS, DS, RESULTS };
static const char *const names[RESULTS] = {"dx", "dw1", "dw2", "db1", "db2", "dwr", "dbr", "dlogits", "ds"};

enum { X, WR, BR, LOGITS, SELECTION, W1, B1, W2, B2, DOUT, OUT, SAVED, SCRATCH_FORWARD, SCRATCH, BUFFERS };

typedef struct device_run {
    smoe_layer layer;
    gpu_buffer buffer[BUFFERS], result[RESULTS];
    size_t count[RESULTS];
    smoe_type type[RESULTS];
    smoe_forward_args forward;
    smoe_backward_args backward;
} device_run;

static gpu_buffer upload(const double *v, int64_t count, smoe_type type)
{
    if (!v) return (gpu_buffer){0};
    const size_t bytes = (size_t)count * oracle_type_bytes(type);
    void *host = malloc(bytes);
    oracle_store(host, type, v, (size_t)count);
    const gpu_buffer b = gpu_copy(host, bytes);
    free(host);
    return b;
}

static void fill_arguments(device_run *r, const oracle_drawn *d)
{
    char *at[BUFFERS];
    for (int i = 0; i < BUFFERS; i++) at[i] = r->buffer[i].memory;
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.x = at[X], f.router_weight = at[WR], f.router_bias = at[BR], f.logits = at[LOGITS];
    f.selection_bias = (float *)(void *)at[SELECTION], f.step = d->input.step;
    f.w1 = at[W1], f.b1 = at[B1], f.w2 = at[W2], f.b2 = at[B2], f.out = at[OUT];
    f.saved = at[SAVED], f.saved_size = r->buffer[SAVED].bytes;
    f.scratch = at[SCRATCH_FORWARD], f.scratch_size = r->buffer[SCRATCH_FORWARD].bytes;
    smoe_backward_args b = SMOE_BACKWARD_ARGS_INIT;
    b.x = f.x, b.router_weight = f.router_weight, b.logits = f.logits, b.selection_bias = f.selection_bias;
    b.w1 = f.w1, b.b1 = f.b1, b.w2 = f.w2, b.b2 = f.b2, b.saved = f.saved, b.saved_size = f.saved_size;
    b.dout = at[DOUT], b.scratch = at[SCRATCH], b.scratch_size = r->buffer[SCRATCH].bytes;
    b.balance_coefficient = (float)d->input.balance_coefficient;
    b.z_coefficient = (float)d->input.z_coefficient;
    b.dx = r->result[DX].memory, b.dw1 = r->result[DW1].memory, b.dw2 = r->result[DW2].memory;
    b.db1 = r->result[DB1].memory, b.db2 = r->result[DB2].memory;
    b.drouter_weight = r->result[DWR].memory, b.drouter_bias = r->result[DBR].memory;
    b.dlogits = r->result[DLOGITS].memory, b.drow_weights = (float *)(void *)r->result[DS].memory;
    r->forward = f, r->backward = b;
}

static device_run make_run(smoe_context *context, const char *name, const smoe_layer *l,
                           const oracle_drawn *d)
{
    const int64_t T = l->tokens, E = l->experts, h = l->hidden, n = l->intermediate, w = oracle_h_width(l);
    device_run r = {.layer = *l};
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(context, smoe_query_sizes(context, l, &sizes), name);
    r.buffer[X] = upload(d->x, T * h, l->dtype);
    r.buffer[WR] = upload(d->router_weight, E * h, l->dtype);
    r.buffer[BR] = upload(d->router_bias, E, l->dtype);
    r.buffer[LOGITS] = d->logits ? upload(d->logits, T * E, l->logits_type)
                                 : gpu_alloc((size_t)(T * E) * oracle_type_bytes(l->logits_type));
    r.buffer[SELECTION] = upload(d->selection_bias, E, SMOE_TYPE_F32);
    r.buffer[W1] = upload(d->w1, E * w * h, l->dtype);
    r.buffer[B1] = upload(d->b1, E * w, l->dtype);
    r.buffer[W2] = upload(d->w2, E * h * n, l->dtype);
    r.buffer[B2] = upload(d->b2, E * h, l->dtype);
    r.buffer[DOUT] = upload(d->dout, T * h, l->dtype);
    r.buffer[OUT] = gpu_alloc((size_t)(T * h) * 2);
    r.buffer[SAVED] = gpu_alloc(sizes.saved_buffer_bytes);
    r.buffer[SCRATCH_FORWARD] = gpu_alloc(sizes.scratch_forward_bytes);
    r.buffer[SCRATCH] = gpu_alloc(sizes.scratch_backward_bytes);
    const int64_t counts[RESULTS] = {T * h,
                                     E * w * h,
                                     E * h * n,
                                     d->b1 ? E * w : 0,
                                     d->b2 ? E * h : 0,
                                     d->router_weight ? E * h : 0,
                                     d->router_bias ? E : 0,
                                     T * E,
                                     sizes.padded_rows};
    for (int i = 0; i < RESULTS; i++) {
        r.type[i] = i == DX        ? l->dtype
                    : i == DLOGITS ? l->logits_type
                    : i == DS      ? SMOE_TYPE_F32
                                   : l->gradient_type;
        r.count[i] = (size_t)counts[i];
        if (counts[i]) r.result[i] = gpu_alloc(r.count[i] * oracle_type_bytes(r.type[i]));
    }
    fill_arguments(&r, d);
    return r;
}

static void free_run(device_run *r, const char *name)
{
    int touched = 0;
    for (int i = 0; i < BUFFERS; i++) touched += gpu_free(r->buffer[i]);
    for (int i = 0; i < RESULTS; i++) touched += gpu_free(r->result[i]);
    if (touched) wrong(name, "canaries", touched);
}

static void poison(gpu_buffer b, int value)
{
    if (b.memory) CHECK_CUDA(cudaMemset(b.memory, value, b.bytes));
}

static int accumulated(const smoe_layer *l, int result)
{
    return l->accumulate && result != DX && result != DLOGITS && result != DS;
}

/* Forward, then backward into poisoned results (accumulated: into zeros, twice). */
static void run_both(smoe_context *context, device_run *r, const char *name)
{
    must(context, smoe_layer_forward(context, &r->layer, &r->forward, NULL), name);
    CHECK_CUDA(cudaDeviceSynchronize());
    poison(r->buffer[SCRATCH_FORWARD], 0xFF), poison(r->buffer[OUT], 0xFF);
    for (int i = 0; i < RESULTS; i++) poison(r->result[i], accumulated(&r->layer, i) ? 0 : 0xFF);
    for (int pass = 0; pass <= r->layer.accumulate; pass++) {
        if (pass && r->layer.reuse_saved)
            must(context, smoe_layer_forward(context, &r->layer, &r->forward, NULL), name);
        poison(r->buffer[SCRATCH], 0xFF);
        must(context, smoe_layer_backward(context, &r->layer, &r->backward, NULL), name);
    }
    CHECK_CUDA(cudaDeviceSynchronize());
}

static void *read_result(const device_run *r, int i)
{
    return r->count[i] ? gpu_read(r->result[i].memory, r->count[i] * oracle_type_bytes(r->type[i])) : NULL;
}

/* ---- Against the oracle */

/* From dS (R) to its padded rows. */
static double *pad_rows(const oracle_forward *f, const double *ds, size_t padded_rows)
{
    double *padded = oracle_alloc(padded_rows, sizeof *padded);
    for (int64_t r = 0; r < f->rows; r++) padded[f->row_padded[r]] = ds[r];
    return padded;
}

typedef struct expected {
    double *values[RESULTS];
    int64_t undecided;
} expected;

static expected expect(const device_run *r, const oracle_drawn *d, const double *logits, bool round_stores)
{
    oracle_input input = d->input;
    input.logits = logits, input.round_stores = round_stores, input.round_inside = true;
    oracle_forward f;
    oracle_backward b;
    oracle_forward_run(&r->layer, &input, &f);
    oracle_backward_run(&r->layer, &input, &f, true, &b);
    double *const given[RESULTS] = {b.dx,           b.dw1,     b.dw2, b.db1, b.db2, b.drouter_weight,
                                    b.drouter_bias, b.dlogits, NULL};
    expected e = {.undecided = f.undecided};
    for (int i = 0; i < RESULTS; i++) {
        if (!r->count[i]) continue;
        e.values[i] = i == DS ? pad_rows(&f, b.ds, r->count[i]) : oracle_alloc(r->count[i], sizeof(double));
        const double times = accumulated(&r->layer, i) ? 2.0 : 1.0;
        for (size_t j = 0; i != DS && j < r->count[i]; j++) e.values[i][j] = times * given[i][j];
    }
    oracle_forward_free(&f), oracle_backward_free(&b);
    return e;
}

static void compare(const test_case *c, const device_run *r, void *const bits[RESULTS], const expected *want,
                    const expected *stored, char *note)
{
    const double cap =
        r->layer.dtype == SMOE_TYPE_BF16 || r->layer.logits_type == SMOE_TYPE_BF16 ? 5e-3 : 1e-3;
    for (int i = 0; i < RESULTS; i++) {
        if (!r->count[i]) continue;
        double *got = oracle_alloc(r->count[i], sizeof *got);
        oracle_load(got, r->type[i], bits[i], r->count[i]);
        const double storage = oracle_relative_error(stored->values[i], want->values[i], r->count[i]);
        const double error = oracle_relative_error(got, want->values[i], r->count[i]);
        const double limit = fmin(i == DBR ? 4 * cap : cap, fmax(1.5 * storage, 5e-6));
        sprintf(note + strlen(note), " %s %.1f/%.1f", names[i], error * 1e4, limit * 1e4);
        if (!(error <= limit)) wrong(c->name, names[i], error);
        free(got);
    }
}

static void same_bits(const test_case *c, const device_run *r, void *const bits[RESULTS], const char *how)
{
    for (int i = 0; i < RESULTS; i++) {
        void *again = read_result(r, i);
        if (again && memcmp(again, bits[i], r->count[i] * oracle_type_bytes(r->type[i])) != 0)
            wrong(c->name, how, i);
        free(again);
    }
}

/* What else is made of dlogits is left out, which must not change the rest. */
static void without_dlogits(device_run *r)
{
    if (!r->backward.router_weight) return; /* they are all that is asked of the router */
    r->backward.dlogits = r->backward.drouter_bias = NULL;
    r->count[DLOGITS] = r->count[DBR] = 0;
}

/* 0: two scores are too close for a fair comparison, try other inputs. */
static int check_drawn(smoe_context *context, const test_case *c, const oracle_drawn *drawn)
{
    const smoe_layer layer = complete(c);
    const int before = wrong_total;
    char note[512] = "";
    device_run r = make_run(context, c->name, &layer, drawn);
    run_both(context, &r, c->name);
    void *bits[RESULTS];
    for (int i = 0; i < RESULTS; i++) bits[i] = read_result(&r, i);
    const size_t pairs = (size_t)(layer.tokens * layer.experts);
    void *stored_logits = gpu_read(r.buffer[LOGITS].memory, pairs * oracle_type_bytes(layer.logits_type));
    double *logits = oracle_alloc(pairs, sizeof *logits);
    oracle_load(logits, layer.logits_type, stored_logits, pairs);
    expected want = expect(&r, drawn, logits, false), stored = expect(&r, drawn, logits, true);
    const int decided = want.undecided + stored.undecided == 0;
    if (decided) {
        compare(c, &r, bits, &want, &stored, note);
        for (int i = 0; i < repeats; i++) {
            run_both(context, &r, c->name);
            same_bits(c, &r, bits, "repeat");
        }
        free_run(&r, c->name);
        smoe_layer other = layer;
        other.chunks = layer.chunks == 1 ? 8 : 1;
        r = make_run(context, c->name, &other, drawn);
        without_dlogits(&r);
        run_both(context, &r, c->name);
        same_bits(c, &r, bits, "other chunks");
        printf("%-40s %s (1e-4)%s\n", c->name, wrong_total == before ? "ok" : "WRONG", note);
        fflush(stdout);
    }
    free_run(&r, c->name);
    for (int i = 0; i < RESULTS; i++) free(bits[i]), free(want.values[i]), free(stored.values[i]);
    free(stored_logits), free(logits);
    return decided;
}

static void check_case(smoe_context *context, const test_case *c)
{
    const smoe_layer layer = complete(c);
    for (uint64_t seed = 11; seed < 51; seed++) {
        oracle_drawn drawn;
        oracle_draw_inputs(&layer, &c->draw, seed, &drawn);
        const int decided = check_drawn(context, c, &drawn);
        oracle_drawn_free(&drawn);
        if (decided) return;
    }
    wrong(c->name, "undecided", 40);
}

#define NAN_CASE "NaN logits, E 13"

/* A token that keeps a NaN logit has NaN in all of its dlogits, one that does not keep it and the others in
 * none. */
static void check_nan(smoe_context *context, smoe_score score, int renormalize, int topk)
{
    enum { E = 13, KEEPS = 7, NEED_NOT = 9 };
    const test_case c = {
        NAN_CASE, {.score = score, .renormalize = renormalize, .experts = E, .topk = topk}, {0}};
    const smoe_layer layer = complete(&c);
    oracle_drawn drawn;
    oracle_draw_inputs(&layer, &c.draw, 11, &drawn);
    for (int e = topk - 1; e < E; e++) drawn.logits[KEEPS * E + e] = (double)NAN;
    drawn.logits[NEED_NOT * E + 3] = (double)NAN;
    device_run r = make_run(context, c.name, &layer, &drawn);
    run_both(context, &r, c.name);
    float *got = read_result(&r, DLOGITS);
    int differ = 0;
    for (int64_t i = 0; i < layer.tokens * E; i++) differ += (isnan(got[i]) != 0) != (i / E == KEEPS);
    if (differ) wrong(c.name, "dlogits", differ);
    printf("%-40s %s score %d K %d\n", c.name, differ ? "WRONG" : "ok", (int)score, topk);
    free(got);
    free_run(&r, c.name);
    oracle_drawn_free(&drawn);
}

static void check_nans(smoe_context *context)
{
    for (int topk = 3; topk < 12; topk += 7) {
        check_nan(context, SMOE_SCORE_TOPK_SOFTMAX, 0, topk);
        for (int renormalize = 0; renormalize < 2; renormalize++) {
            check_nan(context, SMOE_SCORE_SOFTMAX_TOPK, renormalize, topk);
            check_nan(context, SMOE_SCORE_SIGMOID, renormalize, topk);
        }
    }
}

int main(int argc, char **argv)
{
    smoe_context *context = open_cuda();
    const int sharded = argc == 4 && strcmp(argv[1], "--shard") == 0;
    const size_t shard = sharded ? (size_t)atoi(argv[2]) : 0, shards = sharded ? (size_t)atoi(argv[3]) : 1;
    const char *only = argc == 2 ? argv[1] : NULL;
    if (getenv("REPEATS")) repeats = atoi(getenv("REPEATS"));
    for (size_t i = shard; i < sizeof cases / sizeof cases[0]; i += shards)
        if (!only || strstr(cases[i].name, only)) check_case(context, &cases[i]);
    if (shard == 0 && (!only || strstr(NAN_CASE, only))) check_nans(context);
    smoe_destroy(context);
    printf("%d wrong\n", wrong_total);
    return wrong_total != 0;
}
