/* See weights.h. */
#include "train/model/weights.h"

void *weights_at(const model_weights *w, size_t offset)
{
    return (char *)w->params + offset * type_size(w->device->type);
}

void *weights_grad(const model_weights *w, size_t offset)
{
    const size_t size = type_size(w->device->grad_type), before = w->layout.layers[0];
    if (!w->one_layer || offset < before) return (char *)w->grads + offset * size;
    if (offset < w->layout.matrices) return (char *)w->layer + (offset - w->layer_first) * size;
    return (char *)w->grads + (before + offset - w->layout.matrices) * size;
}

/* Elements of the largest layer. */
static int64_t most_of_layers(const model_weights *w)
{
    int64_t most = 0;
    for (size_t l = 0; l < w->layout.layer_count; l++) {
        const int64_t count = (int64_t)(w->layout.layers[l + 1] - w->layout.layers[l]);
        if (count > most) most = count;
    }
    return most;
}

grad_span weights_layer_span(const model_weights *w, int64_t l)
{
    const size_t *layers = w->layout.layers;
    void *grads = w->layer_grads;
    if (grads && w->sharded && l % 2)
        grads = (char *)grads + (size_t)most_of_layers(w) * type_size(w->device->grad_type);
    return (grad_span){grads, (int64_t)layers[l], (int64_t)(layers[l + 1] - layers[l]), (int64_t)layers[l]};
}

void weights_begin_pass(model_weights *w)
{
    if (w->sharded && w->device->adds_gradients)
        w->device->ops->clear(w->device, w->grads,
                              (size_t)weights_grads(w) * type_size(w->device->grad_type));
}

void weights_begin_layer(model_weights *w, int64_t l)
{
    const grad_span span = weights_layer_span(w, l);
    w->layer = span.grads;
    w->layer_first = (size_t)span.first;
    if (w->clears_layer)
        w->device->ops->clear(w->device, span.grads, (size_t)span.count * type_size(w->device->grad_type));
}

int weights_spans(const model_weights *w, grad_span spans[MOST_SPANS])
{
    const int64_t total = (int64_t)w->layout.total, matrices = (int64_t)w->layout.matrices,
                  before = (int64_t)w->layout.layers[0];
    spans[0] = (grad_span){w->grads, 0, w->one_layer ? before : total, 0};
    if (!w->one_layer) return 1;
    void *after = w->grads ? (char *)w->grads + (size_t)before * type_size(w->device->grad_type) : NULL;
    spans[1] = (grad_span){after, matrices, total - matrices, matrices};
    return 2;
}

int64_t weights_grads(const model_weights *w)
{
    grad_span spans[MOST_SPANS];
    int64_t elements = 0;
    for (int i = weights_spans(w, spans); i > 0; i--) elements += spans[i - 1].count;
    return elements;
}

int64_t weights_layer_grads(const model_weights *w)
{
    return w->one_layer ? (w->sharded ? 2 : 1) * most_of_layers(w) : 0;
}

/* Every group starts on 64 elements, which may leave space before it. */
static bool has_gaps(const param_layout *layout)
{
    for (size_t i = 0; i < layout->tensor_count; i++) {
        const param_tensor *t = &layout->tensors[i];
        const size_t next = i + 1 < layout->tensor_count ? t[1].offset : layout->total;
        if (t->offset + t->count < next && t->offset < layout->matrices) return true;
    }
    return false;
}

bool weights_clear_layers(const model_weights *w)
{
    return w->one_layer && (w->device->adds_gradients || has_gaps(&w->layout));
}
