/* The fp8 kernels of Hopper against f8.h on the host, bit for bit: bytes and scales of rows and of weights.
 */
#include "f8_cases.h"

/* ---- Rows ---- */

static void check_rows(const moe_launch *on, int64_t rows, int64_t columns)
{
    char name[80];
    snprintf(name, sizeof name, "rows %d x %d", (int)rows, (int)columns);
    puts(name);
    float *x = draw(rows * columns, 0);
    for (int64_t r = 0; r < rows; r++) /* scales over the whole range, a NaN, an inf, a row of zeros */
        for (int64_t i = 0; i < columns; i++)
            x[r * columns + i] =
                r % 7 == 3 ? 0.0f : bf16(ldexpf(x[r * columns + i], (int)(r * 37 % 250) - 126));
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
    p.h_width = s->gated ? 2 * s->intermediate : s->intermediate, p.experts_here = s->experts;
    return p;
}

/* One matrix of one expert: (rows, columns) from `w`, whose rows 2 j and 2 j + 1 are j and half + j. */
static void check_matrix(const char *name, const float *w, int64_t rows, int64_t columns, int64_t half,
                         const uint8_t *bytes, const uint8_t *transposed, float scale)
{
    const uint32_t amax = largest(w, rows * columns);
    int same = 1, turned = 1;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            const int64_t source = !half ? r : r < half ? 2 * r : 2 * (r - half) + 1;
            const uint8_t wanted = moe_f8_quantize(w[source * columns + c], moe_f8_factor(amax));
            same &= bytes[r * columns + c] == wanted;
            turned &= transposed[c * rows + r] == wanted;
        }
    check(same, name, "bytes differ");
    check(turned, name, "transposed bytes differ");
    check(scale == moe_f8_scale(amax), name, "the scale differs");
}

static int untouched(const uint8_t *bytes, int64_t count)
{
    int same = 1;
    for (int64_t i = 0; i < count; i++) same &= bytes[i] == 0xff;
    return same;
}

static void check_weights(const moe_launch *on, const shape *s)
{
    char name[100];
    snprintf(name, sizeof name, "weights d %d n %d, experts %d to %d of %d", (int)s->hidden,
             (int)s->intermediate, (int)s->first, (int)(s->first + s->count - 1), (int)s->experts);
    puts(name);
    const moe_problem p = problem_of(s);
    const int64_t one = p.h_width * s->hidden, two = s->hidden * s->intermediate;
    float *w1 = draw(s->count * one, 0), *w2 = draw(s->count * two, 0);
    for (int64_t e = 0; e < s->count; e++) /* another scale for every expert */
        for (int64_t i = 0; i < one; i++) w1[e * one + i] = ldexpf(w1[e * one + i], (int)e * 5 - 9);
    w2[two / 2] = NAN; /* the first expert's W2 */
    const gpu_buffer from1 = upload(w1, s->count * one, s->type), from2 = upload(w2, s->count * two, s->type);
    const gpu_buffer to = gpu_alloc((size_t)moe_f8_weights_at(&p, NULL).bytes);
    const moe_f8_quantized call = {from1.memory, from2.memory,  s->type,   moe_f8_weights_at(&p, to.memory),
                                   s->first,     s->count,      s->hidden, s->intermediate,
                                   p.h_width,    s->interleaved};
    moe_launch one_cta = *on; /* whose shared memory has no room for the larger matrices */
    one_cta.sms = 1;
    CHECK_CUDA(moe_sm90_f8_weights(s->first ? &one_cta : on, &call));
    CHECK_CUDA(moe_sm90_f8_weights(s->first ? on : &one_cta, &call)); /* the counters begin at 0 */
    CHECK_CUDA(cudaStreamSynchronize(on->stream));
    char *got = gpu_read(to.memory, to.bytes);
    const moe_f8_weights w = moe_f8_weights_at(&p, got);
    for (int64_t e = 0; e < s->experts; e++) {
        const int64_t i = e - s->first;
        if (i >= 0 && i < s->count) {
            check_matrix(name, w1 + i * one, p.h_width, s->hidden, s->interleaved ? s->intermediate : 0,
                         w.w1 + e * one, w.w1_t + e * one, w.scale1[e]);
            check_matrix(name, w2 + i * two, s->hidden, s->intermediate, 0, w.w2 + e * two, w.w2_t + e * two,
                         w.scale2[e]);
        } else {
            check(untouched(w.w1 + e * one, one) && untouched(w.w1_t + e * one, one) &&
                      untouched(w.w2 + e * two, two) && untouched(w.w2_t + e * two, two) &&
                      untouched((uint8_t *)(w.scale1 + e), 4) && untouched((uint8_t *)(w.scale2 + e), 4),
                  name, "another expert was touched");
        }
    }
    check(!gpu_free(from1) && !gpu_free(from2) && !gpu_free(to), name, "written outside");
    free(w1), free(w2), free(got);
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
    check_rows(&on, 9, 2064);
    static const shape shapes[] = {
        {256, 128, 5, 1, 0, SMOE_TYPE_BF16, 0, 5}, {144, 48, 4, 1, 1, SMOE_TYPE_BF16, 1, 2},
        {16, 16, 3, 0, 0, SMOE_TYPE_F32, 2, 1},    {272, 144, 3, 1, 1, SMOE_TYPE_F32, 0, 3},
        {400, 336, 2, 1, 0, SMOE_TYPE_BF16, 0, 2},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) check_weights(&on, &shapes[i]);
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
