/* Sizes of the plan from top-K ids. Tokens are cut into segments; a CTA takes one segment. The counts of a
 * segment are one row of the count matrix [segment][padded experts] of 16-bit numbers. If the matrix is
 * small, every CTA sums its columns itself, in 16 bits. If it is large, a separate kernel sums them. */
#ifndef MOE_CUDA_PLAN_SIZE_H
#define MOE_CUDA_PLAN_SIZE_H

#include "schedule/scheduler.h"

enum {
    MOE_PLAN_THREADS = 512,
    MOE_PLAN_EACH = 2, /* quads of a thread; a quad is four ids of one token */
    MOE_PLAN_PAIRS = 4 * MOE_PLAN_EACH * MOE_PLAN_THREADS, /* the most pairs of a segment */
    MOE_PLAN_SEGMENT = 256,       /* the most tokens of a segment; a multiple of 32 */
    MOE_PLAN_SMALL_SEGMENT = 128, /* for few tokens, so that more CTAs share them */
    MOE_PLAN_FEW_TOKENS = 8192,
    MOE_PLAN_SUMMED_TOKENS = 65535, /* the counts of so many tokens fit 16 bits */
    MOE_PLAN_SUMMED_CELLS = 65536,  /* 128 KB, read by every CTA */
};

MOE_HOST_DEVICE int32_t moe_plan_padded_experts(int32_t experts)
{
    return (experts + 7) / 8 * 8;
}

/* Quads of a token. */
MOE_HOST_DEVICE int32_t moe_plan_quads(int32_t topk)
{
    return (topk + 3) / 4;
}

/* Offsets into the shared memory of the scatter kernel; `end` is its size. */
typedef struct moe_plan_shared {
    uint32_t masks;  /* uint32 [segment/32][experts]: bit t says that token t of the group chose the expert */
    uint32_t summed; /* uint32 [all segments, those before][4][experts / 8]: expert 8 c + 2 j in the low half
                        of [j][c], 8 c + 2 j + 1 above it */
    uint32_t totals; /* uint32 [4] */
    uint32_t rows;   /* uint32 [experts]: number of rows of the expert */
    uint32_t before; /* uint32 [experts]: number of its rows in earlier segments */
    uint32_t place;  /* int32 [experts][2]: of the segment's first pair with this expert: its padded row minus
                      * its place in `sorted`, and this place */
    uint32_t local;  /* uint32 [experts]: number of pairs of the segment with this expert */
    uint32_t token_first;  /* uint32 [segment + 1]: number of pairs of the earlier tokens of the segment */
    uint32_t sorted;       /* uint32 [segment * topk][2]: expert << 16 | token and the weight, by expert, then
                              token */
    uint32_t token_rows;   /* int32 [segment * topk]: padded rows by token */
    uint32_t ids;          /* uint16 [segment][quads][4] */
    uint32_t group_before; /* uint16 [segment/32][experts]: number of the expert's pairs in earlier groups */
    uint32_t scratch;      /* uint32 [32] */
    uint32_t end;
} moe_plan_shared;

MOE_HOST_DEVICE moe_plan_shared moe_plan_shared_of(int32_t segment, int32_t experts, int32_t topk)
{
    const uint32_t e = (uint32_t)moe_plan_padded_experts(experts), groups = (uint32_t)segment / 32;
    const uint32_t pairs = (uint32_t)(segment * topk);
    moe_plan_shared s;
    s.masks = 0;
    s.summed = s.masks + groups * e * 4;
    s.totals = s.summed + e * 4;
    s.rows = s.totals + 16;
    s.before = s.rows + e * 4;
    s.place = s.before + e * 4;
    s.local = s.place + e * 8;
    s.sorted = s.local + e * 4;
    s.token_rows = s.sorted + pairs * 8;
    s.ids = s.token_rows + pairs * 4;
    s.group_before = s.ids + (uint32_t)(segment * moe_plan_quads(topk)) * 8;
    s.token_first = s.group_before + groups * e * 2;
    s.scratch = s.token_first + (uint32_t)segment * 4 + 16;
    s.end = s.scratch + 128;
    return s;
}

/* May a segment have this many tokens? shared_bytes: the most shared memory of a CTA. */
MOE_HOST_DEVICE int moe_plan_segment_fits(int32_t segment, int32_t experts, int32_t topk,
                                          int32_t shared_bytes)
{
    return segment <= MOE_PLAN_SEGMENT && segment * moe_plan_quads(topk) * 4 <= MOE_PLAN_PAIRS &&
           moe_plan_shared_of(segment, experts, topk).end <= (uint32_t)shared_bytes;
}

/* Tokens of a segment; at least 32, even if they do not fit. */
MOE_HOST_DEVICE int32_t moe_plan_segment(int64_t tokens, int32_t experts, int32_t topk, int32_t shared_bytes)
{
    int32_t segment = tokens > MOE_PLAN_FEW_TOKENS ? MOE_PLAN_SEGMENT : MOE_PLAN_SMALL_SEGMENT;
    while (segment > 32 && !moe_plan_segment_fits(segment, experts, topk, shared_bytes)) segment /= 2;
    return segment;
}

/* Does every CTA sum the matrix itself? */
MOE_HOST_DEVICE int moe_plan_is_summed(int64_t tokens, int32_t experts, int32_t segment)
{
    return tokens <= MOE_PLAN_SUMMED_TOKENS &&
           moe_divide_up(tokens, segment) * moe_plan_padded_experts(experts) <= MOE_PLAN_SUMMED_CELLS;
}

/* The number of CTAs of the plan from given rows. Each warp writes one block at a time. There are at most as
 * many CTAs as SMs. */
MOE_HOST_DEVICE int32_t moe_plan_rows_ctas(int64_t padded_rows, int32_t sms)
{
    const int64_t wanted = moe_divide_up(padded_rows, (int64_t)MOE_PLAN_THREADS / 32 * MOE_BLOCK_ROWS);
    return (int32_t)(wanted < 1 ? 1 : wanted > sms ? sms : wanted);
}

/* ---- Rank of a pair among its token's pairs: how many of the token's ids are lower. Ids are at most 4095.
 * An entry that does not count is 0x4000 or more. Two entries are compared at a time: bit 15 of (id + 0x7fff)
 * - entry is set exactly if entry < id. One word holds the counts of both halves. ---- */

enum { MOE_PLAN_NO_ID = 0x7fff, MOE_PLAN_REPEATED = 0x4000 };

MOE_HOST_DEVICE uint32_t moe_plan_lower(uint32_t id, uint32_t two_entries)
{
    return ((((id + 0x7fff) * 0x00010001u) - two_entries) >> 15) & 0x00010001u;
}

MOE_HOST_DEVICE uint32_t moe_plan_both(uint32_t counts)
{
    return (counts & 0xffff) + (counts >> 16);
}

#endif
