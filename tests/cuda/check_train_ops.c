/* Compares every operation of the trainer on the GPU with that on the CPU, whose arithmetic is f32, on the
 * same inputs (rounded to bf16). The relative Frobenius errors must be within limits, nothing may be written
 * outside of the arrays (canaries), and a second call must give the same bits. check_train_ops [DEVICE]:
 * cuda, or cuda-plain. */
#include "base/random.h"
#include "gpu.h"
#include "train/device.h"
#include "train/model/rope_table.h"

#include <cblas.h>
#include <math.h>
#include <stdbool.h>

enum { CPU, GPU, SIDES, MOST_ARRAYS = 16 };

/* An array on both sides: f32 on the CPU, `type` on the GPU. */
typedef struct array {
    const char *name;
    int64_t count;
    smoe_type type;
    float *start; // the first values on both sides
    void *at[SIDES];
    gpu_buffer buffer;
} array;

typedef struct bench {
    const char *title;
    train_device *device[SIDES];
    array arrays[MOST_ARRAYS];
    int count;
} bench;

static int wrong;

static void die(const error *err)
{
    printf("%s\n", err->text);
    exit(strstr(err->text, "no GPU") || strstr(err->text, "no cuda backend") ? 77 : 1);
}

static float to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static const train_ops *ops_of(const bench *b, int side)
{
    return b->device[side]->ops;
}

static void restore(const bench *b, const array *a, int side)
{
    ops_of(b, side)->store(b->device[side], a->at[side], side == GPU ? a->type : SMOE_TYPE_F32, a->start,
                           a->count);
}

/* An array of `count` normal values with this mean and deviation; or, unless NULL, of the values `given`. */
static array *add_values(bench *b, const char *name, smoe_type type, int64_t count, double mean,
                         double deviation, const float *given)
{
    array *a = &b->arrays[b->count++];
    *a = (array){name, count, type, malloc((size_t)count * sizeof(float)), {NULL, NULL}, {NULL, 0}};
    for (int64_t i = 0; i < count; i++) {
        float value =
            given ? given[i] : (float)(mean + deviation * random_normal((uint64_t)b->count, (uint64_t)i));
        a->start[i] = type == SMOE_TYPE_BF16 ? to_bf16(value) : value;
    }
    a->at[CPU] = ops_of(b, CPU)->allocate(b->device[CPU], (size_t)count * sizeof(float));
    a->buffer = gpu_alloc((size_t)count * type_size(type));
    a->at[GPU] = a->buffer.memory;
    restore(b, a, CPU), restore(b, a, GPU);
    return a;
}

static array *values(bench *b, const char *name, int64_t count)
{
    return add_values(b, name, SMOE_TYPE_BF16, count, 0, 1, NULL);
}

static void finish(const bench *b, int side)
{
    error err = {0};
    if (!ops_of(b, side)->finish(b->device[side], &err)) die(&err);
}

/* An array that an operation writes. On the GPU it is poisoned: its old values must have no effect. */
static array *result(bench *b, const char *name, smoe_type type, int64_t count)
{
    array *a = add_values(b, name, type, count, 0, 0, NULL);
    finish(b, GPU); /* waits for the upload of add_values, which runs on the device's own stream */
    CHECK_CUDA(cudaMemset(a->at[GPU], 0xFF, (size_t)count * type_size(type)));
    CHECK_CUDA(cudaDeviceSynchronize());
    return a;
}

static void *scratch_of(const bench *b, int side, size_t bytes)
{
    void *memory = ops_of(b, side)->allocate(b->device[side], bytes + 256);
    ops_of(b, side)->clear(b->device[side], memory, bytes + 256);
    return memory;
}

static void compare(const bench *b, const array *a, double limit)
{
    float *got = malloc((size_t)a->count * sizeof *got), *want = a->at[CPU];
    double miss = 0, norm = 0;
    ops_of(b, GPU)->load(b->device[GPU], got, a->at[GPU], a->type, a->count);
    finish(b, GPU);
    for (int64_t i = 0; i < a->count; i++) {
        miss += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += (double)want[i] * want[i];
    }
    double apart = norm > 0 ? sqrt(miss / norm) : sqrt(miss);
    if (!(apart <= limit)) wrong++;
    printf("%-44s %-10s %.2e%s\n", b->title, a->name, apart, apart <= limit ? "" : "  WRONG");
    free(got);
}

/* A copy of the GPU's values, to be compared with those of a second call. */
static void *bits_of(const array *a)
{
    return gpu_read(a->at[GPU], (size_t)a->count * type_size(a->type));
}

typedef void call(bench *b, int side, const void *with);

/* Runs the operation on both sides. Each of the `count` results must be within its limit, and a second call
 * on the GPU must give the same bits. */
static void check(bench *b, call *run, const void *with, array *const *results, int count, double limit)
{
    void *bits[MOST_ARRAYS];
    run(b, CPU, with), run(b, GPU, with);
    finish(b, GPU);
    for (int i = 0; i < count; i++) {
        compare(b, results[i], results[i]->type == SMOE_TYPE_F32 ? limit / 4 : limit);
        bits[i] = bits_of(results[i]);
    }
    for (int i = 0; i < b->count; i++) restore(b, &b->arrays[i], GPU);
    run(b, GPU, with);
    finish(b, GPU);
    for (int i = 0; i < count; i++) {
        void *again = bits_of(results[i]);
        if (memcmp(bits[i], again, (size_t)results[i]->count * type_size(results[i]->type)) != 0)
            printf("%-44s %-10s a second call differs  WRONG\n", b->title, results[i]->name), wrong++;
        free(again), free(bits[i]);
    }
    for (int i = 0; i < b->count; i++) {
        if (gpu_free(b->arrays[i].buffer))
            printf("%-44s %-10s written past its end  WRONG\n", b->title, b->arrays[i].name), wrong++;
        ops_of(b, CPU)->release(b->device[CPU], b->arrays[i].at[CPU]);
        free(b->arrays[i].start);
    }
    b->count = 0;
}

#define CHECK(b, run, with, limit, ...)                                                                      \
    check(b, run, with, (array *const[]){__VA_ARGS__}, sizeof((array *[]){__VA_ARGS__}) / sizeof(array *),   \
          limit)

static const double ROUNDED = 0.004; // limit for a result in bf16, whose rounding error is about 0.0017

/* ---- norms ---- */

typedef struct norm_case {
    int64_t rows, d;
    bool add;
    array *y, *rstd, *x, *residual, *w, *dx, *dw, *again;
} norm_case;

static void run_norm(bench *b, int side, const void *with)
{
    const norm_case *c = with;
    ops_of(b, side)->norm(b->device[side], c->y->at[side], c->rstd->at[side], c->x->at[side],
                          c->add ? c->residual->at[side] : NULL, c->w->at[side], c->rows, c->d, 1e-5);
}

static void check_norm(bench *b, int64_t rows, int64_t d, bool add)
{
    char title[64];
    snprintf(title, sizeof title, "norm, %lld rows, d %lld%s", (long long)rows, (long long)d,
             add ? ", residual" : "");
    b->title = title;
    norm_case c = {.rows = rows, .d = d, .add = add};
    c.y = result(b, "y", SMOE_TYPE_BF16, rows * d), c.rstd = result(b, "rstd", SMOE_TYPE_F32, rows);
    c.x = values(b, "x", rows * d), c.residual = values(b, "residual", rows * d), c.w = values(b, "w", d);
    CHECK(b, run_norm, &c, ROUNDED, c.y, c.rstd, c.x);
}

static void run_norm_backward(bench *b, int side, const void *with)
{
    const norm_case *c = with;
    const train_ops *ops = ops_of(b, side);
    train_device *dv = b->device[side];
    float *scratch = scratch_of(b, side, (size_t)ops->norm_scratch(dv, c->rows, c->d) * sizeof(float));
    ops->norm_backward(dv, c->dx->at[side], c->dw->at[side], c->again ? c->again->at[side] : NULL,
                       c->y->at[side], c->x->at[side], c->rstd->at[side], c->w->at[side], c->rows, c->d,
                       c->add, c->add || side == CPU, scratch);
    ops->release(dv, scratch);
}

static void check_norm_backward(bench *b, int64_t rows, int64_t d, bool add)
{
    char title[64];
    smoe_type type = b->device[GPU]->grad_type;
    snprintf(title, sizeof title, "norm backward, %lld rows, d %lld%s", (long long)rows, (long long)d,
             add ? ", adding" : "");
    b->title = title;
    norm_case c = {.rows = rows, .d = d, .add = add};
    c.y = values(b, "dy", rows * d), c.x = values(b, "x", rows * d), c.w = values(b, "w", d);
    c.rstd = add_values(b, "rstd", SMOE_TYPE_F32, rows, 1, 0.1, NULL);
    c.dx = add ? values(b, "dx", rows * d) : result(b, "dx", SMOE_TYPE_BF16, rows * d);
    c.dw = add ? add_values(b, "dw", type, d, 0, 1, NULL) : result(b, "dw", type, d);
    if (add) {
        CHECK(b, run_norm_backward, &c, ROUNDED, c.dx, c.dw);
        return;
    }
    c.again = result(b, "y again", SMOE_TYPE_BF16, rows * d);
    CHECK(b, run_norm_backward, &c, ROUNDED, c.dx, c.dw, c.again);
}

/* ---- attention ---- */

typedef struct heads_case {
    pass_shape shape;
    array *q, *k, *rstd, *qkv, *wq, *wk, *rope, *out, *dout, *dq, *dk, *dqkv, *dwq, *dwk;
} heads_case;

static void run_qk(bench *b, int side, const void *with)
{
    const heads_case *c = with;
    ops_of(b, side)->qk_norm_rope(b->device[side], c->q->at[side], c->k->at[side], c->rstd->at[side],
                                  c->qkv->at[side], c->wq->at[side], c->wk->at[side], c->rope->at[side],
                                  &c->shape, 1e-5);
}

static void run_qk_backward(bench *b, int side, const void *with)
{
    const heads_case *c = with;
    const train_ops *ops = ops_of(b, side);
    train_device *dv = b->device[side];
    int64_t rows = c->shape.sequences * c->shape.length, d = c->shape.heads * c->shape.head_size;
    float *scratch = scratch_of(b, side, (size_t)ops->norm_scratch(dv, rows, d) * sizeof(float));
    ops->qk_norm_rope_backward(dv, c->dqkv->at[side], c->dwq->at[side], c->dwk->at[side], c->dq->at[side],
                               c->dk->at[side], c->qkv->at[side], c->rstd->at[side], c->wq->at[side],
                               c->wk->at[side], c->rope->at[side], &c->shape, side == CPU, scratch);
    ops->release(dv, scratch);
}

static array *angles(bench *b, const pass_shape *shape)
{
    int64_t positions = shape->first + shape->length;
    float *table = malloc((size_t)(positions * shape->head_size) * sizeof *table);
    rope_table(table, positions, shape->head_size, 100);
    array *a = add_values(b, "rope", SMOE_TYPE_F32, positions * shape->head_size, 0, 0, table);
    free(table);
    return a;
}

static void check_qk(bench *b, pass_shape shape)
{
    char title[64];
    smoe_type type = b->device[GPU]->grad_type;
    int64_t rows = shape.sequences * shape.length, d = shape.heads * shape.head_size;
    b->title = title;
    snprintf(title, sizeof title, "q/k norm and RoPE, %lld heads of %lld, from %lld", (long long)shape.heads,
             (long long)shape.head_size, (long long)shape.first);
    heads_case c = {.shape = shape};
    c.rope = angles(b, &shape), c.qkv = values(b, "qkv", rows * 3 * d);
    c.wq = values(b, "wq", d), c.wk = values(b, "wk", d);
    c.rstd = result(b, "rstd", SMOE_TYPE_F32, 2 * rows);
    c.q = result(b, "q", SMOE_TYPE_BF16, rows * d), c.k = result(b, "k", SMOE_TYPE_BF16, rows * d);
    CHECK(b, run_qk, &c, ROUNDED, c.q, c.k, c.rstd);
    snprintf(title, sizeof title, "q/k norm and RoPE backward, %lld heads of %lld", (long long)shape.heads,
             (long long)shape.head_size);
    c.rope = angles(b, &shape), c.qkv = values(b, "qkv", rows * 3 * d);
    c.wq = values(b, "wq", d), c.wk = values(b, "wk", d);
    c.rstd = add_values(b, "rstd", SMOE_TYPE_F32, 2 * rows, 1, 0.1, NULL);
    c.dq = values(b, "dq", rows * d), c.dk = values(b, "dk", rows * d);
    c.dqkv = values(b, "dqkv", rows * 3 * d); // its last third must not change
    c.dwq = result(b, "dwq", type, d), c.dwk = result(b, "dwk", type, d);
    CHECK(b, run_qk_backward, &c, ROUNDED, c.dqkv, c.dwq, c.dwk);
}

static void *third(const array *a, int side, int64_t d)
{
    return (char *)a->at[side] + 2 * d * (side == GPU ? 2 : 4);
}

/* Runs the forward, and the backward if the first position is 0. */
static void run_attention(bench *b, int side, const void *with)
{
    const heads_case *c = with;
    const train_ops *ops = ops_of(b, side);
    train_device *dv = b->device[side];
    const pass_shape *s = &c->shape;
    int64_t d = s->heads * s->head_size;
    void *saved = scratch_of(b, side, ops->attention_saved(dv, s));
    void *scratch = scratch_of(b, side, ops->attention_scratch(dv, s));
    ops->attention(dv, c->out->at[side], saved, c->q->at[side], c->k->at[side], third(c->qkv, side, d), s);
    if (s->first == 0)
        ops->attention_backward(dv, c->dq->at[side], c->dk->at[side], third(c->dqkv, side, d),
                                c->dout->at[side], c->out->at[side], saved, c->q->at[side], c->k->at[side],
                                third(c->qkv, side, d), s, scratch);
    ops->release(dv, saved), ops->release(dv, scratch);
}

static void check_attention(bench *b, pass_shape shape)
{
    char title[64];
    int64_t rows = shape.sequences * shape.length, d = shape.heads * shape.head_size;
    int64_t all = rows + shape.first;
    b->title = title;
    snprintf(title, sizeof title, "attention, %lld x %lld, %lld heads of %lld, from %lld",
             (long long)shape.sequences, (long long)shape.length, (long long)shape.heads,
             (long long)shape.head_size, (long long)shape.first);
    if (shape.first == 0) ops_of(b, GPU)->prepare(b->device[GPU], &shape, true);
    heads_case c = {.shape = shape};
    c.q = values(b, "q", rows * d), c.k = values(b, "k", all * d), c.qkv = values(b, "qkv", all * 3 * d);
    c.dout = values(b, "dout", rows * d), c.out = result(b, "out", SMOE_TYPE_BF16, rows * d);
    if (shape.first) {
        CHECK(b, run_attention, &c, 2 * ROUNDED, c.out);
        return;
    }
    c.dq = result(b, "dq", SMOE_TYPE_BF16, rows * d), c.dk = result(b, "dk", SMOE_TYPE_BF16, rows * d);
    c.dqkv = values(b, "dqkv", rows * 3 * d); // its first two thirds must not change
    CHECK(b, run_attention, &c, 2.5 * ROUNDED, c.out, c.dq, c.dk, c.dqkv);
}

/* ---- products and the dense MLP ---- */

typedef struct linear_case {
    int64_t rows, in, out;
    bool add;
    smoe_type dw_type;
    array *x, *w, *y, *residual, *dx, *dw;
} linear_case;

static void run_linear(bench *b, int side, const void *with)
{
    const linear_case *c = with;
    const train_ops *ops = ops_of(b, side);
    train_device *dv = b->device[side];
    ops->linear(dv, c->y->at[side], c->x->at[side], c->w->at[side], c->add ? c->residual->at[side] : NULL,
                c->rows, c->in, c->out);
    ops->linear_dx(dv, c->dx->at[side], c->residual->at[side], c->w->at[side], c->rows, c->in, c->out,
                   c->add);
    ops->linear_dw(dv, c->dw->at[side], side == GPU ? c->dw_type : SMOE_TYPE_F32, c->residual->at[side],
                   c->x->at[side], c->rows, c->in, c->out, c->add || side == CPU);
}

static void check_linear(bench *b, int64_t rows, int64_t in, int64_t out, bool add, smoe_type dw_type)
{
    char title[64];
    b->title = title;
    snprintf(title, sizeof title, "linear, %lld x %lld -> %lld%s, dw in %s", (long long)rows, (long long)in,
             (long long)out, add ? ", adding" : "", dw_type == SMOE_TYPE_F32 ? "f32" : "bf16");
    linear_case c = {.rows = rows, .in = in, .out = out, .add = add, .dw_type = dw_type};
    c.x = values(b, "x", rows * in), c.w = values(b, "w", out * in);
    c.residual = values(b, "residual", rows * out), c.y = result(b, "y", SMOE_TYPE_BF16, rows * out);
    c.dx = add ? values(b, "dx", rows * in) : result(b, "dx", SMOE_TYPE_BF16, rows * in);
    c.dw = add ? add_values(b, "dw", dw_type, out * in, 0, 1, NULL) : result(b, "dw", dw_type, out * in);
    CHECK(b, run_linear, &c, ROUNDED, c.y, c.dx, c.dw);
}

typedef struct swiglu_case {
    int64_t rows, width;
    array *h, *a, *da;
} swiglu_case;

static void run_swiglu(bench *b, int side, const void *with)
{
    const swiglu_case *c = with;
    ops_of(b, side)->swiglu(b->device[side], c->a->at[side], c->h->at[side], c->rows, c->width);
    ops_of(b, side)->swiglu_backward(b->device[side], c->h->at[side], c->da->at[side], c->rows, c->width);
}

static void check_swiglu(bench *b, int64_t rows, int64_t width)
{
    b->title = "swiglu";
    swiglu_case c = {.rows = rows, .width = width};
    c.h = values(b, "h", rows * 2 * width), c.a = result(b, "a", SMOE_TYPE_BF16, rows * width);
    c.da = values(b, "da", rows * width);
    CHECK(b, run_swiglu, &c, ROUNDED, c.a, c.h);
}

/* ---- both ends ---- */

typedef struct token_case {
    int64_t rows, vocab, d;
    int32_t *tokens, *targets;
    array *x, *weight, *dx, *dweight, *logits, *losses;
    bool add;
} token_case;

static void run_tokens(bench *b, int side, const void *with)
{
    const token_case *c = with;
    const train_ops *ops = ops_of(b, side);
    train_device *dv = b->device[side];
    device_batch batch;
    ops->stage_batch(dv, &batch, c->tokens, c->targets, c->rows, 1, c->rows, c->vocab);
    ops->load_batch(dv);
    ops->embed(dv, c->x->at[side], c->weight->at[side], batch.tokens, c->rows, c->d);
    ops->embed_backward(dv, c->dweight->at[side], c->dx->at[side], &batch, c->rows, c->vocab, c->d, c->add);
    ops->cross_entropy(dv, c->logits->at[side], c->losses->at[side], batch.targets, 0.5f, c->rows, c->vocab);
}

static void check_tokens(bench *b, int64_t rows, int64_t vocab, int64_t d, bool add)
{
    char title[64];
    smoe_type type = b->device[GPU]->grad_type;
    b->title = title;
    snprintf(title, sizeof title, "embedding and loss, %lld rows, vocabulary %lld", (long long)rows,
             (long long)vocab);
    token_case c = {.rows = rows, .vocab = vocab, .d = d, .add = add};
    c.tokens = malloc(2 * (size_t)rows * sizeof *c.tokens), c.targets = c.tokens + rows;
    for (int64_t i = 0; i < 2 * rows; i++)
        c.tokens[i] = (int32_t)(random_bits(3, (uint64_t)i) % (uint64_t)vocab);
    c.targets[0] = (int32_t)vocab - 1;
    c.x = result(b, "x", SMOE_TYPE_BF16, rows * d), c.weight = values(b, "weight", vocab * d);
    c.dx = values(b, "dx", rows * d);
    c.dweight =
        add ? add_values(b, "dweight", type, vocab * d, 0, 1, NULL) : result(b, "dweight", type, vocab * d);
    c.logits = add_values(b, "logits", SMOE_TYPE_BF16, rows * vocab, 3, 4, NULL);
    c.losses = result(b, "losses", SMOE_TYPE_F32, rows);
    CHECK(b, run_tokens, &c, ROUNDED, c.x, c.dweight, c.logits, c.losses);
    free(c.tokens);
}

/* ---- the optimiser ---- */

typedef struct adamw_case {
    int64_t matrices, total;
    adamw_step step;
    int spans; // the weights are updated in so many parts
    array *weights, *master, *grads, *first, *second;
    struct adamw_found {
        double square[SIDES];
    } * found;
} adamw_case;

static void run_adamw(bench *b, int side, const void *with)
{
    const adamw_case *c = with;
    const train_ops *ops = ops_of(b, side);
    train_device *dv = b->device[side];
    char *small = scratch_of(b, side, sizeof c->step + 256), *grads = c->grads->at[side];
    double *square = (double *)(void *)(small + 256);
    void *scratch = scratch_of(b, side, ops->update_scratch(dv, c->total));
    ops->upload(dv, small, &c->step, sizeof c->step);
    adamw_arrays a = {.weights = c->weights->at[side],
                      .master = side == GPU && c->master ? c->master->at[side] : NULL,
                      .first = c->first->at[side],
                      .second = c->second->at[side],
                      .state_type = side == GPU ? c->first->type : SMOE_TYPE_F32,
                      .matrices = c->matrices,
                      .total = c->total,
                      .states = c->total};
    if (c->step.clip > 0) ops->gradient_square(dv, square, grads, a.total);
    ops->begin_update(dv, (adamw_step *)(void *)small, square);
    for (int i = 0; i < c->spans; i++) {
        const int64_t at = i * c->total / c->spans / 64 * 64, end = (i + 1) * c->total / c->spans / 64 * 64;
        const size_t past = (size_t)at * type_size(dv->grad_type);
        ops->update(dv, &a, &(grad_span){grads + past, at, end - at, at}, c->step.clip > 0 ? NULL : square,
                    scratch);
    }
    ops->download(dv, &c->found->square[side], square, sizeof *square);
    ops->release(dv, scratch);
    ops->release(dv, small);
}

/* Without clipping the updates run in several spans, and they also sum the squares of the gradients. */
static void check_adamw(bench *b, int64_t matrices, int64_t total, double clip)
{
    struct adamw_found found;
    const train_device *dv = b->device[GPU];
    b->title = clip > 0 ? "AdamW, clipped" : "AdamW";
    adamw_case c = {.matrices = matrices,
                    .total = total,
                    .spans = clip > 0 ? 1 : 3,
                    .found = &found,
                    .step = {.lr = 0.1,
                             .beta1 = 0.9,
                             .beta2 = 0.95,
                             .eps = 1e-8,
                             .weight_decay = 0.5,
                             .clip = clip,
                             .step = 3}};
    c.weights = values(b, "weights", total);
    if (dv->master) c.master = add_values(b, "master", SMOE_TYPE_F32, total, 0, 0, c.weights->start);
    c.grads = add_values(b, "grads", dv->grad_type, total, 0, 1, NULL);
    c.first = add_values(b, "first", dv->state_type, total, 0, 1, NULL);
    c.second = add_values(b, "second", dv->state_type, total, 3, 0.5, NULL);
    CHECK(b, run_adamw, &c, ROUNDED, c.weights, c.first, c.second);
    const double apart = fabs(found.square[GPU] / found.square[CPU] - 1);
    if (!(apart < 1e-6)) printf("%s: the squares' sums differ by %g  WRONG\n", b->title, apart), wrong++;
}

/* ---- all ---- */

static void check_all(const device_options *options)
{
    error err = {0};
    bench b = {.count = 0};
    b.device[CPU] = device_open(&(device_options){.name = "cpu"}, &err);
    b.device[GPU] = b.device[CPU] ? device_open(options, &err) : NULL;
    if (!b.device[GPU]) die(&err);
    printf("---- %s, gradients in %s\n", options->name, options->bf16 ? "bf16" : "f32");
    check_norm(&b, 5, 24, false), check_norm(&b, 3, 768, true), check_norm(&b, 2, 8192, true);
    check_norm_backward(&b, 5, 24, false), check_norm_backward(&b, 50, 768, true);
    check_norm_backward(&b, 40, 2048, false);
    check_qk(&b, (pass_shape){2, 5, 3, 8, 0, false}), check_qk(&b, (pass_shape){2, 20, 4, 24, 0, false});
    check_qk(&b, (pass_shape){2, 25, 12, 64, 0, false}), check_qk(&b, (pass_shape){1, 3, 2, 16, 7, false});
    check_attention(&b, (pass_shape){2, 40, 2, 16, 0, false}),
        check_attention(&b, (pass_shape){1, 128, 2, 64, 0, false});
    check_attention(&b, (pass_shape){1, 3, 2, 24, 37, false});
    for (int add = 0; add < 2; add++) {
        check_linear(&b, 24, 16, 40, add, b.device[GPU]->grad_type);
        check_linear(&b, 72, 64, 8, add, SMOE_TYPE_F32);
    }
    check_swiglu(&b, 5, 24), check_swiglu(&b, 3, 600);
    check_tokens(&b, 40, 64, 24, false), check_tokens(&b, 1200, 40, 16, true),
        check_tokens(&b, 3, 100, 8, true);
    check_tokens(&b, 3, 58000, 8, false); // more logits in a row than the loss kernel keeps in shared memory
    check_adamw(&b, 4096, 5120, 0), check_adamw(&b, 64, 4096, 0.5), check_adamw(&b, 9984, 10240, 0);
    b.device[GPU]->ops->close(b.device[GPU]);
    b.device[CPU]->ops->close(b.device[CPU]);
}

int main(int argc, char **argv)
{
    openblas_set_num_threads(1);
    device_options options = {.name = argc > 1 ? argv[1] : "cuda"};
    check_all(&options);
    options.bf16 = true;
    check_all(&options);
    printf("%d wrong\n", wrong);
    return wrong > 0;
}
