/* See params.h. */
#include "train/model/params.h"

#include "base/random.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN_FLOATS = 64 }; // every group starts on 256 bytes

bool param_layout_create(param_layout *layout, int64_t layers, error *err)
{
    *layout = (param_layout){.layer_count = (size_t)layers};
    layout->layers = calloc((size_t)layers + 1, sizeof *layout->layers);
    return layout->layers ||
           fail(err, ERROR_RUNTIME, "out of memory: the places of %lld layers", (long long)layers);
}

void param_layout_destroy(param_layout *layout)
{
    free(layout->tensors);
    free(layout->layers);
    *layout = (param_layout){0};
}

bool param_layout_check(const param_layout *layout, error *err)
{
    return !layout->failed || fail(err, ERROR_RUNTIME, "out of memory: the table of the model's tensors");
}

size_t param_group(param_layout *layout)
{
    layout->total = (layout->total + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
    return layout->total;
}

static bool make_room(param_layout *layout)
{
    if (layout->tensor_count < layout->room) return true;
    const size_t room = layout->room ? 2 * layout->room : 64;
    param_tensor *more = realloc(layout->tensors, room * sizeof *more);
    layout->failed |= more == NULL;
    if (!more) return false;
    layout->tensors = more;
    layout->room = room;
    return true;
}

void param_add(param_layout *layout, int64_t rows, int64_t columns, double deviation, const char *format, ...)
{
    if (!make_room(layout)) return;
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

size_t param_add_vector(param_layout *layout, int64_t size, int64_t layer, const char *what)
{
    size_t at = param_group(layout);
    param_add(layout, size, 0, 0.0, "model.layers.%lld.%s.weight", (long long)layer, what);
    return at;
}

size_t param_count(const param_layout *layout)
{
    size_t count = 0;
    for (size_t i = 0; i < layout->tensor_count; i++) count += layout->tensors[i].count;
    return count;
}

uint64_t param_seed(uint64_t seed, size_t index)
{
    return random_bits(seed, index);
}

void param_init(float *weights, const param_layout *layout, uint64_t seed)
{
    memset(weights, 0, layout->total * sizeof *weights);
    for (size_t i = 0; i < layout->tensor_count; i++) {
        const param_tensor *tensor = &layout->tensors[i];
        uint64_t own = param_seed(seed, i);
        float *values = weights + tensor->offset;
#pragma omp parallel for schedule(static)
        for (size_t j = 0; j < tensor->count; j++)
            values[j] = tensor->deviation > 0.0 ? (float)(tensor->deviation * random_normal(own, j)) : 1.0f;
    }
}
