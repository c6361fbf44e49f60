/* See sample.h. */
#include "train/run/sample.h"

#include "base/random.h"

#include <math.h>
#include <stdlib.h>

/* Sorts `order` by descending logit, equal logits by ascending token, as a heap sort. */
static bool before(const float *logits, int32_t a, int32_t b)
{
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void sink(const float *logits, int32_t *order, int64_t at, int64_t count)
{
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && before(logits, order[child], order[child + 1])) child++;
        if (!before(logits, order[at], order[child])) return;
        int32_t kept = order[at];
        order[at] = order[child];
        order[child] = kept;
    }
}

static void sort(const float *logits, int32_t *order, int64_t count)
{
    for (int64_t i = 0; i < count; i++) order[i] = (int32_t)i;
    for (int64_t i = count / 2; i-- > 0;) sink(logits, order, i, count);
    for (int64_t i = count; i-- > 1;) { // the element that comes last in the wanted order is at the top
        int32_t kept = order[0];
        order[0] = order[i];
        order[i] = kept;
        sink(logits, order, 0, i);
    }
}

int32_t sample_choose(sampler *s, const float *logits, int64_t vocab, int32_t *order)
{
    double u = random_uniform(s->seed, s->index++);
    sort(logits, order, vocab);
    if (s->temperature <= 0.0) return order[0];
    double total = 0.0, top = logits[order[0]];
    for (int64_t i = 0; i < vocab; i++) total += exp((logits[order[i]] - top) / s->temperature);
    int64_t kept = 0;
    double mass = 0.0;
    while (kept < vocab && mass < s->top_p * total)
        mass += exp((logits[order[kept++]] - top) / s->temperature);
    double left = u * mass;
    for (int64_t i = 0; i < kept; i++) {
        left -= exp((logits[order[i]] - top) / s->temperature);
        if (left < 0.0) return order[i];
    }
    return order[kept > 0 ? kept - 1 : 0];
}

/* Runs the tokens that the model has not seen yet. */
static bool run(sampler *s, model *m, const int32_t *tokens, int64_t count, float *logits, error *err)
{
    int64_t context = m->config.context;
    if (count - s->start > context) {
        s->start = count - (context + 1) / 2;
        s->cached = 0;
    }
    int64_t length = count - s->start;
    if (!model_continue(m, tokens + s->start, s->cached, length - s->cached, logits, err)) return false;
    s->cached = length;
    return true;
}

/* Broken weights, or values beyond their range. There are no probabilities then. */
static bool check_finite(const float *logits, int64_t vocab, int64_t count, error *err)
{
    for (int64_t i = 0; i < vocab; i++)
        if (!isfinite(logits[i]))
            return fail(err, ERROR_RUNTIME,
                        "after %lld tokens the logit of token %lld is %g: no token can be sampled",
                        (long long)count, (long long)i, (double)logits[i]);
    return true;
}

bool sample_next(sampler *s, model *m, const int32_t *tokens, int64_t count, int32_t *next, error *err)
{
    int64_t vocab = m->config.vocab;
    float *logits = malloc((size_t)vocab * (sizeof *logits + sizeof(int32_t)));
    if (!logits)
        return fail(err, ERROR_RUNTIME, "out of memory: %lld tokens to choose from", (long long)vocab);
    bool done = run(s, m, tokens, count, logits, err) && check_finite(logits, vocab, count, err);
    if (done) *next = sample_choose(s, logits, vocab, (int32_t *)(logits + vocab));
    free(logits);
    return done;
}
