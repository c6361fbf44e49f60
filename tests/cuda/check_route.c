/* Compares routing on the device with the CPU backend on the same logits. Ids, weights, counts, the selection
 * after rounding and the whole plan must be equal bit for bit, losses to 1e-6. Outputs and scratch are
 * poisoned before. Every call is captured in a graph. Also checked: the router's GEMM with small integers,
 * and the update of the selection bias.
 *
 *   cuda_check_route            all of it; exit 0 if all is equal, 1 if not, 3 if CUDA fails, 77 without GPU
 *   cuda_check_route few        what a memory checker can run in minutes
 *   cuda_check_route few even   half of its shapes; `odd` is the other half
 *   cuda_check_route fewest     what the emulator can run in seconds */
#include "cuda/host/device.h"
#include "cuda/host/routing.h"
#include "cuda/schedule/plan_size.h"
#include "gpu.h"
#include "open_cuda.h"
#include "route_cases.h"

#include <math.h>
#include <time.h>

static int failures;

static void must_be_ok(smoe_status status, const smoe_context *context, const char *what)
{
    if (status == SMOE_OK) return;
    fprintf(stderr, "%s: %s\n", what, smoe_last_error(context));
    exit(3);
}

/* Frees buffers; reports an error if a kernel wrote outside of one. */
static void free_all(const gpu_buffer *buffers, int count, const char *what)
{
    for (int i = 0; i < count; i++)
        if (gpu_free(buffers[i])) {
            printf("DIFFERS a write outside of a buffer (%s, buffer %d)\n", what, i);
            failures++;
        }
}

static void *host_poisoned(size_t bytes)
{
    void *p = aligned_alloc(256, moe_align_up(bytes ? bytes : 1));
    if (!p) exit(3);
    return memset(p, 0xff, bytes);
}

/* One case: the layer, its inputs and the results of both sides. */
typedef struct route_case {
    smoe_layer layer;
    moe_problem problem;
    const char *kind;
    void *logits;  /* (T, E) */
    float *bias;   /* (E) or NULL */
    uint8_t *mask; /* (T) or NULL */
    int with_losses;
    _Alignas(16) float losses[2];
    float device_losses[2];
    char *cpu, *device; /* the plans of both sides, in host memory, with the layout of `saved` */
    moe_plan_arrays cpu_plan, device_plan;
    int32_t *list_counts; /* the device's work lists */
    moe_work *tiles, *pieces;
} route_case;

static size_t logits_bytes(const smoe_layer *l)
{
    return (size_t)(l->tokens * l->experts * moe_type_bytes(l->logits_type));
}

static void run_cpu(smoe_context *context, route_case *c)
{
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must_be_ok(smoe_query_sizes(context, &c->layer, &sizes), context, "smoe_query_sizes");
    c->cpu = host_poisoned(sizes.scratch_forward_bytes);
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.logits = c->logits;
    args.selection_bias = c->bias;
    args.token_mask = c->mask;
    args.step = 77;
    args.losses = c->with_losses ? c->losses : NULL;
    args.scratch = c->cpu;
    args.scratch_size = sizes.scratch_forward_bytes;
    must_be_ok(smoe_route(context, &c->layer, &args, NULL), context, "smoe_route");
    if (c->layer.rounding != SMOE_ROUNDING_NONE)
        must_be_ok(smoe_round(context, &c->layer, &args, NULL), context, "smoe_round");
    must_be_ok(smoe_plan(context, &c->layer, &args, NULL), context, "smoe_plan");
    c->cpu_plan = moe_plan_at(&c->problem, c->cpu);
}

/* Enqueues all calls of the forward's routing, each from a graph that contains only this call. */
static void enqueue(const moe_problem *problem, const smoe_forward_args *args, const moe_plan_arrays *plan,
                    const moe_cuda_lists *lists, void *scratch, const moe_launch *on)
{
    const smoe_context context = {0};
    const moe_routing_layout layout = moe_cuda_lay_out_routing(on->device, problem);
    const moe_cuda_routing routing = moe_cuda_routing_of(problem, &layout, args, plan, scratch);
    CHECK_CUDA(moe_cuda_route(&context, on, &routing, args));
    if (problem->layer.rounding != SMOE_ROUNDING_NONE) CHECK_CUDA(moe_cuda_rounding(on, &routing));
    CHECK_CUDA(moe_cuda_plan_from_logits(on, problem, &routing, plan, lists));
}

static void run_graph(const moe_problem *problem, const smoe_forward_args *args, const moe_plan_arrays *plan,
                      const moe_cuda_lists *lists, void *scratch, const moe_launch *on)
{
    cudaGraph_t graph;
    cudaGraphExec_t run;
    CHECK_CUDA(cudaStreamBeginCapture(on->stream, cudaStreamCaptureModeThreadLocal));
    enqueue(problem, args, plan, lists, scratch, on);
    CHECK_CUDA(cudaStreamEndCapture(on->stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&run, graph, 0));
    CHECK_CUDA(cudaGraphLaunch(run, on->stream));
    CHECK_CUDA(cudaStreamSynchronize(on->stream));
    CHECK_CUDA(cudaGraphExecDestroy(run));
    CHECK_CUDA(cudaGraphDestroy(graph));
}

static void run_device(route_case *c, const moe_launch *on)
{
    const moe_problem *p = &c->problem;
    const int32_t limit = moe_piece_limit(p->rows, c->layer.experts);
    const gpu_buffer plan_memory = gpu_alloc(p->plan_bytes),
                     scratch = gpu_alloc(moe_cuda_lay_out_routing(on->device, p).bytes);
    const gpu_buffer losses = gpu_alloc(sizeof c->losses), list_counts = gpu_alloc(16);
    const gpu_buffer tiles = gpu_alloc(
        sizeof(moe_work) * (size_t)moe_work_bound(p->padded_rows, c->layer.experts, MOE_TILE_BLOCKS));
    const gpu_buffer pieces =
        gpu_alloc(sizeof(moe_work) * (size_t)moe_work_bound(p->padded_rows, c->layer.experts, limit));
    const gpu_buffer logits = gpu_copy(c->logits, logits_bytes(&c->layer));
    const gpu_buffer bias = c->bias ? gpu_copy(c->bias, 4 * (size_t)c->layer.experts) : (gpu_buffer){0};
    const gpu_buffer mask = c->mask ? gpu_copy(c->mask, (size_t)c->layer.tokens) : (gpu_buffer){0};
    const moe_cuda_lists lists = {(int32_t *)list_counts.memory, (moe_work *)tiles.memory,
                                  (moe_work *)pieces.memory, limit, (int32_t *)list_counts.memory + 2};
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.logits = logits.memory;
    args.selection_bias = (float *)bias.memory;
    args.token_mask = (uint8_t *)mask.memory;
    args.step = 77;
    args.losses = c->with_losses ? (float *)losses.memory : NULL;
    const moe_plan_arrays plan = moe_plan_at(p, plan_memory.memory);
    run_graph(p, &args, &plan, &lists, scratch.memory, on);

    c->device = gpu_read(plan_memory.memory, p->plan_bytes);
    CHECK_CUDA(cudaMemcpy(c->device_losses, losses.memory, sizeof c->losses, cudaMemcpyDeviceToHost));
    c->device_plan = moe_plan_at(p, c->device);
    c->list_counts = gpu_read(list_counts.memory, 8);
    c->tiles = gpu_read(tiles.memory, tiles.bytes);
    c->pieces = gpu_read(pieces.memory, pieces.bytes);
    const gpu_buffer buffers[] = {plan_memory, scratch, losses, list_counts, tiles,
                                  pieces,      logits,  bias,   mask};
    free_all(buffers, sizeof buffers / sizeof *buffers, c->kind);
}

static void say(const route_case *c, const char *what)
{
    const smoe_layer *l = &c->layer;
    if (failures++ > 40) return;
    printf("DIFFERS %-13s T %lld E %lld K %lld %s score %d renorm %d groups %d bias %d rounding %d tile %d, "
           "%s%s\n",
           what, (long long)l->tokens, (long long)l->experts, (long long)l->topk,
           l->logits_type == SMOE_TYPE_F32 ? "f32" : "bf16", (int)l->score, (int)l->renormalize,
           (int)l->groups, c->bias != NULL, (int)l->rounding, (int)l->tile, c->kind,
           c->mask ? ", masked" : "");
}

static int is_nan_word(uint32_t word)
{
    return (word & 0x7fffffffu) > 0x7f800000u;
}

/* Compares the 32-bit words of both sides. If they are floats, all NaNs count as equal. */
static int same_words(const route_case *c, const char *what, const void *cpu, const void *device,
                      int64_t count, int floats)
{
    const uint32_t *x = cpu, *y = device;
    for (int64_t i = 0; i < count; i++) {
        if (x[i] == y[i] || (floats && is_nan_word(x[i]) && is_nan_word(y[i]))) continue;
        say(c, what);
        if (failures <= 40) printf("        [%lld] is %08x, expected %08x\n", (long long)i, y[i], x[i]);
        return 0;
    }
    return 1;
}

/* Checks that a work list covers the blocks of all experts in order, in entries of at most `limit` blocks. */
static void check_list(const route_case *c, const char *what, const moe_work *list, int32_t count,
                       int32_t limit)
{
    int32_t block = 0, expert = 0;
    for (int32_t i = 0; i < count; i++) {
        while (expert < c->layer.experts && block >= c->cpu_plan.block_offsets[expert + 1]) expert++;
        const int32_t blocks = moe_work_blocks(list[i]);
        if (list[i].row != block * MOE_BLOCK_ROWS || moe_work_expert(list[i]) != expert || blocks < 1 ||
            blocks > limit || block + blocks > c->cpu_plan.block_offsets[expert + 1]) {
            say(c, what);
            return;
        }
        block += blocks;
    }
    if (block != c->cpu_plan.block_offsets[c->layer.experts]) say(c, what);
}

static int near(float a, float b)
{
    if (isnan(a) || isnan(b)) return isnan(a) && isnan(b);
    return a == b || fabs((double)a - (double)b) <= 1e-6 * fabs((double)b);
}

static void compare(route_case *c)
{
    const int64_t tokens = c->layer.tokens, experts = c->layer.experts, pairs = tokens * c->layer.topk;
    const moe_plan_arrays *x = &c->cpu_plan, *y = &c->device_plan;
    int same = same_words(c, "topk_ids", x->topk_ids, y->topk_ids, pairs, 0);
    same = same && same_words(c, "topk_weights", x->topk_weights, y->topk_weights, pairs, 1);
    same = same && same_words(c, "topk_counts", x->topk_counts, y->topk_counts, experts, 0);
    same = same && same_words(c, "counts", x->counts, y->counts, experts, 0);
    same = same && same_words(c, "offsets", x->offsets, y->offsets, experts + 1, 0);
    same = same && same_words(c, "block_offsets", x->block_offsets, y->block_offsets, experts + 1, 0);
    same = same && same_words(c, "order", x->order, y->order, experts, 0);
    same = same && same_words(c, "row_token", x->row_token, y->row_token, c->problem.padded_rows, 0);
    same = same && same_words(c, "row_weight", x->row_weight, y->row_weight, c->problem.padded_rows, 1);
    same = same && same_words(c, "token_offsets", x->token_offsets, y->token_offsets, tokens + 1, 0);
    same = same && same_words(c, "token_rows", x->token_rows, y->token_rows, x->token_offsets[tokens], 0);
    if (same) {
        check_list(c, "tiles", c->tiles, c->list_counts[0], MOE_TILE_BLOCKS);
        check_list(c, "pieces", c->pieces, c->list_counts[1],
                   moe_piece_limit(c->problem.rows, c->layer.experts));
    }
    if (!c->with_losses) return;
    if (!near(c->device_losses[0], c->losses[0]) || !near(c->device_losses[1], c->losses[1])) {
        say(c, "losses");
        printf("        %.9g %.9g, expected %.9g %.9g\n", (double)c->device_losses[0],
               (double)c->device_losses[1], (double)c->losses[0], (double)c->losses[1]);
    }
}

/* Every third case has a mask, and every fifteenth one that leaves out all tokens. */
static void fill_mask(route_case *c, int number)
{
    if (number % 3) return;
    uint64_t random = (uint64_t)number;
    c->mask = malloc((size_t)c->layer.tokens);
    for (int64_t t = 0; t < c->layer.tokens; t++)
        c->mask[t] = number % 5 && next_random(&random) % 3 ? (uint8_t)(1 + t % 255) : 0;
}

static void fill_inputs(route_case *c, logits_kind kind, int biased)
{
    const int64_t experts = c->layer.experts, count = c->layer.tokens * experts;
    uint64_t random = 1000 * (uint64_t)kind + (uint64_t)count;
    c->kind = kind_name(kind);
    c->logits = malloc(logits_bytes(&c->layer));
    for (int64_t i = 0; i < count; i++) {
        union {
            float value;
            uint32_t bits;
        } v = {draw_logit(kind, i / experts, i % experts, experts, &random)};
        if (c->layer.logits_type == SMOE_TYPE_F32)
            ((float *)c->logits)[i] = v.value;
        else
            ((uint16_t *)c->logits)[i] = (uint16_t)(v.bits >> 16);
    }
    if (!biased) return;
    c->bias = malloc(4 * (size_t)experts);
    for (int64_t e = 0; e < experts; e++) c->bias[e] = draw_bias(kind, &random);
}

static void run_case(smoe_context *context, const smoe_layer *layer, logits_kind kind, int biased, int number,
                     const moe_launch *on)
{
    if (layer->rounding == SMOE_ROUNDING_NONE &&
        !moe_plan_segment_fits(32, (int32_t)layer->experts, (int32_t)layer->topk, on->device->shared_bytes))
        return; /* the backend refuses such a layer on this GPU */
    route_case c = {.layer = *layer, .with_losses = kind % 2 == 0};
    moe_problem_init(&c.problem, layer);
    fill_inputs(&c, kind, biased);
    fill_mask(&c, number);
    run_cpu(context, &c);
    run_device(&c, on);
    compare(&c);
    free(c.logits), free(c.bias), free(c.mask), free(c.cpu), free(c.device);
    free(c.list_counts), free(c.tiles), free(c.pieces);
}

/* Which of all cases are run. */
typedef struct extent {
    const char *name;
    int64_t most_tokens, most_rounded_cells; /* limits of T, and of T E in cases with token rounding */
    int64_t most_products;                   /* limit of the products of a GEMM */
    int every, gemm_every; /* one of so many cases, or GEMMs, is run; every = 0: route_shape.every counts */
} extent;

static const extent extents[] = {{"all", INT64_MAX, INT64_MAX, INT64_MAX, 0, 1},
                                 {"few", 1000, INT64_MAX, INT64_MAX, 23, 1},
                                 {"fewest", 1000, 45000, 100000000, 87, 3}};

/* Cases for which the fast top-K does a token again with exact keys, which a sample would mostly miss. */
static int is_always_run(const route_shape *shape, int score, int rounding, int kind)
{
    return score == 9 && rounding == SMOE_ROUNDING_NONE && (kind == LOST || kind == DOMINATED) &&
           shape->experts >= 128 && shape->tokens <= 1000;
}

static int is_left_out(const extent *how, const route_shape *shape, int score, int rounding, int kind)
{
    if (is_always_run(shape, score, rounding, kind)) return 0;
    const int every = how->every ? how->every : shape->every;
    const int shift = how->every ? 5 * (int)(shape - route_shapes) : 0;
    return (rounding != SMOE_ROUNDING_NONE && shape->tokens * shape->experts > how->most_rounded_cells) ||
           (score * 49 + rounding * 7 + kind + shift) % every;
}

static int run_shape(smoe_context *context, const route_shape *shape, const extent *how, const moe_launch *on)
{
    int cases = 0;
    for (int score = 0; score < SCORES; score++)
        for (int rounding = SMOE_ROUNDING_NONE; rounding <= SMOE_ROUNDING_DOWN; rounding++)
            for (int kind = 0; kind < KINDS; kind++) {
                if (is_left_out(how, shape, score, rounding, kind)) continue;
                smoe_layer layer = SMOE_LAYER_INIT;
                layer.tokens = shape->tokens;
                layer.hidden = layer.intermediate = 8;
                layer.experts = shape->experts;
                layer.topk = shape->topk;
                layer.logits_type = shape->logits_type;
                layer.inference = 1;
                layer.rounding = (smoe_rounding)rounding;
                layer.tile = shape->tile;
                layer.seed = 42;
                const int biased = set_score(&layer, score);
                if (biased < 0) continue;
                run_case(context, &layer, (logits_kind)kind, biased, cases++ + (int)(shape - route_shapes),
                         on);
            }
    return cases;
}

/* ---- the router's GEMM: integers small enough that every sum is exact ---- */

static uint16_t small_integer(uint64_t *random, smoe_type type, int *value)
{
    static const uint16_t bf16[] = {0xc000, 0xbf80, 0, 0x3f80, 0x4000},
                          f16[] = {0xc000, 0xbc00, 0, 0x3c00, 0x4000};
    const uint32_t i = next_random(random) % 5;
    *value = (int)i - 2;
    return type == SMOE_TYPE_BF16 ? bf16[i] : f16[i];
}

static uint16_t *integer_matrix(int64_t count, smoe_type type, uint64_t *random, int **values)
{
    uint16_t *matrix = malloc(2 * (size_t)count);
    *values = malloc(sizeof(int) * (size_t)count);
    for (int64_t i = 0; i < count; i++) matrix[i] = small_integer(random, type, *values + i);
    return matrix;
}

static void check_gemm(const moe_launch *on, int64_t tokens, int64_t experts, int64_t hidden, smoe_type type,
                       smoe_type logits_type, int biased)
{
    smoe_layer l = SMOE_LAYER_INIT;
    l.tokens = tokens, l.experts = experts, l.hidden = hidden, l.dtype = type, l.logits_type = logits_type;
    uint64_t random = 5;
    int *x_values, *w_values, *b_values, wrong = 0;
    uint16_t *x = integer_matrix(tokens * hidden, type, &random, &x_values);
    uint16_t *w = integer_matrix(experts * hidden, type, &random, &w_values);
    uint16_t *b = integer_matrix(experts, type, &random, &b_values);
    const gpu_buffer buffers[] = {gpu_copy(x, 2 * (size_t)(tokens * hidden)),
                                  gpu_copy(w, 2 * (size_t)(experts * hidden)),
                                  gpu_copy(b, 2 * (size_t)experts), gpu_alloc(logits_bytes(&l))};
    CHECK_CUDA(moe_cuda_router_gemm(on, &l, buffers[0].memory, buffers[1].memory,
                                    biased ? buffers[2].memory : NULL, buffers[3].memory));
    CHECK_CUDA(cudaDeviceSynchronize());
    char *out = gpu_read(buffers[3].memory, logits_bytes(&l));
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t e = 0; e < experts; e++) {
            int sum = biased ? b_values[e] : 0;
            for (int64_t j = 0; j < hidden; j++) sum += x_values[t * hidden + j] * w_values[e * hidden + j];
            union {
                float value;
                uint32_t bits;
            } v = {(float)sum};
            if (logits_type == SMOE_TYPE_F32)
                wrong += ((float *)out)[t * experts + e] != v.value;
            else
                wrong += ((uint16_t *)out)[t * experts + e] !=
                         (uint16_t)((v.bits + 0x7fffu + (v.bits >> 16 & 1u)) >> 16);
        }
    if (wrong) {
        failures++;
        printf("DIFFERS router GEMM T %lld E %lld d %lld dtype %d logits %d: %d wrong\n", (long long)tokens,
               (long long)experts, (long long)hidden, (int)type, (int)logits_type, wrong);
    }
    free(x), free(w), free(b), free(x_values), free(w_values), free(b_values), free(out);
    free_all(buffers, 4, "router GEMM");
}

static void check_gemms(const moe_launch *on, const extent *how)
{
    static const int64_t shapes[][3] = {{300, 128, 200},  {1, 1, 8},       {129, 7, 64},    {200, 130, 72},
                                        {130, 300, 1536}, {12300, 50, 72}, {2000, 900, 200}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (shapes[i][0] * shapes[i][1] * shapes[i][2] > how->most_products) continue;
        for (int variant = 0; variant < 8; variant += how->gemm_every)
            check_gemm(on, shapes[i][0], shapes[i][1], shapes[i][2],
                       variant & 1 ? SMOE_TYPE_F16 : SMOE_TYPE_BF16,
                       variant & 2 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32, variant & 4);
    }
}

static void check_selection_bias(const moe_launch *on, smoe_context *cpu, int64_t experts)
{
    smoe_layer l = SMOE_LAYER_INIT;
    l.tokens = 100, l.hidden = l.intermediate = 8, l.experts = experts, l.topk = 1,
    l.score = SMOE_SCORE_SIGMOID;
    uint64_t random = 9;
    int32_t *counts = malloc(4 * (size_t)experts);
    float *bias = malloc(4 * (size_t)experts);
    for (int64_t e = 0; e < experts; e++)
        counts[e] = (int32_t)(next_random(&random) % 5), bias[e] = bell(&random);
    int64_t total = 0;
    for (int64_t e = 0; e < experts; e++) total += counts[e];
    counts[0] += (int32_t)((experts - total % experts) % experts); // an integer mean: some biases stay
    const gpu_buffer buffers[] = {gpu_copy(counts, 4 * (size_t)experts), gpu_copy(bias, 4 * (size_t)experts)};
    CHECK_CUDA(moe_cuda_selection_bias(on, (int32_t *)buffers[0].memory, (float *)buffers[1].memory, experts,
                                       1e-3f));
    CHECK_CUDA(cudaDeviceSynchronize());
    float *out = gpu_read(buffers[1].memory, 4 * (size_t)experts);
    must_be_ok(smoe_update_selection_bias(cpu, &l, counts, bias, 1e-3f, NULL), cpu,
               "smoe_update_selection_bias");
    if (memcmp(out, bias, 4 * (size_t)experts)) {
        failures++;
        printf("DIFFERS selection bias, E %lld\n", (long long)experts);
    }
    free(counts), free(bias), free(out);
    free_all(buffers, 2, "selection bias");
}

static double seconds(void)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int argc, char **argv)
{
    const extent *how = extents;
    for (size_t i = 0; i < sizeof extents / sizeof *extents; i++)
        if (argc > 1 && !strcmp(argv[1], extents[i].name)) how = &extents[i];
    smoe_context *context;
    if (smoe_create(&context, NULL) != SMOE_OK) return 3;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        puts("no GPU: skipped");
        return 77;
    }
    moe_device device;
    CHECK_CUDA(moe_cuda_open_device(&device, 0));
    if ((int)kernels_of_environment() == MOE_KERNELS_PORTABLE_99K) device.shared_bytes = MOE_SHARED_99K;
    CHECK_CUDA(moe_cuda_routing_init(&device));
    CHECK_CUDA(moe_cuda_plan_init(&device));
    moe_launch on = {.device = &device, .sms = device.sms};
    CHECK_CUDA(cudaStreamCreateWithFlags(&on.stream, cudaStreamNonBlocking));
    check_gemms(&on, how);
    check_selection_bias(&on, context, 8);
    check_selection_bias(&on, context, 4096);
    const char *half = argc > 2 ? argv[2] : "";
    int cases = 0, shapes = 0;
    for (int i = 0; i < SHAPES; i++) {
        if (route_shapes[i].tokens > how->most_tokens) continue;
        if (!strcmp(half, shapes++ % 2 ? "even" : "odd")) continue;
        const double start = seconds();
        const int before = failures, ran = run_shape(context, &route_shapes[i], how, &on);
        cases += ran;
        printf("T %6lld E %4lld K %2lld %-4s tile %4d: %4d cases, %d differ, %.1f s\n",
               (long long)route_shapes[i].tokens, (long long)route_shapes[i].experts,
               (long long)route_shapes[i].topk, route_shapes[i].logits_type == SMOE_TYPE_F32 ? "f32" : "bf16",
               (int)route_shapes[i].tile, ran, failures - before, seconds() - start);
        fflush(stdout);
    }
    printf("%d cases, %d differ\n", cases, failures);
    smoe_destroy(context);
    return failures != 0;
}
