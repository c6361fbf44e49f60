/* The backward of a layer: dS, dH and the experts' gradients row by row, then the router's gradients. */
#include "oracle/number.h"
#include "oracle/oracle.h"

#include <math.h>
#include <stdlib.h>

static double stored(const smoe_layer *layer, const oracle_input *input, double value)
{
    return input->round_stores ? oracle_round_to(value, layer->dtype) : value;
}

static bool rounds_inside(const smoe_layer *layer, const oracle_input *input)
{
    return input->round_stores && input->round_inside && layer->dtype != SMOE_TYPE_F32;
}

/* dA' to 11 significant bits. */
static double kept_da(const smoe_layer *layer, const oracle_input *input, double value)
{
    if (!rounds_inside(layer, input) || input->exact_da) return value;
    int exponent;
    const double fraction = frexp(value, &exponent);
    return ldexp(nearbyint(ldexp(fraction, 11)), exponent - 11);
}

/* da (n) = dO[t(r)] W2[e] */
static void multiply_dout(const smoe_layer *layer, const oracle_input *input, const oracle_forward *f,
                          int64_t r, double *da)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate, e = f->row_expert[r];
    const double *dout = input->dout + f->row_token[r] * hidden;
    for (int64_t j = 0; j < n; j++) {
        da[j] = 0.0;
        for (int64_t i = 0; i < hidden; i++) da[j] += dout[i] * input->w2[(e * hidden + i) * n + j];
    }
}

double oracle_through_activation(const smoe_layer *layer, const oracle_input *input, const oracle_forward *f,
                                 int64_t r, oracle_row *g)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate, width = oracle_h_width(layer);
    const int64_t e = f->row_expert[r];
    const double *dout = input->dout + f->row_token[r] * hidden, *h = f->h + r * width, s = f->row_weight[r];
    const bool gated = oracle_gated(layer->activation);
    double ds = 0.0;
    for (int64_t i = 0; input->b2 && i < hidden; i++) ds += dout[i] * input->b2[e * hidden + i];
    for (int64_t j = 0; j < n; j++) {
        const double da = kept_da(layer, input, g->da[j]);
        const double up = gated ? h[n + j] : 0.0, a = oracle_activate(layer, h[j], up);
        ds += da * a;
        g->weighted_a[j] = s * a;
        double dgate, dup;
        oracle_activate_backward(layer, h[j], up, s * da, &dgate, &dup);
        g->dh[j] = dgate;
        if (gated) g->dh[n + j] = dup;
    }
    return ds;
}

static void round_row(const smoe_layer *layer, const oracle_input *input, double *row, int64_t count)
{
    for (int64_t i = 0; i < count; i++) row[i] = stored(layer, input, row[i]);
}

static void add_weight_gradients(const smoe_layer *layer, const oracle_input *input, const oracle_forward *f,
                                 int64_t r, const oracle_row *g, oracle_backward *b)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate, width = oracle_h_width(layer);
    const int64_t e = f->row_expert[r], t = f->row_token[r];
    for (int64_t i = 0; i < hidden; i++) {
        const double dout = input->dout[t * hidden + i];
        for (int64_t j = 0; j < n; j++) b->dw2[(e * hidden + i) * n + j] += dout * g->weighted_a[j];
        b->db2[e * hidden + i] += f->row_weight[r] * dout;
    }
    for (int64_t column = 0; column < width; column++) {
        const int64_t row = e * width + oracle_w1_row(layer, (int)(column / n), column % n);
        for (int64_t i = 0; i < hidden; i++)
            b->dw1[row * hidden + i] += g->dh[column] * input->x[t * hidden + i];
        b->db1[row] += g->dh[column];
    }
}

/* dX[t] += dX~[r] = dH[r] W1[e] */
static void add_dx(const smoe_layer *layer, const oracle_input *input, const oracle_forward *f, int64_t r,
                   const double *dh, double *dx)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate, width = oracle_h_width(layer);
    for (int64_t i = 0; i < hidden; i++) {
        double sum = 0.0;
        for (int64_t column = 0; column < width; column++) {
            const int64_t row =
                f->row_expert[r] * width + oracle_w1_row(layer, (int)(column / n), column % n);
            sum += dh[column] * input->w1[row * hidden + i];
        }
        dx[f->row_token[r] * hidden + i] += stored(layer, input, sum);
    }
}

/* dS of every row, and what the rows add to the other gradients */
static void row_gradients(const smoe_layer *layer, const oracle_input *input, const oracle_forward *f,
                          oracle_backward *b)
{
    const int64_t n = layer->intermediate, width = oracle_h_width(layer);
    oracle_row g = {.da = oracle_alloc((size_t)n, sizeof(double)),
                    .dh = oracle_alloc((size_t)width, sizeof(double)),
                    .weighted_a = oracle_alloc((size_t)n, sizeof(double))};
    for (int64_t r = 0; r < f->rows; r++) {
        multiply_dout(layer, input, f, r, g.da);
        b->ds[r] = oracle_through_activation(layer, input, f, r, &g);
        round_row(layer, input, g.dh, width);
        round_row(layer, input, g.weighted_a, n);
        add_weight_gradients(layer, input, f, r, &g, b);
        add_dx(layer, input, f, r, g.dh, b->dx);
    }
    free(g.da);
    free(g.dh);
    free(g.weighted_a);
}

/* dWr = dlogits^T X, dX += dlogits Wr; dbr = sum of dlogits that are not rounded to 16 bits */
static void router_gradients(const smoe_layer *layer, const oracle_input *input, oracle_backward *b)
{
    const int64_t hidden = layer->hidden, experts = layer->experts;
    b->drouter_weight = oracle_alloc((size_t)(experts * hidden), sizeof(double));
    b->drouter_bias = oracle_alloc((size_t)experts, sizeof(double));
    const bool inside = rounds_inside(layer, input);
    for (int64_t t = 0; t < layer->tokens; t++) {
        for (int64_t e = 0; e < experts; e++) {
            const double exact = b->dlogits[t * experts + e];
            const double dlogit = inside ? oracle_round_to(exact, layer->dtype) : exact;
            b->drouter_bias[e] += exact;
            for (int64_t i = 0; i < hidden; i++) {
                b->drouter_weight[e * hidden + i] += dlogit * input->x[t * hidden + i];
                if (input->router_weight)
                    b->dx[t * hidden + i] += dlogit * input->router_weight[e * hidden + i];
            }
        }
    }
}

/* dS as the gradient of the weights that the caller gave. */
static void weight_gradients(const smoe_layer *layer, const oracle_input *input, const oracle_forward *f,
                             oracle_backward *b)
{
    const int64_t topk = layer->topk;
    if (layer->entry == SMOE_ENTRY_FROM_ROWS) {
        b->drow_weights = oracle_alloc((size_t)layer->tokens, sizeof(double));
        for (int64_t r = 0; r < f->rows; r++) b->drow_weights[f->row_token[r]] = b->ds[r];
    }
    if (layer->entry != SMOE_ENTRY_FROM_TOPK) return;
    b->dtopk_weights = oracle_alloc((size_t)(layer->tokens * topk), sizeof(double));
    for (int64_t r = 0; r < f->rows; r++) {
        const int64_t *ids = input->topk_ids + f->row_token[r] * topk;
        int64_t k = 0;
        while (ids[k] != f->row_expert[r]) k++;
        b->dtopk_weights[f->row_token[r] * topk + k] = b->ds[r];
    }
}

/* A weight gradient that will be accumulated is not rounded here. Whoever adds it to the old gradient rounds
 * the sum. */
static void round_gradients(const smoe_layer *layer, oracle_backward *b)
{
    const int64_t experts = layer->experts, hidden = layer->hidden, width = oracle_h_width(layer);
    struct {
        double *values;
        int64_t count;
        smoe_type type;
        bool of_weights;
    } const all[] = {
        {b->dx, layer->tokens * hidden, layer->dtype, false},
        {b->dw1, experts * width * hidden, layer->gradient_type, true},
        {b->db1, experts * width, layer->gradient_type, true},
        {b->dw2, experts * hidden * layer->intermediate, layer->gradient_type, true},
        {b->db2, experts * hidden, layer->gradient_type, true},
        {b->dlogits, layer->tokens * experts, layer->logits_type, false},
        {b->drouter_weight, experts * hidden, layer->gradient_type, true},
        {b->drouter_bias, experts, layer->gradient_type, true},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        if (all[i].of_weights && layer->accumulate) continue;
        for (int64_t k = 0; all[i].values && k < all[i].count; k++)
            all[i].values[k] = oracle_round_to(all[i].values[k], all[i].type);
    }
}

void oracle_backward_run(const smoe_layer *layer, const oracle_input *input, const oracle_forward *f,
                         bool with_router, oracle_backward *b)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate, width = oracle_h_width(layer);
    const size_t experts = (size_t)layer->experts;
    *b = (oracle_backward){0};
    b->ds = oracle_alloc((size_t)f->rows, sizeof(double));
    b->dx = oracle_alloc((size_t)(layer->tokens * hidden), sizeof(double));
    b->dw1 = oracle_alloc(experts * (size_t)(width * hidden), sizeof(double));
    b->db1 = oracle_alloc(experts * (size_t)width, sizeof(double));
    b->dw2 = oracle_alloc(experts * (size_t)(hidden * n), sizeof(double));
    b->db2 = oracle_alloc(experts * (size_t)hidden, sizeof(double));
    if (input->compute == ORACLE_COMPUTE_STORAGE)
        row_gradients(layer, input, f, b);
    else
        oracle_f8_backward(layer, input, f, b);
    weight_gradients(layer, input, f, b);
    if (with_router && layer->entry == SMOE_ENTRY_FROM_LOGITS) {
        b->dlogits = oracle_alloc((size_t)layer->tokens * experts, sizeof(double));
        oracle_router_backward(layer, input, f, b->ds, b->dlogits);
        router_gradients(layer, input, b);
    }
    if (input->round_stores) round_gradients(layer, b);
}

void oracle_backward_free(oracle_backward *b)
{
    void *all[] = {b->ds,           b->dx,
                   b->dw1,          b->db1,
                   b->dw2,          b->db2,
                   b->dlogits,      b->drouter_weight,
                   b->drouter_bias, b->dtopk_weights,
                   b->drow_weights};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
    *b = (oracle_backward){0};
}
