/* The index arithmetic of the Hopper kernels, checked on the host by brute force: the places of elements in
 * shared memory, the cut of the work, and the arithmetic of the plan. No CUDA is needed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cuda/common/swizzle.h"
#include "cuda/schedule/few_rows.h"
#include "cuda/schedule/plan_size.h"
#include "cuda/schedule/scheduler.h"
#include "cuda/schedule/stationary_shares.h"
#include "cuda/schedule/work_order.h"
#include "cuda/sm90/gemm_choice.h"

static uint32_t random_state = 1;

static uint32_t draw(uint32_t below)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % below;
}

/* ---- Shared memory ---- */

/* The 128-byte swizzle as the hardware applies it to an address: bits 7 to 9 are XORed into bits 4 to 6. */
static uint32_t hardware_swizzle(uint32_t address)
{
    return address ^ ((address >> 7 & 7) << 4);
}

static void subtiles_are_swizzled(void **state)
{
    (void)state;
    for (uint32_t row = 0; row < 256; row++)
        for (uint32_t vector = 0; vector < 8; vector++)
            assert_int_equal(moe_subtile_offset(row, vector), hardware_swizzle(row * 128 + vector * 16));
}

/* The 64 gathering threads of the up-projection must write element k of row m where wgmma reads it. */
static void gather_fills_the_tile(void **state)
{
    (void)state;
    static int row_at[16384 / 16];
    memset(row_at, 0xFF, sizeof row_at);
    for (uint32_t thread = 0; thread < 64; thread++)
        for (uint32_t i = 0; i < 16; i++) {
            const uint32_t vector = thread & 7, row = (thread >> 3) + 8 * i;
            const uint32_t to = moe_subtile_offset(thread >> 3, vector) + i * 8 * MOE_SUBTILE_ROW_BYTES;
            assert_int_equal(row_at[to / 16], -1);
            row_at[to / 16] = (int)(row * 8 + vector);
        }
    for (uint32_t m = 0; m < 128; m++)
        for (uint32_t k = 0; k < 64; k++) {
            /* consumer m / 64 starts at its subtile, step k / 16 adds 32 bytes, groups of eight rows 1024 */
            const uint32_t start = m / 64 * MOE_SUBTILE_BYTES + k / 16 * 32;
            const uint32_t in_step = m % 64 % 8 * 128 + m % 64 / 8 * 1024 + k % 16 * 2;
            const uint32_t address = hardware_swizzle(start + in_step);
            assert_int_equal(row_at[address / 16], m * 8 + k / 8);
        }
}

/* Stores a thread's accumulators as write_half of gemm_cooperative.cuh does. Every element of the half must
 * be stored once, at the subtile and vector of its octet. */
static void staging_is_complete(void **state)
{
    (void)state;
    for (int gated = 0; gated < 2; gated++) {
        static int found[2 * MOE_SUBTILE_BYTES / 16];
        memset(found, 0xFF, sizeof found);
        for (uint32_t warp = 0; warp < 4; warp++)
            for (uint32_t q = 0; q < 16; q += 4)
                for (uint32_t odd = 0; odd < 2; odd++)
                    for (uint32_t lane = 0; lane < 32; lane++) {
                        const uint32_t row = warp * 16 + (lane & 15), octet = q + odd + (lane >> 4) * 2;
                        const uint32_t subtile = gated ? odd : q >> 3,
                                       vector = moe_octet_vector(octet, gated);
                        const uint32_t to = row * MOE_SUBTILE_ROW_BYTES + subtile * MOE_SUBTILE_BYTES +
                                            ((vector ^ (lane & 7)) << 4);
                        assert_int_equal(subtile, moe_octet_subtile(octet, gated));
                        assert_int_equal(to, subtile * MOE_SUBTILE_BYTES + moe_subtile_offset(row, vector));
                        assert_int_equal(found[to / 16], -1);
                        found[to / 16] = (int)octet;
                    }
        for (size_t i = 0; i < sizeof found / sizeof found[0]; i++) assert_true(found[i] >= 0);
    }
}

/* With a gate, the box of W1 has eight gate rows, the eight up rows of the same features, and so on. An octet
 * of columns of the tile must have the features that the box has there, and a subtile 64 neighbouring
 * features. */
static void octets_stand_for_their_features(void **state)
{
    (void)state;
    for (uint32_t tile = 0; tile < 3; tile++)
        for (uint32_t half = 0; half < 2; half++)
            for (uint32_t octet = 0; octet < 16; octet++) {
                const uint32_t box_row = (half * 16 + octet) * 8;
                const uint32_t group = box_row / 16, first = moe_octet_feature(tile, half, octet, 1);
                assert_int_equal(first, (tile * 16 + group) * 8);
                assert_int_equal(moe_octet_subtile(octet, 1), box_row / 8 % 2);
                assert_int_equal(moe_octet_vector(octet, 1) * 8, first - (tile * 2 + half) * 64);
                const uint32_t plain = moe_octet_feature(tile, half, octet, 0);
                assert_int_equal(plain, tile * 256 + box_row);
                assert_int_equal(moe_octet_subtile(octet, 0) * 64 + moe_octet_vector(octet, 0) * 8,
                                 plain - (tile * 2 + half) * 128);
            }
}

/* ---- Work ---- */

static void work_entries_keep_what_they_hold(void **state)
{
    (void)state;
    for (int expert = 0; expert < 4096; expert += 91)
        for (int blocks = 1; blocks < 1 << 18; blocks = blocks * 3 + 1) {
            const moe_work work = moe_work_make(64 * blocks, expert, blocks);
            assert_int_equal(work.row, 64 * blocks);
            assert_int_equal(moe_work_expert(work), expert);
            assert_int_equal(moe_work_blocks(work), blocks);
        }
}

static void cuts_cover_everything_once(void **state)
{
    (void)state;
    for (int32_t blocks = 1; blocks < 200; blocks++)
        for (int32_t entries = 1; entries <= blocks; entries++) {
            assert_int_equal(moe_cut(blocks, entries, 0), 0);
            assert_int_equal(moe_cut(blocks, entries, entries), blocks);
            for (int32_t i = 0; i < entries; i++) {
                const int32_t length = moe_cut(blocks, entries, i + 1) - moe_cut(blocks, entries, i);
                assert_true(length == blocks / entries || length == blocks / entries + 1);
            }
        }
    for (int32_t total = 0; total < 50; total++) /* more CTAs than blocks */
        assert_int_equal(moe_cut(total, 132, 132), total);
}

/* Random routings: the lists must be within their bounds, and the number of tiles must be (blocks + experts
 * with an odd number of blocks) / 2. */
static void lists_fit_their_bounds(void **state)
{
    (void)state;
    for (int turn = 0; turn < 2000; turn++) {
        const int64_t experts = 1 + draw(40);
        int64_t rows = 0, blocks = 0, odd = 0, tiles = 0, pieces = 0, capacity = 1 + draw(9000);
        const int32_t limit = moe_piece_limit(capacity, experts);
        assert_true(limit >= 16 && limit <= 4096);
        for (int64_t e = 0; e < experts; e++) {
            int64_t count = draw(3) == 0 ? 0 : draw(700);
            if (turn % 3 == 0 && e == experts / 2) count = capacity - rows;
            if (count > capacity - rows) count = capacity - rows;
            const int64_t own = moe_divide_up(count, MOE_BLOCK_ROWS);
            assert_int_equal(tiles, (blocks + odd) / 2);
            rows += count;
            blocks += own;
            odd += own & 1;
            tiles += moe_divide_up(own, MOE_TILE_BLOCKS);
            pieces += moe_divide_up(own, limit);
        }
        assert_int_equal(tiles, (blocks + odd) / 2);
        const int64_t padded = moe_padded_rows(capacity, experts);
        assert_true(blocks * MOE_BLOCK_ROWS <= padded);
        assert_true(tiles < moe_work_bound(padded, experts, MOE_TILE_BLOCKS));
        assert_true(pieces < moe_work_bound(padded, experts, limit));
    }
}

/* The weight-stationary down-projection does whole units in waves and cuts the rest into shares. Every block
 * of every unit must be done exactly once, and every CTA must have its equal share of the blocks. */
enum { MOST_UNITS = 800, MOST_CTAS = 150 };

typedef struct shared_work {
    moe_stationary_units units;
    int32_t before[MOST_UNITS + 1];
    int waves;
} shared_work;

/* kind 0: pieces of almost equal length; 1: of lengths between 1 and 30; 2: a few long ones among short ones
 */
static void draw_pieces(shared_work *w, int kind)
{
    const int32_t tiles = 1 + (int32_t)draw(5), pieces = 1 + (int32_t)draw((uint32_t)(MOST_UNITS / tiles));
    w->units = (moe_stationary_units){w->before, pieces, tiles, 1 + (int32_t)draw(MOST_CTAS)};
    w->before[0] = 0;
    for (int i = 0; i < pieces; i++) {
        const uint32_t of_kind[] = {24 + draw(3), 1 + draw(30), draw(8) ? 1 : 200};
        w->before[i + 1] = w->before[i] + (int32_t)of_kind[kind];
    }
}

static int count_waves(const shared_work *w)
{
    const moe_stationary_units *u = &w->units;
    int waves = u->pieces * u->column_tiles / u->ctas;
    for (int c = 0; c < u->ctas; c++) waves = moe_waves_within(u, c, waves, moe_equal_share(u, c)).waves;
    return waves;
}

static int unit_blocks(const shared_work *w, int unit)
{
    const int piece = unit / w->units.column_tiles;
    return w->before[piece + 1] - w->before[piece];
}

/* Counts the blocks of a share in `done`, block by block of each unit. */
static void do_share(const shared_work *w, moe_share share, int *done)
{
    while (share.length > 0) {
        assert_in_range(share.unit, 0, w->units.pieces * w->units.column_tiles - 1);
        const int left = unit_blocks(w, share.unit) - share.block;
        const int some = left < share.length ? left : share.length;
        assert_true(some > 0);
        done[share.unit] += some;
        share = (moe_share){share.unit + 1, 0, share.length - some};
    }
}

static void shares_cover_every_block_once(void **state)
{
    (void)state;
    static shared_work w;
    int fewer = 0;
    for (int turn = 0; turn < 600; turn++) {
        draw_pieces(&w, turn % 3);
        const moe_stationary_units *u = &w.units;
        const int units = u->pieces * u->column_tiles;
        w.waves = count_waves(&w);
        fewer += w.waves < units / u->ctas;
        int done[MOST_UNITS] = {0};
        int at = moe_blocks_before(u, w.waves * u->ctas);
        for (int c = 0; c < u->ctas; c++) {
            int whole = 0;
            for (int wave = 0; wave < w.waves; wave++) {
                whole += unit_blocks(&w, wave * u->ctas + c);
                done[wave * u->ctas + c] += unit_blocks(&w, wave * u->ctas + c);
            }
            const int equal = moe_equal_share(u, c);
            assert_int_equal(moe_waves_within(u, c, w.waves, equal).blocks, whole);
            assert_true(whole <= equal);
            moe_share share = {0, 0, equal - whole};
            int found = 0;
            for (int piece = 0; piece < u->pieces; piece++) found += moe_share_begins(u, piece, at, &share);
            assert_int_equal(found, at < moe_stationary_blocks(u));
            do_share(&w, share, done);
            at += share.length;
        }
        assert_int_equal(at, moe_stationary_blocks(u));
        for (int unit = 0; unit < units; unit++) assert_int_equal(done[unit], unit_blocks(&w, unit));
    }
    assert_true(fewer > 50); /* so it was tested that waves are left out */
}

/* With pieces of equal length the number of full waves is units / CTAs, rounded down. */
static void equal_pieces_come_in_full_waves(void **state)
{
    (void)state;
    static shared_work w;
    for (int turn = 0; turn < 100; turn++) {
        draw_pieces(&w, 0);
        for (int i = 0; i < w.units.pieces; i++) w.before[i + 1] = w.before[i] + 40;
        assert_int_equal(count_waves(&w), w.units.pieces * w.units.column_tiles / w.units.ctas);
    }
}

static void places_cover_an_expert_once(void **state)
{
    (void)state;
    enum { ROWS = 500, COLUMNS = 20 };
    for (int32_t rows = 1; rows <= ROWS; rows++) {
        const int32_t height = moe_band_height(rows);
        assert_true(height >= 1 && height < 1.5 * MOE_BAND);
        for (int32_t columns = 1; columns <= COLUMNS; columns++) {
            char seen[ROWS][COLUMNS] = {{0}};
            moe_place before = {0, 0};
            for (int32_t unit = 0; unit < rows * columns; unit++) {
                const moe_place at = moe_place_of(unit, rows, columns);
                assert_true(at.row_tile >= 0 && at.row_tile < rows && at.column_tile >= 0 &&
                            at.column_tile < columns);
                assert_int_equal(seen[at.row_tile][at.column_tile]++, 0);
                const int32_t band = at.row_tile / height, band_before = before.row_tile / height;
                if (columns <= MOE_MOST_COLUMNS_FIRST)
                    assert_true(at.row_tile >= before.row_tile);
                else
                    assert_true(band > band_before ||
                                (band == band_before && at.column_tile >= before.column_tile));
                before = at;
            }
        }
    }
}

/* Every unit is taken once. With 100 CTAs or more their shares of each column tile are about equal. */
static void turns_share_out_every_column_tile(void **state)
{
    (void)state;
    enum { ROWS = 2000, COLUMNS = 48, LARGE = 144 };
    static const int32_t grids[] = {1, 7, 114, 132, LARGE};
    for (size_t g = 0; g < sizeof grids / sizeof *grids; g++)
        for (int32_t columns = 1; columns <= COLUMNS; columns++) {
            const int32_t ctas = grids[g], turn = moe_turn(ctas, columns), units = ROWS * columns;
            char seen[ROWS * COLUMNS] = {0};
            int32_t share[LARGE][COLUMNS] = {{0}}, total = 0;
            assert_true(turn >= 0 && turn < columns);
            for (int32_t cta = 0; cta < ctas; cta++) {
                int32_t unit;
                for (int32_t wave = 0; (unit = moe_unit_in_turns(cta, wave, ctas, turn)) < units; wave++) {
                    assert_true(unit / ctas == wave);
                    assert_int_equal(seen[unit]++, 0);
                    share[cta][unit % columns]++;
                    total++;
                }
            }
            assert_int_equal(total, units);
            for (int32_t c = 0; c < columns; c++) {
                int32_t least = ROWS, most = 0;
                for (int32_t cta = 0; cta < ctas; cta++) {
                    if (share[cta][c] < least) least = share[cta][c];
                    if (share[cta][c] > most) most = share[cta][c];
                }
                /* the mean is 14 to 18 */
                assert_true(ctas < 100 || (most - least <= 7 && least > 0));
            }
        }
}

static void the_down_kernel_fits_its_shape(void **state)
{
    (void)state;
    for (int64_t n = 8; n <= 4096; n += 8)
        for (int64_t columns = 8; columns <= 4096; columns += 56) {
            assert_int_equal(moe_gemm_choose(n, columns, 1), MOE_GEMM_COOPERATIVE);
            const moe_gemm kind = moe_gemm_choose(n, columns, 0);
            if (kind == MOE_GEMM_STATIONARY)
                assert_true(columns % 64 == 0 && (n <= 128 || (n > 192 && n <= 256)));
        }
    assert_int_equal(moe_gemm_choose(256, 768, 0), MOE_GEMM_STATIONARY);
    assert_int_equal(moe_gemm_choose(256, 384, 0), MOE_GEMM_PING_PONG); /* 1.5 tiles of 256 */
    assert_int_equal(moe_gemm_choose(256, 448, 0), MOE_GEMM_STATIONARY);
    assert_int_equal(moe_gemm_choose(256, 760, 0), MOE_GEMM_PING_PONG); /* no multiple of 64 */
    assert_int_equal(moe_gemm_choose(512, 4096, 0), MOE_GEMM_PING_PONG);
    assert_int_equal(moe_gemm_choose(2048, 4096, 0), MOE_GEMM_COOPERATIVE);
}

static void the_kernel_of_dx_rows_fits_its_shape(void **state)
{
    (void)state;
    assert_int_equal(moe_gemm_choose_dx(64, 768), MOE_GEMM_STATIONARY);
    assert_int_equal(moe_gemm_choose_dx(256, 4096), MOE_GEMM_STATIONARY);
    assert_int_equal(moe_gemm_choose_dx(512, 4096), MOE_GEMM_PING_PONG);
    assert_int_equal(moe_gemm_choose_dx(1024, 1536), MOE_GEMM_PING_PONG);
    assert_int_equal(moe_gemm_choose_dx(1024, 4096), MOE_GEMM_COOPERATIVE); /* its last tile has 64 columns */
    assert_int_equal(moe_gemm_choose_dx(1024, 320), MOE_GEMM_PING_PONG);    /* 1.25 tiles of 256 */
    assert_int_equal(moe_gemm_choose_dx(2048, 1536), MOE_GEMM_COOPERATIVE);
}

/* ---- Few rows ---- */

static void few_rows_are_decode_steps(void **state)
{
    (void)state;
    for (int64_t rows = 1; rows <= MOE_FEW_ROWS; rows++) {
        assert_true(moe_few_rows(rows, MOE_FEW_ROWS)); /* many experts */
        assert_true(moe_few_rows(rows, 8) == (rows <= MOE_FEW_ROWS_MEAN * 8));
        assert_true(moe_few_rows(rows, 1) ==
                    (rows <= MOE_FEW_ROWS_GROUP)); /* one expert, one group of rows */
    }
    assert_false(moe_few_rows(MOE_FEW_ROWS + 1, 4096));
    assert_false(moe_few_rows(MOE_FEW_ROWS + 1, 1));
}

/* The work list, as the plan makes it, from random counts. */
static void the_grid_has_every_tile_of_few_rows(void **state)
{
    (void)state;
    for (int64_t rows = 0; rows <= 1000; rows += rows < 20 ? 1 : 7)
        for (int64_t experts = 1; experts <= 40; experts += 3) {
            const int64_t bound = moe_few_rows_tiles(rows, experts),
                          padded_rows = moe_padded_rows(rows, experts);
            assert_true(bound <= moe_work_bound(padded_rows, experts, MOE_TILE_BLOCKS));
            for (int i = 0; i < 20; i++) {
                int64_t tiles = 0, blocks = 0, left = rows;
                for (int64_t e = 0; e < experts; e++) {
                    const uint32_t most = (uint32_t)left + 1;
                    const int64_t count = e + 1 == experts ? left : draw(i % 2 || most < 200 ? most : 200);
                    left -= count;
                    blocks += moe_divide_up(count, MOE_BLOCK_ROWS);
                    tiles += moe_divide_up(moe_divide_up(count, MOE_BLOCK_ROWS), MOE_TILE_BLOCKS);
                }
                assert_true(tiles <= bound && blocks * MOE_BLOCK_ROWS <= padded_rows);
            }
        }
    assert_int_equal(moe_few_rows_tiles(8, 64), 8);
    assert_int_equal(moe_few_rows_tiles(128, 64), 64);
    assert_int_equal(moe_few_rows_tiles(129, 1), 2);
}

/* ---- Plan ---- */

static void division_is_exact(void **state)
{
    (void)state;
    for (uint32_t divisor = 1; divisor <= 64; divisor++) {
        const uint32_t reciprocal = moe_reciprocal(divisor);
        for (uint32_t i = 0; i < 65536; i++) assert_int_equal(moe_divide(i, reciprocal), i / divisor);
    }
}

static void lower_entries_are_counted(void **state)
{
    (void)state;
    const uint32_t others[] = {MOE_PLAN_NO_ID, MOE_PLAN_REPEATED, MOE_PLAN_REPEATED | 4095, 0, 1, 4095};
    for (uint32_t id = 0; id < 4096; id += id < 70 || id > 4000 ? 1 : 37)
        for (uint32_t entry = 0; entry < 4096; entry++)
            for (size_t j = 0; j < sizeof others / sizeof others[0]; j++) {
                const uint32_t want = (entry < id) + (others[j] < id);
                assert_int_equal(moe_plan_both(moe_plan_lower(id, entry | others[j] << 16)), want);
                assert_int_equal(moe_plan_both(moe_plan_lower(id, others[j] | entry << 16)), want);
            }
    /* every valid id is below the marks of entries that do not count */
    assert_int_equal(moe_plan_both(moe_plan_lower(MOE_PLAN_REPEATED, 4095 | MOE_PLAN_NO_ID << 16)), 1);
    assert_int_equal(moe_plan_both(moe_plan_lower(MOE_PLAN_REPEATED, MOE_PLAN_REPEATED << 16)), 1);
}

/* If all of 64 entries count, each half of the word has 32: no half may overflow into the other. */
static void counts_of_both_halves_add_up(void **state)
{
    (void)state;
    uint32_t sum = 0;
    for (int i = 0; i < 32; i++) sum += moe_plan_lower(4095, 7 | 8 << 16);
    assert_int_equal(moe_plan_both(sum), 64);
}

enum { SHARED_BYTES = 232448 }; /* of a CTA on Hopper */

static void shared_memory_of_the_plan_fits(void **state)
{
    (void)state;
    const int64_t tokens[] = {1, 100, 8192, 8193, 1000000};
    for (int32_t experts = 1; experts <= 4096; experts += experts < 40 ? 1 : 169)
        for (int32_t topk = 1; topk <= 64 && topk <= experts; topk++)
            for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
                const int32_t segment = moe_plan_segment(tokens[i], experts, topk, SHARED_BYTES);
                const moe_plan_shared p = moe_plan_shared_of(segment, experts, topk);
                assert_true(moe_plan_segment_fits(segment, experts, topk, SHARED_BYTES));
                assert_true(segment >= 32 && segment % 32 == 0 && segment < MOE_PLAN_THREADS);
                assert_true(p.end <= SHARED_BYTES);
                assert_int_equal(p.rows % 16, 0); /* the memory before it is cleared 16 bytes at a time */
                assert_int_equal(p.place % 8 + p.sorted % 8 + p.ids % 8, 0);
                assert_int_equal(p.token_rows % 4 + p.group_before % 2 + p.token_first % 4, 0);
                assert_true(p.scratch >= p.token_first + 4 * (uint32_t)(segment + 1));
            }
}

/* Counts that every CTA sums must fit into 16 bits. Products with a reciprocal must be exact quotients. */
static void summed_counts_fit(void **state)
{
    (void)state;
    assert_true(moe_plan_is_summed(65535, 128, 256));
    assert_false(moe_plan_is_summed(65536, 8, 256));
    assert_true(moe_plan_is_summed(32768, 256, 128));
    assert_false(moe_plan_is_summed(32769, 256, 128));
    for (uint32_t columns = 1; columns <= 512; columns++)
        for (uint32_t i = 0; i <= MOE_PLAN_THREADS; i++)
            assert_int_equal(moe_divide(i, moe_reciprocal(columns)), i / columns);
}

/* The plan from given rows must have one CTA for each 1024 padded rows, but at least one CTA, and at most one
 * for each multiprocessor of the GPU. */
static void ctas_follow_the_device(void **state)
{
    (void)state;
    static const int32_t multiprocessors[] = {1, 60, 78, 114, 132, 144};
    for (size_t i = 0; i < sizeof multiprocessors / sizeof *multiprocessors; i++) {
        const int32_t most = multiprocessors[i];
        assert_int_equal(moe_plan_rows_ctas(0, most), 1);
        assert_int_equal(moe_plan_rows_ctas(64, most), 1);
        assert_int_equal(moe_plan_rows_ctas(1024, most), 1);
        assert_int_equal(moe_plan_rows_ctas(1024 * (int64_t)(most - 1) + 64, most), most);
        assert_int_equal(moe_plan_rows_ctas(1024 * (int64_t)most, most), most);
        assert_int_equal(moe_plan_rows_ctas(1024 * (int64_t)most + 64, most), most);
        assert_int_equal(moe_plan_rows_ctas(INT32_MAX, most), most);
        if (most > 2) assert_int_equal(moe_plan_rows_ctas(1025, most), 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(subtiles_are_swizzled),
        cmocka_unit_test(gather_fills_the_tile),
        cmocka_unit_test(staging_is_complete),
        cmocka_unit_test(octets_stand_for_their_features),
        cmocka_unit_test(work_entries_keep_what_they_hold),
        cmocka_unit_test(cuts_cover_everything_once),
        cmocka_unit_test(lists_fit_their_bounds),
        cmocka_unit_test(shares_cover_every_block_once),
        cmocka_unit_test(equal_pieces_come_in_full_waves),
        cmocka_unit_test(places_cover_an_expert_once),
        cmocka_unit_test(turns_share_out_every_column_tile),
        cmocka_unit_test(the_down_kernel_fits_its_shape),
        cmocka_unit_test(the_kernel_of_dx_rows_fits_its_shape),
        cmocka_unit_test(few_rows_are_decode_steps),
        cmocka_unit_test(the_grid_has_every_tile_of_few_rows),
        cmocka_unit_test(division_is_exact),
        cmocka_unit_test(lower_entries_are_counted),
        cmocka_unit_test(counts_of_both_halves_add_up),
        cmocka_unit_test(shared_memory_of_the_plan_fits),
        cmocka_unit_test(summed_counts_fit),
        cmocka_unit_test(ctas_follow_the_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
