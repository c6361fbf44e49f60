/* What a slot of a run holds. */
#ifndef HARNESS_SLOTS_H
#define HARNESS_SLOTS_H

#include "harness/run.h"

/* A tensor's elements and their type; bytes: `type` is that of nothing. */
typedef struct extent {
    int64_t count;
    smoe_type type;
    bool bytes;
} extent;

extent slot_extent(const run *r, slot_id id);

#endif
