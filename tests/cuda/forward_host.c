/* See forward_host.h. */
#define _GNU_SOURCE
#include "forward_host.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- 16-bit types on the host */

float to_float(smoe_type type, uint16_t v)
{
    if (type == SMOE_TYPE_BF16) {
        const uint32_t bits = (uint32_t)v << 16;
        float f;
        memcpy(&f, &bits, 4);
        return f;
    }
    const int sign = v >> 15, exponent = v >> 10 & 31, mantissa = v & 1023;
    double f = exponent == 31 ? (mantissa ? NAN : INFINITY)
               : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                              : ldexp(mantissa, -24);
    return (float)(sign ? -f : f);
}

uint16_t from_double(smoe_type type, double value)
{
    if (isnan(value)) return 0x7fff; /* a NaN of either type */
    const int digits = type == SMOE_TYPE_BF16 ? 8 : 11, low = type == SMOE_TYPE_BF16 ? -126 : -14;
    int exponent;
    frexp(value, &exponent);
    if (value == 0 || exponent - 1 < low) exponent = low + 1;
    const double unit = ldexp(1, exponent - digits), rounded = nearbyint(value / unit) * unit;
    if (type == SMOE_TYPE_BF16) {
        const float f = (float)rounded;
        uint32_t bits;
        memcpy(&bits, &f, 4);
        return (uint16_t)(bits >> 16);
    }
    const double size = fabs(rounded);
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    if (size > 65504) return sign | 0x7c00;
    if (size < ldexp(1, -14)) return sign | (uint16_t)(size * ldexp(1, 24));
    frexp(size, &exponent);
    return sign | (uint16_t)((exponent + 14) << 10 | ((int)ldexp(size, 11 - exponent) & 1023));
}

/* ---- Random numbers */

static uint32_t hash(uint64_t i, uint32_t seed)
{
    uint64_t z = i * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull + 0x2545F4914F6CDD1Dull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (uint32_t)((z ^ (z >> 31)) >> 16);
}

static double normal(uint64_t i, uint32_t seed)
{
    const double a = (hash(2 * i, seed) + 1.0) / 4294967297.0, b = hash(2 * i + 1, seed) / 4294967296.0;
    return sqrt(-2 * log(a)) * cos(6.283185307179586 * b);
}

uint16_t *fill(smoe_type type, size_t count, uint32_t seed, int integers, double scale)
{
    uint16_t *v = malloc(count * 2 + 2);
#pragma omp parallel for
    for (size_t i = 0; i < count; i++)
        v[i] = from_double(type, integers ? (hash(i, seed) % 8 < 3 ? (int)(hash(i, seed + 7) % 3) - 1 : 0)
                                          : scale * normal(i, seed));
    return v;
}

/* ---- Routing, plan and forward */

void route(const test_case *c, int32_t *ids, float *weights)
{
    enum { EDGE_COUNTS = 15 };
    static const int edges[EDGE_COUNTS] = {0,   1,   63,  64,  65,  127, 128, 129,
                                           191, 192, 193, 255, 256, 257, 320};
    const int64_t T = c->tokens, E = c->experts, K = c->topk;
    int edge = 0, left = edges[0];
    for (int64_t t = 0; t < T; t++)
        for (int64_t k = 0; k < K; k++) {
            int32_t id = 0;
            switch (c->routing) {
            case UNIFORM: id = (int32_t)((t * K + k) % E); break;
            case ONE_EXPERT: id = (int32_t)((E / 2 + k) % E); break;
            case EDGES: /* K = 1: counts in this order, the rest to the last */
                while (left == 0 && edge < EDGE_COUNTS) left = ++edge < EDGE_COUNTS ? edges[edge] : -1;
                id = edge;
                left--;
                break;
            default: {
                int again = 1;
                for (uint32_t turn = 0; again; turn++) {
                    id = (int32_t)(hash((uint64_t)(t * K + k), 100 + turn) % (uint64_t)E);
                    if (c->routing == HALF_EMPTY) id = id / 2 * 2;
                    again = 0;
                    if (c->routing != REPEATED)
                        for (int64_t j = 0; j < k; j++) again |= ids[t * K + j] == id;
                    if (c->routing == INVALID && hash((uint64_t)(t * K + k), 55) % 4 == 0) {
                        id = hash((uint64_t)t, 56) % 2 ? -1 : (int32_t)E;
                        again = 0;
                    }
                }
            }
            }
            ids[t * K + k] = id;
            weights[t * K + k] = c->rounded ? (hash((uint64_t)(t * K + k), 9) % 1000 + 1) / 1000.0f
                                            : ldexpf(1, (int)(hash((uint64_t)(t * K + k), 9) % 4) - 2);
        }
}

host_plan plan_on_host(const test_case *c, const int32_t *ids, const float *weights, int64_t padded)
{
    const int64_t T = c->tokens, E = c->experts, K = c->topk;
    host_plan p = {calloc(E, 4),
                   calloc(E + 1, 4),
                   calloc(E + 1, 4),
                   calloc(E, 4),
                   malloc(padded * 4),
                   calloc(T + 1, 4),
                   malloc((T * K + 1) * 4),
                   calloc(padded, 4),
                   0,
                   padded};
    char *counts_pair = calloc(T * K, 1);
    for (int64_t t = 0; t < T; t++)
        for (int64_t k = 0; k < K; k++) {
            const int32_t id = ids[t * K + k];
            int real = id >= 0 && id < E;
            for (int64_t j = 0; j < k; j++) real &= ids[t * K + j] != id;
            counts_pair[t * K + k] = (char)real;
            if (real) p.counts[id]++;
        }
    for (int64_t e = 0; e < E; e++) {
        p.offsets[e + 1] = p.offsets[e] + p.counts[e];
        p.blocks[e + 1] = p.blocks[e] + (p.counts[e] + 63) / 64;
        int place = 0;
        for (int64_t f = 0; f < E; f++)
            place += p.counts[f] > p.counts[e] || (p.counts[f] == p.counts[e] && f < e);
        p.order[place] = (int32_t)e;
    }
    memset(p.row_token, 0xFF, padded * 4);
    int32_t *used = calloc(E, 4);
    for (int64_t t = 0; t < T; t++) {
        p.token_offsets[t + 1] = p.token_offsets[t];
        for (int64_t k = 0; k < K; k++) {
            if (!counts_pair[t * K + k]) continue;
            const int32_t e = ids[t * K + k], row = p.blocks[e] * 64 + used[e]++;
            p.row_token[row] = (int32_t)t;
            p.row_weight[row] = weights[t * K + k];
            int32_t at = p.token_offsets[t + 1]++;
            for (; at > p.token_offsets[t] && p.token_rows[at - 1] > row; at--)
                p.token_rows[at] = p.token_rows[at - 1];
            p.token_rows[at] = row;
        }
    }
    p.rows = p.offsets[E];
    free(used);
    free(counts_pair);
    return p;
}

static double activate(smoe_activation kind, double g, double u)
{
    switch (kind) {
    case SMOE_ACTIVATION_SWIGLU: return g / (1 + exp(-g)) * u;
    case SMOE_ACTIVATION_GEGLU: return 0.5 * g * (1 + erf(g * sqrt(0.5))) * u;
    case SMOE_ACTIVATION_GEGLU_TANH:
        return 0.5 * g * (1 + tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * u;
    case SMOE_ACTIVATION_REGLU: return fmax(g, 0) * u;
    case SMOE_ACTIVATION_SWIGLU_OAI: {
        const double h = fmin(g, 7), v = fmax(-7, fmin(u, 7));
        return h / (1 + exp(-1.702 * h)) * (v + 1);
    }
    case SMOE_ACTIVATION_SILU: return g / (1 + exp(-g));
    case SMOE_ACTIVATION_GELU: return 0.5 * g * (1 + erf(g * sqrt(0.5)));
    case SMOE_ACTIVATION_RELU: return fmax(g, 0);
    default: return fmax(g, 0) * fmax(g, 0);
    }
}

void forward_on_host(const test_case *c, const host_plan *p, const uint16_t *x, const uint16_t *w1,
                     const uint16_t *b1, const uint16_t *w2, const uint16_t *b2, uint16_t *h, double *out)
{
    const int64_t d = c->hidden, n = c->intermediate, E = c->experts;
    const int gated = c->activation < SMOE_ACTIVATION_SILU;
    const int64_t width = gated ? 2 * n : n;
    const smoe_type type = c->dtype;
    float *xf = malloc(c->tokens * d * 4), *w1f = malloc(E * width * d * 4), *w2f = malloc(E * d * n * 4);
    double *y = malloc(p->padded * d * 8 + 8);
#pragma omp parallel for
    for (int64_t i = 0; i < c->tokens * d; i++) xf[i] = to_float(type, x[i]);
#pragma omp parallel for
    for (int64_t i = 0; i < E * width * d; i++) w1f[i] = to_float(type, w1[i]);
#pragma omp parallel for
    for (int64_t i = 0; i < E * d * n; i++) w2f[i] = to_float(type, w2[i]);
#pragma omp parallel for schedule(dynamic, 8)
    for (int64_t r = 0; r < (int64_t)p->blocks[E] * 64; r++) {
        int64_t e = 0;
        while (p->blocks[e + 1] * 64 <= r) e++;
        const float *row = p->row_token[r] >= 0 ? xf + p->row_token[r] * d : NULL;
        float *a = malloc(n * 4);
        for (int64_t j = 0; j < width; j++) { /* column j of H: gate columns, then up columns */
            const int64_t from = !gated || c->layout == SMOE_LAYOUT_CONCATENATED ? j
                                 : j < n                                         ? 2 * j
                                                                                 : 2 * (j - n) + 1;
            const float *w = w1f + (e * width + from) * d;
            double sum = 0;
            if (row)
                for (int64_t i = 0; i < d; i++) sum += (double)row[i] * w[i];
            if (b1) sum += to_float(type, b1[e * width + from]);
            h[r * width + j] = from_double(type, sum);
        }
        for (int64_t j = 0; j < n; j++)
            a[j] =
                to_float(type, from_double(type, activate(c->activation, to_float(type, h[r * width + j]),
                                                          gated ? to_float(type, h[r * width + n + j]) : 0)));
        for (int64_t j = 0; j < d; j++) {
            const float *w = w2f + (e * d + j) * n;
            double sum = b2 ? to_float(type, b2[e * d + j]) : 0;
            for (int64_t i = 0; i < n; i++) sum += (double)a[i] * w[i];
            y[r * d + j] = to_float(type, from_double(type, sum));
        }
        free(a);
    }
#pragma omp parallel for
    for (int64_t t = 0; t < c->tokens; t++)
        for (int64_t j = 0; j < d; j++) {
            double sum = 0;
            for (int32_t i = p->token_offsets[t]; i < p->token_offsets[t + 1]; i++)
                sum += (double)p->row_weight[p->token_rows[i]] * y[p->token_rows[i] * d + j];
            out[t * d + j] = sum;
        }
    free(xf), free(w1f), free(w2f), free(y);
}
