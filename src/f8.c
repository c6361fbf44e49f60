/* fp8 on the host: the checks of a layer's `compute`, and the call that quantises weights. */
#include "f8.h"
#include "check.h"
#include "pointers.h"

static const char *compute_name(smoe_compute compute)
{
    switch (compute) {
    case SMOE_COMPUTE_STORAGE: return "SMOE_COMPUTE_STORAGE";
    case SMOE_COMPUTE_F8: return "SMOE_COMPUTE_F8";
    case SMOE_COMPUTE_F8_DGRAD: return "SMOE_COMPUTE_F8_DGRAD";
    }
    return NULL;
}

smoe_status moe_check_compute(smoe_context *context, const smoe_layer *l)
{
    const char *function = context->function, *name = compute_name(l->compute);
    if (!name)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: compute is %d, it must be one of SMOE_COMPUTE_STORAGE, SMOE_COMPUTE_F8, "
                        "SMOE_COMPUTE_F8_DGRAD",
                        function, (int)l->compute);
    if (l->compute == SMOE_COMPUTE_STORAGE) return SMOE_OK;
    if (l->hidden % MOE_F8_MULTIPLE || l->intermediate % MOE_F8_MULTIPLE)
        return moe_fail(context, SMOE_ERROR_SHAPE, "%s: %s is %lld, with %s it must be a multiple of %d",
                        function, l->hidden % MOE_F8_MULTIPLE ? "hidden" : "intermediate",
                        (long long)(l->hidden % MOE_F8_MULTIPLE ? l->hidden : l->intermediate), name,
                        MOE_F8_MULTIPLE);
    if (l->ranks || l->lora_rank1 || l->lora_rank2)
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED, "%s: %s is %d, and compute is %s, which has no %s",
                        function,
                        l->ranks        ? "ranks"
                        : l->lora_rank1 ? "lora_rank1"
                                        : "lora_rank2",
                        (int)(l->ranks        ? l->ranks
                              : l->lora_rank1 ? l->lora_rank1
                                              : l->lora_rank2),
                        name, l->ranks ? "expert parallelism" : "LoRA");
    if (!context->backend->quantize_weights)
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "%s: compute is %s, which the %s backend does not have", function, name,
                        context->backend->name);
    return SMOE_OK;
}

/* The fields that do not point to memory. */
static smoe_status check_quantize_fields(smoe_context *context, const moe_problem *problem,
                                         const smoe_quantize_args *a)
{
    const smoe_layer *l = &problem->layer;
    const char *function = context->function;
    if (l->compute == SMOE_COMPUTE_STORAGE)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: compute is SMOE_COMPUTE_STORAGE, which has no quantised weights", function);
    if (a->weight_type != l->dtype && a->weight_type != SMOE_TYPE_F32)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: weight_type is %s (%d), it must be the layer's dtype (%s) or SMOE_TYPE_F32",
                        function, moe_type_name(a->weight_type) ? moe_type_name(a->weight_type) : "unknown",
                        (int)a->weight_type, moe_type_name(l->dtype));
    if (a->first_expert < 0 || a->first_expert >= l->experts)
        return moe_fail(context, SMOE_ERROR_SHAPE,
                        "%s: first_expert is %lld, it must be from 0 to %lld: the layer has %lld experts",
                        function, (long long)a->first_expert, (long long)l->experts - 1,
                        (long long)l->experts);
    if (a->experts < 1 || a->experts > l->experts - a->first_expert)
        return moe_fail(context, SMOE_ERROR_SHAPE,
                        "%s: experts is %lld, it must be from 1 to %lld: first_expert is %lld of the layer's "
                        "%lld experts",
                        function, (long long)a->experts, (long long)(l->experts - a->first_expert),
                        (long long)a->first_expert, (long long)l->experts);
    return SMOE_OK;
}

smoe_status smoe_quantize_weights(smoe_context *context, const smoe_layer *layer,
                                  const smoe_quantize_args *given, void *stream)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    const char *function = "smoe_quantize_weights";
    moe_problem problem;
    smoe_status status = moe_take_layer(context, function, layer, &problem);
    if (status != SMOE_OK) return status;
    smoe_quantize_args args = SMOE_QUANTIZE_ARGS_INIT;
    status = moe_check_struct(context, function, "args", "SMOE_QUANTIZE_ARGS_INIT", given, sizeof args);
    if (status != SMOE_OK) return status;
    moe_take_struct(&args, sizeof args, given);
    status = check_quantize_fields(context, &problem, &args);
    if (status == SMOE_OK) status = moe_check_quantize_pointers(context, &problem, &args);
    if (status == SMOE_OK) status = context->backend->begin(context);
    return status == SMOE_OK ? context->backend->quantize_weights(context, &problem, &args, stream) : status;
}
