/* What the check of the cuda backend's forward compares with: its cases, their inputs, and plan, H and O by
 * plain loops in double arithmetic on the host, rounded where the library stores. */
#ifndef SMOE_TESTS_CUDA_FORWARD_HOST_H
#define SMOE_TESTS_CUDA_FORWARD_HOST_H

#include <smoe.h>
#include <stddef.h>

/* A bf16 or fp16 value, and the nearest one (ties to even) of a double. */
float to_float(smoe_type type, uint16_t v);
uint16_t from_double(smoe_type type, double value);

/* count values: with `integers` -1, 0 and 1, otherwise normal times scale. The caller frees them. */
uint16_t *fill(smoe_type type, size_t count, uint32_t seed, int integers, double scale);

typedef enum routing { UNIFORM, RANDOM, ONE_EXPERT, HALF_EMPTY, EDGES, INVALID, REPEATED } routing;

typedef struct test_case {
    const char *name;
    int64_t tokens, hidden, intermediate, experts, topk;
    smoe_activation activation;
    routing routing;
    smoe_type dtype;
    smoe_layout layout;
    int rows, bias, inference, chunks, wide, rounded;
} test_case;

typedef struct host_plan {
    int32_t *counts, *offsets, *blocks, *order, *row_token, *token_offsets, *token_rows;
    float *row_weight;
    int64_t rows, padded;
} host_plan;

/* The case's routing: ids and weights (T, K). */
void route(const test_case *c, int32_t *ids, float *weights);

/* The arrays of smoe_plan_view. The caller frees each of them. */
host_plan plan_on_host(const test_case *c, const int32_t *ids, const float *weights, int64_t padded);

/* H (padded, 2n or n), rows of padding too, and O (T, d) as they must be. */
void forward_on_host(const test_case *c, const host_plan *p, const uint16_t *x, const uint16_t *w1,
                     const uint16_t *b1, const uint16_t *w2, const uint16_t *b2, uint16_t *h, double *out);

#endif
