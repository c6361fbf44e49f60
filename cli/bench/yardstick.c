/* See yardstick.h. */
#include "cli/bench/yardstick.h"

#include "base/clock.h"
#include "cli/support/costs.h"

#include "src/activations.h"

#include <cblas.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

typedef struct lengths {
    uint64_t wide, h, a, w1, w2; // floats
} lengths;

static lengths lengths_of(const smoe_layer *layer, int64_t rows)
{
    const int64_t n = layer->intermediate, d = layer->hidden;
    const int64_t width = moe_h_width(layer);
    return (lengths){.wide = (uint64_t)(rows * d),
                     .h = (uint64_t)(rows * width),
                     .a = (uint64_t)(rows * n),
                     .w1 = (uint64_t)(layer->experts * width * d),
                     .w2 = (uint64_t)(layer->experts * d * n)};
}

uint64_t yardstick_bytes(const smoe_layer *layer, int64_t rows)
{
    const lengths l = lengths_of(layer, rows);
    return sizeof(float) * (2 * l.wide + l.h + l.a + 2 * l.w1 + 2 * l.w2) + 2 * (uint64_t)COPY_BYTES;
}

/* Small values of both signs, so that nothing overflows and nothing is denormal. */
static float *make_floats(uint64_t count)
{
    float *values = aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64 + 64);
    for (uint64_t i = 0; values && i < count; i++) values[i] = (float)((i * 37) % 101) * 0.01f - 0.5f;
    return values;
}

static char *make_bytes(void)
{
    char *bytes = aligned_alloc(4096, COPY_BYTES);
    if (bytes) memset(bytes, 1, COPY_BYTES);
    return bytes;
}

/* The yardstick's products run on OpenBLAS's own threads, each of which takes a buffer when it starts. A
 * context has OpenBLAS allocate as many, and they stay when it is gone. */
static bool reserve_buffers(int threads)
{
    smoe_context *context;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = threads;
    if (smoe_create(&context, &options) != SMOE_OK) return false;
    smoe_destroy(context);
    return true;
}

bool yardstick_make(yardstick *made, const smoe_layer *layer, const int32_t *counts, int threads)
{
    int64_t rows = 0;
    for (int64_t e = 0; e < layer->experts; e++) rows += counts[e];
    const lengths l = lengths_of(layer, rows);
    const int64_t n = layer->intermediate;
    *made = (yardstick){.hidden = layer->hidden,
                        .intermediate = n,
                        .h_width = moe_h_width(layer),
                        .experts = layer->experts,
                        .counts = counts,
                        .threads = threads,
                        .wide_rows = make_floats(l.wide),
                        .wide_result = make_floats(l.wide),
                        .h = make_floats(l.h),
                        .a = make_floats(l.a),
                        .w1 = make_floats(l.w1),
                        .w2 = make_floats(l.w2),
                        .dw1 = make_floats(l.w1),
                        .dw2 = make_floats(l.w2),
                        .copy_from = make_bytes(),
                        .copy_to = make_bytes()};
    if (made->wide_rows && made->wide_result && made->h && made->a && made->w1 && made->w2 && made->dw1 &&
        made->dw2 && made->copy_from && made->copy_to && reserve_buffers(threads))
        return true;
    yardstick_free(made);
    return false;
}

void yardstick_free(yardstick *freed)
{
    void *all[] = {freed->wide_rows, freed->wide_result, freed->h,   freed->a,         freed->w1,
                   freed->w2,        freed->dw1,         freed->dw2, freed->copy_from, freed->copy_to};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
    *freed = (yardstick){0};
}

/* C (m, n) = A B with A (m, k), or (k, m) when transposed, and B (k, n), or (n, k). */
static void multiply(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const float *a,
                     const float *b, float *c)
{
    if (m == 0 || k == 0) return;
    cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans,
                transpose_b ? CblasTrans : CblasNoTrans, (blasint)m, (blasint)n, (blasint)k, 1, a,
                (blasint)(transpose_a ? m : k), b, (blasint)(transpose_b ? k : n), 0, c, (blasint)n);
}

static void one_expert(const yardstick *y, smoe_stage stage, int64_t e, int64_t first)
{
    const int64_t d = y->hidden, n = y->intermediate, w = y->h_width, m = y->counts[e];
    const float *wide = y->wide_rows + first * d, *w1 = y->w1 + e * w * d, *w2 = y->w2 + e * d * n;
    float *result = y->wide_result + first * d, *h = y->h + first * w, *a = y->a + first * n;
    switch (stage) {
    case SMOE_STAGE_UP: multiply(false, true, m, w, d, wide, w1, h); return;
    case SMOE_STAGE_DOWN: multiply(false, true, m, d, n, a, w2, result); return;
    case SMOE_STAGE_DH: multiply(false, false, m, n, d, wide, w2, a); return;
    case SMOE_STAGE_DW2: multiply(true, false, d, n, m, wide, a, y->dw2 + e * d * n); return;
    case SMOE_STAGE_DX_ROWS: multiply(false, false, m, d, w, h, w1, result); return;
    case SMOE_STAGE_DW1: multiply(true, false, w, d, m, h, wide, y->dw1 + e * w * d); return;
    default: return;
    }
}

static double stage_ms(const yardstick *y, smoe_stage stage)
{
    const double start = clock_seconds();
    int64_t first = 0;
    for (int64_t e = 0; e < y->experts; first += y->counts[e++]) one_expert(y, stage, e, first);
    return 1e3 * (clock_seconds() - start);
}

void yardstick_gemms(const yardstick *y, bool forward, bool backward, double *ms)
{
    static const smoe_stage stages[] = {SMOE_STAGE_UP,  SMOE_STAGE_DOWN,    SMOE_STAGE_DH,
                                        SMOE_STAGE_DW2, SMOE_STAGE_DX_ROWS, SMOE_STAGE_DW1};
    const int before = openblas_get_num_threads();
    openblas_set_num_threads(y->threads);
    for (size_t i = 0; i < sizeof stages / sizeof stages[0]; i++) {
        const bool wanted = stages[i] < SMOE_STAGE_DH ? forward : backward;
        if (wanted) ms[stage_index(stages[i])] = stage_ms(y, stages[i]);
    }
    openblas_set_num_threads(before);
}

double yardstick_copy(const yardstick *y)
{
    enum { WINDOW = 1 << 20 };
    const double start = clock_seconds();
#pragma omp parallel for schedule(static) num_threads(y->threads)
    for (int i = 0; i < COPY_BYTES / WINDOW; i++)
        memcpy(y->copy_to + (size_t)i * WINDOW, y->copy_from + (size_t)i * WINDOW, WINDOW);
    return 1e3 * (clock_seconds() - start) / (2.0 * COPY_BYTES);
}
