/* Sizes of the plan from given top-K: tokens go by chunks, one a CTA; a chunk's counts are one row of a
 * matrix [chunk][padded experts] of 16 bits. Past MOST_SUMMED chunks another kernel sums its columns; up to
 * there every CTA does that itself, in 16 bits. */
#ifndef SMOE_CUDA_PLAN_SIZE_H
#define SMOE_CUDA_PLAN_SIZE_H

#include "scheduler.h"

enum {
    SMOE_PLAN_CHUNK = 256,       /* the most tokens of a chunk; a multiple of 32 */
    SMOE_PLAN_SMALL_CHUNK = 128, /* for few tokens, so that more CTAs share them */
    SMOE_PLAN_FEW_TOKENS = 8192,
    SMOE_PLAN_MOST_SUMMED = 255,
    SMOE_PLAN_SHARED = 232448
};

/* 255 chunks of 256 tokens: no count passes 16 bits. */
typedef char smoe_plan_sums_fit[SMOE_PLAN_MOST_SUMMED * SMOE_PLAN_CHUNK < 65536 ? 1 : -1];

SMOE_HD int32_t smoe_plan_padded_experts(int32_t experts)
{
    return (experts + 7) / 8 * 8;
}

SMOE_HD int32_t smoe_plan_padded_topk(int32_t topk)
{
    return (topk + 7) / 8 * 8;
}

/* Offsets into the shared memory of the scatter kernel; `end` is its size. */
typedef struct smoe_plan_shared {
    uint32_t masks;  /* uint32 [chunk/32][experts]: bit t says that token t of the group chose the expert */
    uint32_t summed; /* uint16 [2][experts]: all chunks' counts, those of the chunks before */
    uint32_t rows;   /* uint32 [experts]; the next four too: tables in plan_shared.cuh */
    uint32_t first_block;
    uint32_t first_tile;
    uint32_t first_piece;
    uint32_t place;         /* int32 [experts]: padded row of the chunk's first pair, less `local` */
    uint32_t local;         /* uint32 [experts]: pairs of the chunk with this expert */
    uint32_t token_first;   /* uint32 [chunk]: the token's first entry of token_rows */
    uint32_t sorted;        /* uint32 [chunk * topk]: expert << 16 | token, by expert, then token */
    uint32_t sorted_weight; /* float [chunk * topk] */
    uint32_t ids;           /* uint16 [chunk][padded topk] */
    uint32_t
        group_before; /* uint16 [chunk/32][experts]: pairs of the expert in the groups before, plus `local` */
    uint32_t scratch; /* uint32 [256] */
    uint32_t end;
} smoe_plan_shared;

SMOE_HD smoe_plan_shared smoe_plan_shared_of(int32_t chunk, int32_t experts, int32_t topk)
{
    const uint32_t e = (uint32_t)smoe_plan_padded_experts(experts), groups = (uint32_t)chunk / 32;
    const uint32_t pairs = (uint32_t)(chunk * topk), slots = (uint32_t)(chunk * smoe_plan_padded_topk(topk));
    smoe_plan_shared s;
    s.masks = 0;
    s.summed = s.masks + groups * e * 4;
    s.rows = s.summed + e * 4;
    s.first_block = s.rows + e * 4;
    s.first_tile = s.first_block + e * 4;
    s.first_piece = s.first_tile + e * 4;
    s.place = s.first_piece + e * 4;
    s.local = s.place + e * 4;
    s.token_first = s.local + e * 4;
    s.sorted = s.token_first + (uint32_t)chunk * 4;
    s.sorted_weight = s.sorted + pairs * 4;
    s.ids = (s.sorted_weight + pairs * 4 + 15) / 16 * 16;
    s.group_before = s.ids + slots * 2;
    s.scratch = s.group_before + groups * e * 2;
    s.end = s.scratch + 1024;
    return s;
}

/* Tokens of a chunk. */
SMOE_HD int32_t smoe_plan_chunk(int64_t tokens, int32_t experts, int32_t topk)
{
    int32_t chunk = tokens > SMOE_PLAN_FEW_TOKENS ? SMOE_PLAN_CHUNK : SMOE_PLAN_SMALL_CHUNK;
    while (chunk > 32 && smoe_plan_shared_of(chunk, experts, topk).end > SMOE_PLAN_SHARED) chunk /= 2;
    return chunk;
}

/* ---- Rank of a pair among its token's pairs: how many of the token's ids are lower. Ids are at most 4095;
 * an entry that does not count has 0x4000 or more. Two entries at a time: bit 15 of (id + 0x7fff) - entry is
 * set exactly when entry < id. The counts of both halves gather in a word. ---- */

enum { SMOE_PLAN_NO_ID = 0x7fff, SMOE_PLAN_REPEATED = 0x4000 };

SMOE_HD uint32_t smoe_plan_lower(uint32_t id, uint32_t two_entries)
{
    return ((((id + 0x7fff) * 0x00010001u) - two_entries) >> 15) & 0x00010001u;
}

SMOE_HD uint32_t smoe_plan_both(uint32_t counts)
{
    return (counts & 0xffff) + (counts >> 16);
}

#endif
