/* Every check of what a caller hands in; each error text names the function, the argument, the value
 * and the limit. */
#ifndef SMOE_CHECK_H
#define SMOE_CHECK_H

#include "backend.h"

/* A caller's growable struct: not NULL, its struct_size (its first field) possible, and zeros in what lies
 * past the `size` bytes that this library knows. `init` is the macro it is made with. */
smoe_status moe_check_struct(smoe_context *context, const char *function, const char *name, const char *init,
                             const void *caller, size_t size);

/* Copies a struct over the defaults in *to: the bytes that its struct_size covers, none when that is
 * impossible. */
void moe_take_struct(void *to, size_t size, const void *from);

/* The way back: fills as much of a caller's struct as its struct_size covers, which stays as it is. */
void moe_give_struct(void *to, const void *from, size_t size);

/* Enumerators by name, for error texts; NULL for none of smoe.h's. */
const char *moe_type_name(smoe_type type);
const char *moe_entry_name(smoe_entry entry);

/* One pointer argument. */
typedef struct moe_pointer_check {
    const char *name;
    const void *pointer;
    int required;
} moe_pointer_check;

smoe_status moe_check_layer(smoe_context *context, const char *function, const smoe_layer *layer);
smoe_status moe_check_pointers(smoe_context *context, const char *function, const moe_pointer_check *checks,
                               int count);
smoe_status moe_check_buffer(smoe_context *context, const char *function, const char *name,
                             const void *pointer, uint64_t size, uint64_t needed);

#endif
