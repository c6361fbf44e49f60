/* See shards.h. */
#include "train/run/shards.h"

#include <stdlib.h>

enum { UNIT = 8 }; // elements that the kernels of the optimiser take at once

static void cut(shards *s, const model_weights *w)
{
    const param_layout *layout = &w->layout;
    for (int64_t i = 0; i < s->count; i++) {
        shard *span = &s->spans[i];
        span->first = i == 0 ? 0 : (int64_t)layout->layers[i - 1];
        span->count = (int64_t)(i + 1 < s->count ? layout->layers[i] : layout->total) - span->first;
        span->part = span->count / (UNIT * s->ranks) * UNIT;
        span->tail = span->count - s->ranks * span->part;
        span->state = s->parts_end;
        s->parts_end += span->part;
        if (span->part + span->tail > s->most) s->most = span->part + span->tail;
    }
    s->states = s->parts_end;
    for (int64_t i = 0; i < s->count; i++) {
        s->spans[i].tail_state = s->states;
        s->states += s->spans[i].tail;
    }
}

static void list_runs(shards *s)
{
    for (int64_t i = 0; i < s->count; i++) {
        const shard *span = &s->spans[i];
        const int64_t mine = span->first + s->rank * span->part, tail = span->first + s->ranks * span->part;
        if (span->part) s->runs[s->run_count++] = (state_run){mine, span->part, span->state, false};
        if (span->tail)
            s->runs[s->run_count++] = (state_run){tail, span->tail, span->tail_state, s->rank > 0};
    }
}

bool shards_create(shards *s, const model_weights *w, int rank, int ranks, error *err)
{
    *s = (shards){.rank = rank, .ranks = ranks, .count = (int64_t)w->layout.layer_count + 2};
    s->spans = calloc((size_t)s->count, sizeof *s->spans);
    s->runs = calloc(2 * (size_t)s->count, sizeof *s->runs);
    if (!s->spans || !s->runs) {
        shards_destroy(s);
        return fail(err, ERROR_RUNTIME, "out of memory: the shards of %lld spans", (long long)s->count);
    }
    cut(s, w);
    list_runs(s);
    return true;
}

void shards_destroy(shards *s)
{
    free(s->spans);
    free(s->runs);
    *s = (shards){0};
}

bool state_run_next(const adamw_arrays *arrays, int64_t at, int64_t end, state_run *run)
{
    *run = (state_run){at, end - at, at, false};
    if (!arrays->runs) return at < end;
    for (int64_t i = 0; i < arrays->run_count; i++) {
        const state_run *r = &arrays->runs[i];
        if (r->first + r->count <= at) continue;
        const int64_t from = r->first > at ? r->first : at,
                      to = r->first + r->count < end ? r->first + r->count : end;
        *run = (state_run){from, to - from, r->state + from - r->first, r->copy};
        return from < to;
    }
    return false;
}
