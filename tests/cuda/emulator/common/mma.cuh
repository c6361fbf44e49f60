// Replaces src/cuda/common/mma.cuh. Lane t holds rows t / 4 and t / 4 + 8 of a and c, and column t / 4 of b.
// With j = 2 (t % 4) it holds columns j, j + 1, j + 8 and j + 9 of a, the same rows of b, and columns j and
// j + 1 of c.
#pragma once
#include "common/storage.cuh"

namespace moe
{

template <class T>
MOE_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T)
{
    struct fragment {
        float a[4][2], b[2][2];
    } own;
    for (int z = 0; z < 2; z++) {
        for (int i = 0; i < 4; i++) own.a[i][z] = storage<T>::part(a[i], z);
        own.b[0][z] = storage<T>::part(b0, z);
        own.b[1][z] = storage<T>::part(b1, z);
    }
    const fragment *all = emulator::gather(own);
    const int lane = emulator::current->lane;
    for (int i = 0; i < 4; i++) {
        const fragment *row = all + lane / 4 * 4, *column = all + (lane % 4 * 2 + i % 2) * 4;
        for (int k = 0; k < 16; k++)
            c[i] += row[k / 2 % 4].a[i / 2 + k / 8 * 2][k % 2] * column[k / 2 % 4].b[k / 8][k % 2];
    }
}

} // namespace moe
