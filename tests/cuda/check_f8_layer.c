/* Layers with fp8 on a GPU: the forward for inference, forward and backward of SMOE_COMPUTE_F8 and _F8_DGRAD,
 * against the oracle that quantises too; small integers exactly; equal bits of equivalent calls and of each
 * gradient alone; a NaN that stays in its token; the sizes of buffers; and what the backend refuses. */
#include "open_cuda.h"

#include "harness/check.h"
#include "oracle/compare.h"

#include <math.h>

#define SIZES(T, d, n, E, K) .tokens = T, .hidden = d, .intermediate = n, .experts = E, .topk = K
#define TOPK                 .entry = SMOE_ENTRY_FROM_TOPK
#define ROWS                 .entry = SMOE_ENTRY_FROM_ROWS
#define ACT(name)            .activation = SMOE_ACTIVATION_##name
#define BIASES               .b1 = true, .b2 = true

typedef struct f8_case {
    const char *name;
    smoe_layer layer; /* fields that are 0 have the defaults of complete() */
    oracle_draw draw;
} f8_case;

static const int64_t counts[] = {0, 1, 63, 64, 65, 2, 31, 33};

static const f8_case cases[] = {
    {"router, few rows", {SIZES(30, 64, 32, 8, 2)}, {.router = true}},
    {"several groups, biases", {SIZES(150, 272, 400, 3, 2), TOPK}, {BIASES}},
    {"interleaved, chunks",
     {SIZES(160, 256, 272, 4, 2), TOPK, .layout = SMOE_LAYOUT_INTERLEAVED, .chunks = 2},
     {.b1 = true, .broken_ids = true}},
    {"relu2, rows", {SIZES(190, 80, 272, 5, 1), ROWS, ACT(RELU2)}, {BIASES, .row_weights = true}},
    {"promoted sums", {SIZES(70, 1680, 48, 2, 1), TOPK, ACT(GELU)}, {0}},
    {"clamped, any counts",
     {SIZES(259, 64, 48, 8, 1), TOPK, ACT(SWIGLU_CLAMPED)},
     {BIASES, .routing = ORACLE_COUNTS, .counts = counts}},
    {"accumulate, chunks, H's place",
     {SIZES(80, 208, 64, 4, 2), TOPK, .accumulate = 1, .chunks = 4, .reuse_saved = 1},
     {BIASES}},
    {"split expert",
     {SIZES(1200, 256, 16, 3, 1), TOPK, ACT(GELU), .chunks = 4},
     {BIASES, .routing = ORACLE_ONE_TAKES_ALL}},
    {"router and losses",
     {SIZES(80, 64, 32, 6, 2), .rounding = SMOE_ROUNDING_NR_F},
     {.router = true, .router_bias = true, .balance_coefficient = 0.25, .z_coefficient = 0.125}},
    {"integers", {SIZES(140, 128, 144, 4, 2), TOPK, ACT(REGLU)}, {BIASES, .integers = 6}},
};

static int failures;

static smoe_layer complete(const smoe_layer *given)
{
    smoe_layer layer = *given, defaults = SMOE_LAYER_INIT;
    layer.struct_size = sizeof layer;
    layer.dtype = SMOE_TYPE_BF16;
    layer.index_type = SMOE_TYPE_I32;
    layer.groups = layer.groups_kept = 1;
    layer.route_scale = 1.0f;
    layer.tile = 16;
    if (!layer.chunks) layer.chunks = 1;
    layer.gate_limit = defaults.gate_limit, layer.up_limit = defaults.up_limit;
    layer.gate_alpha = defaults.gate_alpha, layer.up_offset = defaults.up_offset;
    return layer;
}

static void judge(void *user, tensor_id id, const verdict *v)
{
    if (v->ok) return;
    printf("%s: %s %g, limit %g\n", (const char *)user, tensor_names[id], v->error, v->limit);
    failures++;
}

static void refused(smoe_context *context, smoe_layer layer, const char *text)
{
    layer.compute = SMOE_COMPUTE_F8;
    if (smoe_supports(context, &layer) == SMOE_ERROR_UNSUPPORTED && strstr(smoe_last_error(context), text))
        return;
    printf("'%s' is not said: %s\n", text, smoe_last_error(context));
    failures++;
}

/* 0, or the status of a machine without the kernels. */
static int check_case(smoe_context *context, const f8_case *c, smoe_compute compute, int inference)
{
    smoe_layer layer = complete(&c->layer);
    layer.compute = compute, layer.inference = inference;
    if (layer.inference) layer.reuse_saved = layer.accumulate = 0;
    const check_options options = {
        .run = {.forward_only = layer.inference, .backwards = layer.accumulate ? 2 : 1},
        .exact = c->draw.integers != 0,
        .seed = 1};
    char text[RUN_TEXT] = "";
    printf("%s, %s\n", c->name, inference ? "inference" : compute == SMOE_COMPUTE_F8 ? "F8" : "F8_DGRAD");
    const run_outcome outcome = check_layer(device_find("cuda"), context, &layer, &c->draw, &options, judge,
                                            (void *)(uintptr_t)c->name, text);
    if (outcome == RUN_OK) return 0;
    printf("%s: %s\n", c->name, text);
    if (outcome == RUN_UNSUPPORTED) return EXIT_NO_DEVICE;
    failures++;
    return 0;
}

static tensors run_drawn(smoe_context *context, const smoe_layer *given, const oracle_drawn *drawn,
                         smoe_compute compute, bool graph)
{
    const run_options options = {.backwards = 1, .graph = graph};
    smoe_layer layer = *given;
    layer.compute = compute;
    tensors got;
    char text[RUN_TEXT] = "";
    if (run_library(device_find("cuda"), context, &layer, drawn, &options, &got, text) == RUN_OK) return got;
    printf("%s\n", text);
    exit(1);
}

/* ---- Equal bits ---- */

static const f8_case several = {"", {SIZES(90, 144, 272, 3, 2), TOPK}, {BIASES}};

static void same_bits(const tensors *a, const tensors *b, const tensor_id *ids, int count, const char *way)
{
    for (int i = 0; i < count; i++) {
        if (!tensor_differing_bits(&a->at[ids[i]], &b->at[ids[i]])) continue;
        printf("%s: %s has other bits\n", way, tensor_names[ids[i]]);
        failures++;
    }
}

/* dX comes from the same bytes with both kinds, db2 from dO as given. */
static void check_equivalent_calls(smoe_context *context)
{
    static const tensor_id all[] = {TENSOR_OUT, TENSOR_DX, TENSOR_DTOPK_WEIGHTS, TENSOR_DW1, TENSOR_DW2,
                                    TENSOR_DB1, TENSOR_DB2},
                           of_rows[] = {TENSOR_H, TENSOR_OUT, TENSOR_DX, TENSOR_DB2};
    static const char *const ways[] = {"chunks", "H's place", "graph", "F8_DGRAD"};
    oracle_drawn drawn;
    const smoe_layer layer = complete(&several.layer);
    oracle_draw_inputs(&layer, &several.draw, 4, &drawn);
    tensors base = run_drawn(context, &layer, &drawn, SMOE_COMPUTE_F8, false);
    for (int way = 0; way < 4; way++) {
        smoe_layer other = layer;
        if (way == 0) other.chunks = 2;
        if (way == 1) other.reuse_saved = 1;
        tensors got =
            run_drawn(context, &other, &drawn, way == 3 ? SMOE_COMPUTE_F8_DGRAD : SMOE_COMPUTE_F8, way == 2);
        same_bits(&got, &base, way == 3 ? of_rows : all, way == 3 ? 4 : 7, ways[way]);
        tensors_free(&got);
    }
    tensors_free(&base);
    oracle_drawn_free(&drawn);
}

static void scale_by(double *values, int64_t count, double factor)
{
    for (int64_t i = 0; i < count; i++) values[i] *= factor;
}

/* Every operand times its own power of two. Without biases ReGLU's results are products of powers of them, so
 * each has the bits that it had, but for its exponent: no scale stands for another one. */
static void check_scales(smoe_context *context)
{
    enum { X = 3, W1 = 6, W2 = -7, DOUT = -5, WEIGHT = 2 };
    static const struct {
        tensor_id id;
        int exponent;
    } all[] = {{TENSOR_H, X + W1},
               {TENSOR_OUT, 2 * (X + W1) + W2 + WEIGHT},
               {TENSOR_DTOPK_WEIGHTS, 2 * (X + W1) + W2 + DOUT},
               {TENSOR_DX, X + 2 * W1 + W2 + WEIGHT + DOUT},
               {TENSOR_DW1, 2 * X + W1 + W2 + WEIGHT + DOUT},
               {TENSOR_DW2, 2 * (X + W1) + WEIGHT + DOUT}};
    const f8_case c = {"", {SIZES(90, 144, 272, 3, 2), TOPK, ACT(REGLU)}, {0}};
    const smoe_layer layer = complete(&c.layer);
    const int64_t d = layer.hidden, weights = layer.experts * d * layer.intermediate;
    oracle_drawn drawn;
    oracle_draw_inputs(&layer, &c.draw, 5, &drawn);
    tensors base = run_drawn(context, &layer, &drawn, SMOE_COMPUTE_F8, false);
    scale_by(drawn.x, layer.tokens * d, ldexp(1, X)), scale_by(drawn.dout, layer.tokens * d, ldexp(1, DOUT));
    scale_by(drawn.w1, 2 * weights, ldexp(1, W1)), scale_by(drawn.w2, weights, ldexp(1, W2));
    scale_by(drawn.topk_weights, layer.tokens * layer.topk, ldexp(1, WEIGHT));
    tensors scaled = run_drawn(context, &layer, &drawn, SMOE_COMPUTE_F8, false);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const tensor *a = &base.at[all[i].id], *b = &scaled.at[all[i].id];
        int64_t wrong = 0;
        for (int64_t j = 0; j < a->count; j++) wrong += ldexp(a->values[j], all[i].exponent) != b->values[j];
        if (wrong) printf("scales: %lld elements of %s\n", (long long)wrong, tensor_names[all[i].id]);
        failures += wrong != 0;
    }
    tensors_free(&base);
    tensors_free(&scaled);
    oracle_drawn_free(&drawn);
}

/* Makes NaN of all bytes of W1 and W2 in weights_f8, or of their transposed copies. Their sizes must be
 * multiples of 256, as those of `several` are. */
static bool spoil(const run *r, bool transposed)
{
    const smoe_layer *l = &r->layer;
    const size_t w2 = (size_t)(l->experts * l->hidden * l->intermediate), w1 = 2 * w2;
    char *at = slot_data(r, SLOT_WEIGHTS_F8);
    return r->on->set(at + (transposed ? w1 : 0), 0x7f, w1) &&
           r->on->set(at + 2 * w1 + (transposed ? w2 : 0), 0x7f, w2);
}

/* Each gradient alone has the bits that it has among all, and only dw1 and dw2 need X. The forward reads no
 * transposed copy of the weights, the backward nothing else of them: python/smoe/fsdp.py relies on it. */
static void check_gradients_alone(smoe_context *context)
{
    static const slot_id slots[] = {SLOT_DX, SLOT_DW1, SLOT_DW2, SLOT_DB1, SLOT_DB2, SLOT_DTOPK_WEIGHTS};
    static const tensor_id ids[] = {TENSOR_DX,  TENSOR_DW1, TENSOR_DW2,
                                    TENSOR_DB1, TENSOR_DB2, TENSOR_DTOPK_WEIGHTS};
    const run_options options = {0};
    oracle_drawn drawn;
    smoe_layer layer = complete(&several.layer);
    layer.compute = SMOE_COMPUTE_F8;
    oracle_draw_inputs(&layer, &several.draw, 4, &drawn);
    tensors all = run_drawn(context, &layer, &drawn, SMOE_COMPUTE_F8, false);
    for (int i = 0; i < 6; i++) {
        bool wanted[SLOTS];
        run r;
        run_wanted(&layer, &drawn, &options, wanted);
        for (int j = 0; j < 6; j++) wanted[slots[j]] = j == i;
        bool done = run_open(&r, device_find("cuda"), context, &layer, wanted) && run_make(&r) &&
                    run_inputs(&r, &drawn) && run_quantize(&r) && spoil(&r, true) &&
                    run_forward(&r, &options) && run_quantize(&r) && spoil(&r, false);
        if (slots[i] != SLOT_DW1 && slots[i] != SLOT_DW2) r.backward.x = NULL;
        done = done && run_backward(&r, &options) && run_check(&r);
        void *got = done ? slot_read(&r, slots[i]) : NULL;
        if (!got || memcmp(got, all.at[ids[i]].bits, slot_bytes(&r, slots[i])) != 0) {
            printf("%s alone: %s\n", tensor_names[ids[i]], done ? "other bits" : r.text);
            failures++;
        }
        free(got);
        run_close(&r);
    }
    tensors_free(&all);
    oracle_drawn_free(&drawn);
}

/* ---- NaN ---- */

enum { NAN_TOKEN = 5 };

/* Is row i (of `rows`) NaN, and no bit of the others changed? */
static int64_t wrong_rows(const tensor *got, const tensor *clean, int64_t rows, const bool *hit)
{
    const int64_t columns = got->count / rows;
    int64_t wrong = 0;
    for (int64_t i = 0; i < got->count; i++)
        wrong += hit[i / columns] ? !isnan(got->values[i]) : got->values[i] != clean->values[i];
    return wrong;
}

/* A NaN in X or in dO of a token makes its rows of O and dX NaN, with SMOE_COMPUTE_F8 also the weight
 * gradients of its experts, and changes no bit of the others. */
static void check_nan(smoe_context *context, smoe_compute compute, bool in_dout)
{
    enum { TOKENS = 90, EXPERTS = 3 };
    const f8_case c = {"NaN", {SIZES(TOKENS, 64, 272, EXPERTS, 1), TOPK}, {BIASES}};
    const smoe_layer layer = complete(&c.layer);
    oracle_drawn drawn;
    oracle_draw_inputs(&layer, &c.draw, 3, &drawn);
    tensors clean = run_drawn(context, &layer, &drawn, compute, false);
    (in_dout ? drawn.dout : drawn.x)[NAN_TOKEN * layer.hidden + 7] = NAN;
    tensors got = run_drawn(context, &layer, &drawn, compute, false);
    const tensor_id of_tokens[] = {TENSOR_OUT, TENSOR_DX, TENSOR_DTOPK_WEIGHTS},
                    of_experts[] = {TENSOR_DW1, TENSOR_DW2, TENSOR_DB1};
    const bool tokens[TOKENS] = {[NAN_TOKEN] = true};
    bool experts[EXPERTS] = {false};
    experts[drawn.topk_ids[NAN_TOKEN]] = true;
    int64_t wrong = 0;
    for (int i = in_dout; i < 3; i++)
        wrong += wrong_rows(&got.at[of_tokens[i]], &clean.at[of_tokens[i]], TOKENS, tokens);
    for (int i = 0; i < 3 && compute == SMOE_COMPUTE_F8; i++)
        wrong += wrong_rows(&got.at[of_experts[i]], &clean.at[of_experts[i]], EXPERTS, experts);
    if (wrong) printf("NaN in %s: %lld elements\n", in_dout ? "dO" : "X", (long long)wrong);
    failures += wrong != 0;
    tensors_free(&clean);
    tensors_free(&got);
    oracle_drawn_free(&drawn);
}

/* ---- Sizes ---- */

static smoe_sizes sizes_of(smoe_context *context, smoe_layer layer, smoe_compute compute)
{
    smoe_sizes sizes = SMOE_SIZES_INIT;
    layer.compute = compute;
    if (smoe_query_sizes(context, &layer, &sizes) == SMOE_OK) return sizes;
    printf("%s\n", smoe_last_error(context));
    exit(1);
}

/* The paper's layers need no more of `saved` and of the forward's scratch than in bf16, and at most 2 % more
 * of the backward's. */
static void check_sizes(smoe_context *context)
{
    static const int64_t layers[][5] = {
        {40960, 768, 256, 128, 8},   {40960, 768, 512, 64, 4},    {40960, 768, 1024, 32, 2},
        {24576, 1536, 256, 128, 8},  {24576, 1536, 512, 64, 4},   {24576, 1536, 1024, 32, 2},
        {32768, 4096, 256, 256, 16}, {32768, 4096, 512, 128, 8},  {32768, 4096, 1024, 64, 4},
        {32768, 4096, 512, 256, 16}, {32768, 4096, 1024, 128, 8}, {32768, 4096, 2048, 64, 4}};
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        const int64_t *l = layers[i];
        const smoe_layer given = {SIZES(l[0], l[1], l[2], l[3], l[4]), TOPK};
        const smoe_layer layer = complete(&given);
        const smoe_sizes f8 = sizes_of(context, layer, SMOE_COMPUTE_F8),
                         bf16 = sizes_of(context, layer, SMOE_COMPUTE_STORAGE);
        if (f8.saved_buffer_bytes == bf16.saved_buffer_bytes &&
            f8.scratch_forward_bytes <= bf16.scratch_forward_bytes &&
            f8.scratch_backward_bytes <= bf16.scratch_backward_bytes / 100 * 102)
            continue;
        printf("sizes of layer %d: forward %llu of %llu, backward %llu of %llu\n", (int)i,
               (unsigned long long)f8.scratch_forward_bytes, (unsigned long long)bf16.scratch_forward_bytes,
               (unsigned long long)f8.scratch_backward_bytes,
               (unsigned long long)bf16.scratch_backward_bytes);
        failures++;
    }
}

/* With an argument: the sizes alone. */
int main(int argc, char **argv)
{
    (void)argv;
    setvbuf(stdout, NULL, _IOLBF, 0); /* so that the last line names the case that hangs */
    smoe_context *context = open_cuda();
    check_sizes(context);
    if (argc > 1) return failures != 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int status = check_case(context, &cases[i], SMOE_COMPUTE_F8, 1);
        if (status) return status;
        check_case(context, &cases[i], SMOE_COMPUTE_F8, 0);
        check_case(context, &cases[i], SMOE_COMPUTE_F8_DGRAD, 0);
    }
    check_equivalent_calls(context);
    check_gradients_alone(context);
    check_scales(context);
    for (int compute = SMOE_COMPUTE_F8; compute <= SMOE_COMPUTE_F8_DGRAD; compute++) {
        check_nan(context, (smoe_compute)compute, false);
        check_nan(context, (smoe_compute)compute, true);
    }
    smoe_layer layer = complete(&cases[0].layer);
    layer.dtype = SMOE_TYPE_F16;
    refused(context, layer, "dtype is SMOE_TYPE_F16");
    smoe_destroy(context);
    printf("%d failures\n", failures);
    return failures != 0;
}
