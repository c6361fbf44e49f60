/* Layers with fp8 on a GPU: the forward of SMOE_COMPUTE_F8 for inference, and forward and backward of
 * _F8_DGRAD, against the oracle that quantises too; small integers exactly; a NaN that stays in its token;
 * and what the backend refuses. */
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
    smoe_layer_f8 l = {layer, SMOE_COMPUTE_F8};
    l.layer.struct_size = sizeof l;
    if (smoe_supports(context, &l.layer) == SMOE_ERROR_UNSUPPORTED && strstr(smoe_last_error(context), text))
        return;
    printf("'%s' is not said: %s\n", text, smoe_last_error(context));
    failures++;
}

/* 0, or the status of a machine without the kernels. */
static int check_case(smoe_context *context, const f8_case *c, smoe_compute compute)
{
    smoe_layer layer = complete(&c->layer);
    layer.inference = compute == SMOE_COMPUTE_F8;
    if (layer.inference) layer.reuse_saved = layer.accumulate = 0;
    const check_options options = {.run = {.compute = compute,
                                           .quantize = moe_quantize_weights,
                                           .forward_only = layer.inference,
                                           .backwards = layer.accumulate ? 2 : 1},
                                   .exact = c->draw.integers != 0,
                                   .seed = 1};
    char text[RUN_TEXT] = "";
    printf("%s%s\n", c->name, layer.inference ? "" : ", training");
    const run_outcome outcome = check_layer(device_find("cuda"), context, &layer, &c->draw, &options, judge,
                                            (void *)(uintptr_t)c->name, text);
    if (outcome == RUN_OK) return 0;
    printf("%s: %s\n", c->name, text);
    if (outcome == RUN_UNSUPPORTED) return EXIT_NO_DEVICE;
    failures++;
    return 0;
}

static tensors run_drawn(smoe_context *context, const smoe_layer *layer, const oracle_drawn *drawn)
{
    const run_options options = {.compute = SMOE_COMPUTE_F8_DGRAD, .quantize = moe_quantize_weights};
    tensors got;
    char text[RUN_TEXT] = "";
    if (run_library(device_find("cuda"), context, layer, drawn, &options, &got, text) == RUN_OK) return got;
    printf("%s\n", text);
    exit(1);
}

/* A NaN in X or in dO of a token makes its rows of O and dX NaN and changes no bit of the others. */
static void check_nan(smoe_context *context, bool in_dout)
{
    enum { TOKEN = 5 };
    const f8_case c = {"NaN", {SIZES(90, 64, 272, 3, 2), TOPK}, {BIASES}};
    const smoe_layer layer = complete(&c.layer);
    oracle_drawn drawn;
    oracle_draw_inputs(&layer, &c.draw, 3, &drawn);
    tensors clean = run_drawn(context, &layer, &drawn);
    (in_dout ? drawn.dout : drawn.x)[TOKEN * layer.hidden + 7] = NAN;
    tensors got = run_drawn(context, &layer, &drawn);
    const tensor_id of_tokens[] = {TENSOR_OUT, TENSOR_DX, TENSOR_DTOPK_WEIGHTS};
    int64_t wrong = 0;
    for (int i = in_dout; i < 3; i++) {
        const tensor *a = &got.at[of_tokens[i]], *b = &clean.at[of_tokens[i]];
        const int64_t columns = a->count / layer.tokens;
        for (int64_t j = 0; j < a->count; j++)
            wrong += j / columns == TOKEN ? !isnan(a->values[j]) : a->values[j] != b->values[j];
    }
    if (wrong) printf("NaN in %s: %lld elements\n", in_dout ? "dO" : "X", (long long)wrong);
    failures += wrong != 0;
    tensors_free(&clean);
    tensors_free(&got);
    oracle_drawn_free(&drawn);
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0); /* so that the last line names the case that hangs */
    smoe_context *context = open_cuda();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int compute = SMOE_COMPUTE_F8; compute <= SMOE_COMPUTE_F8_DGRAD; compute++) {
            const int status = check_case(context, &cases[i], (smoe_compute)compute);
            if (status) return status;
        }
    check_nan(context, false);
    check_nan(context, true);
    smoe_layer layer = complete(&cases[0].layer);
    refused(context, layer, "inference is 0 and compute SMOE_COMPUTE_F8: ");
    layer.inference = 1, layer.dtype = SMOE_TYPE_F16;
    refused(context, layer, "dtype is SMOE_TYPE_F16");
    smoe_destroy(context);
    printf("%d failures\n", failures);
    return failures != 0;
}
