/* The forward of the cuda backend from a given top-K or given rows: see run_checks.h. Small integers with an
 * activation that keeps them integers are compared element by element, normal numbers within the tolerance.
 */
#include "run_checks.h"

#include <string.h>

typedef enum routing { RANDOM, ONE_EXPERT, HALF_EMPTY, EDGES, INVALID, NO_ROWS } routing;

typedef struct test_case {
    const char *name;
    int64_t tokens, hidden, intermediate, experts, topk;
    smoe_activation activation;
    routing routing;
    smoe_type dtype;
    smoe_layout layout;
    int rows, bias, inference, chunks, wide, rounded;
} test_case;

#define B   SMOE_TYPE_BF16
#define F   SMOE_TYPE_F16
#define CAT SMOE_LAYOUT_CONCATENATED
#define INT SMOE_LAYOUT_INTERLEAVED
/* name, T, d, n, E, K, activation, routing, dtype, layout, rows, bias, inference, chunks, wide, rounded */
static const test_case cases[] = {
    {"tiny", 64, 64, 64, 2, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"plain relu tiny", 64, 64, 64, 2, 1, SMOE_ACTIVATION_RELU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"general", 700, 256, 320, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"interleaved", 700, 320, 192, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, INT, 0, 0, 0, 1, 0, 0},
    {"relu2", 700, 192, 320, 5, 2, SMOE_ACTIVATION_RELU2, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"stationary", 900, 512, 256, 5, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"stationary d 768", 3000, 768, 256, 8, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"stationary n 200", 900, 512, 200, 5, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"stationary n 64", 1200, 512, 64, 9, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, INT, 0, 0, 0, 1, 0, 0},
    {"stationary n 40 edges", 3000, 256, 40, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, CAT, 0, 0, 0, 1, 0, 0},
    {"stationary n 128 half empty", 900, 512, 128, 12, 3, SMOE_ACTIVATION_REGLU, HALF_EMPTY, B, CAT, 0, 0, 0,
     1, 0, 0},
    {"stationary n 104 relu f16", 900, 448, 104, 9, 3, SMOE_ACTIVATION_RELU, RANDOM, F, CAT, 0, 0, 0, 1, 0,
     0},
    {"stationary one expert", 5000, 512, 256, 9, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, CAT, 0, 0, 0, 1, 0,
     0},
    {"stationary edges", 3000, 512, 256, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, CAT, 0, 0, 0, 1, 0, 0},
    {"stationary no rows", 200, 256, 256, 16, 1, SMOE_ACTIVATION_REGLU, NO_ROWS, B, CAT, 0, 0, 0, 1, 0, 0},
    {"stationary experts 450", 2000, 256, 200, 450, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0,
     0},
    {"ping-pong", 900, 768, 512, 5, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"ping-pong edges", 3000, 384, 512, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, CAT, 0, 0, 0, 1, 0, 0},
    /* The last column tile is narrower. The second case has more units than an H200 has SMs, and a turn
     * (work_order.h). */
    {"ping-pong tail 128 edges", 2000, 320, 512, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, CAT, 0, 0, 0, 1, 0,
     0},
    {"ping-pong tail 64", 1400, 640, 264, 40, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"half empty d 200 n 328", 600, 200, 328, 16, 2, SMOE_ACTIVATION_REGLU, HALF_EMPTY, B, CAT, 0, 0, 0, 1, 0,
     0},
    {"edges", 3000, 256, 320, 16, 1, SMOE_ACTIVATION_REGLU, EDGES, B, CAT, 0, 0, 0, 1, 0, 0},
    {"half empty", 1000, 192, 128, 32, 4, SMOE_ACTIVATION_REGLU, HALF_EMPTY, B, CAT, 0, 0, 0, 1, 0, 0},
    {"one expert", 3000, 192, 128, 32, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, CAT, 0, 0, 0, 1, 0, 0},
    {"eights d 72 n 40", 500, 72, 40, 7, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"eights d 8 n 8", 500, 8, 8, 7, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, INT, 0, 0, 0, 1, 0, 0},
    {"eights relu d 136 n 24", 500, 136, 24, 7, 3, SMOE_ACTIVATION_RELU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"wide d 1040 topk 2", 150, 1040, 16, 5, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"wide d 1040 topk 3", 150, 1040, 16, 5, 3, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"wide d 1040 topk 5", 150, 1040, 16, 7, 5, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"wide d 1032 topk 3", 150, 1032, 16, 5, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"wide d 8224 topk 4", 40, 8224, 8, 5, 4, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"many steps up", 700, 1608, 320, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"many steps down", 500, 256, 1608, 3, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"bands", 3300, 64, 1160, 1, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"topk 2 d 72 lost", 500, 72, 24, 5, 2, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"topk 2 d 12312 lost", 20, 12312, 8, 5, 2, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"topk 2 d 12312", 20, 12312, 8, 5, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"batches topk 8 d 1040", 150, 1040, 16, 9, 8, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"batches topk 9 d 4112", 60, 4112, 16, 9, 9, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"batches topk 9 d 1040 lost", 150, 1040, 16, 12, 9, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1,
     0, 0},
    {"batches topk 14 d 72", 500, 72, 24, 17, 14, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"batches topk 5 d 2056 lost", 150, 2056, 16, 7, 5, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0,
     0},
    {"topk 1 d 136", 500, 136, 24, 5, 1, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"topk 1 d 7168", 70, 7168, 8, 5, 1, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"bias", 700, 200, 136, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 1, 0, 1, 0, 0},
    {"bias interleaved", 700, 256, 256, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, INT, 0, 1, 0, 1, 0, 0},
    {"bias relu", 700, 256, 192, 6, 2, SMOE_ACTIVATION_RELU, RANDOM, B, CAT, 0, 1, 0, 1, 0, 0},
    {"invalid ids", 900, 128, 128, 10, 5, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"repeated ids int64", 900, 128, 128, 10, 5, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 1, 0},
    {"rows", 500, 256, 192, 9, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 1, 0, 0, 1, 0, 0},
    {"rows int64", 300, 256, 256, 70, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 1, 0, 0, 1, 1, 0},
    {"inference", 700, 256, 256, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 1, 1, 0, 0},
    {"chunks 2", 700, 768, 256, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 2, 0, 0},
    {"chunks 4", 700, 768, 256, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 4, 0, 0},
    {"chunks 64 d 200", 700, 200, 512, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 1, 64, 0, 0},
    {"fp16", 700, 256, 256, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, F, CAT, 0, 0, 0, 1, 0, 0},
    {"fp16 general bias", 700, 320, 192, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, F, INT, 0, 1, 0, 1, 0, 0},
    {"fp16 ping-pong", 700, 384, 512, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, F, CAT, 0, 0, 0, 1, 0, 0},
    {"fp16 ping-pong tail 40", 100, 616, 512, 6, 2, SMOE_ACTIVATION_REGLU, RANDOM, F, CAT, 0, 0, 0, 1, 0, 0},
    {"one token", 1, 64, 64, 8, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"experts 1", 300, 64, 64, 1, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"experts 4096 topk 64", 300, 64, 16, 4096, 64, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"experts 1001 topk 9", 9000, 16, 8, 1001, 9, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"tokens 100001", 100001, 16, 8, 24, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"tokens 70000 E 300", 70000, 8, 8, 300, 3, SMOE_ACTIVATION_REGLU, INVALID, B, CAT, 0, 0, 0, 1, 0, 0},
    {"swiglu", 800, 512, 256, 6, 2, SMOE_ACTIVATION_SWIGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 1},
    {"geglu", 800, 512, 320, 6, 2, SMOE_ACTIVATION_GEGLU, RANDOM, B, CAT, 0, 1, 0, 1, 0, 1},
    {"geglu_tanh", 800, 512, 512, 6, 2, SMOE_ACTIVATION_GEGLU_TANH, RANDOM, B, INT, 0, 0, 0, 1, 0, 1},
    {"swiglu_clamped", 800, 360, 360, 6, 2, SMOE_ACTIVATION_SWIGLU_CLAMPED, RANDOM, B, INT, 0, 1, 0, 1, 0, 1},
    {"swiglu_capped", 800, 360, 360, 6, 2, SMOE_ACTIVATION_SWIGLU_CAPPED, RANDOM, B, CAT, 0, 1, 0, 1, 0, 1},
    {"fp16 swiglu_capped", 300, 360, 136, 6, 2, SMOE_ACTIVATION_SWIGLU_CAPPED, RANDOM, F, INT, 0, 1, 0, 1, 0,
     1},
    {"silu", 800, 512, 256, 6, 2, SMOE_ACTIVATION_SILU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 1},
    {"gelu", 800, 512, 256, 6, 2, SMOE_ACTIVATION_GELU, RANDOM, B, CAT, 0, 1, 0, 1, 0, 1},
    {"fp16 swiglu", 800, 512, 256, 6, 2, SMOE_ACTIVATION_SWIGLU, RANDOM, F, CAT, 0, 0, 0, 1, 0, 1},
    {"fp16 geglu_tanh", 800, 512, 512, 6, 2, SMOE_ACTIVATION_GEGLU_TANH, RANDOM, F, INT, 0, 0, 0, 1, 0, 1},
    {"fp16 silu", 800, 512, 320, 6, 2, SMOE_ACTIVATION_SILU, RANDOM, F, CAT, 0, 1, 0, 1, 0, 1},
    /* the kernels for few rows (src/cuda/experts/few_rows.cuh) */
    {"few rows", 16, 256, 320, 16, 4, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"few long sums", 3, 1160, 1032, 4, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 1, 1, 0, 0},
    {"few bias", 9, 200, 136, 16, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 1, 0, 1, 0, 0},
    {"few bias inter", 12, 328, 192, 8, 4, SMOE_ACTIVATION_REGLU, RANDOM, B, INT, 0, 1, 0, 1, 0, 0},
    {"few relu d 136 n 24", 20, 136, 24, 7, 2, SMOE_ACTIVATION_RELU, RANDOM, B, CAT, 0, 1, 0, 1, 0, 0},
    {"few d 8 n 8", 16, 8, 8, 7, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, INT, 0, 0, 0, 1, 0, 0},
    {"few one expert", 100, 192, 72, 32, 1, SMOE_ACTIVATION_REGLU, ONE_EXPERT, B, CAT, 0, 1, 0, 1, 0, 0},
    {"few chunks 4", 16, 712, 40, 8, 2, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 1, 0, 4, 0, 0},
    {"few chunks 64", 30, 200, 512, 6, 1, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 1, 64, 0, 0},
    {"few given rows", 12, 256, 64, 9, 3, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 1, 1, 0, 1, 0, 0},
    {"few invalid ids", 16, 128, 72, 10, 5, SMOE_ACTIVATION_REGLU, INVALID, B, INT, 0, 0, 0, 1, 1, 0},
    {"few experts 4096", 2, 64, 16, 4096, 64, SMOE_ACTIVATION_REGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"few fp16 bias", 11, 320, 192, 6, 4, SMOE_ACTIVATION_REGLU, RANDOM, F, INT, 0, 1, 0, 1, 0, 0},
    {"few swiglu", 8, 512, 256, 6, 2, SMOE_ACTIVATION_SWIGLU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 1},
    {"few swiglu_clamped", 8, 360, 360, 6, 2, SMOE_ACTIVATION_SWIGLU_CLAMPED, RANDOM, B, INT, 0, 1, 0, 1, 0,
     1},
    {"few swiglu_capped", 8, 360, 360, 6, 2, SMOE_ACTIVATION_SWIGLU_CAPPED, RANDOM, B, INT, 0, 1, 0, 1, 0, 1},
    {"few geglu", 8, 256, 136, 6, 2, SMOE_ACTIVATION_GEGLU, RANDOM, B, CAT, 0, 0, 1, 1, 0, 1},
    {"few geglu_tanh", 8, 256, 136, 6, 2, SMOE_ACTIVATION_GEGLU_TANH, RANDOM, B, CAT, 0, 0, 0, 1, 0, 1},
    {"few silu", 8, 256, 136, 6, 2, SMOE_ACTIVATION_SILU, RANDOM, B, CAT, 0, 1, 0, 1, 0, 1},
    {"few gelu", 8, 256, 136, 6, 2, SMOE_ACTIVATION_GELU, RANDOM, B, CAT, 0, 0, 0, 1, 0, 1},
    {"few relu2", 16, 128, 136, 6, 2, SMOE_ACTIVATION_RELU2, RANDOM, B, CAT, 0, 0, 0, 1, 0, 0},
    {"few fp16 swiglu", 8, 512, 256, 6, 2, SMOE_ACTIVATION_SWIGLU, RANDOM, F, CAT, 0, 0, 0, 1, 0, 1},
};

enum { CASES = sizeof cases / sizeof cases[0], DENSITY = 3 };

static gpu_case make(size_t i)
{
    static int64_t counts[EDGE_EXPERTS];
    static const oracle_routing routings[] = {ORACLE_RANDOM, ORACLE_ONE_TAKES_ALL, ORACLE_HALF_EMPTY,
                                              ORACLE_COUNTS, ORACLE_RANDOM,        ORACLE_COUNTS};
    const test_case *c = &cases[i];
    const bool bias = c->bias, capped = c->activation == SMOE_ACTIVATION_SWIGLU_CAPPED;
    memset(counts, 0, sizeof counts);
    if (c->routing == EDGES) edge_counts(c->tokens, counts);
    return (gpu_case){.name = c->name,
                      .layer = {.tokens = c->rows ? c->tokens * c->topk : c->tokens,
                                .hidden = c->hidden,
                                .intermediate = c->intermediate,
                                .experts = c->experts,
                                .topk = c->rows ? 1 : c->topk,
                                .dtype = c->dtype,
                                .activation = c->activation,
                                .layout = c->layout,
                                .entry = c->rows ? SMOE_ENTRY_FROM_ROWS : SMOE_ENTRY_FROM_TOPK,
                                .index_type = c->wide ? SMOE_TYPE_I64 : SMOE_TYPE_I32,
                                .inference = c->inference,
                                .chunks = c->chunks,
                                .gate_limit = capped ? 2.0f : 7.0f,
                                .up_limit = capped ? 3.0f : 7.0f,
                                .gate_alpha = capped ? 1.0f : 1.702f,
                                .up_offset = capped ? 0.0f : 1.0f},
                      .draw = {.routing = routings[c->routing],
                               .counts = counts,
                               .broken_ids = c->routing == INVALID,
                               .row_weights = true,
                               .b1 = bias,
                               .b2 = bias,
                               .integers = c->rounded ? 0 : DENSITY},
                      .forward_only = true};
}

int main(int argc, char **argv)
{
    return run_checks(argc, argv, make, CASES, 1);
}
