/* What the files of a run share: what a slot holds, the reason of a failure, the results. */
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

/* Writes the reason to run.text and returns false. */
bool run_refuse(run *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

bool run_fetch_forward(run *r, const smoe_plan_view *view, tensors *got);
bool run_fetch_backward(run *r, tensors *got);

#endif
