/* One MoE layer, router included, forward on the CPU: cc layer.c $(pkg-config --cflags --libs smoe) */
#include <smoe.h>
#include <stdio.h>
#include <stdlib.h>

/* an array of `count` random values in [-0.5, 0.5), aligned to 256 bytes; `count` is a multiple of 64 */
static float *random_floats(size_t count)
{
    float *v = aligned_alloc(256, count * sizeof *v);
    for (size_t i = 0; v && i < count; i++) v[i] = (float)rand() / ((float)RAND_MAX + 1) - 0.5f;
    return v;
}

int main(void)
{
    smoe_context *context;
    if (smoe_create(&context, NULL) != SMOE_OK) return 1;
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = 1024, layer.hidden = 256, layer.intermediate = 64, layer.experts = 32, layer.topk = 4;
    layer.dtype = SMOE_TYPE_F32;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    if (smoe_query_sizes(context, &layer, &sizes) != SMOE_OK) return 1;
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.x = random_floats(1024 * 256);
    args.router_weight = random_floats(32 * 256);
    args.w1 = random_floats(32 * 2 * 64 * 256);
    args.w2 = random_floats(32 * 256 * 64);
    args.logits = random_floats(1024 * 32);
    args.out = random_floats(1024 * 256);
    args.saved = aligned_alloc(256, args.saved_size = sizes.saved_buffer_bytes);
    args.scratch = aligned_alloc(256, args.scratch_size = sizes.scratch_forward_bytes);
    if (smoe_layer_forward(context, &layer, &args, NULL) != SMOE_OK) puts(smoe_last_error(context));
    printf("O[0][0] = %g, %.1f MiB kept for the backward\n", ((float *)args.out)[0],
           (double)sizes.saved_bytes / (1 << 20));
    smoe_destroy(context);
}
