/* fp8 in the backward: dO is quantised for dh, dH in dh's epilogue for dx_rows (f8.h). dw2 and dw1 read dH
 * and A' in dtype, as SMOE_COMPUTE_F8_DGRAD has them. */
#include "f8.h"
#include "host/backward.h"
#include "host/f8_table.h"

uint64_t moe_cuda_lay_out_dh8(const moe_problem *p, backward_scratch *s)
{
    const uint64_t groups = (uint64_t)moe_f8_groups(p->layer.intermediate, MOE_F8_DH_FEATURES);
    s->dh_scale = s->dh8 + moe_align_up((uint64_t)(p->padded_rows * p->h_width));
    return s->dh_scale + moe_align_up((uint64_t)p->padded_rows * groups * sizeof(float));
}

uint64_t moe_cuda_lay_out_do8(const moe_problem *p, backward_scratch *s)
{
    s->do_scale = s->parts2 + moe_align_up((uint64_t)(p->layer.tokens * p->layer.hidden));
    return s->do_scale + moe_align_up((uint64_t)p->layer.tokens * sizeof(float));
}

/* dh: of the layer in dtype. */
cudaError_t moe_cuda_dh_f8(backward_call *c, const moe_dh *dh)
{
    const moe_f8_kernels *f8 = c->state->kernels->f8;
    const smoe_layer *layer = &c->problem->layer;
    const moe_f8_weights weights = moe_f8_weights_at(c->problem, c->weights_f8);
    const moe_f8_rows rows = {dh->dout, (uint8_t *)c->scratch + c->at.parts2,
                              (float *)(void *)(c->scratch + c->at.do_scale), layer->tokens, layer->hidden};
    moe_f8_dh call = {.dh = *dh,
                      .do_scale = rows.scale,
                      .w_scale = weights.scale2,
                      .dh8 = (uint8_t *)c->scratch + c->at.dh8,
                      .dh_scale = (float *)(void *)(c->scratch + c->at.dh_scale)};
    call.dh.dout = rows.bytes;
    call.dh.w2 = weights.w2_t;
    const cudaError_t status = f8->rows(&c->on, &rows);
    return status == cudaSuccess ? f8->dh(&c->on, &call) : status;
}

cudaError_t moe_cuda_dx_rows_f8(backward_call *c, const moe_dx_rows *dx)
{
    const moe_f8_weights weights = moe_f8_weights_at(c->problem, c->weights_f8);
    moe_f8_dx_rows call = {*dx, (const float *)(void *)(c->scratch + c->at.dh_scale), weights.scale1};
    call.dx.dh = c->scratch + c->at.dh8;
    call.dx.w1 = weights.w1_t;
    call.dx.interleaved = 0; /* W1_8 has gate rows before up rows */
    return c->state->kernels->f8->dx_rows(&c->on, &call);
}
