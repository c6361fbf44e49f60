/* The words of the tables of cases. */
#ifndef HARNESS_CASE_WORDS_H
#define HARNESS_CASE_WORDS_H

#include "harness/cases.h"

/* the case */
#define QUICK       .quick = true
#define CHECK(name) .check = CASE_##name
#define ONLY(type)  .types = 1u << SMOE_TYPE_##type
#define TYPES(a, b) .types = 1u << SMOE_TYPE_##a | 1u << SMOE_TYPE_##b

/* its layer */
#define SIZES(T, d, n, E, K)      .tokens = T, .hidden = d, .intermediate = n, .experts = E, .topk = K
#define TOPK                      .entry = SMOE_ENTRY_FROM_TOPK
#define ROWS                      .entry = SMOE_ENTRY_FROM_ROWS
#define ACT(name)                 .activation = SMOE_ACTIVATION_##name
#define SCORE(name)               .score = SMOE_SCORE_##name
#define ROUND(name)               .rounding = SMOE_ROUNDING_##name
#define RENORM                    .renormalize = 1
#define GROUPS(all, kept)         .groups = all, .groups_kept = kept
#define INTERLEAVED               .layout = SMOE_LAYOUT_INTERLEAVED
#define GATE(g, u, alpha, offset) .gate_limit = g, .up_limit = u, .gate_alpha = alpha, .up_offset = offset
#define INDEX_64                  .index_type = SMOE_TYPE_I64
#define BF16_LOGITS               .logits_type = SMOE_TYPE_BF16
#define G16                       .gradient_type = SMOE_TYPE_BF16 /* the storage type of the case */

/* its inputs */
#define BIASES         .b1 = true, .b2 = true
#define ROUTER         .router = true, .router_bias = true
#define SELECTION_BIAS .selection_bias = true
#define LOSSES         .balance_coefficient = 0.25, .z_coefficient = 0.125
#define ONE_EXPERT     .routing = ORACLE_ONE_TAKES_ALL
#define HALF_EMPTY     .routing = ORACLE_HALF_EMPTY
#define TIES           .routing = ORACLE_TIES
#define COUNTS(array)  .routing = ORACLE_COUNTS, .counts = array
#define BROKEN_IDS     .broken_ids = true
#define WEIGHTED       .row_weights = true
#define SPARSE(one_in) .integers = one_in
#define DENSE          .integers = 1

#endif
