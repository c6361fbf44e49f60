/* Forward and backward of the whole layer from logits on the cuda backend: every score function, rounding,
 * losses, both gradient types, accumulated gradients, chunks, odd E and K. Every case also runs the
 * comparison `other_ways` of run_checks.h. */
#include "run_checks.h"

typedef struct layer_case {
    const char *name;
    smoe_layer layer;
    oracle_draw draw;
} layer_case;

#define ROUTER .router = true
#define BIASES .router_bias = true, .b1 = true, .b2 = true
/* Coefficients that are large enough for the losses to be a considerable part of dlogits. */
#define LOSSES .balance_coefficient = 40, .z_coefficient = 20

static const layer_case cases[] = {
    /* sparse dlogits: the stage dx adds the router's term of dX while it sums the rows of dX~ */
    {"topk-softmax", {.score = SMOE_SCORE_TOPK_SOFTMAX}, {ROUTER}},
    {"renormalised, scaled, biases", {.renormalize = 1, .route_scale = 2.5f}, {ROUTER, BIASES}},
    {"sigmoid", {.score = SMOE_SCORE_SIGMOID}, {ROUTER, .selection_bias = true}},
    {"sigmoid groups",
     {.score = SMOE_SCORE_SIGMOID, .renormalize = 1, .experts = 16, .topk = 4, .groups = 4, .groups_kept = 2},
     {ROUTER, BIASES, .selection_bias = true}},
    {"sparse E 13 K 7 f16",
     {.score = SMOE_SCORE_TOPK_SOFTMAX, .experts = 13, .topk = 7, .dtype = SMOE_TYPE_F16},
     {ROUTER}},
    {"sparse E 7 K 5 bf16 gradients",
     {.renormalize = 1,
      .experts = 7,
      .topk = 5,
      .gradient_type = SMOE_TYPE_BF16,
      .logits_type = SMOE_TYPE_BF16},
     {ROUTER, BIASES}},
    {"sparse d 200 chunks accumulated",
     {.score = SMOE_SCORE_TOPK_SOFTMAX, .hidden = 200, .chunks = 4, .accumulate = 1},
     {ROUTER, BIASES}},
    {"bf16 gradients accumulated",
     {.gradient_type = SMOE_TYPE_BF16,
      .accumulate = 1,
      .hidden = 136,
      .experts = 24,
      .topk = 3,
      .tokens = 1200},
     {ROUTER, BIASES}},
    {"sparse, 6 parts of dS",
     {.score = SMOE_SCORE_TOPK_SOFTMAX, .tokens = 40, .hidden = 16, .intermediate = 1032},
     {ROUTER, BIASES}},
    {"sparse K 1", {.score = SMOE_SCORE_SIGMOID, .topk = 1, .tokens = 301}, {ROUTER}},
    {"sparse K 40 E 100", {.renormalize = 1, .topk = 40, .experts = 100, .tokens = 37}, {ROUTER, BIASES}},
    {"sparse given logits", {.renormalize = 1, .experts = 9, .topk = 3}, {.selection_bias = false}},
    /* dense */
    {"softmax", {.topk = 3}, {ROUTER, BIASES}},
    {"softmax losses f16", {.dtype = SMOE_TYPE_F16, .route_scale = 1.5f}, {ROUTER, BIASES, LOSSES}},
    {"sigmoid losses", {.score = SMOE_SCORE_SIGMOID, .renormalize = 1}, {ROUTER, LOSSES}},
    {"dense E 13 K 5 bf16 logits",
     {.experts = 13, .topk = 5, .logits_type = SMOE_TYPE_BF16, .gradient_type = SMOE_TYPE_BF16},
     {ROUTER, BIASES, LOSSES}},
    {"dense E 13 K 5 d 1040", {.experts = 13, .topk = 5, .hidden = 1040, .tokens = 90}, {ROUTER, LOSSES}},
    {"dense d 200 chunks accumulated, reuse",
     {.hidden = 200, .chunks = 2, .accumulate = 1, .reuse_saved = 1, .topk = 3},
     {ROUTER, BIASES, LOSSES}},
    {"dense given logits", {.experts = 11, .topk = 3}, {LOSSES}},
    {"dense E 1", {.experts = 1, .topk = 1}, {ROUTER, LOSSES}},
    {"one token", {.tokens = 1, .experts = 10, .topk = 3}, {ROUTER, BIASES, LOSSES}},
    {"few tokens", {.tokens = 9, .experts = 10, .topk = 3, .chunks = 2, .hidden = 136}, {ROUTER, BIASES}},
    {"few tokens, all dropped",
     {.tokens = 7, .experts = 10, .topk = 2, .rounding = SMOE_ROUNDING_DOWN},
     {ROUTER, BIASES}},
    {"experts 1100 topk 9",
     {.experts = 1100, .topk = 9, .tokens = 130, .hidden = 16, .intermediate = 8},
     {ROUTER}},
    {"experts 4096 topk 64",
     {.experts = 4096, .topk = 64, .tokens = 70, .hidden = 16, .intermediate = 8, .renormalize = 1},
     {ROUTER, BIASES}},
    {"many tokens, odd E",
     {.tokens = 2500, .experts = 13, .hidden = 72, .intermediate = 16},
     {ROUTER, BIASES}},
    /* rounding */
    {"nr-f", {.rounding = SMOE_ROUNDING_NR_F}, {ROUTER, BIASES}},
    {"up, renormalised",
     {.rounding = SMOE_ROUNDING_UP, .renormalize = 1, .route_scale = 2.0f},
     {ROUTER, LOSSES}},
    {"down, topk-softmax",
     {.rounding = SMOE_ROUNDING_DOWN, .score = SMOE_SCORE_TOPK_SOFTMAX, .topk = 3},
     {ROUTER}},
    {"nr-s, sigmoid",
     {.rounding = SMOE_ROUNDING_NR_S, .score = SMOE_SCORE_SIGMOID},
     {ROUTER, .selection_bias = true}},
    {"up, sigmoid renormalised, losses f16",
     {.rounding = SMOE_ROUNDING_UP, .score = SMOE_SCORE_SIGMOID, .renormalize = 1, .dtype = SMOE_TYPE_F16},
     {ROUTER, LOSSES, .selection_bias = true}},
    {"balance-f E 13 bf16 logits",
     {.rounding = SMOE_ROUNDING_BALANCE_F, .experts = 13, .topk = 3, .logits_type = SMOE_TYPE_BF16},
     {ROUTER, LOSSES}},
    {"sr-f given logits", {.rounding = SMOE_ROUNDING_SR_F, .seed = 99}, {LOSSES, .step = 5}},
};

static gpu_case make(size_t i)
{
    const layer_case *c = &cases[i];
    return (gpu_case){.name = c->name, .layer = c->layer, .draw = c->draw, .other_ways = true};
}

int main(int argc, char **argv)
{
    return run_checks(argc, argv, make, sizeof cases / sizeof cases[0], 2);
}
