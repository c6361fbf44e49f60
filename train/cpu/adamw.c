/* See adamw.h. */
#include "train/cpu/adamw.h"

#include <math.h>

enum { ADAMW_PANEL = 16384, NORM_GROUP = 1024 };

static void update_panel(float *restrict w, float *restrict grad, float *restrict m, float *restrict v,
                         int64_t count, const adamw_step *s, float factor)
{
    float b1 = (float)s->beta1, b2 = (float)s->beta2;
    float c1 = (float)(1.0 - s->beta1), c2 = (float)(1.0 - s->beta2);
    float rate = (float)(s->lr / (1.0 - pow(s->beta1, (double)s->step)));
    float root = (float)(1.0 / sqrt(1.0 - pow(s->beta2, (double)s->step)));
    float keep = (float)(1.0 - s->lr * s->weight_decay), eps = (float)s->eps;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float g = grad[i] * factor;
        float mean = b1 * m[i] + c1 * g, square = b2 * v[i] + c2 * g * g;
        m[i] = mean;
        v[i] = square;
        w[i] = keep * w[i] - rate * mean / (sqrtf(square) * root + eps);
        grad[i] = 0.0f;
    }
}

void adamw_update(float *w, float *grad, float *m, float *v, int64_t count, const adamw_step *s, float factor)
{
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < count; i += ADAMW_PANEL) {
        int64_t size = count - i < ADAMW_PANEL ? count - i : ADAMW_PANEL;
        update_panel(w + i, grad + i, m + i, v + i, size, s, factor);
    }
}

static double panel_sum(const float *grad, int64_t count)
{
    double sum = 0.0;
    for (int64_t i = 0; i < count; i += NORM_GROUP) {
        int64_t end = i + NORM_GROUP < count ? i + NORM_GROUP : count;
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (int64_t j = i; j < end; j++) part += grad[j] * grad[j];
        sum += part;
    }
    return sum;
}

double gradient_square(const float *grad, int64_t count)
{
    enum { SUMS = 64 }; // fixed, whatever the number of threads
    double sums[SUMS];
    int64_t share = (count + SUMS - 1) / SUMS;
#pragma omp parallel for schedule(dynamic)
    for (int64_t p = 0; p < SUMS; p++) {
        int64_t first = p * share < count ? p * share : count,
                end = first + share < count ? first + share : count;
        sums[p] = panel_sum(grad + first, end - first);
    }
    double total = 0.0;
    for (int p = 0; p < SUMS; p++) total += sums[p];
    return total;
}

double gradient_norm(const float *grad, int64_t count)
{
    return sqrt(gradient_square(grad, count));
}
