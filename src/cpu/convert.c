/* Conversions of rows, and the bf16 rounding itself. The loops are branch-free, so they vectorise. */
#include "convert.h"

#include <string.h>

static inline float bf16_to_f32(uint16_t value)
{
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* Adding 0x7fff plus the lowest kept bit carries into the upper half exactly when the lower half rounds up.
 * A NaN could carry over into an infinity, or lose its payload, so it is cut and made quiet instead. */
static inline uint16_t f32_to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40U;
    return (uint16_t)(value != value ? quiet : rounded);
}

void smoe_load_row(float *to, const void *from, int64_t first_element, int64_t count, smoe_type type)
{
    if (type == SMOE_TYPE_BF16) {
        const uint16_t *restrict source = (const uint16_t *)from + first_element;
        float *restrict target = to;
        for (int64_t i = 0; i < count; i++) target[i] = bf16_to_f32(source[i]);
    } else {
        memcpy(to, (const float *)from + first_element, (size_t)count * sizeof *to);
    }
}

void smoe_store_row(void *to, int64_t first_element, const float *from, int64_t count, smoe_type type)
{
    if (type == SMOE_TYPE_BF16) {
        uint16_t *restrict target = (uint16_t *)to + first_element;
        const float *restrict source = from;
        for (int64_t i = 0; i < count; i++) target[i] = f32_to_bf16(source[i]);
    } else {
        memcpy((float *)to + first_element, from, (size_t)count * sizeof *from);
    }
}

void smoe_add_row(void *to, int64_t first_element, const float *from, int64_t count, smoe_type type)
{
    const float *restrict source = from;
    if (type == SMOE_TYPE_BF16) {
        uint16_t *restrict target = (uint16_t *)to + first_element;
        for (int64_t i = 0; i < count; i++) target[i] = f32_to_bf16(bf16_to_f32(target[i]) + source[i]);
    } else {
        float *restrict target = (float *)to + first_element;
        for (int64_t i = 0; i < count; i++) target[i] += source[i];
    }
}

void smoe_round_row(float *row, int64_t count, smoe_type type)
{
    if (type != SMOE_TYPE_BF16) return;
    for (int64_t i = 0; i < count; i++) row[i] = bf16_to_f32(f32_to_bf16(row[i]));
}
