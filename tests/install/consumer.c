/* A program outside of this repository that uses the installed library: a tiny layer's forward on the CPU. */
#include <smoe.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* `size` zero bytes, aligned as smoe.h requires for saved and scratch */
static void *aligned(uint64_t size)
{
    static unsigned char pool[1 << 22];
    static uint64_t used;
    const uint64_t start = (used + 255) / 256 * 256;
    unsigned char *base = pool + (256 - (uintptr_t)pool % 256) % 256;
    used = start + size;
    return used + 256 <= sizeof pool ? base + start : NULL;
}

int main(void)
{
    smoe_context *context;
    smoe_layer layer = SMOE_LAYER_INIT;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;

    if (smoe_version() != SMOE_VERSION || smoe_create(&context, NULL) != SMOE_OK) return 1;
    layer.tokens = 32;
    layer.hidden = 64;
    layer.intermediate = 16;
    layer.experts = 4;
    layer.topk = 2;
    layer.dtype = SMOE_TYPE_F32;
    if (smoe_query_sizes(context, &layer, &sizes) != SMOE_OK) return 1;
    args.x = aligned(32 * 64 * 4);
    args.router_weight = aligned(4 * 64 * 4);
    args.logits = aligned(32 * 4 * 4);
    args.w1 = aligned(4 * 32 * 64 * 4);
    args.w2 = aligned(4 * 64 * 16 * 4);
    args.out = aligned(32 * 64 * 4);
    args.saved = aligned(args.saved_size = sizes.saved_buffer_bytes);
    args.scratch = aligned(args.scratch_size = sizes.scratch_forward_bytes);
    if (smoe_layer_forward(context, &layer, &args, NULL) != SMOE_OK) {
        fprintf(stderr, "%s\n", smoe_last_error(context));
        return 1;
    }
    printf("smoe %d: saved %llu bytes\n", smoe_version(), (unsigned long long)sizes.saved_bytes);
    smoe_destroy(context);
    return 0;
}
