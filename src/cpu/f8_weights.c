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

static uint32_t find_amax(const source *s)
{
    float piece[PIECE];
    const int64_t total = s->rows * s->columns;
    uint32_t amax = 0;
    for (int64_t i = 0; i < total; i += PIECE) {
        const int64_t count = moe_min(PIECE, total - i);
        moe_load_row(piece, s->weights, s->first + i, count, s->type);
        for (int64_t j = 0; j < count; j++) amax = moe_f8_amax(amax, piece[j]);
    }
    return amax;
}

/* bytes (rows, columns), transposed (columns, rows); returns the scale */
static float quantize_matrix(const source *s, uint8_t *bytes, uint8_t *transposed)
{
    float piece[PIECE];
    const uint32_t amax = find_amax(s);
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
#pragma omp parallel for schedule(dynamic) num_threads(context->threads)
    for (int64_t i = 0; i < args->experts; i++) {
        const int64_t e = args->first_expert + i;
        const source w1 = {args->w1, args->weight_type, i * width * d, width, d, moe_w1_step(problem)};
        const source w2 = {args->w2, args->weight_type, i * d * n, d, n, 1};
        w.scale1[e] = quantize_matrix(&w1, w.w1 + e * width * d, w.w1_t + e * width * d);
        w.scale2[e] = quantize_matrix(&w2, w.w2 + e * d * n, w.w2_t + e * d * n);
    }
    return SMOE_OK;
}
