/* What the checks of fp8's kernels share: the context, random values, quantised values, and the plan of a
 * case, all on the host and on the device. */
#ifndef TESTS_CUDA_F8_CASES_H
#define TESTS_CUDA_F8_CASES_H

#include "gpu.h"
#include "host/device.h"
#include "open_cuda.h"
#include "oracle/f8.h"
#include "oracle/number.h"
#include "sm90/f8_kernels.h"

#include <math.h>

/* A context with Hopper's kernels; without them the program ends as skipped. Each line of the output is
 * written at once, so that the last one names what hangs. */
static inline smoe_context *open_hopper(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    smoe_context *context = open_cuda();
    if (((const device_state *)context->state)->kernels == &moe_sm90_kernels) return context;
    printf("skipped: fp8 is for compute capability 9.0\n");
    exit(EXIT_NO_DEVICE);
}

static int failures;

static inline void check(int ok, const char *name, const char *what)
{
    if (ok) return;
    printf("%s: %s\n", name, what);
    failures++;
}

static uint64_t random_state = 1;

static inline float uniform(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(random_state >> 32) * 0x1p-31f;
}

static inline float bf16(float x)
{
    return moe_float_of((moe_bits_of(x) + 0x7fffu + (moe_bits_of(x) >> 16 & 1)) & 0xffff0000u);
}

/* `count` values: bf16 values of very different sizes, with zeros. Integers: of -8 to 8. */
static inline float *draw(int64_t count, int integers)
{
    float *values = malloc((size_t)count * sizeof *values);
    for (int64_t i = 0; i < count; i++) {
        const float x = uniform();
        values[i] = integers ? rintf(x * 8.0f) : fabsf(x) < 0.02f ? 0.0f : bf16(x * x * x);
    }
    return values;
}

/* The values as elements of a type. */
static inline gpu_buffer upload(const float *values, int64_t count, smoe_type type)
{
    const size_t bytes = (size_t)count * oracle_type_bytes(type);
    double *wide = malloc((size_t)count * sizeof *wide);
    for (int64_t i = 0; i < count; i++) wide[i] = (double)values[i];
    void *elements = malloc(bytes);
    oracle_store(elements, type, wide, (size_t)count);
    const gpu_buffer b = gpu_copy(elements, bytes);
    free(wide), free(elements);
    return b;
}

static inline uint32_t largest(const float *values, int64_t count)
{
    uint32_t amax = 0;
    for (int64_t i = 0; i < count; i++) amax = moe_f8_amax(amax, values[i]);
    return amax;
}

typedef struct experts_case {
    int64_t tokens, hidden, intermediate;
    int experts;
    int64_t counts[4];
    int gated, interleaved, biases; /* ReGLU, or ReLU^2 */
    int64_t first_column, columns;  /* of down's chunk */
} experts_case;

/* The rows of a case, sorted by expert, in blocks of 64: what the plan makes. Host and device. */
typedef struct plan {
    int64_t rows;
    int32_t *row_token, *expert_of_row;
    int32_t block_offsets[5];
    gpu_buffer tokens, offsets, counts, tiles, pieces;
    moe_cuda_lists lists;
} plan;

enum { MOST_ENTRIES = 256, PIECE_BLOCKS = 6 };

/* Appends the entries of an expert to a work list. */
static inline int append(moe_work *list, int count, int32_t row, int32_t expert, int32_t blocks,
                         int32_t limit)
{
    const int32_t entries = (blocks + limit - 1) / limit;
    for (int32_t i = 0; i < entries; i++) {
        const int32_t first = moe_cut(blocks, entries, i);
        list[count++] =
            moe_work_make(row + first * MOE_BLOCK_ROWS, expert, moe_cut(blocks, entries, i + 1) - first);
    }
    return count;
}

static inline plan make_plan(const experts_case *c)
{
    static moe_work tiles[MOST_ENTRIES], pieces[MOST_ENTRIES];
    plan p = {0};
    int32_t counts[4] = {0};
    for (int e = 0; e < c->experts; e++) p.rows += (c->counts[e] + 63) / 64 * 64;
    p.row_token = malloc((size_t)p.rows * 4), p.expert_of_row = malloc((size_t)p.rows * 4);
    int64_t row = 0;
    for (int e = 0; e < c->experts; e++) {
        const int32_t blocks = (int32_t)((c->counts[e] + 63) / 64);
        p.block_offsets[e + 1] = p.block_offsets[e] + blocks;
        counts[0] = append(tiles, counts[0], (int32_t)row, e, blocks, MOE_TILE_BLOCKS);
        counts[1] = append(pieces, counts[1], (int32_t)row, e, blocks, PIECE_BLOCKS);
        for (int64_t i = 0; i < blocks * 64; i++, row++) {
            p.expert_of_row[row] = e;
            p.row_token[row] = i < c->counts[e] ? (int32_t)((i * 7 + e * 13) % c->tokens) : -1;
        }
    }
    p.tokens = gpu_copy(p.row_token, (size_t)p.rows * 4);
    p.offsets = gpu_copy(p.block_offsets, sizeof p.block_offsets);
    p.counts = gpu_copy(counts, sizeof counts);
    p.tiles = gpu_copy(tiles, sizeof tiles), p.pieces = gpu_copy(pieces, sizeof pieces);
    p.lists = (moe_cuda_lists){(int32_t *)p.counts.memory, (moe_work *)p.tiles.memory,
                               (moe_work *)p.pieces.memory, PIECE_BLOCKS, (int32_t *)p.counts.memory + 2};
    return p;
}

static inline void free_plan(plan *p)
{
    gpu_free(p->tokens), gpu_free(p->offsets), gpu_free(p->counts), gpu_free(p->tiles), gpu_free(p->pieces);
    free(p->row_token), free(p->expert_of_row);
}

/* Values in groups: bytes for the device, decoded bytes for the oracle, scales of the groups. */
typedef struct quantized {
    uint8_t *bytes;
    double *values;
    float *scales;
    gpu_buffer device, device_scales;
} quantized;

/* (rows, halves, columns) in groups of `features` columns of all halves; rows_of_scale: so many rows share a
 * scale. */
static inline quantized quantize(const float *from, int64_t rows, int64_t halves, int64_t columns,
                                 int64_t features, int64_t rows_of_scale)
{
    const int64_t groups = (columns + features - 1) / features, scales = rows / rows_of_scale * groups;
    const size_t count = (size_t)(rows * halves * columns);
    quantized q = {malloc(count), malloc(count * sizeof(double)), malloc((size_t)scales * 4), {0}, {0}};
    for (int64_t s = 0; s < scales; s++) {
        const int64_t first = s % groups * features,
                      end = first + features < columns ? first + features : columns;
        const int64_t row0 = s / groups * rows_of_scale * halves; /* of rows of one half */
        uint32_t amax = 0;
        for (int64_t r = row0; r < row0 + rows_of_scale * halves; r++)
            for (int64_t i = first; i < end; i++) amax = moe_f8_amax(amax, from[r * columns + i]);
        q.scales[s] = moe_f8_scale(amax);
        for (int64_t r = row0; r < row0 + rows_of_scale * halves; r++)
            for (int64_t i = first; i < end; i++) {
                q.bytes[r * columns + i] = moe_f8_quantize(from[r * columns + i], moe_f8_factor(amax));
                q.values[r * columns + i] = (double)moe_f8_value(q.bytes[r * columns + i]);
            }
    }
    q.device = gpu_copy(q.bytes, count);
    q.device_scales = gpu_copy(q.scales, (size_t)scales * 4);
    return q;
}

static inline void free_quantized(quantized *q)
{
    gpu_free(q->device), gpu_free(q->device_scales);
    free(q->bytes), free(q->values), free(q->scales);
}

static inline float f16(float x)
{
    return (float)oracle_round_to((double)x, SMOE_TYPE_F16);
}

/* What an accumulator has in the end (gemm_f8.cuh). */
static inline float promoted_sum(oracle_f8_line a, oracle_f8_line b, int64_t count)
{
    float sum = 0.0f;
    if (count <= 1536) return (float)oracle_f8_sum(a, b, count, true);
    for (; count > 1024; a.at += 1024 * a.step, b.at += 1024 * b.step, count -= 1024)
        sum = f16(fmaf((float)oracle_f8_sum(a, b, 1024, true), 0x1p-14f, sum));
    return fmaf(sum, 0x1p14f, (float)oracle_f8_sum(a, b, count, true));
}

static inline float product(const double *a, const double *b, int64_t count)
{
    return promoted_sum((oracle_f8_line){a, 1}, (oracle_f8_line){b, 1}, count);
}

static inline float bf16_at(const uint16_t *p, int64_t i)
{
    return moe_float_of((uint32_t)p[i] << 16);
}

static inline moe_cuda_backward_lists backward_lists(const plan *p, const experts_case *c, gpu_buffer *pieces)
{
    moe_piece all[4];
    int count = 0;
    for (int e = 0; e < c->experts; e++) {
        const int32_t blocks = p->block_offsets[e + 1] - p->block_offsets[e];
        if (blocks) all[count++] = (moe_piece){p->block_offsets[e] * MOE_BLOCK_ROWS, e, blocks, -1};
    }
    *pieces = gpu_copy(all, sizeof all);
    CHECK_CUDA(cudaMemcpy(p->counts.memory + 4, &count, 4, cudaMemcpyHostToDevice));
    return (moe_cuda_backward_lists){.counts = p->lists.counts,
                                     .tiles = p->lists.tiles,
                                     .pieces = (moe_piece *)pieces->memory,
                                     .turn = p->lists.turn};
}

#endif
