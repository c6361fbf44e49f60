/* One MoE layer, router included, forward on a Hopper GPU:
 * cc cuda_layer.c $(pkg-config --cflags --libs smoe) -I/usr/local/cuda/include -L/usr/local/cuda/lib64
 * -lcudart */
#include <cuda_runtime_api.h>
#include <smoe.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *device_bytes(size_t bytes)
{
    void *p;
    const cudaError_t error = cudaMalloc(&p, bytes);
    if (error == cudaSuccess) return p;
    printf("cudaMalloc of %zu bytes: %s\n", bytes, cudaGetErrorString(error));
    exit(1);
}

/* bf16 in [-0.5, 0.5): the upper half of a float. */
static void *random_bf16(size_t count)
{
    uint16_t *host = malloc(count * sizeof *host);
    for (size_t i = 0; i < count; i++) {
        const float v = (float)rand() / ((float)RAND_MAX + 1) - 0.5f;
        uint32_t bits;
        memcpy(&bits, &v, sizeof bits);
        host[i] = (uint16_t)(bits >> 16);
    }
    void *p = device_bytes(count * sizeof *host);
    cudaMemcpy(p, host, count * sizeof *host, cudaMemcpyHostToDevice);
    free(host);
    return p;
}

int main(void)
{
    char why[256] = "";
    smoe_context *context;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA, options.error_text = why, options.error_size = sizeof why;
    if (smoe_create(&context, &options) != SMOE_OK) return puts(why), 1;
    smoe_layer layer = SMOE_LAYER_INIT; /* bf16, SwiGLU */
    layer.tokens = 1024, layer.hidden = 256, layer.intermediate = 64, layer.experts = 32, layer.topk = 4;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    if (smoe_query_sizes(context, &layer, &sizes) != SMOE_OK) return puts(smoe_last_error(context)), 1;
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT; /* every pointer in it points to device memory */
    args.x = random_bf16(1024 * 256);
    args.router_weight = random_bf16(32 * 256);
    args.w1 = random_bf16(32 * 2 * 64 * 256);
    args.w2 = random_bf16(32 * 256 * 64);
    args.logits = device_bytes(1024 * 32 * sizeof(float));
    args.out = device_bytes(1024 * 256 * sizeof(uint16_t));
    args.saved = device_bytes(args.saved_size = sizes.saved_buffer_bytes);
    args.scratch = device_bytes(args.scratch_size = sizes.scratch_forward_bytes);
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    if (smoe_layer_forward(context, &layer, &args, stream) != SMOE_OK)
        return puts(smoe_last_error(context)), 1;
    uint16_t first;
    cudaMemcpyAsync(&first, args.out, sizeof first, cudaMemcpyDeviceToHost, stream);
    const cudaError_t error = cudaStreamSynchronize(stream);
    if (error != cudaSuccess) return puts(cudaGetErrorString(error)), 1;
    const uint32_t bits = (uint32_t)first << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    printf("O[0][0] = %g, %.1f MiB kept for the backward\n", value, (double)sizes.saved_bytes / (1 << 20));
    smoe_destroy(context);
    return 0;
}
