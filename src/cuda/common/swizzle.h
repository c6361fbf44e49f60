/* Where elements are in shared memory. A subtile is a run of rows of 64 elements of 16 bits: 128 bytes,
 * eight vectors of 16 bytes. Vector v of row r is stored at place v xor (r mod 8) of the row, the 128-byte
 * swizzle of TMA and wgmma. A subtile starts at a multiple of 1024 bytes. */
#ifndef MOE_CUDA_SWIZZLE_H
#define MOE_CUDA_SWIZZLE_H

#include "host_device.h"

enum {
    MOE_SUBTILE_COLUMNS = 64,
    MOE_SUBTILE_ROW_BYTES = 128,
    MOE_SUBTILE_BYTES = 64 * MOE_SUBTILE_ROW_BYTES /* of 64 rows */
};

/* Byte of vector `vector` (0..7) of row `row`. */
MOE_HOST_DEVICE uint32_t moe_subtile_offset(uint32_t row, uint32_t vector)
{
    return row * MOE_SUBTILE_ROW_BYTES + ((vector ^ (row & 7)) << 4);
}

/* The up-projection's tile has 256 columns. With a gate they are 128 features: eight gate columns, then the
 * up columns of the same eight features, and so on, so that one thread has both columns of a feature. Half h
 * of the tile (128 columns, 16 octets; a narrow tile has only half 0) fills one staging buffer of two
 * subtiles: with a gate, a gate and an up subtile of 64 features; without, two subtiles of 64 columns. Octet
 * b of the half goes to this subtile and vector. */
MOE_HOST_DEVICE uint32_t moe_octet_subtile(uint32_t octet, int gated)
{
    return gated ? octet & 1 : octet >> 3;
}

MOE_HOST_DEVICE uint32_t moe_octet_vector(uint32_t octet, int gated)
{
    return gated ? octet >> 1 : octet & 7;
}

/* First feature (gated) or column (plain) of octet b of half h of column tile `tile`. */
MOE_HOST_DEVICE uint32_t moe_octet_feature(uint32_t tile, uint32_t half, uint32_t octet, int gated)
{
    return gated ? tile * 128 + half * 64 + (octet >> 1) * 8 : tile * 256 + half * 128 + octet * 8;
}

#endif
