/* dh in e4m3 against f8.h on the host: dH and A' in dtype, and dH's bytes and scales, bit for bit; dS within
 * the rounding of its sums. The tensor cores' sums are the oracle's. */
#include "f8_cases.h"

typedef struct dh_case {
    experts_case of;
    int in_place; /* dH overwrites H */
    int broken;   /* a token whose dO has a NaN, or -1 */
} dh_case;

/* What dh reads. */
typedef struct inputs {
    quantized dout, w2; /* (T, d); transposed: (experts, n, d) */
    float *weights;     /* (rows), 0 in pad rows and some others */
    float *h;           /* (rows, width), bf16 */
} inputs;

/* What it writes, as f32 before it is rounded or quantised. */
typedef struct results {
    float *dh, *a;              /* (rows, width), (rows, n) */
    double *ds, *size_of_terms; /* (groups, rows): the part of dS, the sum of its terms' magnitudes */
} results;

static int64_t width_of(const experts_case *c)
{
    return c->gated ? 2 * c->intermediate : c->intermediate;
}

static inputs draw_inputs(const dh_case *test, const plan *p)
{
    const experts_case *c = &test->of;
    const int64_t n = c->intermediate, d = c->hidden;
    float *dout = draw(c->tokens * d, 0), *w2 = draw(c->experts * n * d, 0);
    for (int64_t i = 0; i < c->tokens * d; i++) dout[i] = ldexpf(dout[i], (int)(i / d * 5 % 60) - 30);
    for (int64_t i = 0; i < c->experts * n * d; i++) w2[i] = ldexpf(w2[i], (int)(i / (n * d)) * 4 - 5);
    if (test->broken >= 0) dout[test->broken * d + d - 1] = NAN;
    inputs in = {.dout = quantize(dout, c->tokens, 1, d, d, 1),
                 .w2 = quantize(w2, c->experts * n, 1, d, d, n),
                 .weights = draw(p->rows, 0),
                 .h = draw(p->rows * width_of(c), 0)};
    for (int64_t r = 0; r < p->rows; r++)
        if (p->row_token[r] < 0 || r % 5 == 1) in.weights[r] = 0.0f;
    free(dout), free(w2);
    return in;
}

/* dA' of a row's group as a worker warp gets it: x (count), fp16, times the result. */
static float row_of_da(const dh_case *test, const inputs *in, const plan *p, int64_t r, int64_t first,
                       int64_t count, float *x)
{
    const int64_t d = test->of.hidden, n = test->of.intermediate;
    const int32_t e = p->expert_of_row[r], token = p->row_token[r];
    uint32_t most = 0;
    for (int64_t j = 0; j < count; j++) {
        x[j] = token < 0 ? 0.0f
               : token == test->broken
                   ? NAN
                   : product(in->dout.values + token * d, in->w2.values + (e * n + first + j) * d, d);
        if (!isnan(x[j])) most = moe_f8_amax(most, x[j]);
    }
    const uint32_t exponent = most >> 23 > 20 ? most >> 23 : 20;
    for (int64_t j = 0; j < count; j++)
        x[j] = isnan(x[j]) ? NAN : f16(x[j] * moe_float_of((268 - exponent) << 23));
    return moe_float_of((exponent - 14) << 23) * (in->dout.scales[token < 0 ? 0 : token] * in->w2.scales[e]);
}

/* ReGLU, or ReLU^2. */
static void differentiate_row(const dh_case *test, const inputs *in, const plan *p, int64_t r, int64_t group,
                              const results *to)
{
    const experts_case *c = &test->of;
    const int64_t n = c->intermediate, width = width_of(c), first = group * MOE_F8_DH_FEATURES,
                  left = n - first, count = left < MOE_F8_DH_FEATURES ? left : MOE_F8_DH_FEATURES;
    float x[MOE_F8_DH_FEATURES];
    const float scale = row_of_da(test, in, p, r, first, count, x), weight = in->weights[r],
                y_weight = weight * scale, *h = in->h + r * width + first;
    double ds = 0.0, size = 0.0;
    for (int64_t j = 0; j < count; j++) {
        const float y = x[j] * y_weight, positive = h[j] <= 0.0f ? 0.0f : h[j],
                    u = c->gated ? h[n + j] : 1.0f;
        const float value = c->gated ? positive : positive * positive;
        const float slope = !c->gated ? 2.0f * positive : h[j] <= 0.0f ? 0.0f : 1.0f;
        to->dh[r * width + first + j] = y * u * slope;
        if (c->gated) to->dh[r * width + n + first + j] = y * value;
        to->a[r * n + first + j] = weight * (value * u);
        ds += (double)x[j] * (double)(value * u);
        size += fabs((double)x[j] * (double)(value * u));
    }
    to->ds[group * p->rows + r] = ds * (double)scale,
                             to->size_of_terms[group * p->rows + r] = size * (double)scale;
}

/* Are these the values, rounded to bf16? */
static int same_bf16(const float *values, const uint16_t *got, int64_t count)
{
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; i++) {
        const float of = bf16_at(got, i);
        wrong += isnan(values[i]) ? !isnan(of) : moe_bits_of(bf16(values[i])) != moe_bits_of(of);
    }
    if (wrong) printf("%lld of %lld elements differ\n", (long long)wrong, (long long)count);
    return !wrong;
}

static int same_ds(const results *want, const float *got, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (isnan(want->ds[i]) ? !isnan(got[i])
                               : !(fabs((double)got[i] - want->ds[i]) <= 1e-5 * want->size_of_terms[i]))
            return 0;
    return 1;
}

/* dH8 with its scales, and dS. */
static void compare_fp8(const char *name, const dh_case *test, const results *want, int64_t rows,
                        const moe_f8_dh *call)
{
    const experts_case *c = &test->of;
    const int64_t n = c->intermediate, width = width_of(c), groups = moe_f8_groups(n, MOE_F8_DH_FEATURES);
    uint8_t *dh8 = gpu_read(call->dh8, (size_t)(rows * width));
    float *scales = gpu_read(call->dh_scale, (size_t)(rows * groups) * 4),
          *ds = gpu_read(call->dh.ds, (size_t)(rows * groups) * 4);
    quantized q = quantize(want->dh, rows, c->gated ? 2 : 1, n, MOE_F8_DH_FEATURES, 1);
    check(!memcmp(q.bytes, dh8, (size_t)(rows * width)), name, "bytes of dH differ");
    check(!memcmp(q.scales, scales, (size_t)(rows * groups) * 4), name, "scales of dH differ");
    check(same_ds(want, ds, rows * groups), name, "dS differs");
    free_quantized(&q);
    free(dh8), free(scales), free(ds);
}

static void compare(const char *name, const dh_case *test, const results *want, int64_t rows,
                    const moe_f8_dh *call)
{
    const experts_case *c = &test->of;
    const int64_t n = c->intermediate, width = width_of(c);
    uint16_t *dh = gpu_read(call->dh.dh, (size_t)(rows * width) * 2),
             *a = gpu_read(call->dh.a, (size_t)(rows * n) * 2);
    check(same_bf16(want->dh, dh, rows * width), name, "dH differs");
    check(same_bf16(want->a, a, rows * n), name, "A' differs");
    compare_fp8(name, test, want, rows, call);
    free(dh), free(a);
}

/* ---- What dw reads ---- */

/* Of dH_w (which 0) or A'_w (1): scales of the tokens, and the expected exponents, which some rows exceed. */
typedef struct dw_rows {
    float *scales;                /* (T) */
    int32_t *expected, *exponent; /* (experts, groups), (rows, groups) */
    uint8_t *bytes;               /* as moe_f8_dw_byte has them */
    int64_t columns, count;       /* of a row, bytes */
    gpu_buffer device, device_exponent, device_expected, device_largest, device_scales;
} dw_rows;

static uint32_t group_amax(const float *row, int64_t halves, int64_t n, int64_t group)
{
    const int64_t first = group * MOE_F8_DH_FEATURES, left = n - first;
    uint32_t amax = 0;
    for (int64_t half = 0; half < halves; half++)
        for (int64_t i = 0; i < left && i < MOE_F8_DH_FEATURES; i++)
            amax = moe_f8_amax(amax, row[half * n + first + i]);
    return amax;
}

static void want_row(dw_rows *w, const float *row, int64_t r, int64_t halves, int64_t n, int64_t group,
                     int32_t expected, float token_scale)
{
    const uint32_t amax = group_amax(row, halves, n, group);
    const int64_t groups = moe_f8_groups(n, MOE_F8_DH_FEATURES), first = group * MOE_F8_DH_FEATURES;
    const int32_t exponent = moe_f8_row_exponent(expected, amax, token_scale);
    w->exponent[r * groups + group] = exponent;
    for (int64_t half = 0; half < halves; half++)
        for (int64_t j = first; j < n && j < first + MOE_F8_DH_FEATURES; j++)
            w->bytes[moe_f8_dw_byte(r, half * n + j, halves * n)] =
                moe_f8_quantize(row[half * n + j], moe_f8_row_factor(exponent, amax, token_scale));
}

/* values: (rows, columns) */
static dw_rows make_dw_rows(const experts_case *c, const plan *p, const float *values, int64_t halves,
                            const float *scales)
{
    const int64_t n = c->intermediate, groups = moe_f8_groups(n, MOE_F8_DH_FEATURES);
    const int64_t of_experts = c->experts * groups;
    dw_rows w = {.columns = halves * n, .count = p->rows * halves * n};
    w.scales = malloc((size_t)c->tokens * 4), w.expected = malloc((size_t)of_experts * 4);
    w.exponent = malloc((size_t)(p->rows * groups) * 4), w.bytes = malloc((size_t)w.count);
    for (int64_t t = 0; t < c->tokens; t++)
        w.scales[t] = scales ? scales[t] : moe_float_of((uint32_t)(131 - t * 3 % 9) << 23);
    for (int64_t i = p->rows * groups - 1; i >= 0; i--) { /* an expert's first row has the expected one */
        const int64_t r = i / groups, token = p->row_token[r] < 0 ? 0 : p->row_token[r];
        const uint32_t amax = group_amax(values + r * w.columns, halves, n, i % groups);
        w.expected[p->expert_of_row[r] * groups + i % groups] =
            moe_f8_exponent(moe_f8_scale(amax)) + moe_f8_exponent(w.scales[token]) + 1;
    }
    for (int64_t g = 0; g < groups; g++)
        w.expected[of_experts - 1 - g] = MOE_F8_LEAST; /* all rows exceed it */
    for (int64_t i = 0; i < p->rows * groups; i++) {
        const int64_t r = i / groups, token = p->row_token[r] < 0 ? 0 : p->row_token[r];
        want_row(&w, values + r * w.columns, r, halves, n, i % groups,
                 w.expected[p->expert_of_row[r] * groups + i % groups], w.scales[token]);
    }
    w.device = gpu_alloc((size_t)w.count);
    w.device_exponent = gpu_alloc((size_t)(p->rows * groups) * 4);
    w.device_expected = gpu_copy(w.expected, (size_t)of_experts * 4);
    w.device_largest = gpu_copy(w.expected, (size_t)of_experts * 4);
    w.device_scales = gpu_copy(w.scales, (size_t)c->tokens * 4);
    return w;
}

static moe_f8_dw_rows call_of(const dw_rows *w)
{
    return (moe_f8_dw_rows){(uint8_t *)w->device.memory, (int32_t *)w->device_exponent.memory,
                            (int32_t *)w->device_largest.memory, (int32_t *)w->device_expected.memory,
                            (float *)w->device_scales.memory};
}

/* C of each group of features. */
static int right_largest(const dw_rows *w, const plan *p, int64_t groups, int64_t count)
{
    int32_t *got = gpu_read(w->device_largest.memory, (size_t)count * 4), *want = malloc((size_t)count * 4);
    memcpy(want, w->expected, (size_t)count * 4);
    for (int64_t i = 0; i < p->rows * groups; i++) {
        int32_t *at = &want[p->expert_of_row[i / groups] * groups + i % groups];
        if (w->exponent[i] > *at) *at = w->exponent[i];
    }
    const int same = !memcmp(got, want, (size_t)count * 4);
    free(got), free(want);
    return same;
}

static void compare_dw_rows(const char *name, dw_rows *w, const plan *p, const experts_case *c)
{
    const int64_t groups = moe_f8_groups(c->intermediate, MOE_F8_DH_FEATURES);
    uint8_t *bytes = gpu_read(w->device.memory, (size_t)w->count);
    int32_t *exponent = gpu_read(w->device_exponent.memory, (size_t)(p->rows * groups) * 4);
    check(!memcmp(bytes, w->bytes, (size_t)w->count), name, "dw's bytes differ");
    check(!memcmp(exponent, w->exponent, (size_t)(p->rows * groups) * 4), name, "w differs");
    check(right_largest(w, p, groups, c->experts * groups), name, "the largest w differs");
    check(!gpu_free(w->device) && !gpu_free(w->device_exponent) && !gpu_free(w->device_largest) &&
              !gpu_free(w->device_expected) && !gpu_free(w->device_scales),
          name, "written outside");
    free(bytes), free(exponent);
    free(w->scales), free(w->expected), free(w->exponent), free(w->bytes);
}

/* The same with the copies for dw instead of dH and A' in dtype. */
static void check_copies(moe_launch *on, const char *name, const dh_case *test, const plan *p,
                         const inputs *in, const results *want, moe_f8_dh call)
{
    const experts_case *c = &test->of;
    const int64_t groups = moe_f8_groups(c->intermediate, MOE_F8_DH_FEATURES), halves = c->gated ? 2 : 1;
    dw_rows of_dh = make_dw_rows(c, p, want->dh, halves, NULL),
            of_a = make_dw_rows(c, p, want->a, 1, in->dout.scales);
    const gpu_buffer h = upload(in->h, p->rows * width_of(c), SMOE_TYPE_BF16);
    call.dh.h = h.memory, call.dh.dh = call.dh.a = NULL;
    call.for_dw[0] = call_of(&of_dh), call.for_dw[1] = call_of(&of_a);
    const size_t bytes = (size_t)(p->rows * width_of(c)), rows = (size_t)(p->rows * groups) * 4;
    CHECK_CUDA(cudaMemset(call.dh8, 0xff, bytes));
    CHECK_CUDA(cudaMemset(call.dh_scale, 0xff, rows));
    CHECK_CUDA(cudaMemset(call.dh.ds, 0xff, rows));
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(moe_sm90_f8_dh(on, &call));
    CHECK_CUDA(cudaStreamSynchronize(on->stream));
    compare_fp8(name, test, want, p->rows, &call);
    compare_dw_rows(name, &of_dh, p, c);
    compare_dw_rows(name, &of_a, p, c);
    check(!gpu_free(h), name, "written outside H");
}

static void check_dh(moe_launch *on, const dh_case *test)
{
    const experts_case *c = &test->of;
    const int64_t n = c->intermediate, width = width_of(c), groups = moe_f8_groups(n, MOE_F8_DH_FEATURES);
    char name[80];
    snprintf(name, sizeof name, "dh d %d n %d%s", (int)c->hidden, (int)n, c->gated ? ", gated" : "");
    puts(name);
    plan p = make_plan(c);
    inputs in = draw_inputs(test, &p);
    const results want = {malloc((size_t)(p.rows * width) * 4), malloc((size_t)(p.rows * n) * 4),
                          malloc((size_t)(p.rows * groups) * 8), malloc((size_t)(p.rows * groups) * 8)};
    for (int64_t i = 0; i < p.rows * groups; i++)
        differentiate_row(test, &in, &p, i / groups, i % groups, &want);
    const gpu_buffer h = upload(in.h, p.rows * width, SMOE_TYPE_BF16),
                     weights = gpu_copy(in.weights, (size_t)p.rows * 4),
                     dh = gpu_alloc((size_t)(p.rows * width) * 2), a = gpu_alloc((size_t)(p.rows * n) * 2),
                     ds = gpu_alloc((size_t)(p.rows * groups) * 4), dh8 = gpu_alloc((size_t)(p.rows * width)),
                     dh_scale = gpu_alloc((size_t)(p.rows * groups) * 4);
    const moe_f8_dh call = {
        .dh = {.dout = in.dout.device.memory,
               .w2 = in.w2.device.memory,
               .h = h.memory,
               .dh = test->in_place ? h.memory : dh.memory,
               .a = a.memory,
               .ds = (float *)ds.memory,
               .row_token = (int32_t *)p.tokens.memory,
               .row_weight = (float *)weights.memory,
               .lists = {.counts = p.lists.counts, .tiles = p.lists.tiles, .turn = p.lists.turn},
               .padded_rows = p.rows,
               .hidden = c->hidden,
               .intermediate = n,
               .experts = c->experts,
               .gated = c->gated,
               .activation = c->gated ? SMOE_ACTIVATION_REGLU : SMOE_ACTIVATION_RELU2},
        .do_scale = (float *)in.dout.device_scales.memory,
        .w_scale = (float *)in.w2.device_scales.memory,
        .dh8 = (uint8_t *)dh8.memory,
        .dh_scale = (float *)dh_scale.memory,
    };
    CHECK_CUDA(moe_sm90_f8_dh(on, &call));
    CHECK_CUDA(cudaStreamSynchronize(on->stream));
    compare(name, test, &want, p.rows, &call);
    check_copies(on, name, test, &p, &in, &want, call);
    check(!gpu_free(h) && !gpu_free(weights) && !gpu_free(dh) && !gpu_free(a) && !gpu_free(ds) &&
              !gpu_free(dh8) && !gpu_free(dh_scale),
          name, "written outside");
    free_quantized(&in.dout), free_quantized(&in.w2), free_plan(&p);
    free(in.weights), free(in.h), free(want.dh), free(want.a), free(want.ds), free(want.size_of_terms);
}

int main(void)
{
    smoe_context *context = open_hopper();
    moe_launch on = launch_on(context->state, SMOE_TYPE_BF16, NULL);
    static const dh_case cases[] = {
        /* narrow tiles, one group and several, more than eight; tiles of one step; then promoted sums */
        {{50, 144, 48, 4, {63, 0, 65, 1}, 1, 0, 0, 0, 0}, 0, 5},
        {{50, 16, 128, 2, {64, 700}, 0, 0, 0, 0, 0}, 1, -1},
        {{50, 272, 400, 3, {70, 1, 130}, 1, 0, 0, 0, 0}, 1, 9},
        {{50, 64, 272, 2, {64, 500}, 0, 0, 0, 0, 0}, 0, -1},
        {{9, 32, 2064, 2, {2, 5}, 1, 0, 0, 0, 0}, 0, -1},
        {{20, 2576, 16, 1, {66}, 1, 0, 0, 0, 0}, 0, 3},
        {{20, 1552, 272, 2, {5, 70}, 1, 0, 0, 0, 0}, 1, -1},
        {{2, 1552, 2064, 1, {2}, 0, 0, 0, 0, 0}, 0, -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_dh(&on, &cases[i]);
    smoe_destroy(context);
    printf("%d failures\n", failures);
    return failures != 0;
}
