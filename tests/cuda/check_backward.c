/* The backward of the cuda backend from a given top-K or given rows, after its forward: see run_checks.h.
 * Sparse small integers with an activation that keeps them integers are compared element by element, normal
 * numbers within the tolerance. */
#include "run_checks.h"

typedef enum routing { RANDOM, ONE_EXPERT, HALF_EMPTY, EDGES, BROKEN, ROWS } routing;

/* The values of the inputs.
 * SPARSE: integers, one in 8 of them not 0.
 * NORMAL: normal numbers.
 * DENSE: integers of -1, 0 and 1. Their sums need more than 16 bits to be exact. So a sum that is rounded
 * before it is accumulated is found.
 * LIMITS: the same integers, for an activation that limits its arguments to -7..7. Many elements of H are
 * exactly 7 or -7. */
enum { SPARSE, NORMAL, DENSE, LIMITS };

typedef struct test_case {
    const char *name;
    int64_t tokens, hidden, intermediate, experts, topk;
    smoe_activation activation;
    routing routing;
    smoe_type dtype, gradient_type;
    smoe_layout layout;
    int bias, chunks, accumulate, reuse_saved, wide, numbers;
} test_case;

#define B   SMOE_TYPE_BF16
#define H   SMOE_TYPE_F16
#define F   SMOE_TYPE_F32
#define CAT SMOE_LAYOUT_CONCATENATED
#define INT SMOE_LAYOUT_INTERLEAVED

/* name, T, d, n, E, K, activation, routing, dtype, gradients, layout, bias, chunks, accumulate, reuse, wide,
 * numbers */
static const test_case cases[] = {
    {"plain relu", 200, 128, 128, 2, 1, SMOE_ACTIVATION_RELU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"gated", 300, 128, 256, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"f32 gradients", 300, 256, 128, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, F, CAT, 0, 1, 0, 0, 0, 0},
    {"interleaved", 300, 320, 192, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, INT, 0, 1, 0, 0, 0, 0},
    {"interleaved f32", 300, 192, 320, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, F, INT, 0, 1, 0, 0, 0, 0},
    {"relu2", 300, 192, 320, 3, 2, SMOE_ACTIVATION_RELU2, RANDOM, B, F, CAT, 0, 1, 0, 0, 0, 0},
    {"accumulate", 300, 192, 192, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, F, CAT, 1, 1, 1, 0, 0, 0},
    {"accumulate bf16", 120, 192, 192, 5, 1, SMOE_ACTIVATION_REGLU, HALF_EMPTY, B, B, INT, 1, 1, 1, 0, 0, 0},
    {"reuse", 300, 192, 256, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 1, 0, 0},
    {"edges", 2241, 128, 64, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"edges n 320", 2241, 192, 320, 16, 1, SMOE_ACTIVATION_RELU, EDGES, B, F, CAT, 0, 1, 0, 0, 0, 0},
    {"half empty", 600, 192, 128, 12, 3, SMOE_ACTIVATION_REGLU, HALF_EMPTY, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"one expert", 2400, 128, 64, 4, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"one expert f32 inter", 2400, 192, 136, 4, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, F, INT, 0, 1, 1, 0,
     0, 0},
    {"many splits", 32400, 8, 8, 30, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, F, CAT, 0, 1, 0, 0, 0, 0},
    {"tall, shared stripe", 500, 320, 64, 5, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"tall, shared stripe inter", 500, 320, 64, 5, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, INT, 1, 1, 1, 0, 0,
     0},
    {"tall, shared stripe f32 inter", 500, 200, 64, 5, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, F, INT, 0, 1, 1,
     0, 0, 0},
    {"tall, shared stripe split", 2400, 200, 64, 4, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, F, INT, 0, 1, 0,
     0, 0, 0},
    {"stationary dx n 64", 900, 512, 64, 9, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, B, INT, 0, 1, 0, 0, 0, 0},
    {"stationary dx n 128 edges", 2241, 512, 128, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, B, CAT, 0, 1, 0, 0,
     0, 0},
    {"stationary dx n 104 half empty", 900, 448, 104, 12, 3, SMOE_ACTIVATION_REGLU, HALF_EMPTY, B, B, INT, 0,
     1, 0, 0, 0, 0},
    {"stationary dx n 40 relu f16", 900, 256, 40, 9, 3, SMOE_ACTIVATION_RELU, RANDOM, H, H, CAT, 0, 1, 0, 0,
     0, 0},
    {"stationary dx experts 450", 2000, 256, 64, 450, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0,
     0, 0},
    {"stationary dx one expert", 2400, 512, 64, 4, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, B, CAT, 0, 1, 0,
     0, 0, 0},
    {"tall", 500, 520, 384, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 1, 0, 0, 0},
    {"tall relu f32", 500, 520, 104, 3, 2, SMOE_ACTIVATION_RELU, RANDOM, B, F, CAT, 1, 1, 1, 0, 0, 0},
    {"tall, shared stripe split inter", 2400, 200, 64, 4, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, B, INT, 0,
     1, 0, 0, 0, 0},
    {"tall relu", 500, 320, 104, 3, 2, SMOE_ACTIVATION_RELU, RANDOM, B, B, CAT, 1, 1, 0, 0, 0, 0},
    {"tall relu fp16", 500, 320, 104, 3, 2, SMOE_ACTIVATION_RELU, RANDOM, H, H, CAT, 1, 1, 1, 0, 0, 0},
    {"tall split", 2400, 200, 104, 4, 1, SMOE_ACTIVATION_RELU, ONE_EXPERT, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"broken ids", 500, 128, 128, 7, 4, SMOE_ACTIVATION_REGLU, BROKEN, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"broken ids int64", 500, 128, 128, 7, 4, SMOE_ACTIVATION_REGLU, BROKEN, B, B, CAT, 1, 1, 0, 0, 1, 0},
    {"rows", 700, 256, 192, 9, 1, SMOE_ACTIVATION_REGLU, ROWS, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"rows int64 bias", 700, 192, 128, 9, 1, SMOE_ACTIVATION_REGLU, ROWS, B, F, INT, 1, 1, 0, 1, 1, 0},
    {"ping-pong", 400, 384, 256, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"ping-pong inter edges", 1400, 192, 256, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, B, INT, 0, 1, 0, 0, 0,
     0},
    /* The last column tile is narrower. The second case has more units than an H200 has SMs, and a turn
     * (work_order.h). */
    {"ping-pong tail 128 edges", 1400, 320, 256, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, B, CAT, 0, 1, 0, 0,
     0, 0},
    {"ping-pong tail 64 inter", 1400, 640, 200, 40, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, B, INT, 0, 1, 0, 0,
     0, 0},
    {"long K", 300, 320, 640, 2, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"many steps", 300, 256, 792, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"bands", 3300, 2312, 24, 1, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"bands dh", 2100, 40, 2056, 2, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"bands dh fp16", 2100, 8, 2056, 3, 1, SMOE_ACTIVATION_RELU, RANDOM, H, F, CAT, 0, 1, 0, 1, 0, 0},
    {"bands dw", 30, 3080, 1544, 1, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, B, INT, 0, 1, 0, 0, 0, 0},
    {"chunks 2", 300, 384, 192, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 2, 0, 0, 0, 0},
    {"chunks 4", 300, 768, 128, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 4, 0, 0, 0, 0},
    {"chunks 64 d 200", 300, 200, 256, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 64, 0, 1, 0, 0},
    {"eights d 72 n 40", 500, 72, 40, 7, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"eights d 8 n 8", 500, 8, 8, 7, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, B, INT, 1, 1, 0, 0, 0, 0},
    {"eights d 136 n 24 f32", 500, 136, 24, 7, 3, SMOE_ACTIVATION_RELU, RANDOM, B, F, CAT, 0, 1, 0, 0, 0, 0},
    {"eights d 200 n 328", 300, 200, 328, 5, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, INT, 1, 1, 0, 0, 0, 0},
    {"bias", 400, 200, 136, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 1, 1, 0, 0, 0, 0},
    {"bias relu", 400, 256, 192, 6, 2, SMOE_ACTIVATION_RELU, RANDOM, B, B, CAT, 1, 1, 0, 0, 0, 0},
    {"fp16", 400, 256, 256, 4, 2, SMOE_ACTIVATION_REGLU, RANDOM, H, H, CAT, 0, 1, 0, 0, 0, 0},
    {"fp16 f32 inter bias", 400, 320, 192, 4, 2, SMOE_ACTIVATION_REGLU, RANDOM, H, F, INT, 1, 1, 0, 0, 0, 0},
    {"fp16 ping-pong tail 40", 100, 616, 256, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, H, H, CAT, 0, 1, 0, 0, 0,
     0},
    {"fp16 accumulate ping-pong", 300, 384, 256, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, H, H, CAT, 0, 1, 1, 0,
     0, 0},
    {"once rounded", 900, 72, 136, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 1, 0, 0, DENSE},
    {"once rounded fp16 inter", 900, 200, 72, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, H, H, INT, 0, 1, 1, 0, 0,
     DENSE},
    {"once rounded, split", 1500, 72, 72, 4, 2, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, B, INT, 1, 1, 1, 0, 0,
     DENSE},
    {"once rounded, split fp16", 2400, 72, 72, 4, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, H, H, CAT, 1, 1, 1, 0,
     0, DENSE},
    {"one token", 1, 64, 64, 8, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 1, 1, 0, 0, 0, 0},
    {"experts 1", 300, 64, 64, 1, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, F, CAT, 0, 1, 0, 0, 0, 0},
    {"experts 4096 topk 64", 100, 16, 8, 4096, 64, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 1, 1, 0, 0, 0,
     0},
    {"experts 1001 topk 9", 3000, 16, 8, 1001, 9, SMOE_ACTIVATION_REGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 0},
    {"swiglu", 500, 256, 256, 4, 2, SMOE_ACTIVATION_SWIGLU, RANDOM, B, B, CAT, 0, 1, 0, 0, 0, 1},
    {"swiglu bias inter", 500, 256, 320, 4, 2, SMOE_ACTIVATION_SWIGLU, RANDOM, B, F, INT, 1, 1, 1, 1, 0, 1},
    {"geglu", 400, 256, 192, 4, 2, SMOE_ACTIVATION_GEGLU, RANDOM, B, F, CAT, 1, 1, 0, 0, 0, 1},
    {"geglu_tanh", 400, 256, 256, 4, 2, SMOE_ACTIVATION_GEGLU_TANH, RANDOM, B, F, INT, 0, 1, 0, 0, 0, 1},
    {"swiglu_clamped", 400, 200, 200, 4, 2, SMOE_ACTIVATION_SWIGLU_CLAMPED, RANDOM, B, F, INT, 1, 1, 0, 0, 0,
     1},
    {"silu", 400, 256, 256, 4, 2, SMOE_ACTIVATION_SILU, RANDOM, B, F, CAT, 0, 1, 0, 0, 0, 1},
    {"gelu", 400, 256, 256, 4, 2, SMOE_ACTIVATION_GELU, RANDOM, B, F, CAT, 1, 1, 0, 0, 0, 1},
    {"fp16 swiglu", 400, 256, 256, 4, 2, SMOE_ACTIVATION_SWIGLU, RANDOM, H, F, CAT, 0, 1, 0, 0, 0, 1},
    {"fp16 geglu_tanh", 400, 256, 192, 4, 2, SMOE_ACTIVATION_GEGLU_TANH, RANDOM, H, F, INT, 0, 1, 0, 0, 0, 1},
    {"fp16 swiglu_clamped", 400, 200, 136, 4, 2, SMOE_ACTIVATION_SWIGLU_CLAMPED, RANDOM, H, H, CAT, 1, 1, 0,
     0, 0, 1},
    {"swiglu_capped", 400, 200, 200, 4, 2, SMOE_ACTIVATION_SWIGLU_CAPPED, RANDOM, B, F, INT, 1, 1, 0, 0, 0,
     1},
    {"fp16 swiglu_capped", 400, 200, 136, 4, 2, SMOE_ACTIVATION_SWIGLU_CAPPED, RANDOM, H, H, CAT, 1, 1, 0, 0,
     0, 1},
    {"limits", 300, 72, 40, 4, 2, SMOE_ACTIVATION_SWIGLU_CLAMPED, RANDOM, B, F, CAT, 0, 1, 0, 0, 0, LIMITS},
    {"limits fp16", 300, 72, 40, 4, 2, SMOE_ACTIVATION_SWIGLU_CLAMPED, RANDOM, H, F, INT, 0, 1, 0, 0, 0,
     LIMITS},
    {"fp16 gelu one expert", 2000, 192, 128, 4, 1, SMOE_ACTIVATION_GELU, ONE_EXPERT, H, F, CAT, 0, 1, 0, 0, 0,
     1},
    /* after the forward for few rows (src/cuda/experts/few_rows.cuh) */
    {"few rows", 16, 128, 72, 16, 4, SMOE_ACTIVATION_REGLU, RANDOM, B, F, CAT, 0, 1, 0, 0, 0, 0},
    {"few bias inter", 12, 200, 136, 8, 4, SMOE_ACTIVATION_REGLU, RANDOM, B, B, INT, 1, 1, 0, 1, 0, 0},
    {"few relu bias", 20, 136, 24, 7, 2, SMOE_ACTIVATION_RELU, RANDOM, B, F, CAT, 1, 1, 0, 0, 0, 0},
    {"few one expert chunks 2", 100, 192, 72, 32, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, F, CAT, 1, 2, 0, 0,
     0, 0},
    {"few given rows", 37, 136, 40, 9, 1, SMOE_ACTIVATION_REGLU, ROWS, H, H, CAT, 1, 1, 0, 0, 0, 0},
    {"few swiglu", 8, 256, 136, 6, 2, SMOE_ACTIVATION_SWIGLU, RANDOM, B, F, CAT, 1, 1, 0, 0, 0, 1},
};

enum { CASES = sizeof cases / sizeof cases[0] };

static gpu_case make(size_t i)
{
    static int64_t counts[EDGE_EXPERTS];
    static const int one_in[] = {[SPARSE] = 8, [NORMAL] = 0, [DENSE] = 1, [LIMITS] = 1};
    static const oracle_routing routings[] = {ORACLE_RANDOM, ORACLE_ONE_TAKES_ALL, ORACLE_HALF_EMPTY,
                                              ORACLE_COUNTS, ORACLE_RANDOM,        ORACLE_RANDOM};
    const test_case *c = &cases[i];
    const bool bias = c->bias, capped = c->activation == SMOE_ACTIVATION_SWIGLU_CAPPED;
    if (c->routing == EDGES) edge_counts(c->tokens, counts);
    return (gpu_case){
        .name = c->name,
        .layer = {.tokens = c->tokens,
                  .hidden = c->hidden,
                  .intermediate = c->intermediate,
                  .experts = c->experts,
                  .topk = c->topk,
                  .dtype = c->dtype,
                  .gradient_type = c->gradient_type == SMOE_TYPE_F32 ? SMOE_TYPE_F32 : SMOE_TYPE_BF16,
                  .activation = c->activation,
                  .layout = c->layout,
                  .entry = c->routing == ROWS ? SMOE_ENTRY_FROM_ROWS : SMOE_ENTRY_FROM_TOPK,
                  .index_type = c->wide ? SMOE_TYPE_I64 : SMOE_TYPE_I32,
                  .accumulate = c->accumulate,
                  .reuse_saved = c->reuse_saved,
                  .chunks = c->chunks,
                  .gate_limit = capped ? 2.0f : 7.0f,
                  .up_limit = capped ? 3.0f : 7.0f,
                  .gate_alpha = capped ? 1.0f : 1.702f,
                  .up_offset = capped ? 0.0f : 1.0f},
        .draw = {.routing = routings[c->routing],
                 .counts = counts,
                 .broken_ids = c->routing == BROKEN,
                 .row_weights = true,
                 .b1 = bias,
                 .b2 = bias,
                 .integers = one_in[c->numbers]},
        .inexact = c->numbers == LIMITS};
}

int main(int argc, char **argv)
{
    return run_checks(argc, argv, make, CASES, 3);
}
