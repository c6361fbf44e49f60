/* See embedding.h. */
#include "train/cpu/embedding.h"

#include "train/cpu/math.h"

#include <math.h>
#include <string.h>

void embedding_forward(float *x, const float *weight, const int32_t *tokens, int64_t rows, int64_t d)
{
#pragma omp parallel for schedule(dynamic, 64)
    for (int64_t r = 0; r < rows; r++) memcpy(x + r * d, weight + tokens[r] * d, (size_t)d * sizeof *x);
}

void embedding_backward(float *dweight, const float *dx, const int32_t *tokens, int64_t rows, int64_t d)
{
    // Threads share the columns, not the rows. So the tokens of a row of dweight are added in order, for any
    // number of threads.
    const int64_t panel = 32;
#pragma omp parallel for schedule(dynamic)
    for (int64_t first = 0; first < d; first += panel) {
        int64_t width = d - first < panel ? d - first : panel;
        for (int64_t r = 0; r < rows; r++) {
            float *restrict to = dweight + tokens[r] * d + first;
            const float *restrict from = dx + r * d + first;
            for (int64_t i = 0; i < width; i++) to[i] += from[i];
        }
    }
}

static float cross_entropy_row(float *restrict row, int32_t target, int64_t vocab, float scale)
{
    float top = largest(row, vocab), sum = 0.0f, wanted = row[target];
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < vocab; i++) {
        row[i] = exp_poly(row[i] - top);
        sum += row[i];
    }
    float inverse = scale / sum;
    for (int64_t i = 0; i < vocab; i++) row[i] *= inverse;
    row[target] -= scale;
    return logf(sum) + top - wanted;
}

void cross_entropy(float *logits, float *losses, const int32_t *targets, float scale, int64_t rows,
                   int64_t vocab)
{
#pragma omp parallel for schedule(dynamic, 64)
    for (int64_t r = 0; r < rows; r++)
        losses[r] = cross_entropy_row(logits + r * vocab, targets[r], vocab, scale);
}
