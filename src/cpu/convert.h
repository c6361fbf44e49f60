/* Converts rows from their storage type (f32 or bf16) to f32 and back, for the types that moe_cpu_stores
 * accepts. `first_element` counts elements of the storage type, so that callers need no
 * arithmetic on void pointers. */
#ifndef MOE_CPU_CONVERT_H
#define MOE_CPU_CONVERT_H

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

#endif
