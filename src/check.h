/* Every check of what a caller hands in; each error text names the function, the argument, the value
 * and the limit. */
#ifndef SMOE_CHECK_H
#define SMOE_CHECK_H

#include "backend.h"

/* Copies a caller's growable struct over the defaults in *to: the bytes that its struct_size (its first
 * field) covers. False when struct_size cannot be right. */
int smoe_take_struct(void *to, size_t size, const void *from);

/* The way back: fills as much of a caller's struct as its struct_size covers, which stays as it is. */
int smoe_give_struct(void *to, const void *from, size_t size);

/* One pointer argument. */
typedef struct smoe_pointer_check {
    const char *name;
    const void *pointer;
    int required;
} smoe_pointer_check;

smoe_status smoe_check_layer(smoe_context *context, const char *function, const smoe_layer *layer);
smoe_status smoe_check_pointers(smoe_context *context, const char *function, const smoe_pointer_check *checks,
                                int count);
smoe_status smoe_check_buffer(smoe_context *context, const char *function, const char *name,
                              const void *pointer, uint64_t size, uint64_t needed);

#endif
