/* The fp8 kernels of Hopper against the host, bit for bit: rows, weights, what is expected for dw. up, down
 * and dx_rows against the products of what they read. */
#include "cpu/experts.h"
#include "f8_cases.h"

/* ---- Rows ---- */

static void check_rows(const moe_launch *on, int64_t rows, int64_t columns)
{
    char name[80];
    snprintf(name, sizeof name, "rows %d x %d", (int)rows, (int)columns);
    puts(name);
    float *x = draw(rows * columns, 0);
    for (int64_t r = 0; r < rows; r++) /* scales over the whole range, a NaN, an inf, a row of zeros */
        for (int64_t i = 0; i < columns; i++) {
            const float value = i == r * 480 % columns ? 64.0f : x[r * columns + i]; /* the largest */
            x[r * columns + i] = r % 7 == 3 ? 0.0f : bf16(ldexpf(value, (int)(r * 37 % 250) - 130));
        }
    x[columns + 5] = NAN;
    x[2 * columns + columns - 1] = -INFINITY;
    const gpu_buffer from = upload(x, rows * columns, SMOE_TYPE_BF16),
                     bytes = gpu_alloc((size_t)(rows * columns)), scale = gpu_alloc((size_t)rows * 4);
    const moe_f8_rows call = {from.memory, (uint8_t *)bytes.memory, (float *)scale.memory, rows, columns};
    CHECK_CUDA(moe_sm90_f8_rows(on, &call));
    CHECK_CUDA(cudaStreamSynchronize(on->stream));
    uint8_t *got = gpu_read(bytes.memory, (size_t)(rows * columns));
    float *scales = gpu_read(scale.memory, (size_t)rows * 4);
    int same_bytes = 1, same_scales = 1;
    for (int64_t r = 0; r < rows; r++) {
        const uint32_t amax = largest(x + r * columns, columns);
        same_scales &= scales[r] == moe_f8_scale(amax);
        for (int64_t i = 0; i < columns; i++)
            same_bytes &= got[r * columns + i] == moe_f8_quantize(x[r * columns + i], moe_f8_factor(amax));
    }
    check(same_bytes, name, "bytes differ");
    check(same_scales, name, "scales differ");
    check(!gpu_free(from) && !gpu_free(bytes) && !gpu_free(scale), name, "written outside");
    free(x), free(got), free(scales);
}

/* ---- Weights ---- */

typedef struct shape {
    int64_t hidden, intermediate, experts;
    int gated, interleaved;
    smoe_type type;
    int64_t first, count; /* of the experts that are quantised */
} shape;

static moe_problem problem_of(const shape *s)
{
    moe_problem p = {0};
    p.layer.hidden = s->hidden, p.layer.intermediate = s->intermediate, p.layer.experts = s->experts;
    p.layer.layout = s->interleaved ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
    p.gated = s->gated, p.h_width = s->gated ? 2 * s->intermediate : s->intermediate;
    p.experts_here = s->experts;
    return p;
}

/* Every expert and group of features has another scale; in one group of W1 the gate's elements are larger, in
 * the next one those of up. Those of up's first row, which is seldom a tile's first, are the largest. */
static float *draw_w1(const shape *s, const moe_problem *p)
{
    const int64_t count = s->count * p->h_width * s->hidden;
    float *w1 = draw(count, 0);
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = i / s->hidden % p->h_width, e = i / s->hidden / p->h_width;
        const int64_t half = s->interleaved ? row % 2 : row / s->intermediate;
        const int64_t feature = s->interleaved ? row / 2 : row % s->intermediate;
        const int64_t group = feature / MOE_F8_DH_FEATURES, first_of_up = half == 1 && feature == 0;
        const int k = (int)(4 - e * 5 + 2 * group - 3 * ((group + half) % 2) + 8 * first_of_up);
        w1[i] = (float)oracle_round_to(ldexp((double)w1[i], k), s->type);
    }
    return w1;
}

static float *draw_w2(const shape *s)
{
    const int64_t one = s->hidden * s->intermediate;
    float *w2 = draw(s->count * one, 0);
    for (int64_t i = 0; i < s->count * one; i++) {
        const int group = (int)(i % s->intermediate / MOE_F8_DH_FEATURES);
        w2[i] = (float)oracle_round_to(ldexp((double)w2[i], group), s->type);
    }
    w2[one / 2] = NAN; /* the first expert's */
    return w2;
}

static void check_weights(const moe_launch *on, const shape *s)
{
    char name[100];
    snprintf(name, sizeof name, "weights d %d n %d, experts %d to %d of %d", (int)s->hidden,
             (int)s->intermediate, (int)s->first, (int)(s->first + s->count - 1), (int)s->experts);
    puts(name);
    const moe_problem p = problem_of(s);
    const size_t bytes = (size_t)moe_f8_weights_at(&p, NULL).bytes;
    float *w1 = draw_w1(s, &p), *w2 = draw_w2(s);
    const gpu_buffer from1 = upload(w1, s->count * p.h_width * s->hidden, s->type),
                     from2 = upload(w2, s->count * s->hidden * s->intermediate, s->type),
                     to = gpu_alloc(bytes);
    const moe_f8_quantized call = {from1.memory, from2.memory,  s->type,   moe_f8_weights_at(&p, to.memory),
                                   s->first,     s->count,      s->hidden, s->intermediate,
                                   p.h_width,    s->interleaved};
    moe_launch one_cta = *on; /* whose shared memory has no room for the larger matrices */
    one_cta.sms = 1;
    CHECK_CUDA(moe_sm90_f8_weights(s->first ? &one_cta : on, &call));
    CHECK_CUDA(moe_sm90_f8_weights(s->first ? on : &one_cta, &call)); /* the counters begin at 0 */
    CHECK_CUDA(cudaStreamSynchronize(on->stream));
    uint8_t *got = gpu_read(to.memory, bytes), *wanted = malloc(bytes);
    memset(wanted, 0xff, bytes);
    smoe_context cpu = {.threads = 1};
    smoe_quantize_args args = SMOE_QUANTIZE_ARGS_INIT;
    args.w1 = w1, args.w2 = w2, args.weight_type = SMOE_TYPE_F32, args.first_expert = s->first;
    args.experts = s->count, args.weights_f8 = wanted, args.weights_f8_size = bytes;
    check(moe_cpu_quantize_weights(&cpu, &p, &args, NULL) == SMOE_OK, name, "the CPU");
    /* All but `work`. Other experts' parts stay as they were. */
    const moe_f8_weights w = moe_f8_weights_at(&p, wanted);
    const void *parts[] = {w.w1, w.w1_t, w.w2, w.w2_t, w.scale1, w.scale2, w.group1, w.group2, w.work};
    static const char *const names[] = {"W1",     "W1 transposed", "W2",     "W2 transposed",
                                        "scale1", "scale2",        "group1", "group2"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const size_t first = (size_t)((const uint8_t *)parts[i] - wanted);
        const size_t end = (size_t)((const uint8_t *)parts[i + 1] - wanted);
        check(!memcmp(got + first, wanted + first, end - first), name, names[i]);
    }
    check(!gpu_free(from1) && !gpu_free(from2) && !gpu_free(to), name, "written outside");
    free(w1), free(w2), free(got), free(wanted);
}

/* ---- What is expected for dw: 2^k of random k where f8.h has scales ---- */

static float *draw_powers(int64_t count, int least, int most)
{
    float *powers = malloc((size_t)count * sizeof *powers);
    for (int64_t i = 0; i < count; i++)
        powers[i] = ldexpf(1.0f, least + (int)((double)(most - least) * fabs((double)uniform()) + 0.5));
    return powers;
}

static void check_expect(const moe_launch *on, const experts_case *c)
{
    char name[80];
    snprintf(name, sizeof name, "expected n %d, %d tokens%s", (int)c->intermediate, (int)c->tokens,
             c->gated ? ", gated" : "");
    puts(name);
    plan p = make_plan(c);
    const int64_t groups = moe_f8_groups(c->intermediate, MOE_F8_DH_FEATURES), count = c->experts * groups;
    float *x_scale = draw_powers(c->tokens + 1, -30, 5), *do_scale = draw_powers(c->tokens + 1, -40, -3),
          *weight = draw(p.rows + 1, 0), *group1 = draw_powers(count, -20, 0),
          *group2 = draw_powers(count, -20, 0);
    if (c->tokens) x_scale[1 % c->tokens] = 1.0f, do_scale[1 % c->tokens] = 1.0f; /* as of a NaN */
    group2[0] = 1.0f, group1[count - 1] = 0x1p-126f;                              /* of a NaN, of zeros */
    weight[0] = NAN;
    for (int64_t r = 3000; r < p.rows; r += 4000) weight[r] = 0x1p120f; /* of one row in the midst */
    int32_t counts[4], *expected[2] = {malloc((size_t)count * 4), malloc((size_t)count * 4)};
    for (int e = 0; e < c->experts; e++) counts[e] = (int32_t)c->counts[e];
    moe_problem problem = {.gated = c->gated};
    problem.layer.hidden = c->hidden, problem.layer.intermediate = c->intermediate;
    problem.layer.experts = c->experts, problem.layer.activation = SMOE_ACTIVATION_GELU;
    const smoe_context cpu = {.threads = 1};
    const moe_plan_arrays arrays = {
        .row_token = p.row_token, .row_weight = weight, .counts = counts, .block_offsets = p.block_offsets};
    const moe_cpu_pass pass = {.context = &cpu,
                               .problem = &problem,
                               .plan = &arrays,
                               .f8 = {.weights = {.group1 = group1, .group2 = group2},
                                      .scale_x = x_scale,
                                      .scale_dout = do_scale,
                                      .expected = {expected[0], expected[1]}}};
    moe_cpu_f8_expect(&pass);
    const float *from[] = {x_scale, do_scale, weight, group1, group2};
    const int64_t of[] = {c->tokens + 1, c->tokens + 1, p.rows + 1, count, count};
    gpu_buffer in[5], out[4], rows = gpu_copy(counts, sizeof counts);
    for (int i = 0; i < 5; i++) in[i] = gpu_copy(from[i], (size_t)of[i] * 4);
    for (int i = 0; i < 4; i++) out[i] = gpu_alloc((size_t)count * 4);
    const moe_f8_expect call = {
        (float *)in[0].memory,
        (float *)in[1].memory,
        (int32_t *)p.tokens.memory,
        (float *)in[2].memory,
        (int32_t *)rows.memory,
        (int32_t *)p.offsets.memory,
        (float *)in[3].memory,
        (float *)in[4].memory,
        {(int32_t *)out[0].memory, (int32_t *)out[1].memory},
        {(int32_t *)out[2].memory, (int32_t *)out[3].memory},
        c->experts,
        (int32_t)groups,
        moe_f8_degree(&problem),
        moe_f8_expected_of_size(&problem),
    };
    CHECK_CUDA(moe_sm90_f8_expect(on, &call));
    CHECK_CUDA(cudaStreamSynchronize(on->stream));
    for (int i = 0; i < 4; i++) {
        int32_t *got = gpu_read(out[i].memory, out[i].bytes);
        check(!memcmp(got, expected[i % 2], (size_t)count * 4), name, i < 2 ? "expected" : "largest");
        check(!gpu_free(out[i]), name, "written outside");
        free(got);
    }
    for (int i = 0; i < 5; i++) gpu_free(in[i]);
    gpu_free(rows), free_plan(&p);
    free(x_scale), free(do_scale), free(weight), free(group1), free(group2), free(expected[0]),
        free(expected[1]);
}

/* ---- up ---- */

/* The part of `size`, plus the sum of the products' magnitudes times scale, by which a value is off. */
static double deviation(float off, const double *a, const double *b, int64_t count, float scale, float size)
{
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += fabs(a[i] * b[i]);
    const double part = fabs((double)off) / (sum * (double)scale + fabs((double)size));
    return isnan(part) ? INFINITY : part;
}

/* H of every row, pad rows too. b1 is in the order of `layout`. `product` rounds as others found the tensor
 * cores to do. If these round otherwise, `most` is below 0.01; with another scale or row it is above. */
static int same_h(const experts_case *c, const plan *p, const quantized *x, const quantized *w,
                  const float *b1, const uint16_t *h)
{
    const int64_t n = c->intermediate, d = c->hidden, width = c->gated ? 2 * n : n;
    int64_t wrong = 0;
    double most = 0.0;
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t j = 0; j < width; j++) {
            const int32_t e = p->expert_of_row[r], token = p->row_token[r] < 0 ? 0 : p->row_token[r];
            const int64_t in_layout = !c->gated || !c->interleaved ? j : j < n ? 2 * j : 2 * (j - n) + 1;
            const int64_t count = p->row_token[r] < 0 ? 0 : d;
            const double *left = x->values + token * d, *right = w->values + (e * width + j) * d;
            const float scale = x->scales[token] * w->scales[e], sum = product(left, right, count) * scale;
            const float bias = c->biases ? b1[e * width + in_layout] : 0.0f;
            const float wanted = bf16(sum + bias), got = bf16_at(h, r * width + j);
            wrong += got != wanted;
            if (got != wanted) most = fmax(most, deviation(got - wanted, left, right, count, scale, bias));
        }
    if (wrong)
        printf("%lld of %lld elements of H differ, by up to %.1e of their products' magnitudes\n",
               (long long)wrong, (long long)(p->rows * width), most);
    return !wrong;
}

/* A's bytes and scales, given H. */
static int same_a(const experts_case *c, int64_t rows, const uint16_t *h, const uint8_t *bytes,
                  const float *scales)
{
    const int64_t n = c->intermediate, width = c->gated ? 2 * n : n;
    float *a = malloc((size_t)(rows * n) * 4);
    for (int64_t i = 0; i < rows * n; i++) {
        const float g = bf16_at(h, i / n * width + i % n), positive = g < 0.0f ? 0.0f : g;
        a[i] = c->gated ? positive * bf16_at(h, i / n * width + n + i % n) : positive * positive;
    }
    quantized q = quantize(a, rows, 1, n, MOE_F8_A_FEATURES, 1);
    const int same = !memcmp(q.bytes, bytes, (size_t)(rows * n)) &&
                     !memcmp(q.scales, scales, (size_t)(rows * moe_f8_groups(n, MOE_F8_A_FEATURES)) * 4);
    free_quantized(&q);
    free(a);
    return same;
}

static void check_up(moe_launch *on, const experts_case *c)
{
    char name[80];
    snprintf(name, sizeof name, "up d %d n %d%s", (int)c->hidden, (int)c->intermediate,
             c->gated ? ", gated" : "");
    puts(name);
    plan p = make_plan(c);
    const int64_t n = c->intermediate, d = c->hidden, width = c->gated ? 2 * n : n;
    float *x = draw(c->tokens * d, 0), *w1 = draw(c->experts * width * d, 0),
          *b1 = draw(c->experts * width, 0);
    for (int64_t i = 0; i < c->tokens * d; i++) x[i] = ldexpf(x[i], (int)(i / d * 5 % 60) - 30);
    quantized x8 = quantize(x, c->tokens, 1, d, d, 1), w8 = quantize(w1, c->experts * width, 1, d, d, width);
    const size_t groups = (size_t)moe_f8_groups(n, MOE_F8_A_FEATURES), rows = (size_t)p.rows;
    const gpu_buffer bias = upload(b1, c->experts * width, SMOE_TYPE_BF16),
                     h = gpu_alloc(rows * (size_t)width * 2), a = gpu_alloc(rows * (size_t)n),
                     a_scale = gpu_alloc(rows * groups * 4);
    const moe_f8_up call = {
        .up = {.x = x8.device.memory,
               .w1 = w8.device.memory,
               .b1 = c->biases ? bias.memory : NULL,
               .h = h.memory,
               .a = a.memory,
               .row_token = (int32_t *)p.tokens.memory,
               .block_offsets = (int32_t *)p.offsets.memory,
               .block_stride = 1,
               .lists = p.lists,
               .rows = p.rows,
               .h_rows = p.rows,
               .hidden = d,
               .intermediate = n,
               .experts = c->experts,
               .gated = c->gated,
               .interleaved = c->interleaved,
               .activation = c->gated ? SMOE_ACTIVATION_REGLU : SMOE_ACTIVATION_RELU2},
        .x_scale = (float *)x8.device_scales.memory,
        .w_scale = (float *)w8.device_scales.memory,
        .a_scale = (float *)a_scale.memory,
    };
    CHECK_CUDA(moe_sm90_f8_up(on, &call));
    CHECK_CUDA(cudaStreamSynchronize(on->stream));
    uint16_t *got_h = gpu_read(h.memory, h.bytes);
    uint8_t *got_a = gpu_read(a.memory, a.bytes);
    float *got_scales = gpu_read(a_scale.memory, a_scale.bytes);
    check(same_h(c, &p, &x8, &w8, b1, got_h), name, "H differs");
    check(same_a(c, p.rows, got_h, got_a, got_scales), name, "A differs");
    check(!gpu_free(bias) && !gpu_free(h) && !gpu_free(a) && !gpu_free(a_scale), name, "written outside");
    free_quantized(&x8), free_quantized(&w8), free_plan(&p);
    free(x), free(w1), free(b1), free(got_h), free(got_a), free(got_scales);
}

/* ---- down ---- */

/* Y = A W^T + b, sums over `width`; W (experts, d, width). */
static int same_y(const experts_case *c, const plan *p, int64_t width, const float *a, const float *w,
                  const float *b, const uint16_t *y)
{
    int64_t wrong = 0;
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t j = 0; j < c->columns; j++) {
            const int32_t e = p->expert_of_row[r];
            const int64_t column = c->first_column + j;
            float sum = c->biases && b ? b[e * c->hidden + column] : 0.0f;
            for (int64_t i = 0; i < width; i++)
                sum += a[r * width + i] * w[(e * c->hidden + column) * width + i];
            wrong += bf16(sum) != bf16_at(y, r * c->columns + j);
        }
    if (wrong)
        printf("%lld of %lld elements of Y or dX~ differ\n", (long long)wrong,
               (long long)(p->rows * c->columns));
    return !wrong;
}

/* Integers, so that all sums are exact. The groups of a row have several sizes, some are zeros. */
static float *draw_rows(int64_t rows, int64_t halves, int64_t columns, int64_t features)
{
    float *a = draw(rows * halves * columns, 1);
    for (int64_t i = 0; i < rows * halves * columns; i++) {
        const int64_t kind = (i / (halves * columns) + i % columns / features) % 5;
        a[i] = kind == 0 ? 0.0f : kind < 4 ? truncf(a[i] / (float)(1 << (kind - 1))) : a[i];
    }
    return a;
}

static float *draw_weights(int64_t count)
{
    float *w = draw(count, 1);
    for (int64_t i = 0; i < count; i++) w[i] = truncf(w[i] / 4.0f);
    return w;
}

static void check_down(moe_launch *on, const experts_case *c)
{
    char name[80];
    snprintf(name, sizeof name, "down n %d, %d columns%s", (int)c->intermediate, (int)c->columns,
             c->biases ? ", bias" : "");
    puts(name);
    plan p = make_plan(c);
    const int64_t n = c->intermediate, d = c->hidden;
    float *a = draw_rows(p.rows, 1, n, MOE_F8_A_FEATURES), *w2 = draw_weights(c->experts * d * n),
          *b2 = draw(c->experts * d, 1);
    quantized a8 = quantize(a, p.rows, 1, n, MOE_F8_A_FEATURES, 1),
              w8 = quantize(w2, c->experts * d, 1, n, n, d);
    const gpu_buffer bias = upload(b2, c->experts * d, SMOE_TYPE_BF16),
                     y = gpu_alloc((size_t)(p.rows * c->columns) * 2);
    const moe_f8_down call = {
        .down = {.a = a8.device.memory,
                 .w2 = w8.device.memory,
                 .b2 = c->biases ? bias.memory : NULL,
                 .y = y.memory,
                 .row_token = (int32_t *)p.tokens.memory,
                 .block_offsets = (int32_t *)p.offsets.memory,
                 .block_stride = 1,
                 .lists = p.lists,
                 .rows = p.rows,
                 .hidden = d,
                 .intermediate = n,
                 .experts = c->experts,
                 .first_column = c->first_column,
                 .columns = c->columns},
        .a_scale = (float *)a8.device_scales.memory,
        .w_scale = (float *)w8.device_scales.memory,
    };
    CHECK_CUDA(moe_sm90_f8_down(on, &call));
    CHECK_CUDA(cudaStreamSynchronize(on->stream));
    uint16_t *got = gpu_read(y.memory, y.bytes);
    check(same_y(c, &p, n, a, w2, b2, got), name, "Y differs");
    check(!gpu_free(bias) && !gpu_free(y), name, "written outside");
    free_quantized(&a8), free_quantized(&w8), free_plan(&p);
    free(a), free(w2), free(b2), free(got);
}

/* ---- dx_rows: a case's biases are not used ---- */

static void check_dx(moe_launch *on, const experts_case *c)
{
    char name[80];
    snprintf(name, sizeof name, "dx_rows n %d, %d columns%s", (int)c->intermediate, (int)c->columns,
             c->gated ? ", gated" : "");
    puts(name);
    plan p = make_plan(c);
    const int64_t n = c->intermediate, d = c->hidden, halves = c->gated ? 2 : 1, width = halves * n;
    float *dh = draw_rows(p.rows, halves, n, MOE_F8_DH_FEATURES),
          *w1_t = draw_weights(c->experts * d * width);
    quantized dh8 = quantize(dh, p.rows, halves, n, MOE_F8_DH_FEATURES, 1),
              w8 = quantize(w1_t, c->experts * d, 1, width, width, d);
    gpu_buffer pieces;
    const moe_cuda_backward_lists lists = backward_lists(&p, c, &pieces);
    const gpu_buffer dx = gpu_alloc((size_t)(p.rows * c->columns) * 2);
    const moe_f8_dx_rows call = {
        .dx = {.dh = dh8.device.memory,
               .w1 = w8.device.memory,
               .dx = dx.memory,
               .block_offsets = (int32_t *)p.offsets.memory,
               .block_stride = 1,
               .lists = lists,
               .rows = p.rows,
               .hidden = d,
               .intermediate = n,
               .row_width = n,
               .experts = c->experts,
               .halves = (int)halves,
               .first_column = c->first_column,
               .columns = c->columns},
        .dh_scale = (float *)dh8.device_scales.memory,
        .w_scale = (float *)w8.device_scales.memory,
    };
    CHECK_CUDA(moe_sm90_f8_dx_rows(on, &call));
    CHECK_CUDA(cudaStreamSynchronize(on->stream));
    uint16_t *got = gpu_read(dx.memory, dx.bytes);
    check(same_y(c, &p, width, dh, w1_t, NULL, got), name, "dX~ differs");
    check(!gpu_free(dx) && !gpu_free(pieces), name, "written outside");
    free_quantized(&dh8), free_quantized(&w8), free_plan(&p);
    free(dh), free(w1_t), free(got);
}

int main(void)
{
    smoe_context *context = open_hopper();
    moe_launch on = launch_on(context->state, SMOE_TYPE_BF16, NULL);
    check_rows(&on, 300, 16);
    check_rows(&on, 12, 1296);
    check_rows(&on, 12, 4640);
    static const shape shapes[] = {
        {256, 128, 5, 1, 0, SMOE_TYPE_BF16, 0, 5}, {144, 48, 4, 1, 1, SMOE_TYPE_BF16, 1, 2},
        {16, 16, 3, 0, 0, SMOE_TYPE_F32, 2, 1},    {272, 144, 3, 1, 1, SMOE_TYPE_F32, 0, 3},
        {400, 336, 2, 1, 0, SMOE_TYPE_BF16, 0, 2}, {48, 576, 3, 1, 1, SMOE_TYPE_F16, 1, 2},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) check_weights(&on, &shapes[i]);
    static const experts_case expects[] = {
        /* several rounds of the threads, more groups than threads, experts without rows, none with rows */
        {900, 4096, 272, 4, {70, 0, 5000, 1}, 1, 0, 0, 0, 0},
        {50, 768, 131104, 2, {64, 0}, 0, 0, 0, 0, 0},
        {0, 16, 16, 3, {0, 0, 0}, 1, 0, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof expects / sizeof *expects; i++) check_expect(&on, &expects[i]);
    static const experts_case ups[] = {
        /* wide and narrow tiles, with a gate and without; tiles of one step; the last three are promoted */
        {50, 272, 144, 3, {70, 0, 130}, 1, 1, 1, 0, 0}, {50, 144, 48, 3, {70, 1, 130}, 1, 0, 0, 0, 0},
        {50, 64, 272, 2, {64, 500}, 0, 0, 1, 0, 0},     {50, 16, 80, 2, {3, 900}, 0, 0, 0, 0, 0},
        {20, 2576, 80, 1, {66}, 1, 0, 1, 0, 0},         {20, 1552, 16, 2, {5, 6}, 1, 1, 1, 0, 0},
        {20, 1552, 272, 2, {5, 70}, 0, 0, 1, 0, 0},
    };
    for (size_t i = 0; i < sizeof ups / sizeof *ups; i++) check_up(&on, &ups[i]);
    static const experts_case downs[] = {
        /* the stationary core with 1, 2, 3 and 4 groups; the cooperative one, which is promoted at last */
        {9, 256, 80, 3, {70, 0, 450}, 1, 0, 0, 0, 256}, {9, 384, 256, 2, {300, 200}, 1, 0, 0, 64, 320},
        {9, 256, 272, 2, {64, 65}, 1, 0, 0, 0, 256},    {9, 320, 512, 2, {200, 100}, 1, 0, 0, 0, 320},
        {9, 272, 144, 2, {130, 64}, 1, 0, 1, 0, 272},   {9, 272, 640, 2, {130, 64}, 1, 0, 0, 0, 272},
        {9, 64, 2320, 1, {130}, 1, 0, 1, 0, 64},
    };
    for (size_t i = 0; i < sizeof downs / sizeof *downs; i++) check_down(&on, &downs[i]);
    static const experts_case dxs[] = {
        /* the stationary core with 1, 2 and 4 steps; the cooperative one with three groups, and promoted */
        {9, 256, 112, 3, {70, 0, 450}, 0, 0, 0, 0, 256}, {9, 384, 80, 2, {300, 200}, 1, 0, 0, 64, 320},
        {9, 256, 256, 2, {64, 165}, 1, 0, 0, 0, 256},    {9, 256, 400, 2, {64, 65}, 0, 0, 0, 0, 256},
        {9, 272, 656, 2, {130, 64}, 1, 0, 0, 0, 272},    {9, 64, 1040, 1, {130}, 1, 0, 0, 0, 64},
    };
    for (size_t i = 0; i < sizeof dxs / sizeof *dxs; i++) check_dx(&on, &dxs[i]);
    smoe_destroy(context);
    printf("%d failures\n", failures);
    return failures != 0;
}
