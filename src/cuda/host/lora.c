/* The launches of LoRA's own kernels (experts/lora.cu), between those of the stages. */
#include "host/lora.h"
#include "host/launch_lora.h"

/* low (padded_rows, rank) = rows factor, or rows factor^T with rank_major, for an expert's factor. */
static cudaError_t project(const moe_launch *on, const moe_problem *problem, const moe_work *tiles,
                           const int32_t *tile_count, moe_cuda_project p)
{
    p.tiles = tiles;
    p.tile_count = tile_count;
    p.tile_bound = moe_work_bound(problem->padded_rows, problem->layer.experts, MOE_TILE_BLOCKS);
    return p.rank ? moe_cuda_project_launch(on, &p) : cudaSuccess;
}

cudaError_t moe_cuda_lora_p1(const forward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_cuda_project p1 = {
        .rows = c->args->x,
        .row_token = c->plan->row_token,
        .factor = c->args->lora_a1,
        .low = c->plan->p1,
        .width = (int32_t)layer->hidden,
        .rank = layer->lora_rank1,
        .rank_major = 1,
    };
    return project(&c->on, c->problem, c->lists.tiles, c->lists.counts, p1);
}

cudaError_t moe_cuda_lora_p2(const forward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_cuda_project p2 = {
        .rows = c->a,
        .factor = c->args->lora_a2,
        .low = c->plan->p2,
        .width = (int32_t)layer->intermediate,
        .rank = layer->lora_rank2,
        .rank_major = 1,
    };
    return project(&c->on, c->problem, c->lists.tiles, c->lists.counts, p2);
}

static cudaError_t run_pair(const backward_call *c, moe_cuda_low_pair p)
{
    const smoe_layer *layer = &c->problem->layer;
    p.block_offsets = c->plan->block_offsets;
    p.block_expert = c->lists.block_expert;
    p.experts = (int32_t)layer->experts;
    p.accumulate = layer->accumulate;
    return moe_cuda_low_pair_launch(&c->on, &p, layer->gradient_type);
}

/* Q2 and, if it is wanted, dB2. */
static cudaError_t run_pair2(const backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_cuda_low_pair p = {
        .rows = c->args->dout,
        .row_token = c->plan->row_token,
        .factor = c->args->lora_b2,
        .low = c->scratch + c->at.q2,
        .other = c->plan->p2,
        .row_weight = c->plan->row_weight,
        .gradient = c->args->dlora_b2,
        .parts = (float *)(c->scratch + c->at.parts2),
        .width = (int32_t)layer->hidden,
        .rank = layer->lora_rank2,
    };
    return run_pair(c, p);
}

cudaError_t moe_cuda_lora_q2(const backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    if (c->at.pair2) return run_pair2(c);
    const moe_cuda_project q2 = {
        .rows = c->args->dout,
        .row_token = c->plan->row_token,
        .factor = c->args->lora_b2,
        .low = c->scratch + c->at.q2,
        .width = (int32_t)layer->hidden,
        .rank = layer->lora_rank2,
    };
    return project(&c->on, c->problem, c->lists.tiles, c->lists.counts, q2);
}

static int wants_q1(const backward_call *c)
{
    return c->args->dx || c->args->dlora_a1;
}

/* Those of Q1 and dB1 that are wanted. */
static cudaError_t run_pair1(const backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_cuda_low_pair p = {
        .rows = c->dh,
        .factor = c->args->lora_b1,
        .low = wants_q1(c) ? c->scratch + c->at.q1 : NULL,
        .other = c->plan->p1,
        .gradient = c->args->dlora_b1,
        .parts = (float *)(c->scratch + c->at.parts1),
        .width = (int32_t)c->problem->h_width,
        .rank = layer->lora_rank1,
    };
    return run_pair(c, p);
}

static cudaError_t run_q1(const backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_cuda_project q1 = {
        .rows = c->dh,
        .factor = c->args->lora_b1,
        .low = c->scratch + c->at.q1,
        .width = (int32_t)c->problem->h_width,
        .rank = layer->lora_rank1,
    };
    return project(&c->on, c->problem, c->lists.tiles, c->lists.counts, q1);
}

/* Those of the gradients of a pair of factors that are wanted. */
static cudaError_t run_sums(const backward_call *c, int rank, moe_cuda_low_sum a, moe_cuda_low_sum b)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_cuda_low_sums sums = {
        .a = a,
        .b = b,
        .block_offsets = c->plan->block_offsets,
        .order = c->plan->order,
        .rank = rank,
        .experts = (int32_t)layer->experts,
        .accumulate = layer->accumulate,
    };
    return a.gradient || b.gradient ? moe_cuda_low_sum_launch(&c->on, &sums, layer->gradient_type)
                                    : cudaSuccess;
}

cudaError_t moe_cuda_lora_gradients2(const backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_cuda_low_sum a2 = {
        .rows = c->a,
        .low = c->scratch + c->at.q2,
        .gradient = c->args->dlora_a2,
        .width = (int32_t)layer->intermediate,
        .rank_major = 1,
    };
    const moe_cuda_low_sum b2 = {
        .rows = c->args->dout,
        .row_token = c->plan->row_token,
        .low = c->plan->p2,
        .row_weight = c->plan->row_weight,
        .gradient = c->at.pair2 ? NULL : c->args->dlora_b2,
        .width = (int32_t)layer->hidden,
    };
    return run_sums(c, layer->lora_rank2, a2, b2);
}

int moe_cuda_wants_lora1(const backward_call *c)
{
    return c->problem->layer.lora_rank1 && (c->args->dx || moe_wants_lora1(c->args));
}

cudaError_t moe_cuda_lora1(const backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_cuda_low_sum a1 = {
        .rows = c->args->x,
        .row_token = c->plan->row_token,
        .low = c->scratch + c->at.q1,
        .gradient = c->args->dlora_a1,
        .width = (int32_t)layer->hidden,
        .rank_major = 1,
    };
    const moe_cuda_low_sum b1 = {
        .rows = c->dh,
        .low = c->plan->p1,
        .gradient = c->at.pair1 ? NULL : c->args->dlora_b1,
        .width = (int32_t)c->problem->h_width,
    };
    cudaError_t status = cudaSuccess;
    if (c->at.pair1)
        status = run_pair1(c);
    else if (wants_q1(c))
        status = run_q1(c);
    return status == cudaSuccess ? run_sums(c, layer->lora_rank1, a1, b1) : status;
}
