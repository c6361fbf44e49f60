/* LoRA beside W1 and W2 against a layer without LoRA whose weights are W1 + B1 A1 and W2 + B2 A2, in f32 on
 * the CPU. Its gradients give those of the factors: dA1 = B1^T dW1, dB1 = dW1 A1^T, and the same for W2. With
 * TEST_ON_CUDA the layer with LoRA runs on a GPU or the emulator. */
#include "oracle/number.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#ifdef TEST_ON_CUDA
#include "cuda/gpu.h"
#include "cuda/open_cuda.h"
#endif

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* ---- A layer's tensors, by name: inputs, then results ---- */

enum { X, W1, B1, W2, B2, LOGITS, IDS, WEIGHTS, OFFSETS, LA1, LB1, LA2, LB2, DOUT, INPUTS };
enum { OUT = INPUTS, DX, DROUTING, DLA1, DLB1, DLA2, DLB2, DW1, DW2, TENSORS };

typedef struct test_case {
    const char *name;
    smoe_entry entry;
    smoe_type dtype;
    smoe_activation activation;
    smoe_layout layout;
    int64_t tokens, hidden, intermediate, experts, topk;
    int32_t rank1, rank2, chunks, reuse_saved, accumulate, f32_gradients, biases;
} test_case;

typedef struct layer_data {
    smoe_layer layer;
    int64_t width, count[TENSORS]; /* 0: the layer has no such tensor */
    float *values[TENSORS];
} layer_data;

static uint32_t seed;

/* Uniform in -scale..scale, exact in bf16. */
static float draw(float scale)
{
    seed = seed * 1664525u + 1013904223u;
    const float value = ((float)(seed >> 8) / 8388608.0f - 1.0f) * scale;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits &= 0xffff0000u;
    float rounded;
    memcpy(&rounded, &bits, 4);
    return rounded;
}

static void make(layer_data *d, int tensor, int64_t count, float scale)
{
    d->count[tensor] = count;
    d->values[tensor] = calloc(count > 0 ? (size_t)count : 1, sizeof(float));
    assert_non_null(d->values[tensor]);
    for (int64_t i = 0; i < count; i++) d->values[tensor][i] = draw(scale);
}

static smoe_layer layer_of(const test_case *c)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = c->tokens, layer.hidden = c->hidden, layer.intermediate = c->intermediate;
    layer.experts = c->experts, layer.topk = c->topk, layer.dtype = c->dtype;
    layer.activation = c->activation, layer.layout = c->layout, layer.entry = c->entry;
    layer.chunks = c->chunks ? c->chunks : 1, layer.reuse_saved = c->reuse_saved;
    layer.accumulate = c->accumulate;
    layer.gradient_type = c->f32_gradients ? SMOE_TYPE_F32 : c->dtype;
    layer.lora_rank1 = c->rank1, layer.lora_rank2 = c->rank2;
    return layer;
}

/* Ids that some tokens have twice and some outside 0..E-1; one expert has no rows. */
static void draw_ids(layer_data *d)
{
    const smoe_layer *l = &d->layer;
    make(d, IDS, l->tokens * l->topk, 0);
    for (int64_t i = 0; i < d->count[IDS]; i++) {
        seed = seed * 1664525u + 1013904223u;
        const int64_t id = seed % 97 == 0 ? -1 : (int64_t)(seed >> 8) % l->experts;
        d->values[IDS][i] = (float)(id == l->experts / 2 && l->experts > 2 ? 0 : id);
    }
}

static void draw_offsets(layer_data *d)
{
    const smoe_layer *l = &d->layer;
    make(d, OFFSETS, l->experts + 1, 0);
    for (int64_t e = 1; e <= l->experts; e++)
        d->values[OFFSETS][e] = (float)(e == 1 ? 0 : (l->tokens - 3) * e / l->experts);
}

static layer_data make_data(const test_case *c)
{
    layer_data d = {.layer = layer_of(c)};
    const smoe_layer *l = &d.layer;
    const int64_t t = l->tokens, h = l->hidden, n = l->intermediate, e = l->experts;
    const int gated = c->activation < SMOE_ACTIVATION_SILU;
    d.width = gated ? 2 * n : n;
    const float by_h = 2.0f / sqrtf((float)h), by_n = 2.0f / sqrtf((float)n);
    seed = 7;
    make(&d, X, t * h, 1), make(&d, DOUT, t * h, 1);
    make(&d, W1, e * d.width * h, by_h), make(&d, W2, e * h * n, by_n);
    make(&d, B1, c->biases ? e * d.width : 0, 0.5f), make(&d, B2, c->biases ? e * h : 0, 0.5f);
    make(&d, LA1, e * c->rank1 * h, by_h), make(&d, LB1, e * d.width * c->rank1, 0.5f);
    make(&d, LA2, e * c->rank2 * n, by_n), make(&d, LB2, e * h * c->rank2, 0.5f);
    make(&d, LOGITS, l->entry == SMOE_ENTRY_FROM_LOGITS ? t * e : 0, 2);
    if (l->entry == SMOE_ENTRY_FROM_TOPK) draw_ids(&d);
    if (l->entry == SMOE_ENTRY_FROM_ROWS) draw_offsets(&d);
    make(&d, WEIGHTS, l->entry == SMOE_ENTRY_FROM_LOGITS ? 0 : t * l->topk, 1);
    make(&d, OUT, t * h, 0), make(&d, DX, t * h, 0);
    make(&d, DROUTING, l->entry == SMOE_ENTRY_FROM_LOGITS ? t * e : t * l->topk, 0);
    for (int i = 0; i < 4; i++) make(&d, DLA1 + i, d.count[LA1 + i], 0);
    make(&d, DW1, d.count[W1], 0), make(&d, DW2, d.count[W2], 0);
    return d;
}

static void free_data(layer_data *d)
{
    for (int i = 0; i < TENSORS; i++) free(d->values[i]);
}

/* ---- One run ---- */

static int is_cuda(const layer_data *d)
{
#ifdef TEST_ON_CUDA
    return d->layer.lora_rank1 || d->layer.lora_rank2;
#else
    (void)d;
    return 0;
#endif
}

static smoe_type type_of(const layer_data *d, int tensor)
{
    if (tensor == IDS || tensor == OFFSETS) return SMOE_TYPE_I32;
    if (tensor == LOGITS || tensor == WEIGHTS || tensor == DROUTING) return SMOE_TYPE_F32;
    return tensor >= DLA1 ? d->layer.gradient_type : d->layer.dtype;
}

static void *on_host(const float *values, int64_t count, smoe_type type)
{
    char *stored = calloc(count > 0 ? (size_t)count : 1, oracle_type_bytes(type));
    assert_non_null(stored);
    for (int64_t i = 0; i < count; i++) {
        const double value = (double)values[i];
        oracle_store(stored + (size_t)i * oracle_type_bytes(type), type, &value, 1);
    }
    return stored;
}

static void to_floats(float *values, const char *stored, int64_t count, smoe_type type)
{
    for (int64_t i = 0; i < count; i++) {
        double value;
        oracle_load(&value, type, stored + (size_t)i * oracle_type_bytes(type), 1);
        values[i] = (float)value;
    }
}

static void *make_memory(int cuda, const void *from, size_t bytes)
{
#ifdef TEST_ON_CUDA
    if (cuda) return from ? gpu_copy(from, bytes).memory : gpu_alloc(bytes).memory;
#endif
    (void)cuda;
    void *memory = aligned_alloc(256, (bytes + 256) / 256 * 256);
    assert_non_null(memory);
    if (from)
        memcpy(memory, from, bytes);
    else
        memset(memory, 0xff, bytes);
    return memory;
}

static void free_memory(int cuda, void *memory, size_t bytes)
{
#ifdef TEST_ON_CUDA
    if (cuda) {
        assert_int_equal(gpu_free((gpu_buffer){memory, (bytes + 255) / 256 * 256}), 0);
        return;
    }
#endif
    (void)cuda, (void)bytes;
    free(memory);
}

typedef struct memories {
    int cuda;
    void *at[TENSORS], *saved, *scratch_forward, *scratch_backward;
    smoe_sizes sizes;
} memories;

static memories make_memories(smoe_context *context, const layer_data *d)
{
    memories m = {.cuda = is_cuda(d), .sizes = SMOE_SIZES_INIT};
    assert_int_equal(smoe_query_sizes(context, &d->layer, &m.sizes), SMOE_OK);
    for (int i = 0; i < TENSORS; i++) {
        if (!d->count[i]) continue;
        const size_t bytes = (size_t)d->count[i] * oracle_type_bytes(type_of(d, i));
        void *start = i < INPUTS ? on_host(d->values[i], d->count[i], type_of(d, i)) : NULL;
        if (d->layer.accumulate && i >= DLA1) {
            for (int64_t k = 0; k < d->count[i]; k++) d->values[i][k] = 1.0f;
            start = on_host(d->values[i], d->count[i], type_of(d, i));
        }
        m.at[i] = make_memory(m.cuda, start, bytes);
        free(start);
    }
    m.saved = make_memory(m.cuda, NULL, m.sizes.saved_buffer_bytes);
    m.scratch_forward = make_memory(m.cuda, NULL, m.sizes.scratch_forward_bytes);
    m.scratch_backward = make_memory(m.cuda, NULL, m.sizes.scratch_backward_bytes);
    return m;
}

static void free_memories(memories *m, const layer_data *d)
{
    for (int i = 0; i < TENSORS; i++)
        if (m->at[i]) free_memory(m->cuda, m->at[i], (size_t)d->count[i] * oracle_type_bytes(type_of(d, i)));
    free_memory(m->cuda, m->saved, m->sizes.saved_buffer_bytes);
    free_memory(m->cuda, m->scratch_forward, m->sizes.scratch_forward_bytes);
    free_memory(m->cuda, m->scratch_backward, m->sizes.scratch_backward_bytes);
}

static smoe_forward_args forward_args(const memories *m)
{
    smoe_forward_args a = SMOE_FORWARD_ARGS_INIT;
    a.x = m->at[X], a.logits = m->at[LOGITS], a.topk_ids = m->at[IDS], a.topk_weights = m->at[WEIGHTS];
    a.offsets = m->at[OFFSETS], a.row_weights = m->at[WEIGHTS];
    a.w1 = m->at[W1], a.b1 = m->at[B1], a.w2 = m->at[W2], a.b2 = m->at[B2], a.out = m->at[OUT];
    a.saved = m->saved, a.saved_size = m->sizes.saved_buffer_bytes;
    a.scratch = m->scratch_forward, a.scratch_size = m->sizes.scratch_forward_bytes;
    a.lora_a1 = m->at[LA1], a.lora_b1 = m->at[LB1], a.lora_a2 = m->at[LA2], a.lora_b2 = m->at[LB2];
    return a;
}

/* lora_only: no other gradients are wanted, and what they alone need is NULL. */
static smoe_backward_args backward_args(const memories *m, const layer_data *d, int lora_only)
{
    const int plain = !d->layer.lora_rank1 && !d->layer.lora_rank2;
    smoe_backward_args a = SMOE_BACKWARD_ARGS_INIT;
    a.x = m->at[X], a.topk_ids = m->at[IDS], a.w2 = m->at[W2], a.b2 = m->at[B2], a.dout = m->at[DOUT];
    a.saved = m->saved, a.saved_size = m->sizes.saved_buffer_bytes;
    a.scratch = m->scratch_backward, a.scratch_size = m->sizes.scratch_backward_bytes;
    a.lora_a1 = m->at[LA1], a.lora_b1 = m->at[LB1], a.lora_a2 = m->at[LA2], a.lora_b2 = m->at[LB2];
    a.dlora_a1 = m->at[DLA1], a.dlora_b1 = m->at[DLB1], a.dlora_a2 = m->at[DLA2], a.dlora_b2 = m->at[DLB2];
    if (plain) a.dw1 = m->at[DW1], a.dw2 = m->at[DW2];
    if (lora_only) {
        a.lora_a1 = NULL;
        if (!a.dlora_a1) a.lora_b1 = NULL;
        return a;
    }
    a.w1 = m->at[W1], a.dx = m->at[DX], a.logits = m->at[LOGITS];
    if (d->layer.entry == SMOE_ENTRY_FROM_LOGITS) a.dlogits = m->at[DROUTING];
    if (d->layer.entry == SMOE_ENTRY_FROM_TOPK) a.dtopk_weights = m->at[DROUTING];
    if (d->layer.entry == SMOE_ENTRY_FROM_ROWS) a.drow_weights = m->at[DROUTING];
    return a;
}

static void read_back(const memories *m, layer_data *d)
{
    for (int i = OUT; i < TENSORS; i++) {
        if (!d->count[i]) continue;
        const size_t bytes = (size_t)d->count[i] * oracle_type_bytes(type_of(d, i));
        char *host = malloc(bytes + 4);
        assert_non_null(host);
#ifdef TEST_ON_CUDA
        if (m->cuda) CHECK_CUDA(cudaMemcpy(host, m->at[i], bytes, cudaMemcpyDeviceToHost));
#endif
        if (!m->cuda) memcpy(host, m->at[i], bytes);
        to_floats(d->values[i], host, d->count[i], type_of(d, i));
        free(host);
    }
}

static smoe_context *open_context(const layer_data *d)
{
#ifdef TEST_ON_CUDA
    if (is_cuda(d)) return open_cuda();
#endif
    (void)d;
    smoe_context *context = NULL;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = 2;
    assert_int_equal(smoe_create(&context, &options), SMOE_OK);
    return context;
}

static void must(smoe_context *context, smoe_status status)
{
    if (status != SMOE_OK) print_error("%s\n", smoe_last_error(context));
    assert_int_equal(status, SMOE_OK);
}

static void run_layer(layer_data *d, int lora_only)
{
    smoe_context *context = open_context(d);
    memories m = make_memories(context, d);
    const smoe_forward_args forward = forward_args(&m);
    const smoe_backward_args backward = backward_args(&m, d, lora_only);
    must(context, smoe_layer_forward(context, &d->layer, &forward, NULL));
    must(context, smoe_layer_backward(context, &d->layer, &backward, NULL));
    read_back(&m, d);
    free_memories(&m, d);
    smoe_destroy(context);
}

/* ---- The reference ---- */

/* The row of W1[e] that gives column j of H. */
static int64_t w1_row(const layer_data *d, int64_t j)
{
    const int64_t n = d->layer.intermediate;
    if (d->width == n || d->layer.layout == SMOE_LAYOUT_CONCATENATED) return j;
    return j < n ? 2 * j : 2 * (j - n) + 1;
}

/* One expert's weight W (rows, columns) with its factors A (rank, columns), B (rows, rank), and the place of
 * the row that row i of B belongs to. */
typedef struct pair {
    float *w, *a, *b;
    int64_t rows, columns, rank;
    const layer_data *of; /* NULL: row i of B belongs to row i of W */
} pair;

static float *w_row(const pair *p, int64_t i)
{
    return p->w + (p->of ? w1_row(p->of, i) : i) * p->columns;
}

static void merge(const pair *p)
{
    for (int64_t i = 0; i < p->rows; i++)
        for (int64_t k = 0; k < p->rank; k++)
            for (int64_t j = 0; j < p->columns; j++)
                w_row(p, i)[j] += p->b[i * p->rank + k] * p->a[k * p->columns + j];
}

/* da (rank, columns) = B^T dW, db (rows, rank) = dW A^T; p->w is dW. */
static void factor_gradients(const pair *p, float *da, float *db)
{
    for (int64_t k = 0; k < p->rank; k++)
        for (int64_t i = 0; i < p->rows; i++) {
            double sum = 0;
            for (int64_t j = 0; j < p->columns; j++) {
                sum += (double)w_row(p, i)[j] * p->a[k * p->columns + j];
                da[k * p->columns + j] += p->b[i * p->rank + k] * w_row(p, i)[j];
            }
            db[i * p->rank + k] += (float)sum;
        }
}

static pair pair1(const layer_data *d, const float *w, int64_t e)
{
    const smoe_layer *l = &d->layer;
    const int64_t r = d->count[LA1] / (l->experts * l->hidden);
    return (pair){(float *)w + e * d->width * l->hidden,
                  d->values[LA1] + e * r * l->hidden,
                  d->values[LB1] + e * d->width * r,
                  d->width,
                  l->hidden,
                  r,
                  d};
}

static pair pair2(const layer_data *d, const float *w, int64_t e)
{
    const smoe_layer *l = &d->layer;
    const int64_t r = d->count[LA2] / (l->experts * l->intermediate);
    return (pair){(float *)w + e * l->hidden * l->intermediate,
                  d->values[LA2] + e * r * l->intermediate,
                  d->values[LB2] + e * l->hidden * r,
                  l->hidden,
                  l->intermediate,
                  r,
                  NULL};
}

static layer_data reference_of(const test_case *c)
{
    layer_data d = make_data(c);
    const int64_t experts = d.layer.experts;
    for (int64_t e = 0; e < experts; e++) {
        const pair first = pair1(&d, d.values[W1], e), second = pair2(&d, d.values[W2], e);
        merge(&first);
        merge(&second);
    }
    int64_t kept[8];
    memcpy(kept, d.count + LA1, 4 * sizeof *kept);
    memcpy(kept + 4, d.count + DLA1, 4 * sizeof *kept);
    memset(d.count + LA1, 0, 4 * sizeof *kept);
    memset(d.count + DLA1, 0, 4 * sizeof *kept);
    d.layer.dtype = d.layer.gradient_type = SMOE_TYPE_F32;
    d.layer.lora_rank1 = d.layer.lora_rank2 = d.layer.accumulate = 0;
    run_layer(&d, 0);
    memcpy(d.count + LA1, kept, 4 * sizeof *kept);
    memcpy(d.count + DLA1, kept + 4, 4 * sizeof *kept);
    for (int i = DLA1; i <= DLB2; i++)
        for (int64_t k = 0; k < d.count[i]; k++) d.values[i][k] = c->accumulate ? 1.0f : 0.0f;
    for (int64_t e = 0; e < experts; e++) {
        const pair first = pair1(&d, d.values[DW1], e), second = pair2(&d, d.values[DW2], e);
        factor_gradients(&first, d.values[DLA1] + (first.a - d.values[LA1]),
                         d.values[DLB1] + (first.b - d.values[LB1]));
        factor_gradients(&second, d.values[DLA2] + (second.a - d.values[LA2]),
                         d.values[DLB2] + (second.b - d.values[LB2]));
    }
    return d;
}

/* ---- The tests ---- */

static double distance(const float *a, const float *b, int64_t count)
{
    double off = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        off += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += (double)b[i] * b[i];
    }
    return sqrt(off) / (sqrt(size) + 1e-30);
}

static const char *const names[TENSORS] = {
    [OUT] = "out",       [DX] = "dx",         [DROUTING] = "drouting", [DLA1] = "dlora_a1",
    [DLB1] = "dlora_b1", [DLA2] = "dlora_a2", [DLB2] = "dlora_b2"};

static int far_off(const test_case *c, const layer_data *got, const layer_data *want, int tensor)
{
    const double limit = c->dtype == SMOE_TYPE_F32 ? 1e-5 : c->dtype == SMOE_TYPE_F16 ? 2e-3 : 1.5e-2;
    const double off = distance(got->values[tensor], want->values[tensor], got->count[tensor]);
    if (off <= limit) return 0;
    print_error("%s: %s is off by %g\n", c->name, names[tensor], off);
    return 1;
}

#ifdef TEST_ON_CUDA
#define EXACT SMOE_TYPE_BF16
#else
#define EXACT SMOE_TYPE_F32
#endif
#define TOPK   SMOE_ENTRY_FROM_TOPK
#define SWIGLU SMOE_ACTIVATION_SWIGLU, SMOE_LAYOUT_CONCATENATED

static const test_case cases[] = {
    {"topk", TOPK, EXACT, SWIGLU, 50, 64, 32, 6, 2, 8, 8, 1, 0, 0, 0, 0},
    {"bf16", TOPK, SMOE_TYPE_BF16, SWIGLU, 150, 64, 64, 3, 2, 16, 16, 1, 1, 0, 0, 1},
    {"beside W1 alone", TOPK, EXACT, SWIGLU, 70, 72, 40, 5, 3, 24, 0, 1, 1, 0, 1, 0},
    {"beside W2 alone", TOPK, EXACT, SWIGLU, 70, 72, 40, 5, 3, 0, 40, 1, 1, 0, 1, 1},
    {"interleaved, biases, chunks", TOPK, EXACT, SMOE_ACTIVATION_GEGLU, SMOE_LAYOUT_INTERLEAVED, 90, 136, 104,
     4, 2, 64, 72, 2, 0, 1, 1, 1},
    {"no gate, logits", SMOE_ENTRY_FROM_LOGITS, EXACT, SMOE_ACTIVATION_RELU2, SMOE_LAYOUT_CONCATENATED, 80,
     96, 200, 8, 2, 16, 32, 2, 1, 0, 0, 0},
    {"large ranks, one expert", TOPK, EXACT, SWIGLU, 700, 264, 288, 1, 1, 256, 136, 1, 0, 0, 1, 0},
    {"rows", SMOE_ENTRY_FROM_ROWS, EXACT, SWIGLU, 300, 64, 136, 4, 1, 16, 16, 1, 1, 1, 1, 0},
#ifdef TEST_ON_CUDA
    {"many columns", TOPK, SMOE_TYPE_BF16, SWIGLU, 150, 1928, 64, 4, 2, 8, 16, 1, 1, 0, 0, 0},
    {"f16", TOPK, SMOE_TYPE_F16, SWIGLU, 150, 64, 64, 3, 2, 16, 16, 1, 1, 0, 0, 1},
    {"f16, no gate, accumulated in f32", TOPK, SMOE_TYPE_F16, SMOE_ACTIVATION_SILU, SMOE_LAYOUT_CONCATENATED,
     90, 136, 104, 4, 2, 8, 40, 1, 0, 1, 1, 0},
#endif
};

static void lora_is_the_layer_with_merged_weights(void **state)
{
    (void)state;
    int wrong = 0;
    for (size_t i = 0; i < COUNT(cases); i++) {
        layer_data want = reference_of(&cases[i]), got = make_data(&cases[i]);
        got.count[DW1] = got.count[DW2] = 0;
        run_layer(&got, 0);
        for (int tensor = OUT; tensor <= DLB2; tensor++) wrong += far_off(&cases[i], &got, &want, tensor);
        free_data(&want), free_data(&got);
    }
    assert_int_equal(wrong, 0);
}

/* Frozen experts whose input needs no gradient; in two of three cases also one factor of each pair. */
static void the_factors_alone_may_have_gradients(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        layer_data all = make_data(&cases[i]), alone = make_data(&cases[i]);
        all.count[DW1] = all.count[DW2] = alone.count[DW1] = alone.count[DW2] = 0;
        if (i % 3) alone.count[DLA1 + i % 2] = alone.count[DLB2 - i % 2] = 0;
        run_layer(&all, 0), run_layer(&alone, 1);
        for (int tensor = DLA1; tensor <= DLB2; tensor++)
            assert_memory_equal(all.values[tensor], alone.values[tensor],
                                (size_t)alone.count[tensor] * sizeof(float));
        free_data(&all), free_data(&alone);
    }
}

static void inference_gives_the_same_bits(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        layer_data training = make_data(&cases[i]), inference = make_data(&cases[i]);
        run_layer(&training, 0);
        inference.layer.inference = 1;
        smoe_context *context = open_context(&inference);
        memories m = make_memories(context, &inference);
        smoe_forward_args forward = forward_args(&m);
        forward.saved = NULL;
        must(context, smoe_layer_forward(context, &inference.layer, &forward, NULL));
        read_back(&m, &inference);
        assert_memory_equal(training.values[OUT], inference.values[OUT],
                            (size_t)training.count[OUT] * sizeof(float));
        free_memories(&m, &inference);
        smoe_destroy(context);
        free_data(&training), free_data(&inference);
    }
}

static void saved_grows_by_the_rows_of_small_rank(void **state)
{
    (void)state;
    layer_data d = make_data(&cases[0]);
    smoe_context *context = open_context(&d);
    smoe_sizes with = SMOE_SIZES_INIT, without = SMOE_SIZES_INIT;
    must(context, smoe_query_sizes(context, &d.layer, &with));
    d.layer.lora_rank1 = d.layer.lora_rank2 = 0;
    must(context, smoe_query_sizes(context, &d.layer, &without));
    const uint64_t element = oracle_type_bytes(d.layer.dtype);
    assert_int_equal(with.saved_bytes - without.saved_bytes, (uint64_t)with.rows * 16 * element);
    assert_true(with.saved_buffer_bytes - without.saved_buffer_bytes <=
                (uint64_t)with.padded_rows * 16 * element + 512);
    /* Scratch: Q1 and Q2 in the backward; on the CPU for each of two threads a panel of P and, of one expert,
     * the factors' gradients; on a GPU for each block two sums of dB1 or dB2, of 128 columns and rank 16. */
    const uint64_t rows = (uint64_t)with.padded_rows * 16 * 4 + 512,
                   threads = 2 * (256 * 8 + 3 * 8 * 64) * 4 + 4096,
                   sums = (uint64_t)with.padded_rows / 64 * 2 * 128 * 16 * 4;
    assert_true(with.scratch_forward_bytes - without.scratch_forward_bytes <= threads);
    assert_true(with.scratch_backward_bytes - without.scratch_backward_bytes <= rows + threads + sums);
    assert_true(with.saved_buffer_bytes <=
                with.saved_constant_bytes + (uint64_t)d.layer.tokens * with.saved_token_bytes);
    smoe_destroy(context);
    free_data(&d);
}

static void wrong_arguments_are_named(void **state)
{
    (void)state;
    layer_data d = make_data(&cases[0]);
    smoe_context *context = open_context(&d);
    memories m = make_memories(context, &d);
    smoe_forward_args forward = forward_args(&m);
    forward.lora_b2 = NULL;
    assert_int_equal(smoe_layer_forward(context, &d.layer, &forward, NULL), SMOE_ERROR_ARGUMENT);
    assert_non_null(strstr(smoe_last_error(context), "lora_b2 is NULL"));
    smoe_backward_args backward = backward_args(&m, &d, 0);
    backward.dlora_a1 = (void *)backward.lora_a1;
    assert_int_equal(smoe_layer_backward(context, &d.layer, &backward, NULL), SMOE_ERROR_ARGUMENT);
    assert_non_null(strstr(smoe_last_error(context), "overlaps"));
    smoe_layer layer = d.layer;
    layer.lora_rank1 = 0;
    backward = backward_args(&m, &d, 0);
    assert_int_equal(smoe_layer_backward(context, &layer, &backward, NULL), SMOE_ERROR_ARGUMENT);
    assert_non_null(strstr(smoe_last_error(context), "lora_rank1 is 0"));
    layer.lora_rank1 = 12;
    assert_int_equal(smoe_supports(context, &layer), SMOE_ERROR_SHAPE);
    layer.lora_rank1 = 264;
    assert_int_equal(smoe_supports(context, &layer), SMOE_ERROR_SHAPE);
    assert_non_null(strstr(smoe_last_error(context), "the range is 0 to 256"));
    free_memories(&m, &d);
    smoe_destroy(context);
    free_data(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lora_is_the_layer_with_merged_weights),
        cmocka_unit_test(the_factors_alone_may_have_gradients),
        cmocka_unit_test(inference_gives_the_same_bits),
        cmocka_unit_test(saved_grows_by_the_rows_of_small_rank),
        cmocka_unit_test(wrong_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
