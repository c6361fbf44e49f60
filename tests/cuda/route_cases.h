/* The layers and inputs on which the device's routing is compared with the CPU backend's. */
#ifndef TESTS_CUDA_ROUTE_CASES_H
#define TESTS_CUDA_ROUTE_CASES_H

#include <math.h>
#include <smoe.h>

enum { KINDS = 7 };

/* The values of the logits. */
typedef enum logits_kind {
    NORMAL = 0,    /* normal numbers */
    LEVELS = 1,    /* five values: many ties */
    EQUAL = 2,     /* all the same */
    DOMINATED = 3, /* expert 0 has by far the highest logit of every token */
    SKEWED = 4,    /* the higher an expert's number, the lower its logits */
    STRANGE = 5,   /* normal numbers, and one in 50 is NaN, infinite, +0 or -0, huge or subnormal */
    LOST = 6       /* as NORMAL in every fourth token; the others have only the special values of STRANGE */
} logits_kind;

static inline const char *kind_name(logits_kind kind)
{
    static const char *const names[KINDS] = {"normal", "levels",  "equal", "dominated",
                                             "skewed", "strange", "lost"};
    return names[kind];
}

static inline uint32_t next_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)(z >> 32);
}

static inline float bell(uint64_t *random)
{
    float sum = 0.0f;
    for (int i = 0; i < 6; i++) sum += (float)(next_random(random) >> 8) * 0x1p-24f;
    return (sum - 3.0f) * 1.41f;
}

static inline float strange_value(uint64_t *random)
{
    static const uint32_t values[] = {0x7fc00000u, 0xffc00000u, 0x7f800000u, 0xff800000u, 0x80000000u, 0u,
                                      0x7f000000u, 0xff000000u, 0x00010000u, 0x80010000u, 0x7f810000u};
    union {
        uint32_t bits;
        float value;
    } v = {values[next_random(random) % (sizeof values / sizeof *values)]};
    return v.value;
}

static inline float draw_logit(logits_kind kind, int64_t token, int64_t expert, int64_t experts,
                               uint64_t *random)
{
    const float x = bell(random);
    switch (kind) {
    case NORMAL: return x;
    case LEVELS: return (float)((int)(next_random(random) % 5) - 2);
    case EQUAL: return 0.5f;
    case DOMINATED: return expert == 0 ? x + 20.0f : x;
    case SKEWED: return x - 4.0f * (float)expert / (float)experts;
    case STRANGE: return next_random(random) % 50 ? x : strange_value(random);
    case LOST: return token % 4 == 0 ? x : strange_value(random);
    }
    return x;
}

/* The bias of DOMINATED shuts out half of the experts, and with LOST only one expert in four has an ordinary
 * bias. With groups, experts that are not kept then compete with kept ones whose score is -inf or NaN. */
static inline float draw_bias(logits_kind kind, uint64_t *random)
{
    const float x = 0.3f * bell(random) - 0.2f;
    if (kind == DOMINATED && next_random(random) % 2) return -INFINITY;
    if (kind == LOST && next_random(random) % 4) return strange_value(random);
    return kind == EQUAL ? 0.0f : x;
}

typedef struct route_shape {
    int64_t tokens, experts, topk;
    smoe_type logits_type;
    int32_t tile;
    int every; /* one of `every` combinations of score, rounding rule and kind of logits is run */
} route_shape;

static const route_shape route_shapes[] = {
    {700, 64, 6, SMOE_TYPE_BF16, 128, 2},     {700, 64, 6, SMOE_TYPE_F32, 128, 2},
    {513, 128, 8, SMOE_TYPE_BF16, 64, 2},     {300, 8, 2, SMOE_TYPE_F32, 32, 2},
    {300, 100, 5, SMOE_TYPE_BF16, 7, 2},      {300, 100, 5, SMOE_TYPE_F32, 100, 2},
    {1000, 256, 4, SMOE_TYPE_BF16, 16, 2},    {1000, 256, 16, SMOE_TYPE_F32, 128, 2},
    {257, 24, 24, SMOE_TYPE_BF16, 128, 2},    {257, 24, 11, SMOE_TYPE_F32, 128, 2},
    {1, 16, 3, SMOE_TYPE_F32, 1, 2},          {40, 16, 1, SMOE_TYPE_BF16, 4096, 2},
    {600, 504, 10, SMOE_TYPE_BF16, 20, 2},    {600, 512, 13, SMOE_TYPE_F32, 64, 2},
    {400, 72, 3, SMOE_TYPE_F32, 50, 2},       {200, 1000, 33, SMOE_TYPE_F32, 16, 5},
    {150, 4096, 64, SMOE_TYPE_BF16, 8, 25},   {150, 4096, 64, SMOE_TYPE_F32, 4, 25},
    {16384, 256, 4, SMOE_TYPE_BF16, 128, 11}, {16384, 256, 4, SMOE_TYPE_F32, 128, 11},
    {20000, 128, 8, SMOE_TYPE_BF16, 128, 11}, {20000, 16, 2, SMOE_TYPE_F32, 1024, 5},
    {90000, 16, 2, SMOE_TYPE_BF16, 128, 11},  {90000, 8, 1, SMOE_TYPE_F32, 4096, 5},
    {70001, 24, 3, SMOE_TYPE_BF16, 3000, 11}, {16401, 512, 10, SMOE_TYPE_F32, 128, 11},
};
enum { SHAPES = sizeof route_shapes / sizeof *route_shapes };

enum { SCORES = 10 };

/* Sets score number `i` of a layer. Returns 1 if this score has a selection bias, 0 if it has none, and -1 if
 * the layer cannot have this score. */
static inline int set_score(smoe_layer *layer, int i)
{
    layer->score = i < 2    ? SMOE_SCORE_SOFTMAX_TOPK
                   : i == 2 ? SMOE_SCORE_TOPK_SOFTMAX
                   : i == 3 ? SMOE_SCORE_SOFTMAX_TOPK
                            : SMOE_SCORE_SIGMOID;
    layer->renormalize = i == 1 || i == 3 || i == 5 || i == 7;
    layer->route_scale = i == 3 || i == 7 ? 2.5f : 1.0f;
    if (i < 7) return i == 6 ? 1 : 0;
    /* 7: 2 of 8 groups are kept. 8: there are E / 2 groups, and one more than half of them are kept. 9: there
     * are 16 groups, and as few as can be are kept, so that even the worst of their experts may be chosen */
    const int64_t groups = i == 7 ? 8 : i == 8 ? layer->experts / 2 : 16, size = layer->experts / groups;
    if (layer->experts % groups || size < 2) return -1;
    layer->groups = (int32_t)groups;
    layer->groups_kept = (int32_t)(i == 7 ? 2 : i == 8 ? groups / 2 + 1 : (layer->topk + size - 1) / size);
    if (size * layer->groups_kept < layer->topk || layer->groups_kept > groups) return -1;
    return 1;
}

#endif
