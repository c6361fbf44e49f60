/* Conversions of rows, and the rounding to bf16. A storage type consists of two conversions and one line in
 * storage_of. The loops have no branches, so the compiler vectorises them. */
#include "convert.h"

#include <string.h>

static inline float f32_of_f32(float value)
{
    return value;
}

static inline float f32_of_bf16(uint16_t value)
{
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* Adding 0x7fff plus the lowest kept bit carries into the upper half exactly when the lower half rounds up.
 * For a NaN the carry could give an infinity. So a NaN is truncated instead and made quiet. */
static inline uint16_t bf16_of_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40U;
    return (uint16_t)(value != value ? quiet : rounded);
}

/* The operations of a storage type. Elements are counted as in convert.h. */
typedef struct storage {
    void (*load)(float *to, const void *from, int64_t first_element, int64_t count);
    void (*store)(void *to, int64_t first_element, const float *from, int64_t count);
    void (*add)(void *to, int64_t first_element, const float *from, int64_t count);
    void (*round)(float *row, int64_t count);
} storage;

/* The four loops of the storage type NAME, whose elements have the C type `element` and the conversions
 * f32_of_NAME and NAME_of_f32. */
#define STORAGE(name, element)                                                                               \
    static void load_##name(float *restrict to, const void *from, int64_t first_element, int64_t count)      \
    {                                                                                                        \
        const element *restrict source = (const element *)from + first_element;                              \
        for (int64_t i = 0; i < count; i++) to[i] = f32_of_##name(source[i]);                                \
    }                                                                                                        \
    static void store_##name(void *to, int64_t first_element, const float *restrict from, int64_t count)     \
    {                                                                                                        \
        element *restrict target = (element *)to + first_element;                                            \
        for (int64_t i = 0; i < count; i++) target[i] = name##_of_f32(from[i]);                              \
    }                                                                                                        \
    static void add_##name(void *to, int64_t first_element, const float *restrict from, int64_t count)       \
    {                                                                                                        \
        element *restrict target = (element *)to + first_element;                                            \
        for (int64_t i = 0; i < count; i++) target[i] = name##_of_f32(f32_of_##name(target[i]) + from[i]);   \
    }                                                                                                        \
    static void round_##name(float *row, int64_t count)                                                      \
    {                                                                                                        \
        for (int64_t i = 0; i < count; i++) row[i] = f32_of_##name(name##_of_f32(row[i]));                   \
    }                                                                                                        \
    static const storage name##_storage = {load_##name, store_##name, add_##name, round_##name};

STORAGE(f32, float)
STORAGE(bf16, uint16_t)

/* NULL for a type that this backend does not store. */
static const storage *storage_of(smoe_type type)
{
    switch (type) {
    case SMOE_TYPE_F32: return &f32_storage;
    case SMOE_TYPE_BF16: return &bf16_storage;
    case SMOE_TYPE_F16:
    case SMOE_TYPE_I32:
    case SMOE_TYPE_I64: break;
    }
    return NULL;
}

int moe_cpu_stores(smoe_type type)
{
    return storage_of(type) != NULL;
}

void moe_load_row(float *to, const void *from, int64_t first_element, int64_t count, smoe_type type)
{
    storage_of(type)->load(to, from, first_element, count);
}

void moe_store_row(void *to, int64_t first_element, const float *from, int64_t count, smoe_type type)
{
    storage_of(type)->store(to, first_element, from, count);
}

void moe_add_row(void *to, int64_t first_element, const float *from, int64_t count, smoe_type type)
{
    storage_of(type)->add(to, first_element, from, count);
}

void moe_round_row(float *row, int64_t count, smoe_type type)
{
    storage_of(type)->round(row, count);
}
