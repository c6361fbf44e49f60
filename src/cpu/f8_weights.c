/* Quantises the weights of a range of experts: the scale of each matrix, its bytes, and the same bytes
 * transposed. A work item is an expert. It allocates nothing: elements are converted one row at a time on the
 * stack. */
#include "convert.h"
#include "experts.h"

enum { PIECE = 512 }; /* elements that are converted at once */

/* A matrix of one expert as the caller has it. `row` of the result is row order(row) of the source. */
typedef struct source {
    const void *weights;
    smoe_type type;
    int64_t first; /* element */
    int64_t rows, columns;
    int64_t halves; /* 2: rows are gate and up rows in turns, to be ordered as gate rows, then up rows */
} source;

static int64_t source_row(const source *s, int64_t row)
{
    const int64_t half = s->rows / 2;
    if (s->halves == 1) return row;
    return row < half ? 2 * row : 2 * (row - half) + 1;
}

/* The largest magnitude of rows [row, row + rows) and columns [column, column + columns). */
static uint32_t find_amax(const source *s, int64_t row, int64_t rows, int64_t column, int64_t columns)
{
    float piece[PIECE];
    uint32_t amax = 0;
    for (int64_t r = row; r < row + rows; r++)
        for (int64_t i = column; i < column + columns; i += PIECE) {
            const int64_t count = moe_min(PIECE, column + columns - i);
            moe_load_row(piece, s->weights, s->first + source_row(s, r) * s->columns + i, count, s->type);
            for (int64_t j = 0; j < count; j++) amax = moe_f8_amax(amax, piece[j]);
        }
    return amax;
}

/* Of W1's rows and of W2's columns of each group of features. */
static void find_groups(const moe_problem *p, const source *w1, const source *w2, float *group1,
                        float *group2)
{
    const int64_t n = p->layer.intermediate, d = p->layer.hidden;
    for (int64_t j = 0; j < n; j += MOE_F8_DH_FEATURES) {
        const int64_t count = moe_min(MOE_F8_DH_FEATURES, n - j), g = j / MOE_F8_DH_FEATURES;
        const uint32_t gate = find_amax(w1, j, count, 0, d);
        const uint32_t up = p->gated ? find_amax(w1, n + j, count, 0, d) : 0;
        group1[g] = moe_f8_scale(gate > up ? gate : up);
        group2[g] = moe_f8_scale(find_amax(w2, 0, d, j, count));
    }
}

/* bytes (rows, columns), transposed (columns, rows); returns the scale */
static float quantize_matrix(const source *s, uint8_t *bytes, uint8_t *transposed)
{
    float piece[PIECE];
    const uint32_t amax = find_amax(s, 0, s->rows, 0, s->columns);
    const float factor = moe_f8_factor(amax);
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t i = 0; i < s->columns; i += PIECE) {
            const int64_t count = moe_min(PIECE, s->columns - i);
            moe_load_row(piece, s->weights, s->first + source_row(s, row) * s->columns + i, count, s->type);
            for (int64_t j = 0; j < count; j++) {
                const uint8_t byte = moe_f8_quantize(piece[j], factor);
                bytes[row * s->columns + i + j] = byte;
                transposed[(i + j) * s->rows + row] = byte;
            }
        }
    return moe_f8_scale(amax);
}

smoe_status moe_cpu_quantize_weights(smoe_context *context, const moe_problem *problem,
                                     const smoe_quantize_args *args, void *stream)
{
    (void)stream;
    const smoe_layer *layer = &problem->layer;
    const moe_f8_weights w = moe_f8_weights_at(problem, args->weights_f8);
    const int64_t d = layer->hidden, n = layer->intermediate, width = problem->h_width;
    const int64_t groups = moe_f8_groups(n, MOE_F8_DH_FEATURES);
#pragma omp parallel for schedule(dynamic) num_threads(context->threads)
    for (int64_t i = 0; i < args->experts; i++) {
        const int64_t e = args->first_expert + i;
        const source w1 = {args->w1, args->weight_type, i * width * d, width, d, moe_w1_step(problem)};
        const source w2 = {args->w2, args->weight_type, i * d * n, d, n, 1};
        w.scale1[e] = quantize_matrix(&w1, w.w1 + e * width * d, w.w1_t + e * width * d);
        w.scale2[e] = quantize_matrix(&w2, w.w2 + e * d * n, w.w2_t + e * d * n);
        find_groups(problem, &w1, &w2, w.group1 + e * groups, w.group2 + e * groups);
    }
    return SMOE_OK;
}
