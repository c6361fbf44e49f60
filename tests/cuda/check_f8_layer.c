/* Layers with SMOE_COMPUTE_F8 on a GPU: the forward for inference against the oracle that quantises too,
 * small integers exactly, and what the backend refuses. */
#include "open_cuda.h"

#include "harness/check.h"

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

static const f8_case cases[] = {
    {"router, few rows", {SIZES(30, 64, 32, 8, 2)}, {.router = true}},
    {"several groups, biases", {SIZES(150, 272, 400, 3, 2), TOPK}, {BIASES}},
    {"interleaved, chunks",
     {SIZES(160, 256, 272, 4, 2), TOPK, .layout = SMOE_LAYOUT_INTERLEAVED, .chunks = 2},
     {.b1 = true, .broken_ids = true}},
    {"relu2, rows", {SIZES(190, 80, 272, 5, 1), ROWS, ACT(RELU2)}, {BIASES, .row_weights = true}},
    {"promoted sums", {SIZES(70, 1680, 48, 2, 1), TOPK, ACT(GELU)}, {0}},
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
    layer.inference = 1;
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

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0); /* so that the last line names the case that hangs */
    smoe_context *context = open_cuda();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const smoe_layer layer = complete(&cases[i].layer);
        const check_options options = {
            .run = {.compute = SMOE_COMPUTE_F8, .quantize = moe_quantize_weights, .forward_only = true},
            .exact = cases[i].draw.integers != 0,
            .seed = 1};
        char text[RUN_TEXT] = "";
        puts(cases[i].name);
        const run_outcome outcome = check_layer(device_find("cuda"), context, &layer, &cases[i].draw,
                                                &options, judge, (void *)(uintptr_t)cases[i].name, text);
        if (outcome == RUN_OK) continue;
        printf("%s: %s\n", cases[i].name, text);
        if (outcome == RUN_UNSUPPORTED) return EXIT_NO_DEVICE;
        failures++;
    }
    smoe_layer layer = complete(&cases[0].layer);
    layer.inference = 0;
    refused(context, layer, "inference is 0");
    layer.inference = 1, layer.dtype = SMOE_TYPE_F16;
    refused(context, layer, "dtype is SMOE_TYPE_F16");
    smoe_destroy(context);
    printf("%d failures\n", failures);
    return failures != 0;
}
