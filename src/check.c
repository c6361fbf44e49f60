/* Argument checks. Limits stand next to the messages that name them. */
#include "check.h"
#include "activations.h"
#include "ep.h"
#include "scores.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* Every struct of smoe.h is far smaller than this. A larger struct_size must come from uninitialised
 * memory. */
enum { LARGEST_STRUCT = 4096 };

/* The size of the caller's struct; 0 when it cannot be right. */
static size_t size_given(const void *caller)
{
    size_t given;
    memcpy(&given, caller, sizeof given);
    return given > sizeof given && given <= LARGEST_STRUCT ? given : 0;
}

smoe_status moe_check_struct(smoe_context *context, const char *function, const char *name, const char *init,
                             const void *caller, size_t size)
{
    if (!caller) return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: %s is NULL", function, name);
    const size_t given = size_given(caller);
    if (!given)
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: %s->struct_size is %zu; start from %s", function,
                        name, *(const size_t *)caller, init);
    for (size_t i = size; i < given; i++)
        if (((const char *)caller)[i])
            return moe_fail(context, SMOE_ERROR_ARGUMENT,
                            "%s: %s->struct_size is %zu, this library knows %zu bytes, and byte %zu is not "
                            "zero: a field is set that only a newer library has",
                            function, name, given, size, i);
    return SMOE_OK;
}

/* The bytes after struct_size that the caller and the library both know. */
static size_t common_bytes(const void *caller, size_t size)
{
    const size_t given = size_given(caller);
    return given ? (given < size ? given : size) - sizeof given : 0;
}

void moe_take_struct(void *to, size_t size, const void *from)
{
    memcpy((char *)to + sizeof(size_t), (const char *)from + sizeof(size_t), common_bytes(from, size));
}

void moe_give_struct(void *to, const void *from, size_t size)
{
    memcpy((char *)to + sizeof(size_t), (const char *)from + sizeof(size_t), common_bytes(to, size));
}

/* An integer field and the range it must lie in. */
typedef struct range_check {
    const char *name;
    int64_t value, low, high;
} range_check;

static smoe_status check_ranges(smoe_context *context, const char *function, smoe_status status,
                                const range_check *checks, int count)
{
    for (int i = 0; i < count; i++) {
        const range_check *c = &checks[i];
        if (c->value < c->low || c->value > c->high)
            return moe_fail(context, status, "%s: %s is %lld, the range is %lld to %lld", function, c->name,
                            (long long)c->value, (long long)c->low, (long long)c->high);
    }
    return SMOE_OK;
}

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static smoe_status check_shape(smoe_context *context, const char *function, const smoe_layer *l)
{
    const int64_t most = INT32_MAX;
    const int64_t topk_limit = l->entry == SMOE_ENTRY_FROM_ROWS ? 1
                               : l->experts < MOE_MAX_TOPK      ? l->experts
                                                                : MOE_MAX_TOPK;
    const range_check shape[] = {
        {"tokens", l->tokens, l->ranks ? 0 : 1, l->ranks ? l->max_tokens : most},
        {"hidden", l->hidden, 8, 1 << 20},
        {"intermediate", l->intermediate, 8, 1 << 20},
        {"experts", l->experts, 1, MOE_MAX_EXPERTS},
        {"topk", l->topk, 1, topk_limit > 0 ? topk_limit : 1},
        {"tile", l->tile, 1, MOE_MAX_TILE},
        {"chunks", l->chunks, 1, MOE_MAX_CHUNKS},
        {"lora_rank1", l->lora_rank1, 0, MOE_MAX_LORA_RANK},
        {"lora_rank2", l->lora_rank2, 0, MOE_MAX_LORA_RANK},
    };
    const smoe_status status = check_ranges(context, function, SMOE_ERROR_SHAPE, shape, COUNT(shape));
    if (status != SMOE_OK) return status;
    if (l->hidden % 8)
        return moe_fail(context, SMOE_ERROR_SHAPE, "%s: hidden is %lld, it must be a multiple of 8", function,
                        (long long)l->hidden);
    if (l->intermediate % 8)
        return moe_fail(context, SMOE_ERROR_SHAPE, "%s: intermediate is %lld, it must be a multiple of 8",
                        function, (long long)l->intermediate);
    if (l->lora_rank1 % 8 || l->lora_rank2 % 8)
        return moe_fail(context, SMOE_ERROR_SHAPE, "%s: %s is %d, it must be a multiple of 8", function,
                        l->lora_rank1 % 8 ? "lora_rank1" : "lora_rank2",
                        l->lora_rank1 % 8 ? (int)l->lora_rank1 : (int)l->lora_rank2);
    if (l->chunks & (l->chunks - 1))
        return moe_fail(context, SMOE_ERROR_SHAPE, "%s: chunks is %d, it must be a power of two", function,
                        (int)l->chunks);
    return SMOE_OK;
}

/* ---- Enumerators, with the names they have in error texts ---- */

typedef struct named_value {
    int value;
    const char *name;
} named_value;

#define NAMED(enumerator)                                                                                    \
    {                                                                                                        \
        enumerator, #enumerator                                                                              \
    }

static const named_value types[] = {NAMED(SMOE_TYPE_F32), NAMED(SMOE_TYPE_BF16), NAMED(SMOE_TYPE_F16),
                                    NAMED(SMOE_TYPE_I32), NAMED(SMOE_TYPE_I64)};
#define ACTIVATION(enumerator, name, shape, curve) NAMED(enumerator),
static const named_value activations[] = {MOE_ACTIVATIONS(ACTIVATION)};
#undef ACTIVATION
static const named_value layouts[] = {NAMED(SMOE_LAYOUT_CONCATENATED), NAMED(SMOE_LAYOUT_INTERLEAVED)};
static const named_value entries[] = {NAMED(SMOE_ENTRY_FROM_LOGITS), NAMED(SMOE_ENTRY_FROM_TOPK),
                                      NAMED(SMOE_ENTRY_FROM_ROWS)};
#define SCORE(enumerator, name, key, value, over, selection) NAMED(enumerator),
static const named_value scores[] = {MOE_SCORES(SCORE)};
#undef SCORE
static const named_value roundings[] = {NAMED(SMOE_ROUNDING_NONE),      NAMED(SMOE_ROUNDING_NR_F),
                                        NAMED(SMOE_ROUNDING_SR_F),      NAMED(SMOE_ROUNDING_NR_S),
                                        NAMED(SMOE_ROUNDING_BALANCE_F), NAMED(SMOE_ROUNDING_UP),
                                        NAMED(SMOE_ROUNDING_DOWN)};

static const char *name_of(const named_value *list, int count, int value)
{
    for (int i = 0; i < count; i++)
        if (list[i].value == value) return list[i].name;
    return NULL;
}

const char *moe_type_name(smoe_type type)
{
    return name_of(types, COUNT(types), (int)type);
}

const char *moe_entry_name(smoe_entry entry)
{
    return name_of(entries, COUNT(entries), (int)entry);
}

/* A field, the enumerators of its type, and which of them are allowed: bit i stands for the i-th. */
typedef struct choice_check {
    const char *name;
    int value;
    const named_value *known;
    int count;
    unsigned allowed;
} choice_check;

enum { ALL = 0xffff, STORED = 1 << 0 | 1 << 1 | 1 << 2, LOGITS = 1 << 0 | 1 << 1, INDICES = 1 << 3 | 1 << 4 };

static int is_allowed(const choice_check *c)
{
    for (int i = 0; i < c->count; i++)
        if (c->value == c->known[i].value) return (int)(c->allowed >> i & 1);
    return 0;
}

static smoe_status refuse_choice(smoe_context *context, const char *function, const choice_check *c)
{
    char number[16], allowed[MOE_ERROR_TEXT] = "";
    size_t used = 0;
    for (int i = 0; i < c->count && used < sizeof allowed; i++)
        if (c->allowed >> i & 1)
            used += (size_t)snprintf(allowed + used, sizeof allowed - used, "%s%s", used ? ", " : "",
                                     c->known[i].name);
    snprintf(number, sizeof number, "%d", c->value);
    const char *name = name_of(c->known, c->count, c->value);
    return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: %s is %s, it must be one of %s", function, c->name,
                    name ? name : number, allowed);
}

static smoe_status check_enums(smoe_context *context, const char *function, const smoe_layer *l)
{
    static const named_value flags[] = {{0, "0"}, {1, "1"}};
    unsigned gradients = 1 << 0; /* SMOE_TYPE_F32, and dtype */
    for (int i = 0; i < COUNT(types); i++) gradients |= (unsigned)(types[i].value == (int)l->dtype) << i;
    const choice_check checks[] = {
        {"dtype", (int)l->dtype, types, COUNT(types), STORED},
        {"activation", (int)l->activation, activations, COUNT(activations), ALL},
        {"layout", (int)l->layout, layouts, COUNT(layouts), ALL},
        {"entry", (int)l->entry, entries, COUNT(entries), ALL},
        {"index_type", (int)l->index_type, types, COUNT(types), INDICES},
        {"logits_type", (int)l->logits_type, types, COUNT(types), LOGITS},
        {"gradient_type", (int)l->gradient_type, types, COUNT(types), gradients},
        {"accumulate", l->accumulate, flags, COUNT(flags), ALL},
        {"inference", l->inference, flags, COUNT(flags), ALL},
        {"reuse_saved", l->reuse_saved, flags, COUNT(flags), ALL},
        {"score", (int)l->score, scores, COUNT(scores), ALL},
        {"renormalize", l->renormalize, flags, COUNT(flags), ALL},
        {"rounding", (int)l->rounding, roundings, COUNT(roundings), ALL},
    };
    for (int i = 0; i < COUNT(checks); i++)
        if (!is_allowed(&checks[i])) return refuse_choice(context, function, &checks[i]);
    return SMOE_OK;
}

/* The values of a clamped or capped activation. A NaN fails every comparison. */
static smoe_status check_gate(smoe_context *context, const char *function, const smoe_layer *l)
{
    const int capped = l->activation == SMOE_ACTIVATION_SWIGLU_CAPPED;
    if (l->activation != SMOE_ACTIVATION_SWIGLU_CLAMPED && !capped) return SMOE_OK;
    const struct {
        const char *name;
        float value, least, most;
        const char *allowed;
    } checks[] = {
        {"gate_limit", l->gate_limit, FLT_MIN, capped ? FLT_MAX : INFINITY, "positive"},
        {"up_limit", l->up_limit, FLT_MIN, capped ? FLT_MAX : INFINITY, "positive"},
        {"gate_alpha", l->gate_alpha, -FLT_MAX, FLT_MAX, "finite"},
        {"up_offset", l->up_offset, -FLT_MAX, FLT_MAX, "finite"},
    };
    for (int i = 0; i < COUNT(checks); i++)
        if (!(checks[i].value >= checks[i].least && checks[i].value <= checks[i].most))
            return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: %s is %g, it must be %s%s", function,
                            checks[i].name, (double)checks[i].value, checks[i].allowed,
                            capped && i < 2 ? " and finite" : "");
    return SMOE_OK;
}

/* Expert groups need a sigmoid router. All groups have the same number of experts, at least two, and the kept
 * groups must have at least K experts together. */
static smoe_status check_groups(smoe_context *context, const char *function, const smoe_layer *l)
{
    const range_check ranges[] = {{"groups", l->groups, 1, l->experts},
                                  {"groups_kept", l->groups_kept, 1, l->groups}};
    const smoe_status status = check_ranges(context, function, SMOE_ERROR_SHAPE, ranges, COUNT(ranges));
    if (status != SMOE_OK || l->groups == 1) return status;
    if (l->entry != SMOE_ENTRY_FROM_LOGITS || !moe_score_takes_bias(l->score))
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: groups is %d, but groups need" MOE_BIASED_SCORES " from logits", function,
                        (int)l->groups);
    if (l->experts % l->groups || l->experts / l->groups < 2)
        return moe_fail(context, SMOE_ERROR_SHAPE,
                        "%s: groups is %d, it must divide experts (%lld) into groups of at least 2", function,
                        (int)l->groups, (long long)l->experts);
    if (l->experts / l->groups * l->groups_kept < l->topk)
        return moe_fail(
            context, SMOE_ERROR_SHAPE, "%s: topk is %lld, but the %d groups kept hold %lld experts", function,
            (long long)l->topk, (int)l->groups_kept, (long long)(l->experts / l->groups * l->groups_kept));
    return SMOE_OK;
}

static smoe_status check_router(smoe_context *context, const char *function, const smoe_layer *l)
{
    if (l->entry != SMOE_ENTRY_FROM_LOGITS && l->rounding != SMOE_ROUNDING_NONE)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: rounding is %s, but entry is %s: rounding needs SMOE_ENTRY_FROM_LOGITS",
                        function, name_of(roundings, COUNT(roundings), (int)l->rounding),
                        moe_entry_name(l->entry));
    if (l->entry == SMOE_ENTRY_FROM_LOGITS && moe_score_over_kept(l->score) && l->renormalize)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: renormalize is 1, but the weights of %s sum to one already", function,
                        name_of(scores, COUNT(scores), (int)l->score));
    if (!(l->route_scale > 0.0f && l->route_scale < 1e30f))
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: route_scale is %g, it must be positive and below 1e30", function,
                        (double)l->route_scale);
    if (l->entry != SMOE_ENTRY_FROM_LOGITS && l->route_scale != 1.0f)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: route_scale is %g, but entry is %s, whose weights are given: it must be 1",
                        function, (double)l->route_scale, moe_entry_name(l->entry));
    return check_groups(context, function, l);
}

/* The fields of a layer with ranks; without ranks all are 0. */
static smoe_status check_ranks(smoe_context *context, const char *function, const smoe_layer *l)
{
    const int64_t most = INT32_MAX, ranks = l->ranks > 0 ? most : 0;
    const range_check ranges[] = {
        {"ranks", l->ranks, 0, MOE_EP_MAX_RANKS},
        {"waves", l->waves, 0, l->ranks ? MOE_EP_MAX_PARTS : 0},
        {"max_tokens", l->max_tokens, l->ranks > 0, l->ranks > 0 ? most / l->ranks : 0},
        {"row_capacity", l->row_capacity, 0, ranks},
    };
    const smoe_status status = check_ranges(context, function, SMOE_ERROR_SHAPE, ranges, COUNT(ranges));
    if (status != SMOE_OK || !l->ranks) return status;
    if (l->lora_rank1 || l->lora_rank2)
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "%s: ranks is %d and %s is %d: a layer with ranks has no LoRA", function,
                        (int)l->ranks, l->lora_rank1 ? "lora_rank1" : "lora_rank2",
                        (int)(l->lora_rank1 ? l->lora_rank1 : l->lora_rank2));
    if (l->waves & (l->waves - 1))
        return moe_fail(context, SMOE_ERROR_SHAPE, "%s: waves is %d, it must be 0, 1, 2, 4 or 8", function,
                        (int)l->waves);
    if (l->experts % l->ranks)
        return moe_fail(context, SMOE_ERROR_SHAPE, "%s: experts is %lld, it must be a multiple of ranks (%d)",
                        function, (long long)l->experts, (int)l->ranks);
    if (l->entry == SMOE_ENTRY_FROM_ROWS)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: ranks is %d, but entry is SMOE_ENTRY_FROM_ROWS: its rows are routed already",
                        function, (int)l->ranks);
    return SMOE_OK;
}

/* Row numbers must fit the plan's int32, and byte counts must fit 64 bits. */
static smoe_status check_rows(smoe_context *context, const char *function, const moe_problem *problem)
{
    const smoe_layer *l = &problem->layer;
    if (problem->padded_rows > INT32_MAX)
        return moe_fail(
            context, SMOE_ERROR_SHAPE,
            "%s: tokens x topk with padding is %lld rows, the limit is %d; use fewer tokens a call", function,
            (long long)problem->padded_rows, INT32_MAX);
    moe_ep_problem ep;
    if (l->ranks) moe_ep_problem_init(&ep, l);
    if (l->ranks && ep.received.padded_rows > INT32_MAX)
        return moe_fail(context, SMOE_ERROR_SHAPE,
                        "%s: a rank may receive %lld rows with padding, the limit is %d; use fewer "
                        "tokens a call",
                        function, (long long)ep.received.padded_rows, INT32_MAX);
    if (l->tokens * l->experts > (int64_t)1 << 40)
        return moe_fail(context, SMOE_ERROR_SHAPE, "%s: tokens x experts is %lld, the limit is 2^40",
                        function, (long long)(l->tokens * l->experts));
    return SMOE_OK;
}

smoe_status moe_check_layer(smoe_context *context, const char *function, const smoe_layer *layer,
                            moe_problem *problem)
{
    smoe_status status = check_enums(context, function, layer);
    if (status == SMOE_OK) status = check_ranks(context, function, layer);
    if (status == SMOE_OK) status = check_shape(context, function, layer);
    if (status == SMOE_OK) status = check_gate(context, function, layer);
    if (status == SMOE_OK) status = check_router(context, function, layer);
    if (status != SMOE_OK) return status;
    moe_problem_init(problem, layer);
    return check_rows(context, function, problem);
}

smoe_status moe_check_offsets(smoe_context *context, const smoe_layer *layer, const void *offsets)
{
    int64_t before = 0;
    for (int64_t e = 0; e <= layer->experts; e++) {
        const int64_t at = moe_load_index(offsets, layer->index_type, e);
        if (e == 0 && at != 0)
            return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: offsets[0] is %lld, it must be 0",
                            context->function, (long long)at);
        if (at < before)
            return moe_fail(context, SMOE_ERROR_ARGUMENT,
                            "%s: offsets[%lld] is %lld, below offsets[%lld], %lld", context->function,
                            (long long)e, (long long)at, (long long)e - 1, (long long)before);
        if (at > layer->tokens)
            return moe_fail(context, SMOE_ERROR_ARGUMENT,
                            "%s: offsets[%lld] is %lld, but the layer has %lld rows (tokens)",
                            context->function, (long long)e, (long long)at, (long long)layer->tokens);
        before = at;
    }
    return SMOE_OK;
}
