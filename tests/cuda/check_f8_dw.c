/* fp8's weight gradients on Hopper, from bytes and exponents as f8.h has them: f32 gradients bit for bit as
 * the oracle's model of the tensor cores gives them, and within 0.02 of exact sums. */
#include "f8_cases.h"
#include "schedule/weight_tiles.h"

enum { EXPERTS = 4, MOST_PIECES = 64 };

/* What the rows are like. */
typedef enum kind {
    INTEGERS, /* the gradient is exact */
    ALIKE,    /* all rows have the exponent that is expected */
    WIDE,     /* some rows have larger ones */
    WITH_NAN  /* a token of expert 1, a row of expert 3 */
} kind;

typedef struct dw_case {
    kind kind;
    int64_t hidden, intermediate, counts[EXPERTS];
    int halves, interleaved, transposed, accumulate;
    int f32;       /* the gradient, else bf16 */
    int32_t limit; /* blocks of a piece */
} dw_case;

typedef struct operands {
    int64_t tokens, rows, width, groups;
    int64_t first_row[EXPERTS + 1];
    int32_t *row_token, *w, *expected, *largest;
    float *token_scale;
    uint8_t *left, *right; /* (tokens, d), (rows, halves, n) */
} operands;

static int64_t lesser(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- Operands, quantised as the CPU backend does it ---- */

static uint32_t amax_of(uint32_t amax, const float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) amax = moe_f8_amax(amax, values[i]);
    return amax;
}

static void make_tokens(const dw_case *c, operands *o)
{
    const int64_t d = c->hidden;
    float *x = malloc((size_t)d * sizeof *x);
    for (int64_t t = 0; t < o->tokens; t++) {
        const int spread = c->kind == WIDE ? (int)(t * 7 % 23) - 11 : 3;
        for (int64_t i = 0; i < d; i++)
            x[i] = c->kind == INTEGERS ? rintf(uniform() * 2.4f) : ldexpf(uniform(), spread);
        if (c->kind == WITH_NAN && t == o->row_token[o->first_row[1] + 2]) x[d - 1] = NAN;
        const uint32_t amax = amax_of(0, x, d);
        o->token_scale[t] = moe_f8_scale(amax);
        for (int64_t i = 0; i < d; i++) o->left[t * d + i] = moe_f8_quantize(x[i], moe_f8_factor(amax));
    }
    free(x);
}

/* One row of dH_w or A'_w, and its exponents. */
static void make_row(const dw_case *c, operands *o, int64_t row, int expert, float *values)
{
    const int64_t n = c->intermediate;
    const float token_scale = o->token_scale[o->row_token[row]];
    for (int64_t j = 0; j < o->width; j++)
        values[j] = c->kind == INTEGERS ? rintf(uniform() * 2.4f) : uniform() / token_scale;
    for (int64_t j = 0; c->kind == WIDE && j < o->width; j++) /* factors from 1 to below the least f16 */
        values[j] = ldexpf(values[j], (int)(row * 5 % 17) * 2 - 4);
    if (c->kind == WITH_NAN && expert == 3 && row == o->first_row[3] + 1) values[0] = NAN;
    for (int64_t g = 0, j = 0; g < o->groups; g++, j += MOE_F8_DH_FEATURES) {
        const int64_t count = lesser(MOE_F8_DH_FEATURES, n - j);
        uint32_t amax = 0;
        for (int half = 0; half < c->halves; half++) amax = amax_of(amax, values + half * n + j, count);
        const int32_t w = moe_f8_row_exponent(o->expected[expert * o->groups + g], amax, token_scale);
        o->w[row * o->groups + g] = w;
        if (w > o->largest[expert * o->groups + g]) o->largest[expert * o->groups + g] = w;
        for (int half = 0; half < c->halves; half++)
            for (int64_t i = half * n + j; i < half * n + j + count; i++)
                o->right[row * o->width + i] =
                    moe_f8_quantize(values[i], moe_f8_row_factor(w, amax, token_scale));
    }
}

static operands make_operands(const dw_case *c)
{
    operands o = {.tokens = 150,
                  .width = c->halves * c->intermediate,
                  .groups = moe_f8_groups(c->intermediate, MOE_F8_DH_FEATURES)};
    for (int e = 0; e < EXPERTS; e++) o.first_row[e + 1] = o.first_row[e] + (c->counts[e] + 63) / 64 * 64;
    o.rows = o.first_row[EXPERTS];
    o.row_token = malloc((size_t)o.rows * 4), o.w = malloc((size_t)(o.rows * o.groups) * 4);
    o.expected = malloc((size_t)(EXPERTS * o.groups) * 4);
    o.largest = malloc((size_t)(EXPERTS * o.groups) * 4);
    o.token_scale = malloc((size_t)o.tokens * 4);
    o.left = malloc((size_t)(o.tokens * c->hidden)), o.right = calloc((size_t)(o.rows * o.width), 1);
    for (int e = 0; e < EXPERTS; e++)
        for (int64_t r = o.first_row[e]; r < o.first_row[e + 1]; r++) /* experts share no token */
            o.row_token[r] = r - o.first_row[e] < c->counts[e]
                                 ? (int32_t)((r - o.first_row[e]) * 7 % 37 * EXPERTS + e)
                                 : -1;
    make_tokens(c, &o);
    for (int64_t i = 0; i < EXPERTS * o.groups; i++)
        o.expected[i] = o.largest[i] = c->kind == WIDE ? (int32_t)(i % 3) - 4 : (int32_t)(i % 3) - 6;
    memset(o.w, 0x7f, (size_t)(o.rows * o.groups) * 4); /* of pad rows: anything */
    float *values = malloc((size_t)o.width * sizeof *values);
    for (int e = 0; e < EXPERTS; e++)
        for (int64_t i = 0; i < c->counts[e]; i++) make_row(c, &o, o.first_row[e] + i, e, values);
    free(values);
    return o;
}

static void free_operands(operands *o)
{
    free(o->row_token), free(o->w), free(o->expected), free(o->largest), free(o->token_scale);
    free(o->left), free(o->right);
}

/* ---- The gradient on the host ---- */

static double *doubles(int64_t count)
{
    return malloc((size_t)count * sizeof(double));
}

typedef struct result {
    float *model;  /* (E, halves, n, d): f32 */
    double *exact; /* of the same decoded bytes */
} result;

static int is_nan(const dw_case *c, int64_t e, int64_t group)
{
    return c->kind == WITH_NAN && (e == 1 || (e == 3 && group == 0));
}

/* Of expert e and the columns of one group and half: left (rows, d) with the factors of the group. */
static void multiply_group(const dw_case *c, const operands *o, int e, int64_t half, int64_t group,
                           double *left, const double *right, result *to)
{
    const int64_t d = c->hidden, n = c->intermediate, first = o->first_row[e],
                  rows = o->first_row[e + 1] - first;
    const int32_t most = o->largest[e * o->groups + group];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < d; i++) {
            const int32_t token = o->row_token[first + r], w = o->w[(first + r) * o->groups + group];
            left[r * d + i] =
                token < 0 ? 0.0 : (double)moe_f8_value(moe_f8_shifted(o->left[token * d + i], w - most));
        }
    const int32_t blocks = (int32_t)(rows / 64), pieces = (blocks + c->limit - 1) / c->limit;
    const int64_t end = lesser((group + 1) * MOE_F8_DH_FEATURES, n);
    for (int64_t j = group * MOE_F8_DH_FEATURES; j < end; j++)
        for (int64_t i = 0; i < d; i++) {
            float sum = 0.0f;
            double exact = 0.0;
            const double *b = right + half * n + j;
            for (int32_t piece = 0; piece < pieces; piece++) {
                const int64_t at = 64 * moe_cut(blocks, pieces, piece),
                              count = 64 * moe_cut(blocks, pieces, piece + 1) - at;
                sum += promoted_sum((oracle_f8_line){left + at * d + i, d},
                                    (oracle_f8_line){b + at * o->width, o->width}, count) *
                       moe_f8_power(most);
            }
            for (int64_t r = 0; r < rows; r++) exact += left[r * d + i] * b[r * o->width];
            const int64_t element = ((e * c->halves + half) * n + j) * d + i;
            to->model[element] = sum, to->exact[element] = exact * (double)moe_f8_power(most);
        }
}

static result host_gradient(const dw_case *c, const operands *o)
{
    const int64_t count = EXPERTS * o->width * c->hidden;
    result to = {calloc((size_t)count, sizeof(float)), calloc((size_t)count, sizeof(double))};
    double *left = doubles(o->rows * c->hidden), *right = doubles(o->rows * o->width);
    for (int e = 0; e < EXPERTS; e++) {
        const int64_t first = o->first_row[e] * o->width, end = o->first_row[e + 1] * o->width;
        for (int64_t i = first; i < end; i++) right[i - first] = (double)moe_f8_value(o->right[i]);
        for (int64_t half = 0; half < c->halves; half++)
            for (int64_t g = 0; g < o->groups; g++)
                if (!is_nan(c, e, g)) multiply_group(c, o, e, half, g, left, right, &to);
    }
    free(left), free(right);
    return to;
}

/* ---- Operands on the device ---- */

/* In groups of 16 rows. */
static gpu_buffer upload_right(const operands *o)
{
    uint8_t *grouped = malloc((size_t)(o->rows * o->width));
    for (int64_t r = 0; r < o->rows; r++)
        for (int64_t j = 0; j < o->width; j++)
            grouped[moe_f8_dw_byte(r, j, o->width)] = o->right[r * o->width + j];
    const gpu_buffer made = gpu_copy(grouped, (size_t)(o->rows * o->width));
    free(grouped);
    return made;
}

/* ---- Work lists ---- */

typedef struct work {
    gpu_buffer counts, pieces, splits;
    int32_t parts;
    moe_cuda_backward_lists lists;
} work;

static work make_work(const dw_case *c, const operands *o)
{
    moe_piece pieces[MOST_PIECES];
    moe_split splits[EXPERTS];
    int32_t counts[6] = {0}; /* and the two counters of units */
    work w = {0};
    for (int e = 0; e < EXPERTS; e++) {
        const int32_t blocks = (int32_t)((o->first_row[e + 1] - o->first_row[e]) / 64);
        const int32_t of_expert = (blocks + c->limit - 1) / c->limit;
        if (of_expert > 1) splits[counts[2]++] = (moe_split){e, w.parts, of_expert};
        for (int32_t i = 0; i < of_expert; i++) {
            const int32_t first = moe_cut(blocks, of_expert, i);
            pieces[counts[1]++] =
                (moe_piece){(int32_t)o->first_row[e] + first * 64, e,
                            moe_cut(blocks, of_expert, i + 1) - first, of_expert > 1 ? w.parts++ : -1};
        }
    }
    counts[3] = counts[1];
    for (int e = 0; e < EXPERTS; e++)
        if (!c->counts[e]) pieces[counts[3]++] = (moe_piece){0, e, 0, -1};
    w.counts = gpu_copy(counts, sizeof counts), w.pieces = gpu_copy(pieces, sizeof pieces);
    w.splits = gpu_copy(splits, sizeof splits);
    w.lists = (moe_cuda_backward_lists){.counts = (int32_t *)w.counts.memory,
                                        .pieces = (moe_piece *)w.pieces.memory,
                                        .splits = (moe_split *)w.splits.memory,
                                        .turn = (int32_t *)w.counts.memory + 4};
    return w;
}

/* ---- Comparison ---- */

/* What the gradient has before the call, with accumulate. */
static float old_value(int64_t element)
{
    return (float)(element % 13) - 6.0f;
}

/* Where element (e, half, j, i) of the host's gradient is in the device's. */
static int64_t place_of(const dw_case *c, int64_t e, int64_t half, int64_t j, int64_t i)
{
    const int64_t n = c->intermediate, d = c->hidden;
    if (!c->transposed) return (e * d + i) * n + j;
    return ((e * c->halves * n) + (c->interleaved ? 2 * j + half : half * n + j)) * d + i;
}

static float got_at(const dw_case *c, const void *gradient, int64_t element)
{
    if (c->f32) return ((const float *)gradient)[element];
    return bf16_at(gradient, element);
}

static void compare(const dw_case *c, const char *name, const operands *o, const result *wanted,
                    const void *gradient)
{
    int64_t wrong = 0;
    double error = 0.0, norm = 0.0;
    for (int64_t at = 0; at < EXPERTS * o->width * c->hidden; at++) {
        const int64_t i = at % c->hidden, j = at / c->hidden % c->intermediate;
        const int64_t half = at / c->hidden / c->intermediate % c->halves, e = at / c->hidden / o->width;
        const int64_t element = place_of(c, e, half, j, i);
        const float got = got_at(c, gradient, element), old = c->accumulate ? old_value(element) : 0.0f;
        if (is_nan(c, e, j / MOE_F8_DH_FEATURES)) {
            wrong += got == got;
            continue;
        }
        const float sum = c->accumulate ? wanted->model[at] + old : wanted->model[at];
        wrong += got != (c->f32 ? sum : bf16(sum));
        if (c->kind == INTEGERS) wrong += (double)got != wanted->exact[at] + (double)old;
        error += pow((double)got - (double)old - wanted->exact[at], 2.0), norm += pow(wanted->exact[at], 2.0);
    }
    if (wrong) printf("    %lld elements differ\n", (long long)wrong);
    printf("    error %.5f\n", sqrt(error / norm));
    check(!wrong && error <= 0.02 * 0.02 * norm, name, "wrong");
}

/* ---- A case ---- */

static gpu_buffer make_gradient(const dw_case *c, int64_t count)
{
    const gpu_buffer b = gpu_alloc((size_t)count * (c->f32 ? 4 : 2));
    if (!c->accumulate) return b; /* NaN */
    float *old = malloc((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) old[i] = old_value(i);
    for (int64_t i = 0; i < count && !c->f32; i++)
        ((uint16_t *)old)[i] = (uint16_t)(moe_bits_of(old[i]) >> 16);
    CHECK_CUDA(cudaMemcpy(b.memory, old, (size_t)count * (c->f32 ? 4 : 2), cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaDeviceSynchronize());
    free(old);
    return b;
}

static void check_dw(moe_launch *on, const dw_case *c)
{
    static const char *const kinds[] = {"integers", "alike", "wide", "NaN"};
    char name[120];
    snprintf(name, sizeof name, "%s %s d %d n %d%s%s%s %s", c->transposed ? "dW1" : "dW2", kinds[c->kind],
             (int)c->hidden, (int)c->intermediate, c->halves == 2 ? " gated" : "",
             c->interleaved ? " interleaved" : "", c->accumulate ? " accumulate" : "",
             c->f32 ? "f32" : "bf16");
    puts(name);
    operands o = make_operands(c);
    work w = make_work(c, &o);
    const int64_t d = c->hidden, n = c->intermediate, count = EXPERTS * o.width * d;
    const int32_t tiles = moe_sm90_f8_kernels.weight_tiles((int32_t)d, (int32_t)n, c->halves);
    const size_t exponents = (size_t)o.groups * 4;
    const gpu_buffer left = gpu_copy(o.left, (size_t)(o.tokens * d)), right = upload_right(&o),
                     token = gpu_copy(o.row_token, (size_t)o.rows * 4),
                     exponent = gpu_copy(o.w, (size_t)o.rows * exponents),
                     expected = gpu_copy(o.expected, EXPERTS * exponents),
                     largest = gpu_copy(o.largest, EXPERTS * exponents), gradient = make_gradient(c, count),
                     parts = gpu_alloc((size_t)(w.parts * tiles) * MOE_WEIGHT_TILE * 4);
    const moe_f8_dw call = {.dw = {.features = right.memory,
                                   .tokens = left.memory,
                                   .gradient = gradient.memory,
                                   .parts = w.parts ? (float *)parts.memory : NULL,
                                   .row_token = (int32_t *)token.memory,
                                   .lists = w.lists,
                                   .rows = o.rows,
                                   .hidden = d,
                                   .intermediate = n,
                                   .row_width = n,
                                   .experts = EXPERTS,
                                   .halves = c->halves,
                                   .interleaved = c->interleaved,
                                   .accumulate = c->accumulate,
                                   .transposed = c->transposed,
                                   .gradient_type = c->f32 ? SMOE_TYPE_F32 : SMOE_TYPE_BF16},
                            .exponent = (int32_t *)exponent.memory,
                            .expected = (int32_t *)expected.memory,
                            .largest = (int32_t *)largest.memory};
    CHECK_CUDA(moe_sm90_f8_kernels.dw(on, &call));
    CHECK_CUDA(cudaStreamSynchronize(on->stream));
    void *got = gpu_read(gradient.memory, gradient.bytes);
    result wanted = host_gradient(c, &o);
    compare(c, name, &o, &wanted, got);
    int outside = 0;
    const gpu_buffer all[] = {left,     right, token,    exponent, expected, largest,
                              gradient, parts, w.counts, w.pieces, w.splits};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) outside += gpu_free(all[i]);
    check(!outside, name, "written outside");
    free(got), free(wanted.model), free(wanted.exact);
    free_operands(&o);
}

int main(void)
{
    smoe_context *context = open_hopper();
    moe_launch on = launch_on(context->state, SMOE_TYPE_BF16, NULL);
    static const dw_case cases[] = {
        {INTEGERS, 16, 16, {65, 0, 64, 63}, 1, 0, 0, 0, 1, 999},
        {INTEGERS, 144, 272, {1, 0, 4096, 65}, 1, 0, 0, 0, 1, 999},
        {INTEGERS, 144, 48, {130, 1, 0, 300}, 2, 1, 1, 1, 0, 2},
        {ALIKE, 80, 144, {70, 0, 200, 1}, 2, 0, 1, 0, 0, 999},
        {ALIKE, 272, 64, {64, 65, 0, 130}, 2, 1, 1, 1, 1, 999},
        {ALIKE, 144, 128, {500, 0, 63, 1}, 1, 0, 0, 1, 0, 3},
        {ALIKE, 16, 64, {1600, 1536, 0, 1}, 1, 0, 1, 0, 1, 999},
        {WIDE, 144, 272, {90, 300, 0, 64}, 2, 0, 1, 0, 1, 4},
        {WIDE, 80, 528, {150, 63, 1, 0}, 1, 0, 0, 0, 1, 999},
        {WITH_NAN, 80, 272, {70, 65, 64, 130}, 2, 0, 1, 0, 1, 999},
        {WITH_NAN, 64, 304, {70, 1700, 0, 130}, 1, 0, 0, 0, 0, 999},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_dw(&on, &cases[i]);
    smoe_destroy(context);
    printf("%d failures\n", failures);
    return failures != 0;
}
