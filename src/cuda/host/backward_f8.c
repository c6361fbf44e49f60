/* fp8 in the backward (f8.h): dO is quantised for dh, dH in dh's epilogue for dx_rows. With
 * SMOE_COMPUTE_F8_DGRAD dw2 and dw1 read dH and A' in dtype. With SMOE_COMPUTE_F8 they read the bytes of dO
 * and of X, which is quantised once more, and the copies of dH and A' that dh writes instead. */
#include "f8.h"
#include "host/backward.h"
#include "host/f8_table.h"

enum { OF_DW1, OF_DW2, COPIES };

/* ---- Scratch ---- */

static uint64_t groups_of(const moe_problem *p)
{
    return (uint64_t)moe_f8_groups(p->layer.intermediate, MOE_F8_DH_FEATURES);
}

static uint64_t lay_out_tokens(const moe_problem *p, uint64_t bytes, uint64_t *scale)
{
    *scale = bytes + moe_align_up((uint64_t)(p->layer.tokens * p->layer.hidden));
    return *scale + moe_align_up((uint64_t)p->layer.tokens * sizeof(float));
}

uint64_t moe_cuda_lay_out_dh8(const moe_problem *p, backward_scratch *s)
{
    s->f8.dh8 = s->shared;
    s->f8.dh_scale = s->f8.dh8 + moe_align_up((uint64_t)(p->padded_rows * p->h_width));
    return s->f8.dh_scale + moe_align_up((uint64_t)p->padded_rows * groups_of(p) * sizeof(float));
}

uint64_t moe_cuda_lay_out_do8(const moe_problem *p, uint64_t at, backward_scratch *s)
{
    s->f8.do8 = at;
    return lay_out_tokens(p, at, &s->f8.do_scale);
}

/* dX~ will overwrite all of this, and the sums of dW1's pieces all from A'_w on. */
uint64_t moe_cuda_lay_out_dw_f8(const moe_problem *p, backward_scratch *s)
{
    const uint64_t rows = (uint64_t)p->padded_rows, of_rows = rows * groups_of(p) * sizeof(int32_t);
    const uint64_t of_experts = (uint64_t)p->layer.experts * groups_of(p) * sizeof(int32_t);
    s->dh = s->shared;
    s->f8.exponent[OF_DW1] = s->dh + moe_align_up(rows * (uint64_t)p->h_width);
    s->f8.expected = s->f8.exponent[OF_DW1] + moe_align_up(of_rows);
    s->f8.x8 = s->f8.expected + moe_align_up(2 * COPIES * of_experts);
    s->parts1 = s->a = lay_out_tokens(p, s->f8.x8, &s->f8.x_scale);
    s->f8.exponent[OF_DW2] = s->a + moe_align_up(rows * (uint64_t)p->layer.intermediate);
    return s->parts2 = moe_cuda_lay_out_do8(p, s->f8.exponent[OF_DW2] + moe_align_up(of_rows), s);
}

/* ---- Stages ---- */

static void *at(const backward_call *c, uint64_t offset)
{
    return c->scratch + offset;
}

static moe_f8_rows tokens_at(const backward_call *c, const void *tokens, uint64_t bytes, uint64_t scale)
{
    const smoe_layer *layer = &c->problem->layer;
    return (moe_f8_rows){tokens, at(c, bytes), at(c, scale), layer->tokens, layer->hidden};
}

static int32_t *expected_at(const backward_call *c, int which)
{
    const int64_t each = c->problem->layer.experts * (int64_t)groups_of(c->problem);
    return (int32_t *)at(c, c->at.f8.expected) + which * each;
}

static int32_t *largest_at(const backward_call *c, int which)
{
    return expected_at(c, COPIES + which);
}

static moe_f8_dw_rows copy_of(const backward_call *c, int which, const float *token_scale)
{
    return (moe_f8_dw_rows){
        .rows = (uint8_t *)(which == OF_DW1 ? c->dh : c->a),
        .exponent = at(c, c->at.f8.exponent[which]),
        .largest = largest_at(c, which),
        .expected = expected_at(c, which),
        .token_scale = token_scale,
    };
}

/* What dh needs to write the copies for dw. If neither dw1 nor dw2 runs, nothing reads the copies, and X may
 * be missing: dO's scales stand for X's. */
static cudaError_t prepare_copies(const backward_call *c, moe_f8_dh *call)
{
    const moe_f8_kernels *f8 = c->state->kernels->f8;
    const moe_f8_weights weights = moe_f8_weights_at(c->problem, c->args->weights_f8);
    const int wanted = c->args->dw1 || c->args->dw2;
    const moe_f8_rows x = tokens_at(c, c->args->x, c->at.f8.x8, c->at.f8.x_scale);
    const float *x_scale = wanted ? x.scale : call->do_scale;
    const moe_f8_expect expect = {
        .x_scale = x_scale,
        .do_scale = call->do_scale,
        .row_token = c->plan->row_token,
        .row_weight = c->plan->row_weight,
        .counts = c->plan->counts,
        .block_offsets = c->plan->block_offsets,
        .group1 = weights.group1,
        .group2 = weights.group2,
        .expected = {expected_at(c, OF_DW1), expected_at(c, OF_DW2)},
        .largest = {largest_at(c, OF_DW1), largest_at(c, OF_DW2)},
        .experts = (int32_t)c->problem->layer.experts,
        .groups = (int32_t)groups_of(c->problem),
        .degree = moe_f8_degree(c->problem),
        .of_size = moe_f8_expected_of_size(c->problem),
    };
    call->for_dw[OF_DW1] = copy_of(c, OF_DW1, x_scale);
    call->for_dw[OF_DW2] = copy_of(c, OF_DW2, call->do_scale);
    const cudaError_t status = wanted ? f8->rows(&c->on, &x) : cudaSuccess;
    return status == cudaSuccess ? f8->expect(&c->on, &expect) : status;
}

/* dh: of the layer in dtype. */
cudaError_t moe_cuda_dh_f8(backward_call *c, const moe_dh *dh)
{
    const moe_f8_kernels *f8 = c->state->kernels->f8;
    const moe_f8_weights weights = moe_f8_weights_at(c->problem, c->args->weights_f8);
    const moe_f8_rows dout = tokens_at(c, dh->dout, c->at.f8.do8, c->at.f8.do_scale);
    moe_f8_dh call = {.dh = *dh,
                      .do_scale = dout.scale,
                      .w_scale = weights.scale2,
                      .dh8 = at(c, c->at.f8.dh8),
                      .dh_scale = at(c, c->at.f8.dh_scale)};
    call.dh.dout = dout.bytes;
    call.dh.w2 = weights.w2_t;
    cudaError_t status = f8->rows(&c->on, &dout);
    if (status == cudaSuccess && moe_cuda_dw_is_f8(c->problem)) status = prepare_copies(c, &call);
    return status == cudaSuccess ? f8->dh(&c->on, &call) : status;
}

/* dw: of the layer in dtype, but `features` is the copy. */
cudaError_t moe_cuda_dw_f8(backward_call *c, const moe_dw *dw)
{
    const int which = dw->transposed ? OF_DW1 : OF_DW2;
    moe_f8_dw call = {*dw, at(c, c->at.f8.exponent[which]), expected_at(c, which), largest_at(c, which)};
    call.dw.tokens = at(c, which == OF_DW1 ? c->at.f8.x8 : c->at.f8.do8);
    return c->state->kernels->f8->dw(&c->on, &call);
}

cudaError_t moe_cuda_db1_f8(const backward_call *c, const moe_cuda_db *db1)
{
    moe_cuda_db call = *db1;
    call.values = at(c, c->at.f8.dh8);
    call.row_weight = at(c, c->at.f8.dh_scale);
    return moe_cuda_db_f8_launch(&c->on, &call, c->problem->layer.gradient_type);
}

cudaError_t moe_cuda_dx_rows_f8(backward_call *c, const moe_dx_rows *dx)
{
    const moe_f8_weights weights = moe_f8_weights_at(c->problem, c->args->weights_f8);
    moe_f8_dx_rows call = {*dx, at(c, c->at.f8.dh_scale), weights.scale1};
    call.dx.dh = at(c, c->at.f8.dh8);
    call.dx.w1 = weights.w1_t;
    call.dx.interleaved = 0; /* W1_8 has gate rows before up rows */
    return c->state->kernels->f8->dx_rows(&c->on, &call);
}
