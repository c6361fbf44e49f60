/* See f8_report.h. A is computed again from the stored H: the layer keeps neither A nor its bytes. */
#include "train/run/f8_report.h"

#include "train/model/experts.h"

#include <math.h>
#include <stdlib.h>

enum { BLOCKS = 4, BLOCK_ROWS = 64, GROUP = 128 }; // GROUP: features of a row that share a scale

const f8_report f8_report_none = {(double)NAN, (double)NAN, (double)NAN, (double)NAN};

typedef struct counted {
    double amax;
    int64_t zeros, subnormals, elements;
} counted;

/* A group with this largest magnitude is divided by the least power of two that makes it at most 448. */
static void add_group(counted *c, const double *a, int64_t count)
{
    double amax = 0.0;
    int exponent = 0;
    for (int64_t i = 0; i < count; i++) amax = fmax(amax, fabs(a[i]));
    c->amax = fmax(c->amax, amax);
    c->elements += count;
    if (frexp(amax / 448.0, &exponent) == 0.5) exponent--;
    for (int64_t i = 0; i < count; i++) {
        const double scaled = ldexp(fabs(a[i]), -exponent);
        if (scaled <= 0x1p-10)
            c->zeros++;
        else if (scaled < 0x1p-6 - 0x1p-10) // from there on it is rounded to 2^-6, which is normal
            c->subnormals++;
    }
}

/* h: a row, gate columns, then up columns. */
static void add_row(counted *c, const float *h, int64_t n)
{
    double a[GROUP];
    for (int64_t first = 0; first < n; first += GROUP) {
        const int64_t count = n - first < GROUP ? n - first : GROUP;
        for (int64_t i = 0; i < count; i++) {
            const double g = (double)h[first + i];
            a[i] = g / (1.0 + exp(-g)) * (double)h[n + first + i];
        }
        add_group(c, a, count);
    }
}

/* Some blocks at equal distances. h: room for the rows of a block. */
static bool add_layer(counted *c, model *m, const block *b, int64_t rows, float *h, error *err)
{
    static const train_routing plain = {.rounding = SMOE_ROUNDING_NONE};
    train_device *dv = m->device;
    const int64_t n = m->config.intermediate;
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    int32_t blocks, tokens[BLOCK_ROWS];
    if (!experts_view(b, rows, &plain, &view, err)) return false;
    dv->ops->download(dv, &blocks, view.block_offsets + m->config.experts, sizeof blocks);
    if (!dv->ops->finish(dv, err)) return false;
    for (int64_t i = 0; i < BLOCKS && i < blocks; i++) {
        const int64_t first = (blocks < BLOCKS ? i : i * blocks / BLOCKS) * BLOCK_ROWS;
        const char *at = (const char *)view.h + (size_t)(first * 2 * n) * type_size(dv->type);
        dv->ops->download(dv, tokens, view.row_token + first, sizeof tokens);
        dv->ops->load(dv, h, at, dv->type, BLOCK_ROWS * 2 * n);
        if (!dv->ops->finish(dv, err)) return false;
        for (int64_t row = 0; row < BLOCK_ROWS; row++)
            if (tokens[row] >= 0) add_row(c, h + row * 2 * n, n);
    }
    return true;
}

bool f8_report_read(f8_report *report, model *m, int64_t rows, error *err)
{
    const model_config *config = &m->config;
    counted c = {0};
    bool done = true;
    report->amax = report->zeros = report->subnormals = (double)NAN;
    if (rows == 0) return true;
    float *h = malloc((size_t)(BLOCK_ROWS * 2 * config->intermediate) * sizeof *h);
    if (!h) return fail(err, ERROR_RUNTIME, "out of memory: %d rows of H", BLOCK_ROWS);
    for (int64_t l = config->dense_layers; done && l < config->layers; l++)
        done = add_layer(&c, m, model_experts(m, l), rows, h, err);
    free(h);
    if (!done || c.elements == 0) return done;
    report->amax = c.amax;
    report->zeros = (double)c.zeros / (double)c.elements;
    report->subnormals = (double)c.subnormals / (double)c.elements;
    return true;
}
