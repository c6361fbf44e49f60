/* See bench_check.h. A token is two small problems of the oracle: its routing, as one token among all
 * experts, and its rows, as one token among only the experts it goes to. */
#include "cli/bench_check.h"

#include "oracle/compare.h"
#include "oracle/number.h"
#include "oracle/oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

double bench_tolerance(smoe_type dtype)
{
    return dtype == SMOE_F32 ? 5e-6 : dtype == SMOE_F16 ? 1e-3 : 5e-3;
}

/* `count` elements from element `first` of a buffer, as doubles. */
static bool read_values(const buffer *from, smoe_type type, int64_t first, int64_t count, double *to)
{
    const size_t element = oracle_type_bytes(type);
    void *stored = oracle_alloc((size_t)count, element);
    const bool good = from->device->download(stored, (const char *)from->data + (size_t)first * element,
                                             (size_t)count * element);
    if (good) oracle_load(to, type, stored, (size_t)count);
    free(stored);
    return good;
}

/* What a token's check works on; d hidden, w width of H. */
typedef struct token_case {
    const bench_case *c;
    int64_t token;
    double *x, *dout; // (d)
    double *router;   // (E, d) Wr, or NULL
    double *logits;   // (E), when they were given
    smoe_layer one;   // this token among all experts
    oracle_input input;
    oracle_forward routing; // its rows: experts ascending, and their weights
} token_case;

/* The pairs of a token as the library's plan has them: kept[E] is set for its experts. */
static bool read_pairs(const token_case *t, unsigned char *kept)
{
    const bench_case *c = t->c;
    const device *device_ = c->settings.device;
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    if (smoe_view_plan(c->context, &c->layer, &c->forward, &view) != SMOE_OK) return false;
    const int64_t experts = c->layer.experts;
    int32_t range[2];
    int32_t *blocks = oracle_alloc((size_t)experts + 1, sizeof *blocks);
    int32_t *rows = NULL;
    bool good = device_->download(range, view.token_offsets + t->token, sizeof range) &&
                device_->download(blocks, view.block_offsets, ((size_t)experts + 1) * sizeof *blocks);
    const int64_t count = good ? range[1] - range[0] : 0;
    good = good && count >= 0 && count <= experts;
    if (good) {
        rows = oracle_alloc((size_t)count + 1, sizeof *rows);
        good = device_->download(rows, view.token_rows + range[0], (size_t)count * sizeof *rows);
    }
    for (int64_t i = 0; good && i < count; i++)
        for (int64_t e = 0; e < experts; e++)
            if (rows[i] >= 64 * (int64_t)blocks[e] && rows[i] < 64 * (int64_t)blocks[e + 1]) kept[e] = 1;
    free(blocks);
    free(rows);
    return good;
}

/* What rounding made of the token's pairs of plain top-K. */
static bool apply_rounding(token_case *t)
{
    const smoe_layer *one = &t->one;
    oracle_forward *f = &t->routing;
    unsigned char *kept = oracle_alloc((size_t)one->experts, 1);
    const bool good = read_pairs(t, kept);
    for (int64_t e = 0; good && e < one->experts; e++) {
        if (kept[e] && f->pair[e] == ORACLE_OUT) {
            const double p = one->score == SMOE_SIGMOID ? 1 / (1 + exp(-f->logits[e])) : f->probability[e];
            f->pair[e] = ORACLE_ADDED;
            f->pair_weight[e] = p * (double)one->route_scale;
        }
        if (!kept[e]) {
            f->pair[e] = ORACLE_OUT;
            f->pair_weight[e] = 0;
        }
    }
    free(kept);
    return good;
}

/* The token's experts and weights: scored anew, or as given. */
static bool route_token(token_case *t)
{
    const bench_case *c = t->c;
    const int64_t topk = t->one.topk;
    smoe_layer plain = t->one;
    plain.rounding = SMOE_ROUND_NONE;
    bool good = true;
    if (c->layer.entry == SMOE_FROM_TOPK) {
        int64_t *ids = oracle_alloc((size_t)topk, sizeof *ids);
        double *weights = oracle_alloc((size_t)topk, sizeof *weights);
        int32_t given[64];
        good = c->settings.device->download(given, (const int32_t *)c->topk_ids.data + t->token * topk,
                                            (size_t)topk * sizeof *given) &&
               read_values(&c->topk_weights, SMOE_F32, t->token * topk, topk, weights);
        for (int64_t k = 0; good && k < topk; k++) ids[k] = given[k];
        oracle_input input = {.topk_ids = ids, .topk_weights = weights};
        if (good) oracle_round(&plain, &input, &t->routing);
        free(ids);
        free(weights);
    } else {
        oracle_logits(&plain, &t->input, &t->routing);
        oracle_route(&plain, &t->input, &t->routing);
        oracle_round(&plain, &t->input, &t->routing);
        if (t->one.rounding != SMOE_ROUND_NONE) good = apply_rounding(t);
    }
    if (good) oracle_plan(&t->one, &t->input, &t->routing);
    return good;
}

/* The weights of the token's experts as (m, rows, columns) doubles. */
static double *read_experts(const token_case *t, const buffer *from, int64_t values)
{
    const int64_t m = t->routing.rows;
    double *weights = oracle_alloc((size_t)(m * values), sizeof *weights);
    for (int64_t r = 0; r < m; r++)
        if (!read_values(from, t->one.dtype, t->routing.row_expert[r] * values, values,
                         weights + r * values)) {
            free(weights);
            return NULL;
        }
    return weights;
}

/* dX's term of the router: dlogits Wr. */
static void add_router_term(const token_case *t, const double *ds, double *dx)
{
    const int64_t d = t->one.hidden, experts = t->one.experts;
    double *dlogits = oracle_alloc((size_t)experts, sizeof *dlogits);
    oracle_router_backward(&t->one, &t->input, &t->routing, ds, dlogits);
    for (int64_t e = 0; e < experts; e++)
        for (int64_t i = 0; i < d; i++) dx[i] += dlogits[e] * t->router[e * d + i];
    free(dlogits);
}

/* out (d), and dx (d) when it is wanted, of the token in fp64. */
static bool compute_token(const token_case *t, double *out, double *dx)
{
    const int64_t d = t->one.hidden, m = t->routing.rows, width = oracle_h_width(&t->one);
    memset(out, 0, (size_t)d * sizeof *out);
    if (dx) memset(dx, 0, (size_t)d * sizeof *dx);
    if (m == 0) {
        if (dx && t->router) add_router_term(t, NULL, dx);
        return true;
    }
    double *w1 = read_experts(t, &t->c->w1, width * d),
           *w2 = read_experts(t, &t->c->w2, d * t->one.intermediate);
    int64_t *ids = oracle_alloc((size_t)m, sizeof *ids);
    for (int64_t r = 0; r < m; r++) ids[r] = r;
    const bool good = w1 && w2;
    if (good) {
        smoe_layer small = t->one;
        small.entry = SMOE_FROM_TOPK;
        small.rounding = SMOE_ROUND_NONE;
        small.experts = small.topk = m;
        const oracle_input input = {.x = t->x,
                                    .topk_ids = ids,
                                    .topk_weights = t->routing.row_weight,
                                    .w1 = w1,
                                    .w2 = w2,
                                    .dout = t->dout};
        oracle_forward forward;
        oracle_forward_run(&small, &input, &forward);
        memcpy(out, forward.out, (size_t)d * sizeof *out);
        if (dx) {
            oracle_backward backward;
            oracle_backward_run(&small, &input, &forward, false, &backward);
            memcpy(dx, backward.dx, (size_t)d * sizeof *dx);
            if (t->router) add_router_term(t, backward.ds, dx);
            oracle_backward_free(&backward);
        }
        oracle_forward_free(&forward);
    }
    free(w1);
    free(w2);
    free(ids);
    return good;
}

static bool check_token(const bench_case *c, int64_t token, double *router, double *out, double *dx)
{
    const smoe_layer *l = &c->layer;
    const int64_t d = l->hidden;
    token_case t = {.c = c, .token = token, .router = router, .one = *l};
    t.one.tokens = 1;
    t.x = oracle_alloc((size_t)d, sizeof *t.x);
    t.dout = oracle_alloc((size_t)d, sizeof *t.dout);
    t.logits = oracle_alloc((size_t)l->experts, sizeof *t.logits);
    bool good = read_values(&c->x, l->dtype, token * d, d, t.x);
    if (dx) good = good && read_values(&c->dout, l->dtype, token * d, d, t.dout);
    const bool given = c->logits.data && !router;
    if (given) good = good && read_values(&c->logits, SMOE_F32, token * l->experts, l->experts, t.logits);
    t.input = (oracle_input){.x = t.x, .router_weight = router, .logits = given ? t.logits : NULL};
    good = good && route_token(&t) && compute_token(&t, out, dx);
    oracle_forward_free(&t.routing);
    free(t.x);
    free(t.dout);
    free(t.logits);
    return good;
}

static int64_t tokens_to_check(const smoe_layer *layer)
{
    const int64_t affordable = CHECK_PRODUCTS / (3 * layer->topk * layer->intermediate * layer->hidden);
    int64_t count = affordable < CHECK_TOKENS_MOST ? affordable : CHECK_TOKENS_MOST;
    if (count < CHECK_TOKENS_LEAST) count = CHECK_TOKENS_LEAST;
    return count < layer->tokens ? count : layer->tokens;
}

bool bench_check(const bench_case *c, bench_errors *errors, error *err)
{
    const smoe_layer *l = &c->layer;
    const int64_t d = l->hidden, count = tokens_to_check(l);
    const size_t values = (size_t)(count * d);
    double *want = oracle_alloc(4 * values, sizeof *want), *router = NULL;
    double *want_dx = want + values, *out = want + 2 * values, *dx = want + 3 * values;
    bool good = true;
    if (c->router_weight.data) {
        router = oracle_alloc((size_t)(l->experts * d), sizeof *router);
        good = read_values(&c->router_weight, l->dtype, 0, l->experts * d, router);
    }
    for (int64_t i = 0; good && i < count; i++) {
        const int64_t token = count > 1 ? i * (l->tokens - 1) / (count - 1) : 0;
        good = check_token(c, token, router, want + i * d, c->settings.backward ? want_dx + i * d : NULL) &&
               read_values(&c->out, l->dtype, token * d, d, out + i * d);
        if (c->settings.backward) good = good && read_values(&c->dx, l->dtype, token * d, d, dx + i * d);
    }
    errors->forward = oracle_relative_error(out, want, values);
    errors->backward = c->settings.backward ? oracle_relative_error(dx, want_dx, values) : NAN;
    free(want);
    free(router);
    return good || fail(err, ERROR_RUNTIME, "results could not be read back for the check");
}
