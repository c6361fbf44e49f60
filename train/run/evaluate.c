/* See evaluate.h. */
#include "train/run/evaluate.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

typedef struct pass_memory {
    int32_t *inputs, *targets; // (m->frame.sequences, context)
} pass_memory;

/* Runs one pass on the tokens in `memory` and adds its losses. */
static bool add_pass(evaluation *result, model *m, const tokens *data, const pass_memory *memory,
                     int64_t sequences, int64_t length, smoe_compute compute, error *err)
{
    const model_batch batch = {memory->inputs, memory->targets, sequences, length};
    double loss;
    if (!model_loss(m, &batch, NULL, compute, &loss, err)) return false;
    result->loss += loss * (double)(sequences * length); // the sum, until run() divides it
    result->tokens += result->rows = sequences * length;
    result->bytes += tokens_bytes(data, memory->targets, sequences * length);
    return true;
}

/* Windows [begin, end) of `count` at equal distances, in passes of up to m->frame.sequences. */
static bool add_windows(evaluation *result, model *m, const tokens *data, int64_t begin, int64_t end,
                        int64_t count, const pass_memory *memory, const evaluation_watch *watch, error *err)
{
    int64_t windows = tokens_windows(data), context = m->config.context;
    for (int64_t first = begin; first < end; first += m->frame.sequences) {
        if (watch->stop && *watch->stop) {
            result->stopped = true;
            return true;
        }
        int64_t sequences = end - first < m->frame.sequences ? end - first : m->frame.sequences;
        for (int64_t i = 0; i < sequences; i++)
            tokens_window(data, (first + i) * windows / count, 1, memory->inputs + i * context,
                          memory->targets + i * context);
        if (!add_pass(result, m, data, memory, sequences, context, watch->compute, err)) return false;
        if (watch->pass)
            watch->pass(watch->user, (double)(first + sequences - begin) / (double)(end - begin));
    }
    return true;
}

/* Adds up what the ranks have. A stop on one of them is one on all. */
static bool sum_ranks(evaluation *result, model *m, train_comm *comm, error *err)
{
    double sums[4] = {result->loss, (double)result->tokens, (double)result->bytes, result->stopped};
    static_assert(SCALARS >= 4, "they have room in the model's scalars");
    if (!comm_sum(comm, m->scalars, sums, 4, err)) return false;
    *result = (evaluation){sums[0], (int64_t)sums[1], (int64_t)sums[2], sums[3] > 0.0, result->rows};
    return true;
}

static bool run(evaluation *result, model *m, const tokens *data, int64_t most, const pass_memory *memory,
                const evaluation_watch *watch, error *err)
{
    const int rank = watch->comm ? watch->comm->rank : 0, ranks = watch->comm ? watch->comm->ranks : 1;
    const int64_t windows = tokens_windows(data), rest = tokens_rest(data);
    const bool all = most <= 0 || most > windows;
    *result = (evaluation){0};
    const int64_t count = all ? windows : most;
    if (!add_windows(result, m, data, count * rank / ranks, count * (rank + 1) / ranks, count, memory, watch,
                     err))
        return false;
    if (all && rest > 0 && !result->stopped && rank + 1 == ranks) {
        tokens_rest_window(data, memory->inputs, memory->targets);
        if (!add_pass(result, m, data, memory, 1, rest, watch->compute, err)) return false;
    }
    if (watch->comm && !sum_ranks(result, m, watch->comm, err)) return false;
    result->loss = result->stopped ? (double)NAN : result->loss / (double)result->tokens;
    return true;
}

bool evaluate(evaluation *result, model *m, const tokens *data, int64_t most, const evaluation_watch *watch,
              error *err)
{
    int64_t rows = m->frame.sequences * m->config.context;
    int32_t *inputs = malloc(2 * (size_t)rows * sizeof *inputs);
    if (!inputs) return fail(err, ERROR_RUNTIME, "out of memory: a batch of %lld tokens", (long long)rows);
    const pass_memory memory = {inputs, inputs + rows};
    bool done = run(result, m, data, most, &memory, watch, err);
    free(inputs);
    return done;
}
