/* The experts with quantised operands: forward, and the backward of a row and of the weights.
 *
 *   H[r]   = (sum X8 W1_8) sx[t] s1[e] + b1[e]                   sx, so, s1, s2: scales of tokens and experts
 *   Y[r]   = (sum over groups of A: (sum A8 W2_8) sa[r, g]) s2[e] + b2[e]
 *   dA'[r] = (sum dO8 W2_8) so[t] s2[e]
 *   dX~[r] = (sum over groups of dH: (sum dH8 W1_8) sh[r, g]) s1[e]
 *   dW1[e] = 2^C sum over the rows of (e4m3 of dH[r] sx[t] 2^-w) (e4m3 of X8[t] 2^(w - C))
 *   dW2[e] = 2^C sum over the rows of (e4m3 of A'[r] so[t] 2^-w) (e4m3 of dO8[t] 2^(w - C))
 *
 * w is the exponent of a row's group: what is expected for the expert's rows, or more if the row needs more.
 * C is the largest w of the expert. What is expected is computed from the scales. */
#include "oracle/f8.h"
#include "oracle/number.h"

#include <math.h>
#include <stdlib.h>

/* Operands that the caller gives. w1 has its rows in the order of H's columns. */
typedef struct operands {
    double *x, *sx, *dout, *so;
    double *w1, *s1, *w2, *s2;
} operands;

static double *quantize_rows(const double *from, int64_t rows, int64_t columns, double **scales)
{
    double *to = oracle_alloc((size_t)(rows * columns), sizeof *to);
    *scales = oracle_alloc((size_t)rows, sizeof **scales);
    for (int64_t r = 0; r < rows; r++)
        (*scales)[r] = oracle_f8_quantize(from + r * columns, columns, to + r * columns);
    return to;
}

static operands make_operands(const smoe_layer *layer, const oracle_input *input)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate, width = oracle_h_width(layer);
    double *ordered = oracle_alloc((size_t)(layer->experts * width * hidden), sizeof *ordered);
    for (int64_t row = 0; row < layer->experts * width; row++) {
        const int64_t e = row / width, column = row % width;
        const int64_t from = e * width + oracle_w1_row(layer, (int)(column / n), column % n);
        for (int64_t i = 0; i < hidden; i++) ordered[row * hidden + i] = input->w1[from * hidden + i];
    }
    operands q = {0};
    q.x = quantize_rows(input->x, layer->tokens, hidden, &q.sx);
    if (input->dout) q.dout = quantize_rows(input->dout, layer->tokens, hidden, &q.so);
    q.w1 = quantize_rows(ordered, layer->experts, width * hidden, &q.s1);
    q.w2 = quantize_rows(input->w2, layer->experts, hidden * n, &q.s2);
    free(ordered);
    return q;
}

static void free_operands(operands *q)
{
    double *all[] = {q->x, q->sx, q->dout, q->so, q->w1, q->s1, q->w2, q->s2};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

static double stored(const smoe_layer *layer, const oracle_input *input, double value)
{
    return input->round_stores ? oracle_round_to(value, layer->dtype) : value;
}

static oracle_f8_line along(const double *at, int64_t step)
{
    return (oracle_f8_line){at, step};
}

/* ---- Forward ---- */

/* y (d) of one row whose quantised A is a8 (n), scales (groups) */
static void down_row(const smoe_layer *layer, const oracle_input *input, const operands *q, int64_t e,
                     const double *a8, const double *scales, double *y)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate;
    for (int64_t i = 0; i < hidden; i++) {
        const double *w2 = q->w2 + (e * hidden + i) * n;
        double sum = 0.0;
        for (int64_t j = 0; j < n; j += ORACLE_F8_GROUP_A) {
            const int64_t count = n - j < ORACLE_F8_GROUP_A ? n - j : ORACLE_F8_GROUP_A;
            sum += scales[j / ORACLE_F8_GROUP_A] *
                   oracle_f8_sum(along(a8 + j, 1), along(w2 + j, 1), count, input->short_sums);
        }
        y[i] = stored(layer, input, sum * q->s2[e] + (input->b2 ? input->b2[e * hidden + i] : 0.0));
    }
}

static void forward_row(const smoe_layer *layer, const oracle_input *input, const operands *q,
                        const oracle_forward *f, int64_t r, double *y)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate, width = oracle_h_width(layer);
    const int64_t e = f->row_expert[r], t = f->row_token[r];
    const bool gated = oracle_gated(layer->activation);
    double *h = f->h + r * width, *a = f->a + r * n;
    for (int64_t column = 0; column < width; column++) {
        const double sum =
            oracle_f8_sum(along(q->x + t * hidden, 1), along(q->w1 + (e * width + column) * hidden, 1),
                          hidden, input->short_sums);
        const int64_t b1 = e * width + oracle_w1_row(layer, (int)(column / n), column % n);
        h[column] = stored(layer, input, sum * q->sx[t] * q->s1[e] + (input->b1 ? input->b1[b1] : 0.0));
    }
    double *a8 = oracle_alloc((size_t)n, sizeof *a8), *scales = oracle_alloc((size_t)n, sizeof *scales);
    for (int64_t j = 0; j < n; j++) a[j] = oracle_activate(layer, h[j], gated ? h[n + j] : 0.0);
    for (int64_t j = 0; j < n; j += ORACLE_F8_GROUP_A)
        scales[j / ORACLE_F8_GROUP_A] =
            oracle_f8_quantize(a + j, n - j < ORACLE_F8_GROUP_A ? n - j : ORACLE_F8_GROUP_A, a8 + j);
    down_row(layer, input, q, e, a8, scales, y);
    free(a8);
    free(scales);
}

void oracle_f8_experts(const smoe_layer *layer, const oracle_input *input, oracle_forward *f)
{
    const int64_t hidden = layer->hidden;
    operands q = make_operands(layer, input);
    f->h = oracle_alloc((size_t)(f->rows * oracle_h_width(layer)), sizeof(double));
    f->a = oracle_alloc((size_t)(f->rows * layer->intermediate), sizeof(double));
    f->out = oracle_alloc((size_t)(layer->tokens * hidden), sizeof(double));
    double *y = oracle_alloc((size_t)(f->rows * hidden), sizeof *y);
#pragma omp parallel for schedule(dynamic, 8)
    for (int64_t r = 0; r < f->rows; r++) forward_row(layer, input, &q, f, r, y + r * hidden);
    for (int64_t r = 0; r < f->rows; r++)
        for (int64_t i = 0; i < hidden; i++)
            f->out[f->row_token[r] * hidden + i] += f->row_weight[r] * y[r * hidden + i];
    for (int64_t i = 0; i < layer->tokens * hidden; i++) f->out[i] = stored(layer, input, f->out[i]);
    free(y);
    free_operands(&q);
}

/* ---- Backward: rows ---- */

/* dH and A' of all rows, exact. */
typedef struct all_rows {
    double *dh, *weighted_a; /* (R, w), (R, n) */
} all_rows;

/* The columns of dH of features j .. j + count - 1: gate columns, with a gate also the up columns. */
static int64_t gather_group(const smoe_layer *layer, const double *dh, int64_t j, int64_t count, double *to)
{
    const int64_t n = layer->intermediate, halves = oracle_gated(layer->activation) ? 2 : 1;
    for (int64_t part = 0; part < halves; part++)
        for (int64_t i = 0; i < count; i++) to[part * count + i] = dh[part * n + j + i];
    return halves * count;
}

/* dX[t] += dX~[r], and db1 += the quantised dH, with F8_DGRAD dH as it is stored */
static void add_row(const smoe_layer *layer, const oracle_input *input, const operands *q,
                    const oracle_forward *f, int64_t r, const double *dh, oracle_backward *b)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate, width = oracle_h_width(layer);
    const int64_t e = f->row_expert[r], halves = width / n;
    double group[2 * ORACLE_F8_GROUP_DH], dh8[2 * ORACLE_F8_GROUP_DH];
    double *sums = oracle_alloc((size_t)hidden, sizeof *sums);
    for (int64_t j = 0; j < n; j += ORACLE_F8_GROUP_DH) {
        const int64_t count = n - j < ORACLE_F8_GROUP_DH ? n - j : ORACLE_F8_GROUP_DH;
        const int64_t columns = gather_group(layer, dh, j, count, group);
        const double scale = oracle_f8_quantize(group, columns, dh8);
        for (int64_t part = 0; part < halves; part++) {
            const int64_t column = part * n + j;
            for (int64_t i = 0; i < count; i++)
                b->db1[e * width + oracle_w1_row(layer, (int)part, j + i)] +=
                    input->compute == ORACLE_COMPUTE_F8 ? scale * dh8[part * count + i]
                                                        : stored(layer, input, dh[column + i]);
            for (int64_t i = 0; i < hidden; i++)
                sums[i] += scale * oracle_f8_sum(along(dh8 + part * count, 1),
                                                 along(q->w1 + (e * width + column) * hidden + i, hidden),
                                                 count, input->short_sums);
        }
    }
    for (int64_t i = 0; i < hidden; i++)
        b->dx[f->row_token[r] * hidden + i] += stored(layer, input, sums[i] * q->s1[e]);
    free(sums);
}

static void backward_row(const smoe_layer *layer, const oracle_input *input, const operands *q,
                         const oracle_forward *f, int64_t r, oracle_row *row, oracle_backward *b)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate;
    const int64_t e = f->row_expert[r], t = f->row_token[r];
    for (int64_t j = 0; j < n; j++)
        row->da[j] = oracle_f8_sum(along(q->dout + t * hidden, 1), along(q->w2 + e * hidden * n + j, n),
                                   hidden, input->short_sums) *
                     q->so[t] * q->s2[e];
    b->ds[r] = oracle_through_activation(layer, input, f, r, row);
    for (int64_t i = 0; i < hidden; i++)
        b->db2[e * hidden + i] += f->row_weight[r] * input->dout[t * hidden + i];
    add_row(layer, input, q, f, r, row->dh, b);
}

/* ---- Backward: weights ---- */

/* F8_DGRAD: from dH, A', X and dO as they are stored. */
static void add_exact_weights(const smoe_layer *layer, const oracle_input *input, const oracle_forward *f,
                              const all_rows *rows, oracle_backward *b)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate, width = oracle_h_width(layer);
    for (int64_t r = 0; r < f->rows; r++) {
        const int64_t e = f->row_expert[r], t = f->row_token[r];
        for (int64_t column = 0; column < width; column++) {
            const int64_t to = e * width + oracle_w1_row(layer, (int)(column / n), column % n);
            const double dh = stored(layer, input, rows->dh[r * width + column]);
            for (int64_t i = 0; i < hidden; i++) b->dw1[to * hidden + i] += dh * input->x[t * hidden + i];
        }
        for (int64_t j = 0; j < n; j++) {
            const double a = stored(layer, input, rows->weighted_a[r * n + j]);
            for (int64_t i = 0; i < hidden; i++)
                b->dw2[(e * hidden + i) * n + j] += a * input->dout[t * hidden + i];
        }
    }
}

static int log2_of(double power)
{
    return ilogb(power);
}

/* The rows of an expert, and one group of features. What dW sums: right (rows, width) and left (rows, d). */
typedef struct weight_group {
    int64_t first_row, count; /* of the expert */
    int64_t width;
    double *right, *left;
    int *w;
    int largest; /* C */
} weight_group;

/* The exponents of the scales that the features' rows of W1 and columns of W2 alone would have. */
static void feature_exponents(const smoe_layer *layer, const oracle_input *input, int64_t e, int64_t j,
                              int64_t count, int *of_w1, int *of_w2)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate, halves = oracle_h_width(layer) / n;
    double largest1 = 0.0, largest2 = 0.0;
    for (int64_t i = j; i < j + count; i++)
        for (int64_t k = 0; k < hidden; k++) {
            for (int64_t part = 0; part < halves; part++) {
                const int64_t row = e * halves * n + oracle_w1_row(layer, (int)part, i);
                largest1 = fmax(largest1, fabs(input->w1[row * hidden + k]));
            }
            largest2 = fmax(largest2, fabs(input->w2[(e * hidden + k) * n + i]));
        }
    *of_w1 = log2_of(oracle_f8_scale(largest1));
    *of_w2 = log2_of(oracle_f8_scale(largest2));
}

/* Of the `count` features from j on: a product of scales, with the largest over the rows. */
static int expected_exponent(const smoe_layer *layer, const oracle_input *input, const operands *q,
                             const oracle_forward *f, int64_t e, int64_t j, int64_t count, bool dw1)
{
    const bool square = oracle_gated(layer->activation) || layer->activation == SMOE_ACTIVATION_RELU2;
    const int degree = square ? 2 : 1;
    int size = -10000, log2_d = 0;
    for (int64_t r = 0; r < f->rows; r++) {
        if (f->row_expert[r] != e) continue;
        const double s = f->row_weight[r];
        const int64_t t = f->row_token[r];
        const int of_weight = s == 0.0 ? -127 : isfinite(s) ? ilogb(s) : 128;
        const int of_row = log2_of(q->so[t]) + of_weight + degree * log2_of(q->sx[t]);
        if (of_row > size) size = of_row;
    }
    while (ldexp(1.0, log2_d) < (double)layer->hidden) log2_d++;
    int of_w1, of_w2;
    feature_exponents(layer, input, e, j, count, &of_w1, &of_w2);
    const int weights = dw1 ? (degree - 1) * of_w1 + of_w2 : degree * of_w1;
    const int expected = size + weights + (square ? log2_d + 19 : (log2_d + 1) / 2 + 8);
    return expected < -126 ? -126 : expected > 127 ? 127 : expected;
}

/* right = e4m3 of values times the token's scale over 2^w; then left = e4m3 of token bytes over 2^(C - w) */
static void fill_rights(weight_group *g, int64_t i, const double *values, double token_scale, int expected)
{
    double largest = 0.0;
    bool finite = true;
    for (int64_t j = 0; j < g->width; j++) {
        finite = finite && isfinite(values[j]);
        largest = fmax(largest, fabs(values[j]));
    }
    const int own = log2_of(oracle_f8_scale(finite ? largest : (double)NAN)) + log2_of(token_scale);
    g->w[i] = own > expected ? own > 127 ? 127 : own : expected;
    if (g->w[i] > g->largest) g->largest = g->w[i];
    for (int64_t j = 0; j < g->width; j++)
        g->right[i * g->width + j] =
            finite ? oracle_f8_round(ldexp(values[j] * token_scale, -g->w[i])) : (double)NAN;
}

static void fill_lefts(const smoe_layer *layer, const oracle_forward *f, const double *tokens,
                       weight_group *g)
{
    for (int64_t i = 0; i < g->count; i++)
        for (int64_t k = 0; k < layer->hidden; k++)
            g->left[i * layer->hidden + k] = oracle_f8_round(
                ldexp(tokens[f->row_token[g->first_row + i] * layer->hidden + k], g->w[i] - g->largest));
}

static double weight_of(const smoe_layer *layer, const oracle_input *input, const weight_group *g, int64_t i,
                        int64_t column)
{
    const double sum = oracle_f8_sum(along(g->left + i, layer->hidden), along(g->right + column, g->width),
                                     g->count, input->short_sums);
    return ldexp(sum, g->largest);
}

/* Features j .. of dW1[e] and dW2[e] */
static void add_group(const smoe_layer *layer, const oracle_input *input, const operands *q,
                      const oracle_forward *f, const all_rows *rows, int64_t e, int64_t j, weight_group *g,
                      oracle_backward *b)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate, width = oracle_h_width(layer);
    const int64_t count = n - j < ORACLE_F8_GROUP_DH ? n - j : ORACLE_F8_GROUP_DH;
    double values[2 * ORACLE_F8_GROUP_DH];
    int expected = expected_exponent(layer, input, q, f, e, j, count, true);
    g->width = count * (width / n);
    g->largest = expected;
    for (int64_t i = 0; i < g->count; i++) {
        gather_group(layer, rows->dh + (g->first_row + i) * width, j, count, values);
        fill_rights(g, i, values, q->sx[f->row_token[g->first_row + i]], expected);
    }
    fill_lefts(layer, f, q->x, g);
    for (int64_t column = 0; column < g->width; column++) {
        const int64_t to = e * width + oracle_w1_row(layer, (int)(column / count), j + column % count);
        for (int64_t i = 0; i < hidden; i++) b->dw1[to * hidden + i] = weight_of(layer, input, g, i, column);
    }
    expected = expected_exponent(layer, input, q, f, e, j, count, false);
    g->width = count;
    g->largest = expected;
    for (int64_t i = 0; i < g->count; i++)
        fill_rights(g, i, rows->weighted_a + (g->first_row + i) * n + j,
                    q->so[f->row_token[g->first_row + i]], expected);
    fill_lefts(layer, f, q->dout, g);
    for (int64_t column = 0; column < count; column++)
        for (int64_t i = 0; i < hidden; i++)
            b->dw2[(e * hidden + i) * n + j + column] = weight_of(layer, input, g, i, column);
}

static void add_weights(const smoe_layer *layer, const oracle_input *input, const operands *q,
                        const oracle_forward *f, const all_rows *rows, oracle_backward *b)
{
    for (int64_t e = 0; e < layer->experts; e++) {
        weight_group g = {.first_row = f->offsets[e], .count = f->counts[e]};
        g.right = oracle_alloc((size_t)(g.count * 2 * ORACLE_F8_GROUP_DH), sizeof(double));
        g.left = oracle_alloc((size_t)(g.count * layer->hidden), sizeof(double));
        g.w = oracle_alloc((size_t)g.count, sizeof(int));
        for (int64_t j = 0; g.count && j < layer->intermediate; j += ORACLE_F8_GROUP_DH)
            add_group(layer, input, q, f, rows, e, j, &g, b);
        free(g.right);
        free(g.left);
        free(g.w);
    }
}

void oracle_f8_backward(const smoe_layer *layer, const oracle_input *input, const oracle_forward *f,
                        oracle_backward *b)
{
    const int64_t n = layer->intermediate, width = oracle_h_width(layer);
    operands q = make_operands(layer, input);
    all_rows rows = {oracle_alloc((size_t)(f->rows * width), sizeof(double)),
                     oracle_alloc((size_t)(f->rows * n), sizeof(double))};
    double *da = oracle_alloc((size_t)n, sizeof *da);
    for (int64_t r = 0; r < f->rows; r++) {
        oracle_row row = {da, rows.dh + r * width, rows.weighted_a + r * n};
        backward_row(layer, input, &q, f, r, &row, b);
    }
    if (input->compute == ORACLE_COMPUTE_F8)
        add_weights(layer, input, &q, f, &rows, b);
    else
        add_exact_weights(layer, input, f, &rows, b);
    free(da);
    free(rows.dh);
    free(rows.weighted_a);
    free_operands(&q);
}
