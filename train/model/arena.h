/* Allocates aligned parts of one memory range, one after the other. With a NULL base it only counts their
 * bytes. */
#ifndef TRAIN_ARENA_H
#define TRAIN_ARENA_H

#include "train/ops.h"

enum { ARENA_ALIGN = 256 };

typedef struct arena {
    char *base;
    size_t used,
        most; // most: the largest value of `used` so far. Setting `used` back frees parts
} arena;

static inline void *arena_take(arena *a, size_t bytes)
{
    void *part = a->base ? a->base + a->used : NULL;
    a->used += (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    if (a->used > a->most) a->most = a->used;
    return part;
}

static inline void *arena_values(arena *a, smoe_type type, int64_t count)
{
    return arena_take(a, (size_t)count * type_size(type));
}

static inline float *arena_floats(arena *a, int64_t count)
{
    return arena_values(a, SMOE_TYPE_F32, count);
}

#endif
