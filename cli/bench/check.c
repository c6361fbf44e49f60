/* See check.h. A token's routing is a small problem of the oracle, one token among all experts. Its
 * rows are then computed in fp64 from the stored weights, an expert at a time: of the largest layers a
 * handful of experts is gigabytes. Tokens are checked side by side. */
#include "cli/bench/check.h"

#include "oracle/compare.h"
#include "oracle/number.h"
#include "oracle/oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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
    const smoe_plan_view *view;
    const double *decoded; // (2^16) the value of every 16-bit pattern; NULL: f32
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
    const smoe_plan_view view = *t->view;
    const int64_t experts = c->run.layer.experts;
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

/* Applies what rounding did to the token's pairs of plain top-K. */
static bool apply_rounding(token_case *t)
{
    const smoe_layer *one = &t->one;
    oracle_forward *f = &t->routing;
    unsigned char *kept = oracle_alloc((size_t)one->experts, 1);
    const bool good = read_pairs(t, kept);
    for (int64_t e = 0; good && e < one->experts; e++) {
        if (kept[e] && f->pair[e] == ORACLE_OUT) {
            f->pair[e] = ORACLE_ADDED;
            f->pair_weight[e] = oracle_added_weight(one, f, e);
        }
        if (!kept[e]) {
            f->pair[e] = ORACLE_OUT;
            f->pair_weight[e] = 0;
        }
    }
    free(kept);
    return good;
}

/* The token's experts and weights: computed from the logits, or as given. */
static bool route_token(token_case *t)
{
    const bench_case *c = t->c;
    const int64_t topk = t->one.topk;
    smoe_layer plain = t->one;
    plain.rounding = SMOE_ROUNDING_NONE;
    bool good = true;
    if (c->run.layer.entry == SMOE_ENTRY_FROM_TOPK) {
        int64_t *ids = oracle_alloc((size_t)topk, sizeof *ids);
        double *weights = oracle_alloc((size_t)topk, sizeof *weights);
        int32_t given[64];
        good = c->settings.device->download(
                   given, (const int32_t *)slot_data(&c->run, SLOT_TOPK_IDS) + t->token * topk,
                   (size_t)topk * sizeof *given) &&
               read_values(slot_memory(&c->run, SLOT_TOPK_WEIGHTS), SMOE_TYPE_F32, t->token * topk, topk,
                           weights);
        for (int64_t k = 0; good && k < topk; k++) ids[k] = given[k];
        oracle_input input = {.topk_ids = ids, .topk_weights = weights};
        if (good) oracle_round(&plain, &input, &t->routing);
        free(ids);
        free(weights);
    } else {
        oracle_logits(&plain, &t->input, &t->routing);
        for (int64_t e = 0; e < plain.experts; e++) // the scores are computed from the stored logits
            t->routing.logits[e] = oracle_round_to(t->routing.logits[e], plain.logits_type);
        oracle_route(&plain, &t->input, &t->routing);
        oracle_round(&plain, &t->input, &t->routing);
        if (t->one.rounding != SMOE_ROUNDING_NONE) good = apply_rounding(t);
    }
    if (good) oracle_plan(&t->one, &t->input, &t->routing);
    return good;
}

/* One expert's weights as they are stored, and room for one of their rows. */
typedef struct expert {
    void *w1, *w2;  // (w, d), (d, n)
    double *row;    // (max(d, n))
    double *h, *dh; // (w): gate features, then up features
    double *a, *da; // (n)
} expert;

static bool read_expert(const token_case *t, int64_t e, expert *to)
{
    const device *on = t->c->settings.device;
    const size_t element = oracle_type_bytes(t->one.dtype);
    const size_t w2 = (size_t)(t->one.hidden * t->one.intermediate) * element;
    const size_t w1 = (size_t)(oracle_h_width(&t->one) * t->one.hidden) * element;
    return on->download(to->w1, (const char *)slot_data(&t->c->run, SLOT_W1) + (size_t)e * w1, w1) &&
           on->download(to->w2, (const char *)slot_data(&t->c->run, SLOT_W2) + (size_t)e * w2, w2);
}

/* Row `row` of a stored matrix with `columns` columns. */
static const double *load_row(const token_case *t, const void *matrix, int64_t row, int64_t columns,
                              double *to)
{
    const uint16_t *halves = (const uint16_t *)matrix + row * columns;
    if (!t->decoded) oracle_load(to, t->one.dtype, (const float *)matrix + row * columns, (size_t)columns);
    for (int64_t i = 0; t->decoded && i < columns; i++) to[i] = t->decoded[halves[i]];
    return to;
}

static double dot(const double *a, const double *b, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

static void add_scaled(double *to, double scale, const double *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++) to[i] += scale * from[i];
}

/* out += s W2 act(W1 x) */
static void row_forward(const token_case *t, const expert *e, double s, double *out)
{
    const int64_t d = t->one.hidden, n = t->one.intermediate, width = oracle_h_width(&t->one);
    for (int64_t j = 0; j < width; j++)
        e->h[j] = dot(t->x, load_row(t, e->w1, oracle_w1_row(&t->one, (int)(j / n), j % n), d, e->row), d);
    for (int64_t j = 0; j < n; j++) e->a[j] = oracle_activate(&t->one, e->h[j], width > n ? e->h[n + j] : 0);
    for (int64_t i = 0; i < d; i++) out[i] += s * dot(e->a, load_row(t, e->w2, i, n, e->row), n);
}

/* dx += W1^T dact(h, s W2^T dO); returns dS. After row_forward. */
static double row_backward(const token_case *t, const expert *e, double s, double *dx)
{
    const int64_t d = t->one.hidden, n = t->one.intermediate, width = oracle_h_width(&t->one);
    memset(e->da, 0, (size_t)n * sizeof *e->da);
    for (int64_t i = 0; i < d; i++) add_scaled(e->da, t->dout[i], load_row(t, e->w2, i, n, e->row), n);
    for (int64_t j = 0; j < n; j++) {
        double unused, *up = width > n ? &e->dh[n + j] : &unused;
        oracle_activate_backward(&t->one, e->h[j], width > n ? e->h[n + j] : 0, s * e->da[j], &e->dh[j], up);
    }
    for (int64_t j = 0; j < width; j++)
        add_scaled(dx, e->dh[j], load_row(t, e->w1, oracle_w1_row(&t->one, (int)(j / n), j % n), d, e->row),
                   d);
    return dot(e->da, e->a, n);
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

static void *room(int64_t count, size_t bytes)
{
    return oracle_alloc((size_t)count, bytes);
}

/* out (d), and dx (d) when it is wanted, of the token in fp64, one of its experts after the other. */
static bool compute_token(const token_case *t, double *out, double *dx)
{
    const int64_t d = t->one.hidden, n = t->one.intermediate, width = oracle_h_width(&t->one);
    const size_t element = oracle_type_bytes(t->one.dtype), number = sizeof(double);
    const expert e = {.w1 = room(width * d, element),
                      .w2 = room(d * n, element),
                      .row = room(d > n ? d : n, number),
                      .h = room(width, number),
                      .dh = room(width, number),
                      .a = room(n, number),
                      .da = room(n, number)};
    double *ds = room(t->routing.rows + 1, number);
    memset(out, 0, (size_t)d * sizeof *out);
    if (dx) memset(dx, 0, (size_t)d * sizeof *dx);
    bool good = true;
    for (int64_t r = 0; good && r < t->routing.rows; r++) {
        expert this = e;
        good = read_expert(t, t->routing.row_expert[r], &this);
        if (!good) break;
        row_forward(t, &this, t->routing.row_weight[r], out);
        if (dx) ds[r] = row_backward(t, &this, t->routing.row_weight[r], dx);
    }
    if (good && dx && t->router) add_router_term(t, ds, dx);
    void *all[] = {e.w1, e.w2, e.row, e.h, e.dh, e.a, e.da, ds};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
    return good;
}

/* The same for all tokens of a check. */
typedef struct check_context {
    const bench_case *c;
    smoe_plan_view view;
    double *decoded, *router; // as in token_case
} check_context;

static bool check_token(const check_context *with, int64_t token, double *out, double *dx)
{
    const bench_case *c = with->c;
    const smoe_layer *l = &c->run.layer;
    const int64_t d = l->hidden;
    double *const router = with->router;
    token_case t = {
        .c = c, .view = &with->view, .decoded = with->decoded, .token = token, .router = router, .one = *l};
    t.one.tokens = 1;
    t.x = oracle_alloc((size_t)d, sizeof *t.x);
    t.dout = oracle_alloc((size_t)d, sizeof *t.dout);
    t.logits = oracle_alloc((size_t)l->experts, sizeof *t.logits);
    bool good = read_values(slot_memory(&c->run, SLOT_X), l->dtype, token * d, d, t.x);
    if (dx) good = good && read_values(slot_memory(&c->run, SLOT_DOUT), l->dtype, token * d, d, t.dout);
    const bool given = slot_data(&c->run, SLOT_LOGITS) && !router;
    if (given)
        good = good && read_values(slot_memory(&c->run, SLOT_LOGITS), l->logits_type, token * l->experts,
                                   l->experts, t.logits);
    t.input = (oracle_input){.x = t.x, .router_weight = router, .logits = given ? t.logits : NULL};
    good = good && route_token(&t) && compute_token(&t, out, dx);
    oracle_forward_free(&t.routing);
    free(t.x);
    free(t.dout);
    free(t.logits);
    return good;
}

/* The value of every pattern of a 16-bit type; NULL for others. */
static double *decode_all(smoe_type type)
{
    enum { PATTERNS = 1 << 16 };
    if (oracle_type_bytes(type) != 2) return NULL;
    double *decoded = oracle_alloc(PATTERNS, sizeof *decoded);
    for (int i = 0; i < PATTERNS; i++) {
        const uint16_t pattern = (uint16_t)i;
        oracle_load(&decoded[i], type, &pattern, 1);
    }
    return decoded;
}

static int64_t tokens_to_check(const smoe_layer *layer)
{
    const int64_t affordable = CHECK_PRODUCTS / (3 * layer->topk * layer->intermediate * layer->hidden);
    int64_t count = affordable < CHECK_TOKENS_MOST ? affordable : CHECK_TOKENS_MOST;
    if (count < CHECK_TOKENS_LEAST) count = CHECK_TOKENS_LEAST;
    return count < layer->tokens ? count : layer->tokens;
}

static bool open_check(check_context *with, const bench_case *c)
{
    const int64_t values = c->run.layer.experts * c->run.layer.hidden;
    *with = (check_context){.c = c, .view = SMOE_PLAN_VIEW_INIT};
    if (smoe_view_plan(c->run.context, &c->run.layer, &c->run.forward, &with->view) != SMOE_OK) return false;
    with->decoded = decode_all(c->run.layer.dtype);
    if (!slot_data(&c->run, SLOT_ROUTER_WEIGHT)) return true;
    with->router = oracle_alloc((size_t)values, sizeof *with->router);
    return read_values(slot_memory(&c->run, SLOT_ROUTER_WEIGHT), c->run.layer.dtype, 0, values, with->router);
}

bool bench_check(const bench_case *c, bench_errors *errors, error *err)
{
    const smoe_layer *l = &c->run.layer;
    const bool backward = c->settings.backward;
    const int64_t d = l->hidden, count = tokens_to_check(l);
    const size_t values = (size_t)(count * d);
    double *want = oracle_alloc(4 * values, sizeof *want);
    double *want_dx = want + values, *out = want + 2 * values, *dx = want + 3 * values;
    check_context with;
    bool good = open_check(&with, c);
#pragma omp parallel for schedule(dynamic) reduction(&& : good)
    for (int64_t i = 0; i < count; i++) {
        const int64_t token = count > 1 ? i * (l->tokens - 1) / (count - 1) : 0;
        good = good && check_token(&with, token, want + i * d, backward ? want_dx + i * d : NULL) &&
               read_values(slot_memory(&c->run, SLOT_OUT), l->dtype, token * d, d, out + i * d) &&
               (!backward || read_values(slot_memory(&c->run, SLOT_DX), l->dtype, token * d, d, dx + i * d));
    }
    errors->forward = oracle_relative_error(out, want, values);
    errors->backward = backward ? oracle_relative_error(dx, want_dx, values) : NAN;
    free(want);
    free(with.decoded);
    free(with.router);
    return good || fail(err, ERROR_RUNTIME, "results could not be read back for the check");
}
