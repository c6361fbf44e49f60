/* The trainer's model. The gradient of every parameter is compared with finite differences of the loss;
 * RMSNorm, RoPE and attention with plain loops in double; AdamW with its formula. Every number of threads
 * must give the same bits. */
#include "base/random.h"
#include "train/cpu/adamw.h"
#include "train/cpu/attention.h"
#include "train/cpu/embedding.h"
#include "train/cpu/math.h"
#include "train/cpu/norm.h"
#include "train/cpu/rope.h"
#include "train/model/experts.h"
#include "train/model/model.h"
#include "train/model/rope_table.h"

#include <cblas.h>
#include <math.h>
#include <omp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static float *values(int64_t count, double deviation, uint64_t seed)
{
    float *x = malloc((size_t)count * sizeof *x);
    assert_non_null(x);
    for (int64_t i = 0; i < count; i++) x[i] = (float)(deviation * random_normal(seed, (uint64_t)i));
    return x;
}

static float *poisoned(int64_t count)
{
    float *x = malloc((size_t)count * sizeof *x);
    assert_non_null(x);
    return memset(x, 0xff, (size_t)count * sizeof *x);
}

static double relative(const float *have, const double *want, int64_t count)
{
    double miss = 0, norm = 0;
    for (int64_t i = 0; i < count; i++) {
        miss += (have[i] - want[i]) * (have[i] - want[i]);
        norm += want[i] * want[i];
    }
    return sqrt(miss / norm);
}

static void exp_is_close(void **state)
{
    (void)state;
    double worst = 0;
    for (int i = -86999; i <= 87999; i++) {
        float x = (float)i * 1e-3f;
        worst = fmax(worst, fabs(exp_poly(x) / exp((double)x) - 1.0));
    }
    if (!(worst < 3e-7)) fail_msg("relative error %g", worst);
    assert_true(exp_poly(0.0f) == 1.0f);
    assert_true(exp_poly(-INFINITY) < 1e-37f);
    assert_true(isnan(exp_poly(NAN)));
}

static void norm_matches_formula(void **state)
{
    (void)state;
    enum { ROWS = 300, SIZE = 24 }; // three panels
    float *x = values(ROWS * SIZE, 2.0, 1), *w = values(SIZE, 1.0, 2), *y = poisoned(ROWS * SIZE),
          *rstd = poisoned(ROWS);
    norm_forward(y, SIZE, rstd, x, SIZE, w, ROWS, SIZE, 1e-5f);
    double *want = malloc(sizeof(double) * ROWS * SIZE);
    for (int r = 0; r < ROWS; r++) {
        double sum = 0;
        for (int i = 0; i < SIZE; i++) sum += (double)x[r * SIZE + i] * x[r * SIZE + i];
        for (int i = 0; i < SIZE; i++) want[r * SIZE + i] = x[r * SIZE + i] / sqrt(sum / SIZE + 1e-5) * w[i];
    }
    assert_true(relative(y, want, ROWS * SIZE) < 1e-6);
    free(x), free(w), free(y), free(rstd), free(want);
}

/* Attention at every position compared with its formula in double. The length is no multiple of the tile. */
static void attention_matches_formula(void **state)
{
    (void)state;
    enum { B = 2, C = 150, H = 2, S = 8, D = H * S };
    pass_shape shape = {B, C, H, S, 0, false};
    float *q = values(B * C * D, 1.5, 1), *k = values(B * C * D, 1.5, 2), *v = values(B * C * 3 * D, 1.0, 3);
    float *out = poisoned(B * C * D), *p = poisoned(attention_saved(&shape));
    attention_forward(out, p, q, k, v, &shape);
    double *want = calloc(B * C * D, sizeof *want);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H; h++)
            for (int i = 0; i < C; i++) {
                double weight[C], sum = 0;
                for (int j = 0; j <= i; j++) {
                    double dot = 0;
                    for (int s = 0; s < S; s++)
                        dot += (double)q[(b * C + i) * D + h * S + s] * k[(b * C + j) * D + h * S + s];
                    sum += weight[j] = exp(dot / sqrt(S));
                }
                for (int j = 0; j <= i; j++)
                    for (int s = 0; s < S; s++)
                        want[(b * C + i) * D + h * S + s] +=
                            weight[j] / sum * v[(b * C + j) * 3 * D + h * S + s];
            }
    assert_true(relative(out, want, B * C * D) < 2e-6);
    free(q), free(k), free(v), free(out), free(p), free(want);
}

static void rope_turns_pairs(void **state)
{
    (void)state;
    enum { C = 7, H = 2, S = 6 };
    float table[C * S], *x = values(2 * C * H * S, 1.0, 5), *y = malloc(sizeof(float) * 2 * C * H * S);
    memcpy(y, x, sizeof(float) * 2 * C * H * S);
    pass_shape shape = {2, C, H, S, 0, false};
    rope_table(table, C, S, 100.0);
    rope_apply(y, table, 2 * C, &shape, false);
    for (int r = 0; r < 2 * C; r++)
        for (int h = 0; h < H; h++)
            for (int i = 0; i < S / 2; i++) {
                double angle = (r % C) * pow(100.0, -2.0 * i / S);
                float a = x[(r * H + h) * S + i], b = x[(r * H + h) * S + i + S / 2];
                assert_float_equal(y[(r * H + h) * S + i], a * cos(angle) - b * sin(angle), 1e-6);
                assert_float_equal(y[(r * H + h) * S + i + S / 2], b * cos(angle) + a * sin(angle), 1e-6);
            }
    rope_apply(y, table, 2 * C, &shape, true);
    for (int i = 0; i < 2 * C * H * S; i++) assert_float_equal(y[i], x[i], 2e-6);
    free(x), free(y);
}

static void adamw_matches_formula(void **state)
{
    (void)state;
    enum { N = 20000 }; // two panels
    float *w = values(N, 1.0, 1), *m = values(N, 0.1, 2), *v = values(N, 0.1, 3), *g = values(N, 1.0, 4);
    for (int i = 0; i < N; i++) v[i] *= v[i];
    double want[4];
    int at[4] = {0, 1, N - 2, N - 1};
    adamw_step s = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.2, .step = 3};
    for (int i = 0; i < 4; i++) {
        double grad = 0.5 * g[at[i]], mean = 0.9 * m[at[i]] + 0.1 * grad,
               square = 0.95 * v[at[i]] + 0.05 * grad * grad;
        double step = mean / (1 - pow(0.9, 3)) / (sqrt(square / (1 - pow(0.95, 3))) + 1e-8);
        want[i] = w[at[i]] - 0.1 * (step + 0.2 * w[at[i]]);
    }
    adamw_update(w, g, m, v, N, &s, 0.5f);
    for (int i = 0; i < 4; i++) assert_float_equal(w[at[i]], want[i], 1e-6);
    for (int i = 0; i < N; i++) assert_true(g[i] == 0.0f);
    free(w), free(m), free(v), free(g);
}

static model_config tiny(void)
{
    model_config c = model_config_default();
    c.vocab = 19;
    c.hidden = 16;
    c.heads = 2;
    c.layers = 2;
    c.experts = 4;
    c.topk = 2;
    c.intermediate = 8;
    c.context = 70; // two tiles of attention
    c.dense_layers = 2;
    c.dense_intermediate = 24;
    c.initializer_range = 0.3;
    return c;
}

static int32_t *tokens_of(int64_t count, int64_t vocab, uint64_t seed)
{
    int32_t *tokens = malloc((size_t)count * sizeof *tokens);
    assert_non_null(tokens);
    for (int64_t i = 0; i < count; i++)
        tokens[i] = (int32_t)(random_bits(seed, (uint64_t)i) % (uint64_t)vocab);
    return tokens;
}

static void make(model *m, const model_config *c, const train_routing *routing)
{
    error err = {0};
    model_options options = {.sequences = 2, .routing = routing, .use = MODEL_TRAIN};
    if (!model_create(m, NULL, c, &options, &err)) fail_msg("%s", err.text);
    param_init(m->weights.host, &m->weights.layout, 7);
    // norms' weights that are not one, so that their gradients have an effect
    for (size_t i = m->weights.layout.matrices; i < m->weights.layout.total; i++)
        m->weights.host[i] += (float)(0.2 * random_normal(9, i));
}

static double total_loss(model *m, const model_batch *batch)
{
    error err = {0};
    double loss;
    if (!model_loss(m, batch, &m->routing, SMOE_COMPUTE_STORAGE, &loss, &err)) fail_msg("%s", err.text);
    for (int64_t l = m->config.dense_layers; l < m->config.layers; l++)
        loss += m->routing.balance_coefficient * experts_losses(model_experts(m, l))[0] +
                m->routing.z_coefficient * experts_losses(model_experts(m, l))[1];
    return loss;
}

/* A hash of the experts of all tokens in all layers. */
static uint64_t routes(model *m, int64_t rows)
{
    const model_config *c = &m->config;
    uint64_t hash = 0;
    for (int64_t l = c->dense_layers; l < c->layers; l++) {
        smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
        error err = {0};
        if (!experts_view(model_experts(m, l), rows, &m->routing, &view, &err)) fail_msg("%s", err.text);
        for (int64_t t = 0; t < rows; t++) {
            uint64_t chosen = 0; // of at most 64 experts
            for (int64_t k = 0; k < c->topk; k++) chosen |= 1ull << view.topk_ids[t * c->topk + k];
            hash = random_bits(hash, chosen);
        }
    }
    return hash;
}

/* The slope of the loss along `direction` of one tensor, by central differences. NAN if a token's experts
 * change between the two points, because the loss is not continuous there. */
static double slope(model *m, const model_batch *batch, const param_tensor *tensor, const float *direction,
                    double step)
{
    float *w = m->weights.host + tensor->offset, *kept = malloc(tensor->count * sizeof *kept);
    double loss[2];
    uint64_t route[2];
    memcpy(kept, w, tensor->count * sizeof *kept);
    for (int side = 0; side < 2; side++) {
        for (size_t i = 0; i < tensor->count; i++)
            w[i] = kept[i] + (float)((side ? step : -step) * direction[i]);
        loss[side] = total_loss(m, batch);
        route[side] = routes(m, batch->sequences * batch->length);
    }
    memcpy(w, kept, tensor->count * sizeof *kept);
    free(kept);
    return route[0] == route[1] ? (loss[1] - loss[0]) / (2 * step) : NAN;
}

/* Compares the slope along a direction with the product of direction and gradient. The direction is the
 * gradient (trial 0), or the gradient plus noise of the same norm. False if the routing changed. */
static bool check_slope(model *m, const model_batch *batch, const param_tensor *tensor, uint64_t trial)
{
    const float *grad = (const float *)m->weights.grads + tensor->offset;
    int64_t count = (int64_t)tensor->count;
    double norm = gradient_norm(grad, count), want = 0;
    float *direction = values(count, trial ? norm / sqrt((double)count) : 0.0, 40 + trial);
    for (int64_t j = 0; j < count; j++) direction[j] += grad[j];
    double length = gradient_norm(direction, count);
    for (int64_t j = 0; j < count; j++) {
        direction[j] /= (float)(length > 0 ? length : 1);
        want += (double)direction[j] * grad[j];
    }
    double have = slope(m, batch, tensor, direction, 2e-3);
    free(direction);
    if (fabs(have - want) > 0.01 * norm + 5e-5)
        fail_msg("%s, trial %d: slope %.6g, gradient %.6g (norm %.6g)", tensor->name, (int)trial, have, want,
                 norm);
    return !isnan(have);
}

static void check_gradients(const model_config *c, const train_routing *routing)
{
    enum { TRIALS = 3 };
    model m;
    make(&m, c, routing);
    int32_t *tokens = tokens_of(2 * c->context, c->vocab, 1),
            *targets = tokens_of(2 * c->context, c->vocab, 2);
    model_batch batch = {tokens, targets, 2, c->context};
    error err = {0};
    double loss;
    if (!model_gradients(&m, &batch, &loss, &err)) fail_msg("%s", err.text);
    size_t checked = 0, trials = TRIALS * m.weights.layout.tensor_count;
    for (size_t i = 0; i < trials; i++)
        checked += check_slope(&m, &batch, &m.weights.layout.tensors[i / TRIALS], i % TRIALS);
    if (checked < trials * 3 / 4) fail_msg("only %zu of %zu slopes had one routing", checked, trials);
    free(tokens), free(targets);
    model_destroy(&m);
}

static void dense_gradients_match_differences(void **state)
{
    (void)state;
    model_config c = tiny();
    check_gradients(&c, NULL);
}

static void tied_gradients_match_differences(void **state)
{
    (void)state;
    model_config c = tiny();
    c.tied = true;
    check_gradients(&c, NULL);
}

static void sparse_gradients_match_differences(void **state)
{
    (void)state;
    model_config c = tiny();
    c.context = 6; // few tokens, so that few change their experts
    c.dense_layers = 1;
    c.shared_intermediate = 16;
    check_gradients(&c, NULL);
    c.shared_intermediate = 0;
    c.norm_topk_prob = true;
    check_gradients(&c, NULL);
}

/* The other scores, with groups of experts, a scale and selection biases. */
static void router_gradients_match_differences(void **state)
{
    (void)state;
    model_config c = tiny();
    c.context = 6;
    c.dense_layers = 1;
    c.score = SMOE_SCORE_TOPK_SOFTMAX;
    c.route_scale = 1.7;
    check_gradients(&c, NULL);
    c.score = SMOE_SCORE_SIGMOID;
    c.groups = 2;
    check_gradients(&c, NULL);
    c.norm_topk_prob = true;
    c.selection_bias = true;
    check_gradients(&c, NULL);
}

/* The counts of experts in layer 1 for one batch, and its biases after a step of `parts` parts. */
static void count(const model_config *c, const model_batch *batch, int64_t parts, int32_t *counts,
                  float *biases)
{
    const train_routing routing = {.bias_rate = 0.25f};
    const model_options options = {
        .sequences = batch->sequences / parts, .parts = parts, .routing = &routing, .use = MODEL_TRAIN};
    error err = {0};
    model m;
    double loss;
    int32_t routed[4];
    if (!model_create(&m, NULL, c, &options, &err)) fail_msg("%s", err.text);
    param_init(m.weights.host, &m.weights.layout, 7);
    if (!model_gradients(&m, batch, &loss, &err) || !model_update_biases(&m, &err)) fail_msg("%s", err.text);
    if (!experts_counts(model_experts(&m, 1), m.frame.rows, counts, routed, &err)) fail_msg("%s", err.text);
    memcpy(biases, experts_bias(model_experts(&m, 1)), 4 * sizeof *biases);
    model_destroy(&m);
}

/* A step of two micro-batches moves the biases by the sum of both counts. Each part has one token over and
 * over, and so few experts; among the tokens of the second are some with which the last part alone would move
 * the biases otherwise. */
static void biases_follow_the_counts_of_all_parts(void **state)
{
    (void)state;
    enum { EXPERTS = 4 };
    model_config c = tiny();
    c.score = SMOE_SCORE_SIGMOID;
    c.selection_bias = true;
    c.dense_layers = 1;
    const int64_t half = 2 * c.context;
    int32_t *tokens = tokens_of(2 * half, c.vocab, 1), *targets = tokens_of(2 * half, c.vocab, 2), differ = 0;
    for (int32_t token = 0; token < 8; token++) {
        int32_t counts[3][EXPERTS];
        float biases[3][EXPERTS];
        for (int i = 0; i < 2 * half; i++) tokens[i] = i < half ? 9 : token;
        for (int i = 0; i < 2; i++)
            count(&c, &(model_batch){tokens + i * half, targets + i * half, 2, c.context}, 1, counts[i],
                  biases[i]);
        count(&c, &(model_batch){tokens, targets, 4, c.context}, 2, counts[2], biases[2]);
        for (int e = 0; e < EXPERTS; e++) {
            const int64_t sum = counts[0][e] + counts[1][e], mean = 2 * half * c.topk / EXPERTS;
            assert_true(biases[2][e] == (sum < mean ? 0.25f : sum > mean ? -0.25f : 0.0f));
            differ += biases[2][e] != biases[1][e];
        }
    }
    assert_true(differ > 0);
    free(tokens), free(targets);
}

static void auxiliary_gradients_match_differences(void **state)
{
    (void)state;
    model_config c = tiny();
    c.context = 6;
    c.dense_layers = 0;
    c.dense_intermediate = 0;
    train_routing routing = {.balance_coefficient = 0.3f, .z_coefficient = 0.1f};
    check_gradients(&c, &routing);
}

/* Four sequences in one, two and four micro-batches must give the same loss and gradients, except for the
 * order of the sums. The load-balance loss is left out, because it is not a mean over tokens. */
static void micro_batches_add_up(void **state)
{
    (void)state;
    enum { SEQUENCES = 4 };
    model_config c = tiny();
    c.dense_layers = 1;
    c.shared_intermediate = 16;
    train_routing routing = {.z_coefficient = 0.1f};
    int32_t *tokens = tokens_of(SEQUENCES * c.context, c.vocab, 1),
            *targets = tokens_of(SEQUENCES * c.context, c.vocab, 2);
    model_batch batch = {tokens, targets, SEQUENCES, c.context};
    float *whole = NULL;
    double want = 0, loss;
    for (int64_t parts = 1; parts <= SEQUENCES; parts *= 2) {
        model m;
        error err = {0};
        const model_options options = {
            .sequences = SEQUENCES / parts, .parts = parts, .routing = &routing, .use = MODEL_TRAIN};
        if (!model_create(&m, NULL, &c, &options, &err)) fail_msg("%s", err.text);
        param_init(m.weights.host, &m.weights.layout, 7);
        if (!model_gradients(&m, &batch, &loss, &err)) fail_msg("%s", err.text);
        const int64_t total = (int64_t)m.weights.layout.total;
        float *grads = m.weights.grads;
        if (!whole) {
            whole = malloc((size_t)total * sizeof *whole);
            memcpy(whole, grads, (size_t)total * sizeof *whole);
            want = loss;
        }
        for (int64_t i = 0; i < total; i++) grads[i] -= whole[i];
        const double miss = gradient_norm(grads, total) / gradient_norm(whole, total);
        if (!(miss < 1e-6 && fabs(loss / want - 1) < 1e-7))
            fail_msg("%d passes: gradients differ by %.3g, losses %.9g and %.9g", (int)parts, miss, loss,
                     want);
        model_destroy(&m);
    }
    free(whole), free(tokens), free(targets);
}

/* One and two column chunks must give the same bits of the loss and of all gradients. */
static void chunks_change_nothing(void **state)
{
    (void)state;
    model_config c = tiny();
    c.dense_layers = 1;
    c.hidden = 128;
    int32_t *tokens = tokens_of(2 * c.context, c.vocab, 1), *targets = tokens_of(2 * c.context, c.vocab, 2);
    model_batch batch = {tokens, targets, 2, c.context};
    model m[2];
    double loss[2];
    for (int i = 0; i < 2; i++) {
        error err = {0};
        const model_options options = {.sequences = 2, .use = MODEL_TRAIN, .chunks = i + 1};
        if (!model_create(&m[i], NULL, &c, &options, &err)) fail_msg("%s", err.text);
        param_init(m[i].weights.host, &m[i].weights.layout, 7);
        if (!model_gradients(&m[i], &batch, &loss[i], &err)) fail_msg("%s", err.text);
    }
    assert_true(m[1].bytes.turns < m[0].bytes.turns);
    assert_true(loss[0] == loss[1]);
    assert_memory_equal(m[0].weights.grads, m[1].weights.grads, m[0].weights.layout.total * sizeof(float));
    for (int i = 0; i < 2; i++) model_destroy(&m[i]);
    free(tokens), free(targets);
}

/* Every choice of what the backward computes again must give the same bits of the loss and of all gradients,
 * and must keep less memory than the choice before. */
static void recomputation_changes_nothing(void **state)
{
    (void)state;
    model_config c = tiny();
    c.dense_layers = 1;
    c.shared_intermediate = 16;
    int32_t *tokens = tokens_of(2 * c.context, c.vocab, 1), *targets = tokens_of(2 * c.context, c.vocab, 2);
    model_batch batch = {tokens, targets, 2, c.context};
    model m[RECOMPUTE_NAMES];
    double loss[RECOMPUTE_NAMES];
    for (int i = 0; i < RECOMPUTE_NAMES; i++) {
        error err = {0};
        const model_options options = {.sequences = 2, .use = MODEL_TRAIN, .recompute = (model_recompute)i};
        if (!model_create(&m[i], NULL, &c, &options, &err)) fail_msg("%s", err.text);
        param_init(m[i].weights.host, &m[i].weights.layout, 7);
        for (size_t w = m[i].weights.layout.matrices; w < m[i].weights.layout.total;
             w++) // norms' weights that are not one
            m[i].weights.host[w] += (float)(0.2 * random_normal(9, w));
        if (!model_gradients(&m[i], &batch, &loss[i], &err)) fail_msg("%s", err.text);
        assert_true(loss[i] == loss[0]);
        assert_memory_equal(m[i].weights.grads, m[0].weights.grads,
                            m[0].weights.layout.total * sizeof(float));
        assert_true(i == 0 || m[i].bytes.layers < m[i - 1].bytes.layers);
    }
    for (int i = 0; i < RECOMPUTE_NAMES; i++) model_destroy(&m[i]);
    free(tokens), free(targets);
}

/* One, two and three threads must give the same bits of the loss and of all gradients. */
static void threads_change_nothing(void **state)
{
    (void)state;
    model_config c = tiny();
    c.dense_layers = 1;
    c.hidden = 64;
    c.context = 130;
    int32_t *tokens = tokens_of(2 * c.context, c.vocab, 1), *targets = tokens_of(2 * c.context, c.vocab, 2);
    model_batch batch = {tokens, targets, 2, c.context};
    float *first = NULL;
    double first_loss = 0;
    int most = omp_get_max_threads();
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        model m;
        error err = {0};
        make(&m, &c, NULL);
        double loss;
        assert_true(model_gradients(&m, &batch, &loss, &err));
        size_t bytes = m.weights.layout.total * sizeof(float);
        if (!first) {
            first = malloc(bytes);
            memcpy(first, m.weights.grads, bytes);
            first_loss = loss;
        }
        assert_true(loss == first_loss);
        assert_memory_equal(first, m.weights.grads, bytes);
        model_destroy(&m);
    }
    omp_set_num_threads(most);
    free(first), free(tokens), free(targets);
}

/* The bytes that a model for passes of 2 sequences needs beside its weights. */
static size_t pass_bytes(const model_config *c, model_use use)
{
    error err = {0};
    model m;
    if (!model_measure(&m, NULL, c, &(model_options){.sequences = 2, .use = use}, &err))
        fail_msg("%s", err.text);
    const size_t bytes = m.bytes.layers + m.bytes.turns + m.bytes.rest;
    model_destroy(&m);
    return bytes;
}

/* A model without a backward must not have the memory of all attention weights, which grows with the square
 * of the context, and must give the bits of a training model, with any number of threads. */
static void evaluation_keeps_no_attention_weights(void **state)
{
    (void)state;
    const int most = omp_get_max_threads();
    model_config c = tiny();
    c.context = 150; // the last tile of attention is a part
    int32_t *tokens = tokens_of(2 * c.context, c.vocab, 1), *targets = tokens_of(2 * c.context, c.vocab, 2);
    const model_batch batch = {tokens, targets, 2, c.context};
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        double loss[2];
        for (int i = 0; i < 2; i++) {
            const model_options options = {.sequences = 2, .use = i ? MODEL_EVALUATE : MODEL_TRAIN};
            error err = {0};
            model m;
            if (!model_create(&m, NULL, &c, &options, &err)) fail_msg("%s", err.text);
            param_init(m.weights.host, &m.weights.layout, 7);
            if (!model_loss(&m, &batch, NULL, SMOE_COMPUTE_STORAGE, &loss[i], &err)) fail_msg("%s", err.text);
            model_destroy(&m);
        }
        assert_true(loss[0] == loss[1] && isfinite(loss[0]));
        for (model_use use = MODEL_EVALUATE; use <= MODEL_GENERATE; use++) {
            if (use == MODEL_TRAIN) continue;
            model_config longer = c;
            longer.context = 4096;
            const size_t bytes = pass_bytes(&longer, use);
            longer.context = 8192;
            assert_true(pass_bytes(&longer, use) < 2.1 * (double)bytes);
        }
    }
    omp_set_num_threads(most);
    free(tokens), free(targets);
}

int main(void)
{
    openblas_set_num_threads(1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_close),
        cmocka_unit_test(norm_matches_formula),
        cmocka_unit_test(attention_matches_formula),
        cmocka_unit_test(rope_turns_pairs),
        cmocka_unit_test(adamw_matches_formula),
        cmocka_unit_test(dense_gradients_match_differences),
        cmocka_unit_test(tied_gradients_match_differences),
        cmocka_unit_test(sparse_gradients_match_differences),
        cmocka_unit_test(auxiliary_gradients_match_differences),
        cmocka_unit_test(router_gradients_match_differences),
        cmocka_unit_test(biases_follow_the_counts_of_all_parts),
        cmocka_unit_test(micro_batches_add_up),
        cmocka_unit_test(chunks_change_nothing),
        cmocka_unit_test(recomputation_changes_nothing),
        cmocka_unit_test(threads_change_nothing),
        cmocka_unit_test(evaluation_keeps_no_attention_weights),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
