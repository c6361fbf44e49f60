// Replaces src/cuda/sm90/f8.cuh. The tensor cores' sums are those that the authors of MMA-Sim found on
// Hopper: an instruction aligns its products and the accumulator to the largest exponent, where a product has
// the sum of its factors' exponents, truncates each at 2^-13 of it, and truncates the sum to 13 fraction
// bits.
#pragma once
#include "sm90/wgmma.cuh"

namespace moe
{

struct e4m3 {
};

// v = significand 2^(exponent - 3) with a significand of 4 bits; exponents begin at -6.
struct e4m3_parts {
    int significand, exponent;
    bool nan;
};

inline e4m3_parts parts_of_e4m3(uint8_t byte)
{
    const int stored = byte >> 3 & 15, fraction = byte & 7;
    const int significand = stored ? 8 + fraction : fraction;
    return {byte & 0x80 ? -significand : significand, (stored ? stored : 1) - 7, (byte & 0x7f) == 0x7f};
}

inline float e4m3_value(uint8_t byte)
{
    const e4m3_parts v = parts_of_e4m3(byte);
    return v.nan ? __uint_as_float(0x7fc00000) : ldexpf((float)v.significand, v.exponent - 3);
}

inline uint8_t to_e4m3(float v)
{
    if (v != v) return 0x7f;
    const uint8_t sign = std::signbit(v) ? 0x80 : 0;
    const float size = fabsf(v);
    if (size >= 448.0f) return sign | 0x7e;
    const int exponent = size < 0x1p-6f ? -6 : ilogbf(size);
    const int steps = (int)nearbyintf(ldexpf(size, 3 - exponent)); // 16: the next exponent
    return sign | (uint8_t)((exponent + 6) * 8 + steps);
}

MOE_DEVICE uint32_t pack_e4m3(float a, float b, float c, float d)
{
    return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | (uint32_t)to_e4m3(d) << 24;
}

MOE_DEVICE void prefetch_bytes(const void *from, uint32_t bytes)
{
    if ((uintptr_t)from % 16 || bytes % 16 || !bytes) abort();
    volatile char last = ((const char *)from)[bytes - 1]; // may be read
    (void)last;
}

MOE_DEVICE uint32_t add_one(uint32_t *to)
{
    return (*to)++;
}

MOE_DEVICE void add_one_release(uint32_t *to)
{
    ++*to;
}

MOE_DEVICE uint32_t load_acquire_gpu(const uint32_t *from)
{
    return *(const volatile uint32_t *)from;
}

MOE_DEVICE uint32_t scale_e4m3(uint32_t four, uint32_t low, uint32_t high)
{
    using H = storage<__half>;
    float products[4];
    for (int i = 0; i < 4; i++) {
        const uint32_t factors = i < 2 ? low : high;
        const float product =
            e4m3_value((uint8_t)(four >> 8 * i)) * (i % 2 ? H::high(factors) : H::low(factors));
        products[i] = H::low(H::pack(product, 0.0f));
    }
    return pack_e4m3(products[0], products[1], products[2], products[3]);
}

MOE_DEVICE void copy4_async(uint32_t to, const void *from)
{
    if (to % 4 || (uintptr_t)from % 4) abort();
    emulator::start_copy({to, from, 4});
}

MOE_DEVICE void store_shared8(uint32_t address, uint32_t low, uint32_t high)
{
    emulator::write_shared(address, uint2{low, high});
}

MOE_DEVICE void store_shared2(uint32_t address, uint32_t low)
{
    emulator::write_shared(address, (uint16_t)low);
}

MOE_DEVICE int lane_again()
{
    return emulator::current->lane;
}

MOE_DEVICE int of_eight_lanes(int value, int i)
{
    return emulator::gather(value)[(emulator::current->lane & ~7) | i];
}

MOE_DEVICE void store_streaming8_if(bool wanted, void *to, uint32_t low, uint32_t high)
{
    if (!wanted) return;
    if ((uintptr_t)to % 8) abort();
    memcpy(to, &low, 4), memcpy((char *)to + 4, &high, 4);
}

template <> struct tensor_core<e4m3> {
    enum { STEP = 32 };

    template <operand_order A = K_MAJOR, operand_order B = K_MAJOR, int COUNT>
    static void multiply(float (&c)[COUNT], uint64_t a, uint64_t b, int keep)
    {
        static_assert(A == K_MAJOR && B == K_MAJOR, "operands of 8 bits cannot be transposed");
        check(a, 64);
        check(b, COUNT * 2);
        emulator::current->multiplies.add([=, &c] { multiply_now(c, a, b, keep); });
    }

    // A from registers, which must not change until they have been read.
    template <int COUNT> static void multiply(float (&c)[COUNT], const uint32_t (&a)[4], uint64_t b, int keep)
    {
        check(b, COUNT * 2);
        fragment own, quad[4];
        memcpy(own.words, a, sizeof a);
        memcpy(quad, emulator::gather(own) + (emulator::current->lane & ~3), sizeof quad);
        emulator::current->multiplies.add([=, &c, &a] {
            if (memcmp(own.words, a, sizeof a)) {
                fprintf(stderr, "a wgmma's registers changed while it was under way\n");
                abort();
            }
            multiply_rows(
                c,
                [&](e4m3_parts(&to)[STEP], int half) {
                    for (int k = 0; k < STEP; k++)
                        to[k] =
                            parts_of_e4m3((uint8_t)(quad[k / 4 % 4].words[k / 16 * 2 + half] >> k % 4 * 8));
                },
                b, keep);
        });
    }
    struct fragment {
        uint32_t words[4];
    };

    // Checks the fences of an operand's `count` rows, two vectors each.
    static void check(uint64_t descriptor, int count)
    {
        for (int i = emulator::current->lane; i < count * 2; i += emulator::WARP)
            emulator::check_fenced(element_address(descriptor, K_MAJOR, i / 2, i % 2 * 8),
                                   emulator::current->fenced, "wgmma");
    }

    static void read(e4m3_parts (&to)[STEP], uint64_t descriptor, int row)
    {
        for (int k = 0; k < STEP; k++) // element_address counts 16-bit elements
            to[k] = parts_of_e4m3(
                emulator::read_shared<uint8_t>(element_address(descriptor, K_MAJOR, row, k / 2) + k % 2));
    }

    static float sum(float c, const e4m3_parts (&a)[STEP], const e4m3_parts (&b)[STEP])
    {
        enum { NONE = -1000 };
        int most = c != 0.0f ? std::max(ilogbf(c), -126) : NONE;
        for (int k = 0; k < STEP; k++) {
            if (a[k].nan || b[k].nan || c != c) return __uint_as_float(0x7fffffff);
            if (a[k].significand && b[k].significand) most = std::max(most, a[k].exponent + b[k].exponent);
        }
        if (most == NONE) return 0.0f;
        int64_t units = (int64_t)ldexp(c, 13 - most); // of 2^(most - 13)
        for (int k = 0; k < STEP; k++) {
            const int product = a[k].significand * b[k].significand; // times 2^(exponent - 6)
            const int left = a[k].exponent + b[k].exponent - 6 - (most - 13);
            units += left >= 0 ? product * (1 << left) : left > -9 ? product / (1 << -left) : 0;
        }
        const int bits = units ? 64 - __builtin_clzll((uint64_t)std::abs(units)) : 0;
        if (bits > 14) units = units / (1ll << (bits - 14)) * (1ll << (bits - 14));
        return (float)ldexp((double)units, most - 13);
    }

    template <int COUNT> static void multiply_now(float (&c)[COUNT], uint64_t a, uint64_t b, int keep)
    {
        const int first = emulator::current->warp % 4 * 16 + emulator::current->lane / 4;
        multiply_rows(
            c, [&](e4m3_parts(&to)[STEP], int half) { read(to, a, first + half * 8); }, b, keep);
    }

    // read_row: the lane's first or second row of A.
    template <int COUNT, class Read>
    static void multiply_rows(float (&c)[COUNT], const Read &read_row, uint64_t b, int keep)
    {
        const int lane = emulator::current->lane;
        e4m3_parts rows[2][STEP], column[STEP];
        for (int half = 0; half < 2; half++) read_row(rows[half], half);
        for (int quad = 0; quad < COUNT; quad += 4)
            for (int z = 0; z < 2; z++) {
                read(column, b, quad * 2 + lane % 4 * 2 + z);
                for (int half = 0; half < 2; half++) {
                    float &to = c[quad + 2 * half + z];
                    to = sum(keep ? to : 0.0f, rows[half], column);
                }
            }
    }
};

} // namespace moe
