/* See params.h. */
#include "train/model/params.h"

#include "common/random.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN_FLOATS = 64 }; // every group starts on 256 bytes

static void add(param_layout *layout, int64_t rows, int64_t columns, double deviation, const char *format,
                ...)
{
    param_tensor *tensor = &layout->tensors[layout->tensor_count++];
    *tensor = (param_tensor){.shape = {rows, columns}, .rank = columns ? 2 : 1, .offset = layout->total};
    tensor->count = (size_t)(rows * (columns ? columns : 1));
    tensor->deviation = deviation;
    va_list list;
    va_start(list, format);
    vsnprintf(tensor->name, sizeof tensor->name, format, list);
    va_end(list);
    layout->total += tensor->count;
}

/* The place where the next group starts. */
static size_t group(param_layout *layout)
{
    layout->total = (layout->total + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
    return layout->total;
}

static void add_swiglu(param_layout *layout, size_t *w1, size_t *w2, int64_t d, int64_t width, double in,
                       double out, const char *prefix)
{
    *w1 = group(layout);
    add(layout, width, d, in, "%s.gate_proj.weight", prefix);
    add(layout, width, d, in, "%s.up_proj.weight", prefix);
    *w2 = group(layout);
    add(layout, d, width, out, "%s.down_proj.weight", prefix);
}

static void add_experts(param_layout *layout, const model_config *c, param_layer *layer, int l, double in,
                        double out)
{
    layer->router = group(layout);
    add(layout, c->experts, c->hidden, in, "model.layers.%d.mlp.gate.weight", l);
    layer->w1 = group(layout);
    for (int e = 0; e < c->experts; e++) {
        add(layout, c->intermediate, c->hidden, in, "model.layers.%d.mlp.experts.%d.gate_proj.weight", l, e);
        add(layout, c->intermediate, c->hidden, in, "model.layers.%d.mlp.experts.%d.up_proj.weight", l, e);
    }
    layer->w2 = group(layout);
    for (int e = 0; e < c->experts; e++)
        add(layout, c->hidden, c->intermediate, out, "model.layers.%d.mlp.experts.%d.down_proj.weight", l, e);
}

static void add_layer_matrices(param_layout *layout, const model_config *c, param_layer *layer, int l)
{
    // Matrices whose product is added to the residual stream start smaller, so that the variance of the
    // stream does not grow with the depth.
    double in = c->initializer_range, out = in / sqrt(2.0 * (double)c->layers);
    char prefix[64];
    layer->qkv = group(layout);
    for (int i = 0; i < 3; i++)
        add(layout, c->hidden, c->hidden, in, "model.layers.%d.self_attn.%c_proj.weight", l, "qkv"[i]);
    layer->output = group(layout);
    add(layout, c->hidden, c->hidden, out, "model.layers.%d.self_attn.o_proj.weight", l);
    if (l < c->dense_layers) {
        snprintf(prefix, sizeof prefix, "model.layers.%d.mlp", l);
        add_swiglu(layout, &layer->dense_w1, &layer->dense_w2, c->hidden, c->dense_intermediate, in, out,
                   prefix);
        return;
    }
    add_experts(layout, c, layer, l, in, out);
    if (!c->shared_intermediate) return;
    snprintf(prefix, sizeof prefix, "model.layers.%d.mlp.shared_expert", l);
    add_swiglu(layout, &layer->dense_w1, &layer->dense_w2, c->hidden, c->shared_intermediate, in, out,
               prefix);
}

static size_t add_vector(param_layout *layout, int64_t size, int l, const char *what)
{
    size_t at = group(layout);
    add(layout, size, 0, 0.0, "model.layers.%d.%s.weight", l, what);
    return at;
}

static size_t tensor_bound(const model_config *c)
{
    return (size_t)(3 + c->layers * (12 + 3 * c->experts));
}

bool param_layout_create(param_layout *layout, const model_config *c, error *err)
{
    *layout = (param_layout){0};
    layout->tensors = calloc(tensor_bound(c), sizeof *layout->tensors);
    layout->layers = calloc((size_t)c->layers, sizeof *layout->layers);
    if (!layout->tensors || !layout->layers) {
        param_layout_destroy(layout);
        return fail(err, ERROR_RUNTIME, "out of memory: the table of the model's tensors");
    }
    layout->embedding = group(layout);
    add(layout, c->vocab, c->hidden, c->initializer_range, "model.embed_tokens.weight");
    layout->head = layout->embedding;
    if (!c->tied) {
        layout->head = group(layout);
        add(layout, c->vocab, c->hidden, c->initializer_range, "lm_head.weight");
    }
    for (int l = 0; l < c->layers; l++) add_layer_matrices(layout, c, &layout->layers[l], l);
    layout->matrices = group(layout);
    for (int l = 0; l < c->layers; l++) {
        param_layer *layer = &layout->layers[l];
        layer->input_norm = add_vector(layout, c->hidden, l, "input_layernorm");
        layer->mlp_norm = add_vector(layout, c->hidden, l, "post_attention_layernorm");
        layer->q_norm = add_vector(layout, c->hidden, l, "self_attn.q_norm");
        layer->k_norm = add_vector(layout, c->hidden, l, "self_attn.k_norm");
    }
    layout->norm = group(layout);
    add(layout, c->hidden, 0, 0.0, "model.norm.weight");
    layout->total = group(layout);
    return true;
}

void param_layout_destroy(param_layout *layout)
{
    free(layout->tensors);
    free(layout->layers);
    *layout = (param_layout){0};
}

size_t param_count(const param_layout *layout)
{
    size_t count = 0;
    for (size_t i = 0; i < layout->tensor_count; i++) count += layout->tensors[i].count;
    return count;
}

uint64_t param_stream(uint64_t seed, size_t index)
{
    return random_bits(seed, index);
}

void param_init(float *weights, const param_layout *layout, uint64_t seed)
{
    memset(weights, 0, layout->total * sizeof *weights);
    for (size_t i = 0; i < layout->tensor_count; i++) {
        const param_tensor *tensor = &layout->tensors[i];
        uint64_t stream = param_stream(seed, i);
        float *values = weights + tensor->offset;
#pragma omp parallel for schedule(static)
        for (size_t j = 0; j < tensor->count; j++)
            values[j] =
                tensor->deviation > 0.0 ? (float)(tensor->deviation * random_normal(stream, j)) : 1.0f;
    }
}
