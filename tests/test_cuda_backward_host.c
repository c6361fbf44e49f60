/* The index arithmetic of the Hopper backward, checked on the host by brute force: tiles of the weight
 * gradients, the cut of experts into pieces, and the places of a tile's elements in the staging buffer. */
#include "cuda/schedule/weight_tiles.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- Tiles: every feature of every half belongs to exactly one stripe, no stripe crosses halves ---- */

static void every_feature_has_one_stripe(void **state)
{
    (void)state;
    for (int n = 8; n <= 1040; n += 8)
        for (int halves = 1; halves <= 2; halves++) {
            const int each = moe_stripes_of_half(n), tiles = (each * halves + 1) / 2; /* wide ones */
            char *seen = calloc((size_t)(n * halves), 1);
            assert_non_null(seen);
            for (int stripe = 0; stripe < 2 * tiles; stripe++) {
                const moe_stripe s = moe_stripe_of(stripe, each);
                if (s.half >= halves) continue; /* the other stripe of an odd last tile */
                for (int f = s.feature; f < s.feature + MOE_WEIGHT_STRIPE && f < n; f++)
                    seen[s.half * n + f]++;
            }
            for (int i = 0; i < n * halves; i++) assert_int_equal(seen[i], 1);
            assert_true((2 * tiles - 2) / each < halves); /* at most one stripe is idle */
            free(seen);
        }
}

static void check_grid(moe_weight_grid grid, int hidden_tiles, int feature_tiles, int tall)
{
    assert_int_equal(grid.hidden_tiles, hidden_tiles);
    assert_int_equal(grid.feature_tiles, feature_tiles);
    assert_int_equal(grid.tall, tall);
}

/* Tiles are tall where that makes fewer of them. */
static void tiles_are_tall_where_that_saves(void **state)
{
    (void)state;
    check_grid(moe_weight_grid_of(1536, 256, 2), 12, 2, 0);
    check_grid(moe_weight_grid_of(768, 128, 1), 3, 1, 1);
    check_grid(moe_weight_grid_of(768, 128, 2), 6, 1, 0);
    check_grid(moe_weight_grid_of(768, 64, 1), 3, 1, 1);
    check_grid(moe_weight_grid_of(768, 64, 2), 3, 1, 1);      /* both halves are one stripe */
    check_grid(moe_weight_grid_of(2048, 1408, 1), 8, 11, 1);  /* 16 x 6 wide tiles */
    check_grid(moe_weight_grid_of(2880, 2880, 1), 23, 12, 0); /* 12 x 23 tall tiles are as many */
    for (int d = 8; d <= 800; d += 8)
        for (int n = 8; n <= 800; n += 8) {
            const moe_weight_grid grid = moe_weight_grid_of(d, n, 1);
            assert_true(grid.hidden_tiles * (grid.tall ? 256 : 128) >= d);
            assert_true(grid.feature_tiles * (grid.tall ? 128 : 256) >= n);
        }
}

/* The columns of both operands that the tiles from number `first` on read, if the tiles before them were in
 * an earlier wave. */
static int read_again(int first, moe_weight_grid grid)
{
    char hidden[64] = {0}, feature[64] = {0};
    int sum = 0;
    for (int tile = first; tile < moe_grid_tiles(grid); tile++) {
        const moe_place at = moe_weight_place_of(tile, grid);
        if (!hidden[at.row_tile]++) sum += grid.tall ? 256 : 128;
        if (!feature[at.column_tile]++) sum += grid.tall ? 128 : 256;
    }
    return sum;
}

/* That every tile is there once: test_tile_order.c. */
static void the_last_tiles_read_few_columns(void **state)
{
    (void)state;
    /* d = 768, 2n = 2048: the last quarter of the tiles reads all of d and two of eight tiles of features */
    assert_int_equal(read_again(36, moe_weight_grid_of(768, 1024, 2)), 768 + 2 * 256);
    /* d = 1536, 2n = 512: it reads all features and three of twelve tiles of d */
    assert_int_equal(read_again(18, moe_weight_grid_of(1536, 256, 2)), 512 + 3 * 128);
}

/* ---- Pieces ---- */

static uint32_t next(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static void check_split(const int32_t *blocks, int experts, int tiles, int ctas)
{
    int64_t all = 0, split = 0;
    for (int e = 0; e < experts; e++) all += blocks[e];
    const int32_t limit = moe_split_limit(all, tiles, ctas);
    for (int e = 0; e < experts; e++) {
        const int pieces = blocks[e] > limit ? (blocks[e] + limit - 1) / limit : 1;
        int32_t end = 0;
        for (int i = 0; i < pieces; i++) {
            assert_int_equal(moe_cut(blocks[e], pieces, i), end);
            end = moe_cut(blocks[e], pieces, i + 1);
            assert_true(end - moe_cut(blocks[e], pieces, i) <= limit);
        }
        assert_int_equal(end, blocks[e]);
        if (pieces > 1) split += pieces;
    }
    assert_true(split <= moe_split_bound(all, tiles, ctas));
    assert_true(split <= moe_split_bound(all + 1000, tiles, ctas)); /* the library may ask for more rows */
    assert_true(split < 1 << 16); /* lists.cu stores the number in 16 bits */
}

static void experts_are_cut_into_pieces(void **state)
{
    (void)state;
    enum { MOST = 64 };
    uint32_t seed = 1;
    for (int turn = 0; turn < 20000; turn++) {
        int32_t blocks[MOST];
        const int experts = 1 + (int)(next(&seed) % MOST), tiles = 1 + (int)(next(&seed) % 300);
        const int ctas = 1 + (int)(next(&seed) % 200), scale = 1 << next(&seed) % 14;
        for (int e = 0; e < experts; e++) blocks[e] = (int32_t)(next(&seed) % (uint32_t)scale);
        if (turn % 3 == 0) blocks[next(&seed) % (uint32_t)experts] = (int32_t)(next(&seed) % 100000);
        check_split(blocks, experts, tiles, ctas);
    }
    const int32_t huge[2] = {33000000, 5};
    check_split(huge, 2, 100, 132);
}

/* With uniform routing and a shape of the paper no expert may be split. A single expert must be split so that
 * all CTAs have work. */
static void only_large_experts_are_cut(void **state)
{
    (void)state;
    const int32_t tiles = moe_grid_tiles(moe_weight_grid_of(1536, 256, 1));
    assert_int_equal(tiles, 12);
    assert_true(moe_split_limit(24576 * 8 / 64, tiles, 132) > 24576 * 8 / 128 / 64);
    const int64_t blocks = 3072, pieces = moe_divide_up(blocks, moe_split_limit(blocks, tiles, 132));
    assert_true(pieces * tiles >= 132 - tiles && pieces * tiles <= 132 + tiles);
}

/* ---- Staging: what TMA finds at (row, column) of a subtile is the element that belongs there ---- */

enum { BUFFER_BYTES = 2 * MOE_SUBTILE_BYTES };

/* The feature and the row of d of element i of a thread's accumulators. The feature counts from the start of
 * the part, the row from the consumer's first of 64 rows. */
static int feature_of(int lane, int i)
{
    return (i >> 2) * 8 + (lane & 3) * 2 + (i & 1);
}

static int d_of(int warp, int lane, int i)
{
    return warp * 16 + (lane >> 2) + (i >> 1 & 1) * 8;
}

static void put(int32_t *buffer, uint32_t at, uint32_t size, int value)
{
    assert_true(at + size <= BUFFER_BYTES);
    assert_int_equal(buffer[at / size], -1);
    buffer[at / size] = value;
}

static void staged_f32_have_their_places(void **state)
{
    (void)state;
    for (int transposed = 0; transposed < 2; transposed++) {
        int32_t buffer[BUFFER_BYTES / 4];
        memset(buffer, 0xff, sizeof buffer);
        for (int thread = 0; thread < 128; thread++)
            for (int i = 0; i < 32; i++) {
                const int f = feature_of(thread & 31, i), d = d_of(thread >> 5, thread & 31, i);
                const int row = transposed ? f : d, column = transposed ? d : f;
                put(buffer, moe_part_f32((uint32_t)row, (uint32_t)column), 4, row * 64 + column);
            }
        for (int row = 0; row < 64; row++)
            for (int column = 0; column < 64; column++) {
                const uint32_t at = (uint32_t)(column / 32) * MOE_SUBTILE_BYTES +
                                    moe_subtile_offset((uint32_t)row, (uint32_t)(column % 32) / 4) +
                                    (uint32_t)(column % 4) * 4;
                assert_int_equal(buffer[at / 4], row * 64 + column);
            }
    }
}

/* stmatrix: lane 8 j + i has the address of row i of matrix j. Thread t holds elements 2 (t % 4) and
 * 2 (t % 4) + 1 of row t / 4, or with transposition of column t / 4. */
static void staged_16_bits_have_their_places(void **state)
{
    (void)state;
    for (int transposed = 0; transposed < 2; transposed++) {
        int32_t buffer[BUFFER_BYTES / 2];
        memset(buffer, 0xff, sizeof buffer);
        for (uint32_t warp = 0; warp < 4; warp++)
            for (uint32_t q = 0; q < 8; q++)
                for (uint32_t j = 0; j < 4; j++)
                    for (uint32_t t = 0; t < 32; t++)
                        for (uint32_t z = 0; z < 2; z++) {
                            const int i = (int)(q * 8 + j * 2 + z), f = feature_of((int)t, i);
                            const int d = d_of((int)warp, (int)t, i);
                            const uint32_t matrix_row = transposed ? 2 * (t % 4) + z : t / 4;
                            const uint32_t matrix_column = transposed ? t / 4 : 2 * (t % 4) + z;
                            const uint32_t lane = j * 8 + matrix_row;
                            const uint32_t at = transposed ? moe_part_transposed(warp, lane, q)
                                                           : moe_part_plain(warp, lane, q);
                            put(buffer, at + matrix_column * 2, 2, f * 64 + d);
                        }
        for (int f = 0; f < 128; f++)
            for (int d = 0; d < 64; d++) {
                const uint32_t row = (uint32_t)(transposed ? f : d),
                               column = (uint32_t)(transposed ? d : f % 64);
                const uint32_t subtile = transposed ? 0 : (uint32_t)f / 64;
                const uint32_t at =
                    subtile * MOE_SUBTILE_BYTES + moe_subtile_offset(row, column / 8) + column % 8 * 2;
                assert_int_equal(buffer[at / 2], f * 64 + d);
            }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_feature_has_one_stripe),     cmocka_unit_test(tiles_are_tall_where_that_saves),
        cmocka_unit_test(the_last_tiles_read_few_columns),  cmocka_unit_test(experts_are_cut_into_pieces),
        cmocka_unit_test(only_large_experts_are_cut),       cmocka_unit_test(staged_f32_have_their_places),
        cmocka_unit_test(staged_16_bits_have_their_places),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
