/* See attention.h. Backward, with dp[i, j] = <dout[i], v[j]>: ds = p (dp - sum over j of p dp) / sqrt(head
 * size); dq = ds k, dk = ds^T q, dv = p^T dout. */
#include "train/cpu/attention.h"

#include "train/cpu/math.h"

#include <cblas.h>
#include <math.h>
#include <omp.h>

int64_t attention_scratch(const pass_shape *s)
{
    return (int64_t)omp_get_max_threads() * ATTENTION_ROWS * s->length;
}

int64_t attention_saved(const pass_shape *s)
{
    return s->forward_only ? attention_scratch(s) : s->sequences * s->heads * s->length * s->length;
}

/* Row i of a tile: softmax over its first `keep` entries, zero after them up to `width`. */
static void softmax_row(float *restrict row, int64_t keep, int64_t width, float scale)
{
    float top = largest(row, keep), sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < keep; j++) {
        row[j] = exp_poly((row[j] - top) * scale);
        sum += row[j];
    }
    float inverse = 1.0f / sum;
    for (int64_t j = 0; j < keep; j++) row[j] *= inverse;
    for (int64_t j = keep; j < width; j++) row[j] = 0.0f;
}

/* One head of one sequence; the pointers point to its first row and column. With forward_only all tiles of p
 * are in one place. */
static void head_forward(float *out, float *p, const float *q, const float *k, const float *v,
                         const pass_shape *s)
{
    int d = (int)(s->heads * s->head_size), size = (int)s->head_size, length = (int)s->length;
    float scale = 1.0f / sqrtf((float)size);
    for (int first = 0; first < length; first += ATTENTION_ROWS) {
        int end = first + ATTENTION_ROWS < length ? first + ATTENTION_ROWS : length, rows = end - first;
        float *tile = s->forward_only ? p : p + (int64_t)first * length; // (rows, end) of row stride length
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, end, size, 1.0f, q + (int64_t)first * d, d,
                    k, d, 0.0f, tile, length);
        for (int i = 0; i < rows; i++) softmax_row(tile + (int64_t)i * length, first + i + 1, end, scale);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, size, end, 1.0f, tile, length, v, 3 * d,
                    0.0f, out + (int64_t)first * d, d);
    }
}

void attention_forward(float *out, float *p, const float *q, const float *k, const float *v,
                       const pass_shape *s)
{
    int64_t d = s->heads * s->head_size;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t b = 0; b < s->sequences; b++)
        for (int64_t h = 0; h < s->heads; h++) {
            int64_t at = b * s->length * d + h * s->head_size;
            int64_t at_p = s->forward_only ? (int64_t)omp_get_thread_num() * ATTENTION_ROWS * s->length
                                           : (b * s->heads + h) * s->length * s->length;
            head_forward(out + at, p + at_p, q + at, k + at, v + b * s->length * 3 * d + h * s->head_size, s);
        }
}

/* One query of one head, with `keep` keys. The weights are used at once and not stored. */
static void query_forward(float *restrict out, const float *q, const float *k, const float *v, int64_t keep,
                          int64_t d, int64_t size)
{
    float scale = 1.0f / sqrtf((float)size), top = -INFINITY, sum = 0.0f;
    for (int64_t s = 0; s < size; s++) out[s] = 0.0f;
    for (int64_t j = 0; j < keep; j++) {
        float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int64_t s = 0; s < size; s++) dot += q[s] * k[j * d + s];
        float now = dot > top ? dot : top, old = exp_poly((top - now) * scale),
              weight = exp_poly((dot - now) * scale);
        sum = sum * old + weight;
#pragma omp simd
        for (int64_t s = 0; s < size; s++) out[s] = out[s] * old + weight * v[j * 3 * d + s];
        top = now;
    }
    for (int64_t s = 0; s < size; s++) out[s] /= sum;
}

void attention_continue(float *out, const float *q, const float *k, const float *v, const pass_shape *s)
{
    int64_t size = s->head_size, d = s->heads * size;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t i = 0; i < s->length; i++)
        for (int64_t h = 0; h < s->heads; h++)
            query_forward(out + i * d + h * size, q + i * d + h * size, k + h * size, v + h * size,
                          s->first + i + 1, d, size);
}

/* Overwrites one row of dp with ds, computed from a row of p */
static void softmax_row_backward(float *restrict dp, const float *restrict p, int64_t width, float scale)
{
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (int64_t j = 0; j < width; j++) dot += dp[j] * p[j];
#pragma omp simd
    for (int64_t j = 0; j < width; j++) dp[j] = p[j] * (dp[j] - dot) * scale;
}

static void head_backward(float *dq, float *dk, float *dv, const float *dout, const float *p, const float *q,
                          const float *k, const float *v, const pass_shape *s, float *ds)
{
    int d = (int)(s->heads * s->head_size), size = (int)s->head_size, length = (int)s->length;
    int stride = 3 * d;
    float scale = 1.0f / sqrtf((float)size);
    // The last tile has every key. So it is processed first and writes dk and dv, and the other tiles add to
    // the first rows of these.
    int last = (length - 1) / ATTENTION_ROWS * ATTENTION_ROWS;
    for (int first = last; first >= 0; first -= ATTENTION_ROWS) {
        int end = first + ATTENTION_ROWS < length ? first + ATTENTION_ROWS : length, rows = end - first;
        float add = first == last ? 0.0f : 1.0f;
        const float *tile = p + (int64_t)first * length;
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, end, size, 1.0f, dout + (int64_t)first * d,
                    d, v, stride, 0.0f, ds, length);
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, end, size, rows, 1.0f, tile, length,
                    dout + (int64_t)first * d, d, add, dv, stride);
        for (int i = 0; i < rows; i++)
            softmax_row_backward(ds + (int64_t)i * length, tile + (int64_t)i * length, end, scale);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, size, end, 1.0f, ds, length, k, d, 0.0f,
                    dq + (int64_t)first * d, d);
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, end, size, rows, 1.0f, ds, length,
                    q + (int64_t)first * d, d, add, dk, d);
    }
}

void attention_backward(float *dq, float *dk, float *dv, const float *dout, const float *p, const float *q,
                        const float *k, const float *v, const pass_shape *s, float *scratch)
{
    int64_t d = s->heads * s->head_size;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t b = 0; b < s->sequences; b++)
        for (int64_t h = 0; h < s->heads; h++) {
            int64_t at = b * s->length * d + h * s->head_size;
            int64_t at_v = b * s->length * 3 * d + h * s->head_size;
            head_backward(dq + at, dk + at, dv + at_v, dout + at,
                          p + (b * s->heads + h) * s->length * s->length, q + at, k + at, v + at_v, s,
                          scratch + (int64_t)omp_get_thread_num() * ATTENTION_ROWS * s->length);
        }
}
