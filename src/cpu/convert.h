/* Rows between their storage (f32 or bf16) and f32, for types that moe_cpu_stores; and indices.
 * `first_element` counts elements of the storage type, so that a row of a big tensor is addressed without
 * arithmetic on void pointers. */
#ifndef SMOE_CPU_CONVERT_H
#define SMOE_CPU_CONVERT_H

#include <smoe.h>

/* Does this backend store `type`? */
int moe_cpu_stores(smoe_type type);

/* to[i] = from[first_element + i]; exact. */
void moe_load_row(float *to, const void *from, int64_t first_element, int64_t count, smoe_type type);

/* to[first_element + i] = from[i], to the nearest, ties to even; NaN stays NaN. */
void moe_store_row(void *to, int64_t first_element, const float *from, int64_t count, smoe_type type);

/* to[first_element + i] += from[i], added in f32 and rounded once. */
void moe_add_row(void *to, int64_t first_element, const float *from, int64_t count, smoe_type type);

/* row[i] rounded to what `type` stores, in place. */
void moe_round_row(float *row, int64_t count, smoe_type type);

/* indices[at], of topk_ids or offsets; -1, which is no expert, for a type that they do not have. */
int64_t moe_load_index(const void *indices, smoe_type type, int64_t at);

#endif
