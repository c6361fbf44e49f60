/* Compares the whole model on the GPU with the CPU: the loss and the gradient of every tensor for one batch,
 * from the same weights (rounded to bf16). A second pass must give the same bits. check_train_model [DEVICE]:
 * cuda, or cuda-plain. */
#include "base/random.h"
#include "train/device.h"
#include "train/model/experts.h"
#include "train/run/step.h"

#include <cblas.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int wrong;

static float to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void die(const error *err)
{
    printf("%s\n", err->text);
    exit(strstr(err->text, "no GPU") || strstr(err->text, "no cuda backend") ? 77 : 1);
}

static void make(model *m, train_device *device, const model_config *c, const model_options *options)
{
    error err = {0};
    if (!model_create(m, device, c, options, &err)) die(&err);
    float *weights = malloc(m->weights.layout.total * sizeof *weights);
    param_init(weights, &m->weights.layout, 7);
    for (size_t i = m->weights.layout.matrices; i < m->weights.layout.total; i++) // norms away from one
        weights[i] += (float)(0.2 * random_normal(9, i));
    for (size_t i = 0; i < m->weights.layout.total; i++) weights[i] = to_bf16(weights[i]);
    m->device->ops->store(m->device, m->weights.params, m->device->type, weights,
                          (int64_t)m->weights.layout.total);
    free(weights);
}

static float *gradients(model *m, const model_batch *batch, double *loss)
{
    error err = {0};
    float *grads = malloc(m->weights.layout.total * sizeof *grads);
    if (!model_gradients(m, batch, loss, &err)) die(&err);
    m->device->ops->load(m->device, grads, m->weights.grads, m->device->grad_type,
                         (int64_t)m->weights.layout.total);
    if (!m->device->ops->finish(m->device, &err)) die(&err);
    return grads;
}

/* The experts of each token of a layer as a mask with one bit for each expert, at most 64. */
static uint64_t *experts_of(model *m, int64_t layer, int64_t rows)
{
    error err = {0};
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    const int64_t topk = m->config.topk;
    const size_t bytes = (size_t)(rows * topk) * sizeof(int32_t);
    int32_t *ids = malloc(bytes);
    uint64_t *chosen = calloc((size_t)rows, sizeof *chosen);
    if (!experts_view(model_experts(m, layer), rows, &m->routing, &view, &err)) die(&err);
    m->device->ops->download(m->device, ids, view.topk_ids, bytes);
    if (!m->device->ops->finish(m->device, &err)) die(&err);
    for (int64_t i = 0; i < rows * topk; i++) chosen[i / topk] |= 1ull << ids[i];
    free(ids);
    return chosen;
}

/* The number of tokens, summed over all layers with experts, that the two models send to different experts.
 * GEMMs that sum in another order give logits with other last bits; these decide between experts whose logits
 * are nearly equal. */
static int64_t tokens_routed_otherwise(model *cpu, model *gpu, int64_t rows)
{
    int64_t moved = 0;
    for (int64_t l = cpu->config.dense_layers; l < cpu->config.layers; l++) {
        uint64_t *want = experts_of(cpu, l, rows), *have = experts_of(gpu, l, rows);
        for (int64_t t = 0; t < rows; t++) moved += have[t] != want[t];
        free(want), free(have);
    }
    return moved;
}

/* Computes the relative Frobenius error of each tensor's gradient and prints the errors above `limit` and the
 * worst one. The error of all tensors together must be at most `limit_all`. */
static void compare(const model *m, const float *have, const float *want, double limit, double limit_all)
{
    double worst = 0;
    const char *where = "";
    double all = 0, miss_all = 0;
    for (size_t i = 0; i < m->weights.layout.tensor_count; i++) {
        const param_tensor *t = &m->weights.layout.tensors[i];
        double miss = 0, norm = 0;
        for (size_t j = t->offset; j < t->offset + t->count; j++) {
            miss += ((double)have[j] - want[j]) * ((double)have[j] - want[j]);
            norm += (double)want[j] * want[j];
        }
        all += norm, miss_all += miss;
        double relative = norm > 0 ? sqrt(miss / norm) : miss > 0 ? INFINITY : 0;
        if (!(relative <= limit))
            printf("   %s: error %.4f, limit %.4f\n", t->name, relative, limit), wrong++;
        if (!(relative <= worst)) worst = relative, where = t->name;
    }
    const double together = sqrt(miss_all / all);
    if (!(together <= limit_all)) printf("   all: error %.4f, limit %.4f\n", together, limit_all), wrong++;
    printf("   gradients: worst error %.4f (%s), all %.4f\n", worst, where, together);
}

static void check(const char *name, const device_options *options, const model_config *c, int64_t sequences,
                  const train_routing *routing, model_recompute recompute, double limit)
{
    error err = {0};
    model cpu, gpu;
    int64_t rows = sequences * c->context;
    int32_t *tokens = malloc(2 * (size_t)rows * sizeof *tokens);
    for (int64_t i = 0; i < 2 * rows; i++)
        tokens[i] = (int32_t)(random_bits(1, (uint64_t)i) % (uint64_t)c->vocab);
    model_batch batch = {tokens, tokens + rows, sequences, c->context};
    train_device *device = device_open(options, &err);
    if (!device) die(&err);
    device->loss_rows = rows / 2 + 1; // two parts
    make(&cpu, NULL, c, &(model_options){.sequences = sequences, .routing = routing, .use = MODEL_TRAIN});
    make(&gpu, device, c,
         &(model_options){
             .sequences = sequences, .routing = routing, .use = MODEL_TRAIN, .recompute = recompute});
    double want, have, again;
    float *reference = gradients(&cpu, &batch, &want), *first = gradients(&gpu, &batch, &have);
    float *second = gradients(&gpu, &batch, &again);
    printf("%s: loss %.6f, on the CPU %.6f\n", name, have, want);
    if (!(fabs(have / want - 1) < 2e-3)) printf("   losses differ\n"), wrong++;
    const int64_t moved = tokens_routed_otherwise(&cpu, &gpu, rows);
    if (moved > 0) printf("   %lld tokens routed otherwise\n", (long long)moved);
    if (moved > rows / 20) printf("   more than one token in twenty\n"), wrong++;
    /* Experts have few tokens here. So a token that moved changes the gradients of two experts much, and
     * those of all tensors together little. */
    compare(&gpu, first, reference, moved > 0 ? INFINITY : limit, moved > 0 ? 0.06 : 0.03);
    if (have != again || memcmp(first, second, gpu.weights.layout.total * sizeof *first) != 0)
        printf("   two passes differ\n"), wrong++;
    free(reference), free(first), free(second), free(tokens);
    model_destroy(&cpu), model_destroy(&gpu);
    device->ops->close(device);
}

/* Loss and gradients must have the same bits for every choice of what the backward computes again. Each
 * choice must keep less memory than the choice before. */
static void check_recompute(const char *name, const device_options *options, const model_config *c)
{
    error err = {0};
    const int64_t rows = 2 * c->context;
    int32_t *tokens = malloc(2 * (size_t)rows * sizeof *tokens);
    for (int64_t i = 0; i < 2 * rows; i++)
        tokens[i] = (int32_t)(random_bits(1, (uint64_t)i) % (uint64_t)c->vocab);
    const model_batch batch = {tokens, tokens + rows, 2, c->context};
    train_device *device = device_open(options, &err);
    if (!device) die(&err);
    float *first = NULL;
    double loss = 0, want = 0;
    size_t layers = SIZE_MAX;
    for (int i = 0; i < RECOMPUTE_NAMES; i++) {
        model m;
        make(&m, device, c,
             &(model_options){.sequences = 2, .use = MODEL_TRAIN, .recompute = (model_recompute)i});
        float *grads = gradients(&m, &batch, &loss);
        printf("%s, %s recomputed: loss %.9g, layers keep %zu bytes\n", name, model_recompute_names[i], loss,
               m.bytes.layers);
        if (!first) first = grads, want = loss;
        if (loss != want || memcmp(first, grads, m.weights.layout.total * sizeof *grads) != 0)
            printf("   other bits\n"), wrong++;
        if (m.bytes.layers >= layers) printf("   no less\n"), wrong++;
        layers = m.bytes.layers;
        if (grads != first) free(grads);
        model_destroy(&m);
    }
    free(first), free(tokens);
    device->ops->close(device);
}

/* A copy of an array of the device. */
static void *bits_of(train_device *dv, const void *array, size_t bytes)
{
    error err = {0};
    void *bits = malloc(bytes);
    dv->ops->download(dv, bits, array, bytes);
    if (!dv->ops->finish(dv, &err)) die(&err);
    return bits;
}

/* Compares steps that update the weights during the backward, layer by layer, with steps that update all
 * weights after it. A clipping limit that is never reached causes the second kind. Weights, moments and
 * losses must be equal bit for bit. The last steps are replays of a CUDA graph. */
static void check_updates(const char *name, const device_options *options, const model_config *c)
{
    enum { STEPS = 4, ARRAYS = 4 };
    error err = {0};
    const int64_t rows = 2 * c->context;
    int32_t *tokens = malloc(2 * (size_t)rows * sizeof *tokens);
    for (int64_t i = 0; i < 2 * rows; i++)
        tokens[i] = (int32_t)(random_bits(1, (uint64_t)i) % (uint64_t)c->vocab);
    const model_batch batch = {tokens, tokens + rows, 2, c->context};
    train_device *device = device_open(options, &err);
    if (!device) die(&err);
    void *bits[2][ARRAYS];
    size_t bytes[ARRAYS], gradients[2];
    step_result found[2][STEPS];
    for (int layers = 0; layers < 2; layers++) {
        model m;
        optimizer o;
        train_step s;
        make(&m, device, c, &(model_options){.sequences = 2, .use = MODEL_TRAIN, .one_layer = layers});
        if (!optimizer_create(&o, &m, NULL, &err) || !step_open(&s, &m, &o, NULL, NULL, !layers, &err))
            die(&err);
        gradients[layers] = m.bytes.gradients;
        for (int i = 0; i < STEPS; i++) {
            const adamw_step update = {.lr = 0.01,
                                       .beta1 = 0.9,
                                       .beta2 = 0.95,
                                       .eps = 1e-8,
                                       .weight_decay = 0.1,
                                       .clip = layers ? 0 : 1e9,
                                       .step = i + 1};
            step_stage(&s, &batch);
            if (!step_run(&s, &update, &err) || !step_finish(&s, &found[layers][i], &err)) die(&err);
        }
        const size_t total = m.weights.layout.total, state = type_size(o.arrays.state_type);
        const void *arrays[ARRAYS] = {m.weights.params, o.arrays.first, o.arrays.second, o.arrays.master};
        const size_t sizes[ARRAYS] = {total * type_size(device->type), total * state, total * state,
                                      o.arrays.master ? total * sizeof(float) : 0};
        for (int i = 0; i < ARRAYS; i++) bits[layers][i] = bits_of(device, arrays[i], bytes[i] = sizes[i]);
        step_close(&s);
        optimizer_destroy(&o);
        model_destroy(&m);
    }
    printf("%s: gradients of %zu bytes, at once %zu; norm of the last step %.9g, at once %.9g\n", name,
           gradients[1], gradients[0], found[1][STEPS - 1].norm, found[0][STEPS - 1].norm);
    if (gradients[1] >= gradients[0]) printf("   no less\n"), wrong++;
    for (int i = 0; i < STEPS; i++)
        if (found[0][i].loss != found[1][i].loss || !(fabs(found[1][i].norm / found[0][i].norm - 1) < 1e-6))
            printf("   step %d differs\n", i + 1), wrong++;
    if (!(found[0][STEPS - 1].loss < found[0][0].loss)) printf("   nothing learned\n"), wrong++;
    for (int i = 0; i < ARRAYS; i++) {
        if (memcmp(bits[0][i], bits[1][i], bytes[i]) != 0) printf("   array %d differs\n", i), wrong++;
        free(bits[0][i]), free(bits[1][i]);
    }
    free(tokens);
    device->ops->close(device);
}

/* Four sequences in several micro-batches must give the loss and the gradients of one batch, except for the
 * order of the sums. With fewer rows cuBLASLt sums its products in another order too, and rounds them to
 * bf16. */
static void check_parts(const device_options *options, const model_config *c)
{
    enum { SEQUENCES = 4 };
    error err = {0};
    int64_t rows = SEQUENCES * c->context;
    int32_t *tokens = malloc(2 * (size_t)rows * sizeof *tokens);
    for (int64_t i = 0; i < 2 * rows; i++)
        tokens[i] = (int32_t)(random_bits(1, (uint64_t)i) % (uint64_t)c->vocab);
    model_batch batch = {tokens, tokens + rows, SEQUENCES, c->context};
    train_routing routing = {.z_coefficient = 0.01f};
    const bool plain = strcmp(options->name, "cuda-plain") == 0;
    float *whole = NULL;
    double want = 0;
    train_device *device = device_open(options, &err);
    if (!device) die(&err);
    for (int64_t parts = 1; parts <= SEQUENCES; parts *= 2) {
        model m;
        double have;
        const model_options wanted = {.sequences = SEQUENCES / parts,
                                      .parts = parts,
                                      .routing = &routing,
                                      .use = MODEL_TRAIN,
                                      .recompute = RECOMPUTE_NORMS};
        make(&m, device, c, &wanted);
        float *grads = gradients(&m, &batch, &have);
        if (!whole) {
            whole = grads;
            want = have;
        } else {
            printf("%lld micro-batches: loss %.6f, of one %.6f\n", (long long)parts, have, want);
            if (!(fabs(have / want - 1) < (plain ? 1e-5 : 1e-3))) printf("   losses differ\n"), wrong++;
            compare(&m, grads, whole, plain ? 2e-3 : 0.1, plain ? 1e-3 : 0.03);
            free(grads);
        }
        model_destroy(&m);
    }
    free(whole), free(tokens);
    device->ops->close(device);
}

int main(int argc, char **argv)
{
    openblas_set_num_threads(1);
    device_options options = {.name = argc > 1 ? argv[1] : "cuda"}, narrow = options;
    narrow.bf16 = true;
    model_config c = model_config_default();
    c.vocab = 64;
    c.hidden = 64;
    c.heads = 4;
    c.layers = 2;
    c.experts = 8;
    c.topk = 2;
    c.intermediate = 32;
    c.context = 40;
    c.initializer_range = 0.2;
    c.dense_layers = 2;
    c.dense_intermediate = 96;
    check("dense", &options, &c, 2, NULL, RECOMPUTE_NONE, 0.03);
    c.tied = true;
    check("dense, tied, bf16 gradients, all recomputed", &narrow, &c, 2, NULL, RECOMPUTE_LAYERS, 0.03);
    c.dense_layers = 1;
    c.shared_intermediate = 48;
    check("experts and a shared expert, norms recomputed", &options, &c, 2, NULL, RECOMPUTE_NORMS, 0.1);
    c.dense_layers = 0;
    c.dense_intermediate = 0;
    c.shared_intermediate = 0;
    c.norm_topk_prob = true;
    train_routing routing = {.balance_coefficient = 0.1f, .z_coefficient = 0.01f};
    check("experts, weights divided by their sum", &narrow, &c, 2, NULL, RECOMPUTE_NORMS, 0.1);
    check("experts with losses", &narrow, &c, 2, &routing, RECOMPUTE_NONE, 0.1);
    c.tied = false;
    narrow.sums = true;
    check_parts(&narrow, &c);
    c.tied = true;
    c.dense_layers = 1;
    c.dense_intermediate = 96;
    check_parts(&options, &c);
    narrow.sums = false;
    c.layers = 3;
    check_updates("updates in the backward, bf16", &narrow, &c);
    c.hidden = 80; // and 5 experts: a gap after the router
    c.heads = 5;   // heads of 16, as cuDNN takes them above
    c.experts = 5;
    check_updates("updates in the backward, f32 states", &options, &c);
    c.tied = false;
    c.dense_layers = 0;
    c.dense_intermediate = 0;
    check_updates("updates in the backward, three layers with experts", &narrow, &c);
    check_recompute("experts", &narrow, &c);
    c.shared_intermediate = 48;
    check_recompute("experts and a shared expert", &options, &c);
    printf("%d wrong\n", wrong);
    return wrong > 0;
}
