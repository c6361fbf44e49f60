/* One table for each kind of call lists the memory that the call is given. */
#include "pointers.h"
#include "f8.h"
#include "wanted.h"

#include <assert.h>

/* What the call does with a memory that it only reads if the pointer is not NULL: 0. */
enum { NEEDED = 1, WRITTEN = 2, BUFFER = 4 /* saved or scratch */, PAIR = 8 /* of floats */, BYTES = 16 };

enum { MOST_MEMORIES = 32 };

typedef struct memory {
    const char *name;
    const void *pointer;
    int use;
    int64_t bytes; /* 0: the call ignores the pointer */
    uint64_t size; /* of a buffer, as the caller gives it */
} memory;

static int align_of(const memory *m)
{
    if (m->use & BUFFER) return MOE_BUFFER_ALIGN;
    if (m->use & PAIR) return (int)_Alignof(float);
    return m->use & BYTES ? 1 : MOE_TENSOR_ALIGN;
}

static smoe_status check_alone(smoe_context *context, const memory *m)
{
    const int align = align_of(m);
    if (!m->pointer && m->use & NEEDED)
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: %s is NULL, %lld bytes are needed",
                        context->function, m->name, (long long)m->bytes);
    if ((uintptr_t)m->pointer % (uintptr_t)align)
        return moe_fail(context, SMOE_ERROR_ALIGNMENT, "%s: %s is %p, it must be aligned to %d bytes",
                        context->function, m->name, m->pointer, align);
    if (m->use & BUFFER && m->size < (uint64_t)m->bytes)
        return moe_fail(context, SMOE_ERROR_BUFFER, "%s: %s has %llu bytes, smoe_query_sizes asks for %lld",
                        context->function, m->name, (unsigned long long)m->size, (long long)m->bytes);
    return SMOE_OK;
}

static int overlap(const memory *a, const memory *b)
{
    const uintptr_t p = (uintptr_t)a->pointer, q = (uintptr_t)b->pointer;
    return p < q ? q - p < (uint64_t)a->bytes : p - q < (uint64_t)b->bytes;
}

static smoe_status refuse_overlap(smoe_context *context, const memory *written, const memory *other)
{
    return moe_fail(context, SMOE_ERROR_ARGUMENT,
                    "%s: %s (%lld bytes at %p) overlaps %s (%lld bytes at %p), and %s is written",
                    context->function, other->name, (long long)other->bytes, other->pointer, written->name,
                    (long long)written->bytes, written->pointer, written->name);
}

static smoe_status check_memories(smoe_context *context, const memory *all, int count)
{
    const memory *used[MOST_MEMORIES];
    int uses = 0;
    for (int i = 0; i < count; i++) {
        const smoe_status status = all[i].bytes ? check_alone(context, &all[i]) : SMOE_OK;
        if (status != SMOE_OK) return status;
        if (all[i].pointer && all[i].bytes) used[uses++] = &all[i];
    }
    for (int i = 0; i < uses; i++)
        for (int j = 0; used[i]->use & WRITTEN && j < uses; j++)
            if (j != i && overlap(used[i], used[j])) return refuse_overlap(context, used[i], used[j]);
    return SMOE_OK;
}

/* 0 without fp8 */
static int64_t weights_f8_bytes(const moe_problem *problem)
{
    return problem->layer.compute == SMOE_COMPUTE_STORAGE ? 0
                                                          : (int64_t)moe_f8_weights_at(problem, NULL).bytes;
}

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))
smoe_status moe_check_forward_pointers(smoe_context *context, const moe_problem *problem,
                                       const smoe_forward_args *a, uint64_t scratch_bytes, int needs)
{
    const smoe_layer *l = &problem->layer;
    const int logits = l->entry == SMOE_ENTRY_FROM_LOGITS, topk = l->entry == SMOE_ENTRY_FROM_TOPK,
              rows = l->entry == SMOE_ENTRY_FROM_ROWS;
    const int router = logits && needs & MOE_NEEDS_ROUTER, routing = needs & MOE_NEEDS_ROUTING ? NEEDED : 0,
              weights = needs & MOE_NEEDS_WEIGHTS ? NEEDED : 0, gemm = router && a->router_weight;
    const int64_t element = problem->element, index = moe_type_bytes(l->index_type), e = l->experts;
    const int64_t td = l->tokens * l->hidden * element, ed = e * l->hidden * element,
                  tk = l->tokens * l->topk, here = problem->experts_here, f8 = weights_f8_bytes(problem);
    const memory all[] = {
        {"x", a->x, gemm || needs & MOE_NEEDS_X ? NEEDED : 0, td, 0},
        {"router_weight", a->router_weight, 0, logits * ed, 0},
        {"router_bias", a->router_bias, 0, logits * e * element, 0},
        {"logits", a->logits, (router ? NEEDED : 0) | (gemm ? WRITTEN : 0),
         logits * l->tokens * e * moe_type_bytes(l->logits_type), 0},
        {"selection_bias", a->selection_bias, 0, logits * e * 4, 0},
        {"token_mask", a->token_mask, BYTES, logits * l->tokens, 0},
        {"losses", a->losses, PAIR | (router ? WRITTEN : 0), logits * 2 * 4, 0},
        {"topk_ids", a->topk_ids, routing, topk * tk * index, 0},
        {"topk_weights", a->topk_weights, routing, topk * tk * 4, 0},
        {"offsets", a->offsets, routing, rows * (e + 1) * index, 0},
        {"row_weights", a->row_weights, 0, rows * l->tokens * 4, 0},
        {"w1", a->w1, weights, f8 ? 0 : here * problem->h_width * l->hidden * element, 0},
        {"b1", a->b1, 0, here * problem->h_width * element, 0},
        {"w2", a->w2, weights, f8 ? 0 : here * l->hidden * l->intermediate * element, 0},
        {"weights_f8", a->weights_f8, NEEDED | BUFFER, weights ? f8 : 0, a->weights_f8_size},
        {"b2", a->b2, 0, here * l->hidden * element, 0},
        {"lora_a1", a->lora_a1, weights, e * l->lora_rank1 * l->hidden * element, 0},
        {"lora_b1", a->lora_b1, weights, e * l->lora_rank1 * problem->h_width * element, 0},
        {"lora_a2", a->lora_a2, weights, e * l->lora_rank2 * l->intermediate * element, 0},
        {"lora_b2", a->lora_b2, weights, e * l->lora_rank2 * l->hidden * element, 0},
        {"out", a->out, needs & MOE_NEEDS_OUT ? NEEDED | WRITTEN : 0, td, 0},
        {"saved", a->saved, NEEDED | WRITTEN | BUFFER, (int64_t)problem->saved_buffer_bytes, a->saved_size},
        {"scratch", a->scratch, NEEDED | WRITTEN | BUFFER, (int64_t)scratch_bytes, a->scratch_size},
    };
    static_assert(COUNT(all) <= MOST_MEMORIES, "check_memories holds them all");
    return check_memories(context, all, COUNT(all));
}

smoe_status moe_check_backward_pointers(smoe_context *context, const moe_problem *problem,
                                        const smoe_backward_args *a, uint64_t scratch_bytes, int router)
{
    const smoe_layer *l = &problem->layer;
    const int logits = l->entry == SMOE_ENTRY_FROM_LOGITS, topk = l->entry == SMOE_ENTRY_FROM_TOPK;
    const int da = moe_wants_ds(l, a, router) || moe_wants_dh(a) || a->dw2;
    const int64_t f8 = weights_f8_bytes(problem);
    const int again = problem->recomputes && da,
              dw2_reads_x = problem->layer.compute == SMOE_COMPUTE_F8 && a->dw2;
    const int x = a->dw1 || dw2_reads_x || a->dlora_a1 || (router && a->drouter_weight) || again,
              router_gradient = router ? WRITTEN : 0;
    const int64_t element = problem->element, gradient = moe_type_bytes(l->gradient_type), e = l->experts;
    const int64_t te = logits * l->tokens * e * moe_type_bytes(l->logits_type),
                  tk = topk * l->tokens * l->topk;
    const int64_t td = l->tokens * l->hidden * element, ed = e * l->hidden, width = problem->h_width,
                  here = problem->experts_here, hd = here * l->hidden;
    const int64_t a1 = e * l->lora_rank1 * l->hidden, b1 = e * l->lora_rank1 * width,
                  a2 = e * l->lora_rank2 * l->intermediate, b2 = e * l->lora_rank2 * l->hidden;
    const int64_t ds = topk ? 0 : logits ? problem->padded_rows : l->tokens;
    const memory all[] = {
        {"x", a->x, x ? NEEDED : 0, td, 0},
        {"router_weight", a->router_weight, 0, logits * ed * element, 0},
        {"logits", a->logits, router && moe_reads_logits(l, a) ? NEEDED : 0, te, 0},
        {"topk_ids", a->topk_ids, a->dtopk_weights ? NEEDED : 0, tk * moe_type_bytes(l->index_type), 0},
        {"w1", a->w1, a->dx || again ? NEEDED : 0, f8 ? 0 : hd * width * element, 0},
        {"w2", a->w2, da ? NEEDED : 0, f8 ? 0 : hd * l->intermediate * element, 0},
        {"weights_f8", a->weights_f8, NEEDED | BUFFER, da || a->dx ? f8 : 0, a->weights_f8_size},
        {"b2", a->b2, 0, hd * element, 0},
        {"dout", a->dout, da || a->db2 ? NEEDED : 0, td, 0},
        {"dx", a->dx, WRITTEN, td, 0},
        {"dw1", a->dw1, WRITTEN, hd * width * gradient, 0},
        {"dw2", a->dw2, WRITTEN, hd * l->intermediate * gradient, 0},
        {"db1", a->db1, WRITTEN, here * width * gradient, 0},
        {"db2", a->db2, WRITTEN, hd * gradient, 0},
        {"drouter_weight", a->drouter_weight, router_gradient, logits * ed * gradient, 0},
        {"drouter_bias", a->drouter_bias, router_gradient, logits * e * gradient, 0},
        {"dlogits", a->dlogits, router_gradient, te, 0},
        {"dtopk_weights", a->dtopk_weights, WRITTEN, tk * 4, 0},
        {"drow_weights", a->drow_weights, WRITTEN, ds * 4, 0},
        {"token_mask", a->token_mask, BYTES, logits * l->tokens, 0},
        {"lora_a1", a->lora_a1, a->dx ? NEEDED : 0, a1 * element, 0},
        {"lora_b1", a->lora_b1, a->dx || a->dlora_a1 ? NEEDED : 0, b1 * element, 0},
        {"lora_a2", a->lora_a2, da ? NEEDED : 0, a2 * element, 0},
        {"lora_b2", a->lora_b2, da ? NEEDED : 0, b2 * element, 0},
        {"dlora_a1", a->dlora_a1, WRITTEN, a1 * gradient, 0},
        {"dlora_b1", a->dlora_b1, WRITTEN, b1 * gradient, 0},
        {"dlora_a2", a->dlora_a2, WRITTEN, a2 * gradient, 0},
        {"dlora_b2", a->dlora_b2, WRITTEN, b2 * gradient, 0},
        {"loss_gradients", a->loss_gradients, PAIR, router ? 2 * 4 : 0, 0},
        {"saved", a->saved, NEEDED | BUFFER | (l->reuse_saved ? WRITTEN : 0),
         (int64_t)problem->saved_buffer_bytes, a->saved_size},
        {"scratch", a->scratch, NEEDED | WRITTEN | BUFFER, (int64_t)scratch_bytes, a->scratch_size},
    };
    static_assert(COUNT(all) <= MOST_MEMORIES, "check_memories holds them all");
    return check_memories(context, all, COUNT(all));
}

smoe_status moe_check_plan_pointer(smoe_context *context, const moe_problem *problem,
                                   const smoe_forward_args *a, uint64_t scratch_bytes)
{
    const memory saved = {"saved", a->saved, NEEDED | BUFFER, (int64_t)problem->saved_buffer_bytes,
                          a->saved_size},
                 work = {"scratch", a->scratch, NEEDED | BUFFER, (int64_t)scratch_bytes, a->scratch_size};
    return check_memories(context, problem->layer.inference ? &work : &saved, 1);
}

smoe_status moe_check_bias_pointers(smoe_context *context, const moe_problem *problem, const int32_t *counts,
                                    const float *bias)
{
    const int64_t bytes = 4 * problem->layer.experts;
    const memory all[] = {{"counts", counts, NEEDED, bytes, 0}, {"bias", bias, NEEDED | WRITTEN, bytes, 0}};
    return check_memories(context, all, COUNT(all));
}

smoe_status moe_check_quantize_pointers(smoe_context *context, const moe_problem *problem,
                                        const smoe_quantize_args *a)
{
    const int64_t d = problem->layer.hidden, element = moe_type_bytes(a->weight_type);
    const memory all[] = {
        {"w1", a->w1, NEEDED, a->experts * problem->h_width * d * element, 0},
        {"w2", a->w2, NEEDED, a->experts * d * problem->layer.intermediate * element, 0},
        {"weights_f8", a->weights_f8, NEEDED | WRITTEN | BUFFER, weights_f8_bytes(problem),
         a->weights_f8_size},
    };
    return check_memories(context, all, COUNT(all));
}
