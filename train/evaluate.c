/* See evaluate.h. */
#include "train/evaluate.h"

#include <math.h>
#include <stdlib.h>

/* Passes of up to m->sequences windows; inputs and targets have room for one pass. */
static bool run(evaluation *result, model *m, const tokens *data, int64_t count, int32_t *inputs,
                int32_t *targets, const volatile sig_atomic_t *stop, error *err)
{
    int64_t windows = tokens_windows(data), context = m->config.context;
    double sum = 0.0;
    *result = (evaluation){.loss = NAN};
    for (int64_t first = 0; first < count; first += m->sequences) {
        if (stop && *stop) {
            result->stopped = true;
            return true;
        }
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

bool evaluate(evaluation *result, model *m, const tokens *data, int64_t most,
              const volatile sig_atomic_t *stop, error *err)
{
    int64_t windows = tokens_windows(data), rows = m->sequences * m->config.context;
    int32_t *inputs = malloc(2 * (size_t)rows * sizeof *inputs);
    if (!inputs) return fail(err, ERROR_RUNTIME, "out of memory: a batch of %lld tokens", (long long)rows);
    int64_t count = most > 0 && most < windows ? most : windows;
    bool done = run(result, m, data, count, inputs, inputs + rows, stop, err);
    free(inputs);
    return done;
}
