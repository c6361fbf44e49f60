// Matrix descriptors: where wgmma finds an operand in shared memory.
#pragma once
#include "common/ptx.cuh"

namespace moe
{

// Matrix descriptor of a K-major operand: 1024 bytes from one group of eight rows to the next, 128-byte
// swizzle. `where` is address / 16; a step of 16 elements along K adds 2, of 64 rows 512.
constexpr uint64_t DESCRIPTOR = (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;

// Of a K-major operand of `columns` without swizzle: 16 bytes of each column, then the next 16 along K.
MOE_DEVICE constexpr uint64_t plain_descriptor(uint32_t columns)
{
    return (uint64_t)columns << 16 | (uint64_t)(128 >> 4) << 32;
}

// Of an MN-major operand: 8192 bytes from one subtile of 64 to the next, 1024 from eight rows of K to the
// next. A step of 16 elements along K adds 128.
constexpr uint64_t MN_DESCRIPTOR =
    (uint64_t)(8192 >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;

enum operand_order { K_MAJOR = 0, MN_MAJOR = 1 };

template <operand_order ORDER = K_MAJOR> MOE_DEVICE uint64_t descriptor(uint32_t where)
{
    return (ORDER == MN_MAJOR ? MN_DESCRIPTOR : DESCRIPTOR) | where;
}

// What a step of 16 elements along K adds to a descriptor.
template <operand_order ORDER> MOE_DEVICE constexpr uint32_t descriptor_step()
{
    return ORDER == MN_MAJOR ? 128 : 2;
}

MOE_DEVICE uint32_t descriptor_address(uint32_t shared)
{
    return (shared & 0x3FFFF) >> 4;
}

} // namespace moe
