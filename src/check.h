/* The checks of a caller's arguments. Each error text names the function, the argument, the value and the
 * limit. */
#ifndef MOE_CHECK_H
#define MOE_CHECK_H

#include "backend.h"

/* Checks a caller's struct: it is not NULL, its struct_size (the first field) is possible, and the bytes
 * beyond the `size` that this library knows are zero. `init` is the macro that initialises it. */
smoe_status moe_check_struct(smoe_context *context, const char *function, const char *name, const char *init,
                             const void *caller, size_t size);

/* Copies a struct over the defaults in *to. Only the bytes that its struct_size covers are copied, and none
 * if struct_size is impossible. */
void moe_take_struct(void *to, size_t size, const void *from);

/* The reverse: writes the part of a caller's struct that its struct_size covers. struct_size itself is not
 * changed. */
void moe_give_struct(void *to, const void *from, size_t size);

/* The name of an enumerator, for error texts; NULL if smoe.h has no such value. */
const char *moe_type_name(smoe_type type);
const char *moe_entry_name(smoe_entry entry);

/* Takes the caller's layer with defaults for what its struct_size does not cover, checks it, and asks the
 * backend whether it runs such layers. */
smoe_status moe_take_layer(smoe_context *context, const char *function, const smoe_layer *layer,
                           moe_problem *problem);

/* Fills *problem if the layer passes. */
smoe_status moe_check_layer(smoe_context *context, const char *function, const smoe_layer *layer,
                            moe_problem *problem);

/* A layer's `compute`, after everything else. f8.c. */
smoe_status moe_check_compute(smoe_context *context, const smoe_layer *layer);

/* Checks the values of offsets (E+1), which must be in host memory. */
smoe_status moe_check_offsets(smoe_context *context, const smoe_layer *layer, const void *offsets);

#endif
