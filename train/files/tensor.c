/* Element types, sizes and conversion to f32 of the tensors in safetensors.h. */
#include "train/files/safetensors.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    size_t size;
} dtypes[] = {
    [TENSOR_F64] = {"F64", 8},   [TENSOR_F32] = {"F32", 4}, [TENSOR_F16] = {"F16", 2},
    [TENSOR_BF16] = {"BF16", 2}, [TENSOR_I64] = {"I64", 8}, [TENSOR_I32] = {"I32", 4},
    [TENSOR_I16] = {"I16", 2},   [TENSOR_I8] = {"I8", 1},   [TENSOR_U8] = {"U8", 1},
    [TENSOR_BOOL] = {"BOOL", 1},
};
static_assert(sizeof dtypes / sizeof *dtypes == TENSOR_DTYPES, "a row for each dtype");
static_assert(sizeof(float) == 4 && sizeof(double) == 8, "F32 and F64 are float and double");
#ifdef __BYTE_ORDER__
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensor data are little-endian and used in place");
#endif

size_t tensor_dtype_size(tensor_dtype dtype)
{
    return dtypes[dtype].size;
}

const char *tensor_dtype_name(tensor_dtype dtype)
{
    return dtypes[dtype].name;
}

/* The product of the nonzero dimensions must fit too, so a zero dimension does not hide an overflow of the
 * others. */
bool tensor_size(const tensor *t, int64_t *elements, int64_t *bytes)
{
    int64_t size = (int64_t)tensor_dtype_size(t->dtype), product = 1;
    bool empty = false;
    *elements = *bytes = 0;
    for (int i = 0; i < t->rank; i++) {
        int64_t n = t->shape[i];
        if (n < 0) return false;
        if (n == 0) empty = true;
        if (n > 0 && product > INT64_MAX / size / n) return false;
        if (n > 0) product *= n;
    }
    if (empty) return true;
    *elements = product;
    *bytes = product * size;
    return true;
}

static float f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13; // bias 15 -> 127
    if (exponent == 31) bits = sign | 0x7f800000 | fraction << 13;  // infinity, NaN
    float value;
    memcpy(&value, &bits, sizeof value);
    if (exponent == 0) { // zero, subnormal: fraction * 2^-24
        value = (float)fraction * 0x1p-24f;
        if (sign != 0) value = -value;
    }
    return value;
}

static float bf16_to_f32(uint16_t brain)
{
    uint32_t bits = (uint32_t)brain << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* "[2, 3]" */
static void shape_text(char *text, size_t size, int rank, const int64_t *shape)
{
    size_t at = (size_t)snprintf(text, size, "[");
    for (int i = 0; i < rank && at < size; i++)
        at += (size_t)snprintf(text + at, size - at, i > 0 ? ", %lld" : "%lld", (long long)shape[i]);
    if (at < size) snprintf(text + at, size - at, "]");
}

static bool check_shape(const tensor *t, int rank, const int64_t *shape, error *err)
{
    if (t->rank == rank && (rank == 0 || memcmp(t->shape, shape, (size_t)rank * sizeof *shape) == 0))
        return true;
    char have[128], want[128];
    shape_text(have, sizeof have, t->rank, t->shape);
    shape_text(want, sizeof want, rank, shape);
    return fail(err, ERROR_RUNTIME, "tensor %.128s has shape %s, wanted %s", t->name, have, want);
}

bool tensor_is_real(const tensor *t, int rank, const int64_t *shape, error *err)
{
    int64_t elements, bytes;
    if (!check_shape(t, rank, shape, err)) return false;
    if (!tensor_size(t, &elements, &bytes))
        return fail(err, ERROR_RUNTIME, "tensor %.128s: its bytes do not fit into 63 bits", t->name);
    if (t->dtype == TENSOR_F32 || t->dtype == TENSOR_F16 || t->dtype == TENSOR_BF16 || t->dtype == TENSOR_F64)
        return true;
    return fail(err, ERROR_RUNTIME, "tensor %.128s has dtype %s, wanted F32, F16, BF16 or F64", t->name,
                tensor_dtype_name(t->dtype));
}

void tensor_read_part(const tensor *t, int64_t first, int64_t count, float *out)
{
    const unsigned char *data = (const unsigned char *)t->data + (size_t)first * tensor_dtype_size(t->dtype);
    uint16_t half;
    double wide;
    switch (t->dtype) {
    case TENSOR_F16:
        for (int64_t i = 0; i < count; i++) memcpy(&half, data + 2 * i, 2), out[i] = f16_to_f32(half);
        return;
    case TENSOR_BF16:
        for (int64_t i = 0; i < count; i++) memcpy(&half, data + 2 * i, 2), out[i] = bf16_to_f32(half);
        return;
    case TENSOR_F64:
        for (int64_t i = 0; i < count; i++) memcpy(&wide, data + 8 * i, 8), out[i] = (float)wide;
        return;
    default:
        if (count > 0) memcpy(out, data, (size_t)count * sizeof *out);
    }
}

bool tensor_read_f32(const tensor *t, int rank, const int64_t *shape, float *out, error *err)
{
    int64_t elements, bytes;
    if (!tensor_is_real(t, rank, shape, err)) return false;
    tensor_size(t, &elements, &bytes);
    tensor_read_part(t, 0, elements, out);
    return true;
}
