// Stands in for src/cuda/mma.cuh. Lane t holds rows t / 4 and t / 4 + 8 of a and c, column t / 4 of b; pairs
// of columns of a and rows of b from 2 (t % 4) and 8 more, columns 2 (t % 4) and the next of c.
#pragma once
#include "storage.cuh"

namespace smoe
{

template <class T>
SMOE_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T)
{
    struct fragment {
        uint32_t a[4], b[2];
    };
    const fragment *all = emulator::gather(fragment{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int lane = emulator::current->lane;
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const uint32_t left = all[row % 8 * 4 + k / 2 % 4].a[row / 8 + k / 8 * 2];
            const uint32_t right = all[column * 4 + k / 2 % 4].b[k / 8];
            c[i] += storage<T>::part(left, k % 2) * storage<T>::part(right, k % 2);
        }
    }
}

} // namespace smoe
