/* In one call the problem, the layout of the scratch and the entering of the device happen once: the linker
 * puts counters between the library and these functions. The context's device is not the thread's current
 * one. */
#include "host/backward.h"
#include "host/forward.h"
#include "host/routing.h"

#include <stdio.h>
#include <stdlib.h>

enum counted { PROBLEM, FORWARD, ROUTING, BACKWARD, GET_DEVICE, SET_DEVICE, COUNTED };
static int counts[COUNTED];

void __real_moe_problem_init(moe_problem *problem, const smoe_layer *layer);
void __wrap_moe_problem_init(moe_problem *problem, const smoe_layer *layer);
void __wrap_moe_problem_init(moe_problem *problem, const smoe_layer *layer)
{
    counts[PROBLEM]++;
    __real_moe_problem_init(problem, layer);
}

typedef void lay_out(const device_state *state, const moe_problem *problem, moe_layout *layout);
lay_out __real_moe_cuda_lay_out_forward, __wrap_moe_cuda_lay_out_forward;
lay_out __real_moe_cuda_lay_out_backward, __wrap_moe_cuda_lay_out_backward;
void __wrap_moe_cuda_lay_out_forward(const device_state *state, const moe_problem *problem,
                                     moe_layout *layout)
{
    counts[FORWARD]++;
    __real_moe_cuda_lay_out_forward(state, problem, layout);
}

void __wrap_moe_cuda_lay_out_backward(const device_state *state, const moe_problem *problem,
                                      moe_layout *layout)
{
    counts[BACKWARD]++;
    __real_moe_cuda_lay_out_backward(state, problem, layout);
}

typedef moe_routing_layout lay_out_routing(const moe_device *device, const moe_problem *problem);
lay_out_routing __real_moe_cuda_lay_out_routing, __wrap_moe_cuda_lay_out_routing;
moe_routing_layout __wrap_moe_cuda_lay_out_routing(const moe_device *device, const moe_problem *problem)
{
    counts[ROUTING]++;
    return __real_moe_cuda_lay_out_routing(device, problem);
}

cudaError_t __real_cudaGetDevice(int *device);
cudaError_t __wrap_cudaGetDevice(int *device);
cudaError_t __wrap_cudaGetDevice(int *device)
{
    counts[GET_DEVICE]++;
    return __real_cudaGetDevice(device);
}

cudaError_t __real_cudaSetDevice(int device);
cudaError_t __wrap_cudaSetDevice(int device);
cudaError_t __wrap_cudaSetDevice(int device)
{
    counts[SET_DEVICE]++;
    return __real_cudaSetDevice(device);
}

static int failures;

static void expect(const char *call, smoe_status status, const int expected[COUNTED])
{
    static const char *const names[COUNTED] = {"problems",           "layouts of a forward",
                                               "layouts of routing", "layouts of a backward",
                                               "cudaGetDevice",      "cudaSetDevice"};
    failures += status != SMOE_OK;
    if (status != SMOE_OK) printf("%s: status %d\n", call, (int)status);
    for (int i = 0; i < COUNTED; i++) {
        if (counts[i] != expected[i])
            printf("%s: %d %s, %d expected\n", call, counts[i], names[i], expected[i]);
        failures += counts[i] != expected[i];
        counts[i] = 0;
    }
}

static void *buffer(size_t bytes)
{
    void *memory = NULL;
    if (cudaMalloc(&memory, bytes) != cudaSuccess || cudaMemset(memory, 0, bytes) != cudaSuccess) exit(3);
    return memory;
}

int main(void)
{
    smoe_context *context;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA;
    options.device = 1;
    if (smoe_create(&context, &options) != SMOE_OK || cudaSetDevice(0) != cudaSuccess) return 3;
    for (int i = 0; i < COUNTED; i++) counts[i] = 0;
    smoe_layer l = SMOE_LAYER_INIT;
    l.tokens = 200, l.hidden = 128, l.intermediate = 64, l.experts = 4, l.topk = 2, l.chunks = 2;
    l.rounding = SMOE_ROUNDING_NR_F;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    expect("smoe_query_sizes", smoe_query_sizes(context, &l, &sizes), (int[COUNTED]){1, 1, 1, 1, 0, 0});
    const size_t x = 2 * 200 * 128, w1 = 2 * 4 * 128 * 128, w2 = w1 / 2;
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.x = buffer(x), f.router_weight = buffer(2 * 4 * 128), f.logits = buffer(4 * 200 * 4), f.w1 = buffer(w1);
    f.w2 = buffer(w2), f.out = buffer(x), f.losses = buffer(8);
    f.saved = buffer(sizes.saved_buffer_bytes), f.saved_size = sizes.saved_buffer_bytes;
    f.scratch = buffer(sizes.scratch_forward_bytes), f.scratch_size = sizes.scratch_forward_bytes;
    expect("smoe_layer_forward", smoe_layer_forward(context, &l, &f, NULL), (int[COUNTED]){1, 1, 1, 0, 1, 2});
    expect("smoe_experts_forward", smoe_experts_forward(context, &l, &f, NULL),
           (int[COUNTED]){1, 1, 1, 0, 1, 2});
    smoe_backward_args b = SMOE_BACKWARD_ARGS_INIT;
    b.x = f.x, b.router_weight = f.router_weight, b.logits = f.logits, b.w1 = f.w1, b.w2 = f.w2;
    b.saved = f.saved, b.saved_size = f.saved_size, b.dout = buffer(x), b.dx = buffer(x),
    b.dw1 = buffer(2 * w1);
    b.dw2 = buffer(2 * w2), b.drouter_weight = buffer(4 * 4 * 128);
    b.scratch = buffer(sizes.scratch_backward_bytes), b.scratch_size = sizes.scratch_backward_bytes;
    expect("smoe_layer_backward", smoe_layer_backward(context, &l, &b, NULL),
           (int[COUNTED]){1, 0, 0, 1, 1, 2});
    smoe_destroy(context);
    printf("%d failures\n", failures);
    return failures != 0;
}
