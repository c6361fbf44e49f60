/* Times routing on the device, in microseconds. A figure is the median of 30 replays of a CUDA graph of 20
 * links (calls), divided by 20. The calls read 256 MB of logits by turns, so that each reads its logits from
 * device memory and not from the L2 cache. For layers from logits the figures are cumulative: top-K; top-K
 * and the rest of route; these and rounding; these and the plan, which is everything. For given top-K: the
 * second kernel of the plan alone, and the whole plan. The last figure of a line is the target, if there is
 * one. */
#include "bench/link_time.h"
#include "cuda/host/device.h"
#include "cuda/host/routing.h"
#include "cuda/schedule/plan_size.h"
#include "tests/cuda/gpu.h"
#include "tests/cuda/route_cases.h"

enum { LOGITS_BYTES = 256 << 20 };

static moe_device device;

typedef struct route_timing {
    moe_problem problem;
    moe_plan_arrays plan;
    moe_cuda_lists lists;
    char *scratch, *logits;
    int sets; /* of logits */
    moe_cuda_plan given;
    gpu_buffer memory[7];
} route_timing;

typedef cudaError_t (*link_function)(const route_timing *t, const smoe_forward_args *args,
                                     const moe_launch *on);

/* The timed work: link i is `enqueue` on set number i % sets of the logits. */
typedef struct route_links {
    const route_timing *t;
    link_function enqueue;
} route_links;

static cudaError_t enqueue_route(const void *work, int i, cudaStream_t stream)
{
    const route_links *links = work;
    const route_timing *t = links->t;
    const size_t set = (size_t)(t->problem.layer.tokens * t->problem.layer.experts *
                                moe_type_bytes(t->problem.layer.logits_type));
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.logits = t->logits + (size_t)(i % t->sets) * set;
    const moe_launch on = {.device = &device, .sms = device.sms, .stream = stream};
    return links->enqueue(t, &args, &on);
}

/* Median microseconds of a link. */
static float time_links(const route_timing *t, link_function enqueue)
{
    const route_links links = {t, enqueue};
    return link_time(&links, enqueue_route);
}

static moe_cuda_routing routing_of(const route_timing *t, const smoe_forward_args *args)
{
    const moe_routing_layout layout = moe_cuda_lay_out_routing(&device, &t->problem);
    return moe_cuda_routing_of(&t->problem, &layout, args, &t->plan, t->scratch);
}

static cudaError_t route_link(const route_timing *t, const smoe_forward_args *args, const moe_launch *on)
{
    const smoe_context context = {0};
    const moe_cuda_routing r = routing_of(t, args);
    return moe_cuda_route(&context, on, &r, args);
}

static cudaError_t round_link(const route_timing *t, const smoe_forward_args *args, const moe_launch *on)
{
    const cudaError_t status = route_link(t, args, on);
    const moe_cuda_routing r = routing_of(t, args);
    return status == cudaSuccess ? moe_cuda_rounding(on, &r) : status;
}

static cudaError_t plan_link(const route_timing *t, const smoe_forward_args *args, const moe_launch *on)
{
    const int rounded = t->problem.layer.rounding != SMOE_ROUNDING_NONE;
    const cudaError_t status = rounded ? round_link(t, args, on) : route_link(t, args, on);
    if (status != cudaSuccess) return status;
    const moe_cuda_routing r = routing_of(t, args);
    return moe_cuda_plan_from_logits(on, &t->problem, &r, &t->plan, &t->lists);
}

static cudaError_t topk_link(const route_timing *t, const smoe_forward_args *args, const moe_launch *on)
{
    moe_cuda_routing r = routing_of(t, args);
    r.keys = NULL, r.mask = NULL, r.segment_counts = NULL; /* no results for later kernels */
    return moe_cuda_topk(on, &r);
}

/* The plan from given top-K: from the ids and weights that route has written to the plan's arrays. */
static cudaError_t given_link(const route_timing *t, const smoe_forward_args *args, const moe_launch *on)
{
    (void)args;
    return moe_cuda_plan_topk(on, &t->given);
}

static cudaError_t scatter_link(const route_timing *t, const smoe_forward_args *args, const moe_launch *on)
{
    (void)args;
    moe_cuda_plan p = t->given;
    p.counted = 1;
    return moe_cuda_plan_topk(on, &p);
}

static route_timing set_up(const smoe_layer *layer)
{
    route_timing t = {0};
    moe_problem_init(&t.problem, layer);
    const int32_t limit = moe_piece_limit(t.problem.rows, layer->experts);
    const int64_t count = layer->tokens * layer->experts;
    const size_t set = (size_t)(count * moe_type_bytes(layer->logits_type));
    const size_t entry = sizeof(moe_work);
    t.sets = (int)(LOGITS_BYTES / set) < 2       ? 2
             : (int)(LOGITS_BYTES / set) > LINKS ? LINKS
                                                 : (int)(LOGITS_BYTES / set);
    t.memory[0] = gpu_alloc(t.problem.plan_bytes);
    t.memory[1] = gpu_alloc(moe_cuda_lay_out_routing(&device, &t.problem).bytes);
    t.memory[2] = gpu_alloc((size_t)t.sets * set);
    t.memory[3] = gpu_alloc(16);
    t.memory[4] =
        gpu_alloc(entry * (size_t)moe_work_bound(t.problem.padded_rows, layer->experts, SMOE_TILE_BLOCKS));
    t.memory[5] = gpu_alloc(entry * (size_t)moe_work_bound(t.problem.padded_rows, layer->experts, limit));
    t.plan = moe_plan_at(&t.problem, t.memory[0].memory);
    t.scratch = t.memory[1].memory;
    t.logits = t.memory[2].memory;
    t.lists = (moe_cuda_lists){(int32_t *)t.memory[3].memory, (moe_work *)t.memory[4].memory,
                               (moe_work *)t.memory[5].memory, limit, (int32_t *)t.memory[3].memory + 2};
    const int32_t experts = (int32_t)layer->experts, topk = (int32_t)layer->topk;
    const int32_t segment = moe_plan_segment(layer->tokens, experts, topk, device.shared_bytes);
    t.memory[6] = gpu_alloc(moe_cuda_plan_work_bytes(layer->tokens, experts, segment));
    t.given = (moe_cuda_plan){.ids = t.plan.topk_ids,
                              .weights = t.plan.topk_weights,
                              .tokens = (int32_t)layer->tokens,
                              .experts = experts,
                              .topk = topk,
                              .padded_rows = (int32_t)t.problem.padded_rows,
                              .segment = segment,
                              .counts = t.plan.counts,
                              .row_offsets = t.plan.offsets,
                              .block_offsets = t.plan.block_offsets,
                              .order = t.plan.order,
                              .row_token = t.plan.row_token,
                              .token_offsets = t.plan.token_offsets,
                              .token_rows = t.plan.token_rows,
                              .row_weight = t.plan.row_weight,
                              .lists = t.lists,
                              .work = t.memory[6].memory};
    uint64_t random = 3;
    char *host = malloc(set);
    for (int64_t i = 0; i < count; i++) {
        const float x = bell(&random);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (layer->logits_type == SMOE_TYPE_F32)
            ((uint32_t *)host)[i] = bits;
        else
            ((uint16_t *)host)[i] = (uint16_t)(bits >> 16);
    }
    for (int i = 0; i < t.sets; i++)
        CHECK_CUDA(cudaMemcpy(t.logits + (size_t)i * set, host, set, cudaMemcpyHostToDevice));
    free(host);
    return t;
}

static void tear_down(const route_timing *t)
{
    for (size_t i = 0; i < sizeof t->memory / sizeof t->memory[0]; i++) gpu_free(t->memory[i]);
}

static void end_line(double target)
{
    if (target > 0.0) printf(", target %.0f", target);
    printf("\n");
    fflush(stdout);
}

/* target: microseconds of all stages together; with rounding, of the time that the stages add to top-K.
 * 0: no target. */
static void time_layer(const smoe_layer *l, double target)
{
    route_timing t = set_up(l);
    const double topk = time_links(&t, topk_link), route = time_links(&t, route_link);
    const double rounded = l->rounding ? time_links(&t, round_link) : route, plan = time_links(&t, plan_link);
    printf("T %6lld E %4lld K %2lld %-4s score %d groups %d rounding %d | topk %6.2f route %6.2f round %6.2f "
           "plan %6.2f | %s %6.2f",
           (long long)l->tokens, (long long)l->experts, (long long)l->topk,
           l->logits_type == SMOE_TYPE_F32 ? "f32" : "bf16", (int)l->score, (int)l->groups, (int)l->rounding,
           topk, route, rounded, plan, l->rounding ? "adds" : "in all", l->rounding ? plan - topk : plan);
    end_line(target);
    tear_down(&t);
}

static smoe_layer layer_of(int64_t tokens, int64_t experts, int64_t topk, smoe_type type, smoe_score score)
{
    smoe_layer l = SMOE_LAYER_INIT;
    l.tokens = tokens, l.experts = experts, l.topk = topk, l.logits_type = type, l.score = score;
    l.renormalize = 1;
    l.hidden = l.intermediate = 8, l.inference = 1;
    return l;
}

static void time_shape(int64_t tokens, int64_t experts, int64_t topk, smoe_type type, smoe_score score,
                       smoe_rounding rounding, double target)
{
    smoe_layer l = layer_of(tokens, experts, topk, type, score);
    l.rounding = rounding;
    time_layer(&l, target);
}

/* Sigmoid; top-K searches `kept` of the groups. */
static void time_groups(int64_t tokens, int64_t experts, int64_t topk, smoe_type type, int32_t groups,
                        int32_t kept)
{
    smoe_layer l = layer_of(tokens, experts, topk, type, SMOE_SCORE_SIGMOID);
    l.groups = groups, l.groups_kept = kept;
    time_layer(&l, 0);
}

static void time_given(int64_t tokens, int64_t experts, int64_t topk, double target)
{
    smoe_layer l = SMOE_LAYER_INIT;
    l.tokens = tokens, l.experts = experts, l.topk = topk, l.logits_type = SMOE_TYPE_BF16;
    l.hidden = l.intermediate = 8, l.inference = 1;
    route_timing t = set_up(&l);
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.logits = t.logits;
    const moe_launch on = {.device = &device, .sms = device.sms};
    CHECK_CUDA(route_link(&t, &args, &on));
    CHECK_CUDA(cudaDeviceSynchronize());
    const double plan = time_links(&t, given_link), scatter = time_links(&t, scatter_link);
    printf("T %6lld E %4lld K %2lld given top-K | scatter %6.2f | in all %6.2f", (long long)tokens,
           (long long)experts, (long long)topk, scatter, plan);
    end_line(target);
    tear_down(&t);
}

static smoe_layer gemm_layer;
static void *gemm_x, *gemm_weight;

static cudaError_t gemm_link(const route_timing *t, const smoe_forward_args *args, const moe_launch *on)
{
    (void)t;
    return moe_cuda_router_gemm(on, &gemm_layer, gemm_x, gemm_weight, NULL, args->logits);
}

static void time_gemm(int64_t tokens, int64_t hidden, int64_t experts)
{
    smoe_layer l = SMOE_LAYER_INIT;
    l.tokens = tokens, l.experts = experts, l.hidden = hidden, l.intermediate = 8, l.topk = 1,
    l.inference = 1;
    const gpu_buffer x = gpu_alloc((size_t)(tokens * hidden * 2)),
                     weight = gpu_alloc((size_t)(experts * hidden * 2));
    CHECK_CUDA(cudaMemset(x.memory, 0x3c, x.bytes));
    CHECK_CUDA(cudaMemset(weight.memory, 0x3c, weight.bytes));
    route_timing t = set_up(&l);
    gemm_layer = l, gemm_x = x.memory, gemm_weight = weight.memory;
    const float time = time_links(&t, gemm_link);
    printf("router GEMM T %6lld d %5lld E %4lld: %7.2f us, %.0f TFLOP/s, X at %.2f TB/s\n", (long long)tokens,
           (long long)hidden, (long long)experts, (double)time,
           2e-6 * (double)tokens * (double)hidden * (double)experts / (double)time,
           2e-6 * (double)tokens * (double)hidden / (double)time);
    tear_down(&t);
    gpu_free(x), gpu_free(weight);
}

int main(void)
{
    CHECK_CUDA(moe_cuda_open_device(&device, 0));
    CHECK_CUDA(moe_cuda_routing_init(&device));
    CHECK_CUDA(moe_cuda_plan_init(&device));
    time_given(32768, 256, 16, 12);
    time_given(24576, 128, 8, 0);
    time_given(40960, 128, 8, 0);
    time_given(16384, 512, 10, 0);
    time_given(512, 128, 8, 0);
    for (int i = 0; i < 2; i++) {
        const smoe_type type = i ? SMOE_TYPE_F32 : SMOE_TYPE_BF16;
        time_shape(32768, 128, 8, type, SMOE_SCORE_TOPK_SOFTMAX, SMOE_ROUNDING_NONE, i ? 0 : 14);
        time_shape(32768, 128, 8, type, SMOE_SCORE_SOFTMAX_TOPK, SMOE_ROUNDING_NONE, 0);
        time_shape(16384, 512, 10, type, SMOE_SCORE_TOPK_SOFTMAX, SMOE_ROUNDING_NONE, i ? 0 : 24);
        time_shape(512, 128, 8, type, SMOE_SCORE_SOFTMAX_TOPK, SMOE_ROUNDING_NONE, 0);
        time_shape(16384, 256, 4, type, SMOE_SCORE_SOFTMAX_TOPK, SMOE_ROUNDING_NR_F, i ? 0 : 22);
        time_shape(32768, 128, 8, type, SMOE_SCORE_SOFTMAX_TOPK, SMOE_ROUNDING_NR_F, 0);
        time_shape(16384, 256, 4, type, SMOE_SCORE_SOFTMAX_TOPK, SMOE_ROUNDING_NR_S, 0);
        time_shape(16384, 256, 4, type, SMOE_SCORE_SOFTMAX_TOPK, SMOE_ROUNDING_BALANCE_F, 0);
        time_shape(16384, 256, 8, type, SMOE_SCORE_SIGMOID, SMOE_ROUNDING_NONE, 0);
        time_shape(40960, 128, 8, type, SMOE_SCORE_SIGMOID, SMOE_ROUNDING_NONE, 0);
        time_groups(16384, 256, 8, type, 8, 4); /* as DeepSeek-V3 routes */
    }
    time_gemm(32768, 2048, 128);
    time_gemm(16384, 4096, 256);
    time_gemm(512, 2048, 128);
    return 0;
}
