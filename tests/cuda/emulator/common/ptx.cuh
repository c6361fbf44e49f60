// Replaces src/cuda/common/ptx.cuh.
#pragma once
#include "emulator.h"

#define MOE_DEVICE inline

namespace moe
{

MOE_DEVICE uint32_t shared_address(const void *pointer)
{
    return (uint32_t)((const char *)pointer - emulator::shared);
}

MOE_DEVICE int warp_number()
{
    return emulator::current->warp;
}

template <int REGISTERS> MOE_DEVICE void take_registers()
{
    __syncwarp();
}

template <int REGISTERS> MOE_DEVICE void give_registers()
{
    __syncwarp();
}

MOE_DEVICE void fence_async_proxy()
{
    emulator::current->fenced = ++emulator::hazard_time;
}

MOE_DEVICE void named_barrier_sync(int barrier, int threads)
{
    emulator::named_arrive(barrier, threads, true);
}

MOE_DEVICE void named_barrier_arrive(int barrier, int threads)
{
    emulator::named_arrive(barrier, threads, false);
}

// stmatrix: lane 8 j + i has the address of row i of matrix j. Lane t holds elements 2 (t % 4) and
// 2 (t % 4) + 1 of row t / 4.
MOE_DEVICE void store_four(uint32_t address, const uint32_t (&pairs)[4], bool transposed)
{
    const uint32_t *rows = emulator::gather(address);
    const int row = emulator::current->lane / 4, column = emulator::current->lane % 4 * 2;
    for (int j = 0; j < 4; j++)
        for (int z = 0; z < 2; z++) {
            const uint32_t at =
                transposed ? rows[j * 8 + column + z] + row * 2 : rows[j * 8 + row] + (column + z) * 2;
            emulator::write_shared(at, (uint16_t)(pairs[j] >> (16 * z)));
        }
    __syncwarp();
}

MOE_DEVICE void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    store_four(address, {a, b, c, d}, false);
}

MOE_DEVICE void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    store_four(address, {a, b, c, d}, true);
}

// ldmatrix: the reverse of store_four without transposition.
MOE_DEVICE void load_matrices(uint32_t (&m)[4], uint32_t address)
{
    const uint32_t *rows = emulator::gather(address);
    const int row = emulator::current->lane / 4, pair = emulator::current->lane % 4;
    for (int j = 0; j < 4; j++) {
        if (rows[j * 8 + row] % 16) abort();
        emulator::check_copied(rows[j * 8 + row], "ldmatrix");
        m[j] = emulator::read_shared<uint32_t>(rows[j * 8 + row] + pair * 4);
    }
}

MOE_DEVICE void load_matrices_transposed(uint32_t (&m)[4], uint32_t address)
{
    const uint32_t *rows = emulator::gather(address);
    const int row = emulator::current->lane / 4, column = emulator::current->lane % 4 * 2;
    for (int j = 0; j < 4; j++) {
        m[j] = 0;
        for (int z = 0; z < 2; z++) {
            if (rows[j * 8 + column + z] % 16) abort();
            emulator::check_copied(rows[j * 8 + column + z], "ldmatrix");
            const uint32_t v = emulator::read_shared<uint16_t>(rows[j * 8 + column + z] + row * 2);
            m[j] |= v << (16 * z);
        }
    }
}

MOE_DEVICE uint4 load_shared16(uint32_t address)
{
    if (address % 16) abort();
    emulator::check_copied(address, "ld.shared");
    return emulator::read_shared<uint4>(address);
}

MOE_DEVICE void store_shared16(uint32_t address, uint4 v)
{
    emulator::write_shared(address, v);
}

MOE_DEVICE void copy16_async(uint32_t to, const void *from, uint32_t bytes)
{
    if ((bytes != 0 && bytes != 16) || to % 16 || (uintptr_t)from % 16) abort();
    emulator::start_copy({to, bytes ? from : nullptr});
}

MOE_DEVICE void copy16_async_if(uint32_t real, uint32_t to, const void *from)
{
    copy16_async(to, from, real ? 16 : 0);
}

MOE_DEVICE void copy16_async_if_unhinted(uint32_t real, uint32_t to, const void *from)
{
    copy16_async(to, from, real ? 16 : 0);
}

MOE_DEVICE const char *advance_by_adds(const char *from, uint32_t bytes)
{
    return from + bytes;
}

MOE_DEVICE const char *lane_address(const char *address, int lane)
{
    return (const char *)__shfl_sync(~0u, (unsigned long long)address, lane);
}

MOE_DEVICE void copy16_async_unhinted(uint32_t to, const void *from, uint32_t bytes)
{
    copy16_async(to, from, bytes);
}

enum : uint64_t { EVICT_FIRST = 1, EVICT_LAST };
MOE_DEVICE void copy16_async_by(uint64_t, uint32_t to, const void *from, uint32_t bytes)
{
    copy16_async(to, from, bytes);
}

MOE_DEVICE void commit_copies()
{
    emulator::current->groups.push_back(emulator::current->open);
    emulator::current->open.clear();
}

template <int PENDING> MOE_DEVICE void wait_copies()
{
    emulator::land_copies(PENDING, false);
}

MOE_DEVICE void wait_all_copies()
{
    emulator::land_copies(0, true);
}

MOE_DEVICE float load_shared_float(uint32_t address)
{
    return emulator::read_shared<float>(address);
}

MOE_DEVICE void store_shared_word(uint32_t address, uint32_t v)
{
    emulator::write_shared(address, v);
}

MOE_DEVICE bool second_of_two(uint32_t address)
{
    const uint32_t before = emulator::read_shared<uint32_t>(address);
    emulator::write_shared(address, before ^ 1);
    return before == 1;
}

MOE_DEVICE void store_shared_float(uint32_t address, float v)
{
    emulator::write_shared(address, v);
}

MOE_DEVICE void store_shared_floats(uint32_t address, float a, float b)
{
    emulator::write_shared(address, float2{a, b});
}

MOE_DEVICE void store_global16(void *to, uint4 v)
{
    if ((uintptr_t)to % 16) abort();
    memcpy(to, &v, 16);
}

MOE_DEVICE void store_streaming16_if(bool wanted, void *to, uint4 v)
{
    if (wanted) store_global16(to, v);
}

MOE_DEVICE uint4 load_global16_if(uint32_t real, const void *from)
{
    if ((uintptr_t)from % 16) abort();
    uint4 v = {0, 0, 0, 0};
    if (real) memcpy(&v, from, 16);
    return v;
}

MOE_DEVICE int load_word_if(bool real, const int *from, int otherwise)
{
    return real ? *from : otherwise;
}

MOE_DEVICE void prefetch_l2(const void *)
{
}

MOE_DEVICE uint32_t add_bf16_pairs(uint32_t a, uint32_t b)
{
    uint32_t sums = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const uint32_t x = a >> shift << 16, y = b >> shift << 16;
        const float sum = __uint_as_float(x) + __uint_as_float(y);
        sums |= (sum != sum ? 0x7fffu : (uint32_t)__bfloat16_as_ushort(__float2bfloat16_rn(sum))) << shift;
    }
    return sums;
}

MOE_DEVICE float larger_or_nan(float a, float b)
{
    return a != a || b != b ? __uint_as_float(0x7fffffffu) : a > b || (a == b && !std::signbit(a)) ? a : b;
}

MOE_DEVICE uint32_t larger_bf16_pairs(uint32_t a, uint32_t b)
{
    uint32_t pairs = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const float larger =
            larger_or_nan(__uint_as_float(a >> shift << 16), __uint_as_float(b >> shift << 16));
        pairs |= __float_as_uint(larger) >> 16 << shift;
    }
    return pairs;
}

static const bool HAS_BULK_COPIES = emulator::capability() >= 90;
enum { SM_THREADS = 2048 };

MOE_DEVICE void let_next_start()
{
}

MOE_DEVICE void wait_for_previous()
{
}

} // namespace moe
