/* See evaluate.h. */
#include "train/evaluate.h"

#include <stdlib.h>

/* Passes of up to m->sequences windows; inputs and targets have room for one pass. */
static bool run(evaluation *result, model *m, const tokens *data, int64_t count, int32_t *inputs,
                int32_t *targets, error *err)
{
    int64_t windows = tokens_windows(data), context = m->config.context;
    double sum = 0.0;
    for (int64_t first = 0; first < count; first += m->sequences) {
        int64_t sequences = count - first < m->sequences ? count - first : m->sequences;
        for (int64_t i = 0; i < sequences; i++)
            tokens_window(data, (first + i) * windows / count, 1, inputs + i * context,
                          targets + i * context);
        model_batch batch = {inputs, targets, sequences, context};
        double loss;
        if (!model_loss(m, &batch, NULL, &loss, err)) return false;
        sum += loss * (double)(sequences * context);
    }
    result->tokens = count * context;
    result->loss = sum / (double)result->tokens;
    return true;
}

bool evaluate(evaluation *result, model *m, const tokens *data, int64_t most, error *err)
{
    int64_t windows = tokens_windows(data), rows = m->sequences * m->config.context;
    int32_t *inputs = malloc(2 * (size_t)rows * sizeof *inputs);
    if (!inputs) return fail(err, ERROR_RUNTIME, "out of memory: a batch of %lld tokens", (long long)rows);
    bool done = run(result, m, data, most > 0 && most < windows ? most : windows, inputs, inputs + rows, err);
    free(inputs);
    return done;
}
