/* Trains one MoE layer, router included, on the CPU: forward, backward and a step of SGD, two hundred times.
 * cc train_layer.c $(pkg-config --cflags --libs smoe)
 * The layer learns the outputs of another layer, its teacher. Exit status 0 if the loss fell to less than
 * half. */
#include <smoe.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { T = 256, D = 64, N = 32, E = 8, K = 2, STEPS = 200 };

/* The trained tensors: Wr (E, d), W1 (E, 2n, d), W2 (E, d, n), each a part of one array. */
enum { WR = E * D, W1 = E * 2 * N * D, W2 = E * D * N, WEIGHTS = WR + W1 + W2 };

/* Memory of `bytes` bytes that is zero; saved and scratch must be aligned to 64 bytes. */
static void *zeros(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory) {
        fputs("out of memory\n", stderr);
        exit(3);
    }
    return memset(memory, 0, bytes);
}

static void draw(float *values, size_t count, float scale)
{
    for (size_t i = 0; i < count; i++) values[i] = scale * (2 * (float)rand() / (float)RAND_MAX - 1);
}

static void check(smoe_status status, const smoe_context *context)
{
    if (status == SMOE_OK) return;
    fprintf(stderr, "%s\n", smoe_last_error(context));
    exit(3);
}

/* The mean squared error of out (T, d), and its gradient. */
static float loss_of(const float *out, const float *target, float *dout)
{
    float sum = 0;
    for (size_t i = 0; i < T * D; i++) {
        const float miss = out[i] - target[i];
        sum += miss * miss / (T * D);
        dout[i] = 2 * miss / (T * D);
    }
    return sum;
}

int main(void)
{
    smoe_context *context;
    char why[256] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.error_text = why, options.error_size = sizeof why;
    if (smoe_create(&context, &options) != SMOE_OK) return fprintf(stderr, "%s\n", why), 3;

    smoe_layer layer = SMOE_LAYER_INIT; /* SwiGLU, softmax over the K best logits */
    layer.tokens = T, layer.hidden = D, layer.intermediate = N, layer.experts = E, layer.topk = K;
    layer.dtype = layer.gradient_type = SMOE_TYPE_F32;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    check(smoe_query_sizes(context, &layer, &sizes), context);

    float *x = zeros(T * D * sizeof *x), *logits = zeros(T * E * sizeof *logits);
    float *out = zeros(T * D * sizeof *out), *target = zeros(T * D * sizeof *target);
    float *dout = zeros(T * D * sizeof *dout);
    float *weights = zeros(WEIGHTS * sizeof *weights), *gradients = zeros(WEIGHTS * sizeof *gradients);
    void *saved = zeros(sizes.saved_buffer_bytes);
    void *scratch =
        zeros(sizes.scratch_forward_bytes > sizes.scratch_backward_bytes ? sizes.scratch_forward_bytes
                                                                         : sizes.scratch_backward_bytes);

    smoe_forward_args forward = SMOE_FORWARD_ARGS_INIT;
    forward.x = x, forward.logits = logits, forward.out = target;
    forward.router_weight = weights, forward.w1 = weights + WR, forward.w2 = weights + WR + W1;
    forward.saved = saved, forward.saved_size = sizes.saved_buffer_bytes;
    forward.scratch = scratch, forward.scratch_size = sizes.scratch_forward_bytes;

    smoe_backward_args backward = SMOE_BACKWARD_ARGS_INIT; /* no dx: nothing lies below the layer */
    backward.x = x, backward.logits = logits, backward.dout = dout;
    backward.router_weight = forward.router_weight, backward.w1 = forward.w1, backward.w2 = forward.w2;
    backward.drouter_weight = gradients, backward.dw1 = gradients + WR, backward.dw2 = gradients + WR + W1;
    backward.saved = saved, backward.saved_size = sizes.saved_buffer_bytes;
    backward.scratch = scratch, backward.scratch_size = sizes.scratch_backward_bytes;

    draw(x, T * D, 1);
    draw(weights, WEIGHTS, 0.3f);
    check(smoe_layer_forward(context, &layer, &forward, NULL), context); /* the teacher's */

    draw(weights, WEIGHTS, 0.3f);
    forward.out = out;
    float first = 0, loss = 0;
    for (int step = 0; step < STEPS; step++) {
        check(smoe_layer_forward(context, &layer, &forward, NULL), context);
        loss = loss_of(out, target, dout);
        if (step == 0) first = loss;
        check(smoe_layer_backward(context, &layer, &backward, NULL), context);
        for (size_t i = 0; i < WEIGHTS; i++) weights[i] -= 20 * gradients[i];
        if (step % 20 == 0) printf("step %3d: loss %.4f\n", step, loss);
    }
    printf("step %d: loss %.4f, it was %.4f\n", STEPS, loss, first);

    free(x), free(logits), free(out), free(target), free(dout), free(weights), free(gradients);
    free(saved), free(scratch);
    smoe_destroy(context);
    return loss < first / 2 ? 0 : 1;
}
