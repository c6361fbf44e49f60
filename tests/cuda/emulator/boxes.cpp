// TMA: tensor maps and copies of boxes. A box_map is stored in the memory of the CUtensorMap.
#include "emulator.h"

namespace emulator
{

struct box_map {
    cuuint32_t rank, box[5];
    CUtensorMapDataType type;
    char *base;
    int64_t size[5], stride[5]; // stride[0]: bytes of an element
};
static_assert(sizeof(box_map) <= sizeof(CUtensorMap), "the map is stored in place of the real one");

CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *,
                CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill)
{
    box_map m = {rank, {}, type, (char *)base, {}, {}};
    const int element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    if ((uintptr_t)base % 16 || box[0] * element != 128 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B)
        return CUDA_ERROR_INVALID_VALUE;
    for (cuuint32_t i = 0; i < rank; i++) {
        if (!sizes[i] || !box[i] || box[i] > 256 || (i && strides[i - 1] % 16))
            return CUDA_ERROR_INVALID_VALUE;
        m.size[i] = (int64_t)sizes[i];
        m.box[i] = box[i];
        m.stride[i] = i ? (int64_t)strides[i - 1] : element;
    }
    memcpy((void *)map, &m, sizeof m);
    return CUDA_SUCCESS;
}

template <class T> static float widen(T v);
template <> float widen(float v)
{
    return v;
}
template <> float widen(__nv_bfloat16 v)
{
    return __bfloat162float(v);
}
template <> float widen(__half v)
{
    return __half2float(v);
}

static void narrow(float v, float &to)
{
    to = v;
}
static void narrow(float v, __nv_bfloat16 &to)
{
    to = __float2bfloat16_rn(v);
}
static void narrow(float v, __half &to)
{
    to = __float2half_rn(v);
}

template <class T> static void add(char *to, const char *value)
{
    T a, b;
    memcpy(&a, to, sizeof a);
    memcpy(&b, value, sizeof b);
    narrow(widen(a) + widen(b), a);
    memcpy(to, &a, sizeof a);
}

static void add(CUtensorMapDataType type, char *to, const char *value)
{
    if (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32) return add<float>(to, value);
    if (type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) return add<__nv_bfloat16>(to, value);
    add<__half>(to, value);
}

static uint32_t bytes_of(const box_map &m)
{
    uint32_t bytes = (uint32_t)m.stride[0];
    for (cuuint32_t i = 0; i < m.rank; i++) bytes *= m.box[i];
    return bytes;
}

void check_box(const CUtensorMap *map, uint32_t address)
{
    box_map m;
    memcpy(&m, (const void *)map, sizeof m);
    for (uint32_t i = 0; i < bytes_of(m); i += GRANULE)
        check_fenced(address + i, current->fenced, "a TMA store");
}

uint32_t move_box(const CUtensorMap *map, uint32_t address, const int *coordinates, transfer how)
{
    box_map m;
    memcpy(&m, (const void *)map, sizeof m);
    const uint32_t element = (uint32_t)m.stride[0], count = bytes_of(m) / element;
    if (address % 1024 || address + count * element > SHARED_BYTES) abort();
    for (uint32_t i = 0; how == LOAD && i < count * element; i += GRANULE)
        note_write(address + i, nullptr, false);
    for (uint32_t i = 0; i < count; i++) {
        char *there = m.base, *here = shared + swizzled(address + i * element);
        bool inside = true;
        uint32_t rest = i;
        for (cuuint32_t j = 0; j < m.rank; j++) {
            const int64_t x = (int64_t)coordinates[j] + rest % m.box[j];
            rest /= m.box[j];
            inside = inside && x >= 0 && x < m.size[j];
            there += x * m.stride[j];
        }
        if (how == LOAD && inside) memcpy(here, there, element);
        if (how == LOAD && !inside) memset(here, 0, element);
        if (how == STORE && inside) memcpy(there, here, element);
        if (how == ADD && inside) add(m.type, there, here);
    }
    return count * element;
}

} // namespace emulator
