/* The DRAM traffic that the order of an expert's tiles causes, by a model of the L2 cache. 132 CTAs take the
 * tiles in their order. Each step reads a slice of the row tile's rows and one of the column tile's weights.
 * A slice that is not in L2 is read from DRAM and replaces the least recently used slices.
 * docs/log/2026-11-22.md has a larger model, which also has tiles of one block and units that are claimed
 * early: it predicted 37 GB for an up-projection for which an H200 read 37 GB. */
#include "cuda/schedule/weight_tiles.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    CTAS = 132,
    L2_KB = 38000,
    SLICE = 8, /* steps of 64 that are read at once: 128 rows are 128 KB, 256 columns 256 KB */
    ROW_KB = 16 * SLICE,
    COLUMN_KB = 32 * SLICE,
};

/* For every slice the time of its last use, 0 if it is not in L2; and a queue of all uses, to find the slice
 * that was not used for the longest time. */
typedef struct cache {
    int64_t *last;
    int32_t *queue_slice;
    int64_t *queue_time;
    int64_t head, tail, now, kb, dram_kb;
    int32_t row_slices; /* slices below are of rows, the others of weights */
} cache;

static int slice_kb(const cache *c, int32_t slice)
{
    return slice < c->row_slices ? ROW_KB : COLUMN_KB;
}

static void drop_oldest(cache *c)
{
    const int32_t slice = c->queue_slice[c->head];
    const int64_t time = c->queue_time[c->head++];
    if (c->last[slice] != time) return; /* the slice was used again after this use */
    c->last[slice] = 0;
    c->kb -= slice_kb(c, slice);
}

static void use(cache *c, int32_t slice)
{
    if (!c->last[slice]) {
        c->dram_kb += slice_kb(c, slice);
        c->kb += slice_kb(c, slice);
    }
    c->last[slice] = ++c->now;
    c->queue_slice[c->tail] = slice;
    c->queue_time[c->tail++] = c->now;
    while (c->kb > L2_KB) drop_oldest(c);
}

typedef moe_place order(int32_t unit, int32_t row_tiles, int32_t column_tiles);

static moe_place columns_first(int32_t unit, int32_t row_tiles, int32_t column_tiles)
{
    return moe_place_in(unit, row_tiles, column_tiles, 1);
}

static moe_place rows_first(int32_t unit, int32_t row_tiles, int32_t column_tiles)
{
    return moe_place_in(unit, row_tiles, column_tiles, 0);
}

/* The DRAM traffic of one expert, divided by the bytes that must be read at least once. The expert has so
 * many tiles, and each tile `steps` = K / 64 steps. CTA i begins i / CTAS of a tile's time after CTA 0, as in
 * a long run in which each CTA takes the next tile when it is free. */
static double traffic(order *place, int32_t row_tiles, int32_t column_tiles, int32_t steps)
{
    const int32_t slices = steps / SLICE, units = row_tiles * column_tiles;
    const size_t all = (size_t)(row_tiles + column_tiles) * (size_t)slices;
    const size_t uses = 2 * (size_t)units * (size_t)slices;
    cache c = {.last = calloc(all, sizeof *c.last),
               .queue_slice = malloc(uses * sizeof *c.queue_slice),
               .queue_time = malloc(uses * sizeof *c.queue_time),
               .row_slices = row_tiles * slices};
    assert_true(c.last && c.queue_slice && c.queue_time);
    for (int64_t tick = 0; tick < (int64_t)(units + CTAS) * slices; tick++) {
        /* Tick t: CTA t % CTAS is at its own step; unit u begins at tick u * slices, in time u / CTAS tiles.
         */
        const int64_t cta = tick % CTAS, time = tick / CTAS;
        const int64_t local =
            time * CTAS - cta * slices; /* CTAS ticks a slice; late by its share of a tile */
        if (local < 0) continue;
        const int64_t done = local / CTAS, unit = done / slices * CTAS + cta;
        if (unit >= units) continue;
        const moe_place at = place((int32_t)unit, row_tiles, column_tiles);
        const int32_t k = (int32_t)(done % slices);
        use(&c, at.row_tile * slices + k);
        use(&c, c.row_slices + at.column_tile * slices + k);
    }
    const double once = (double)slices * (row_tiles * (double)ROW_KB + column_tiles * (double)COLUMN_KB);
    const double result = (double)c.dram_kb / once;
    free(c.last);
    free(c.queue_slice);
    free(c.queue_time);
    return result;
}

static void every_order_reads_all_of_it(void **state)
{
    (void)state;
    assert_true(traffic(columns_first, 4, 4, 16) == 1.0); /* fits */
    assert_true(traffic(rows_first, 8, 16, 112) >= 1.0);
    assert_true(traffic(moe_place_of, 8, 16, 112) >= 1.0);
}

static void many_rows_and_columns_go_in_bands(void **state)
{
    (void)state;
    const struct {
        int32_t rows, columns, steps;
    } shapes[] = {{32, 128, 96}, {128, 16, 112}, {128, 12, 64}, {64, 23, 48}}; /* up of the suite `ep` */
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const double bands = traffic(moe_place_of, shapes[i].rows, shapes[i].columns, shapes[i].steps);
        const double rows = traffic(rows_first, shapes[i].rows, shapes[i].columns, shapes[i].steps);
        print_message("%d x %d tiles, %d steps: bands %.2f, rows first %.2f, columns first %.2f\n",
                      (int)shapes[i].rows, (int)shapes[i].columns, (int)shapes[i].steps, bands, rows,
                      traffic(columns_first, shapes[i].rows, shapes[i].columns, shapes[i].steps));
        assert_true(bands < 0.5 * rows);
    }
}

/* `chosen` must read less than half of what `other` reads. */
static void assert_halved(order *chosen, order *other, int32_t row_tiles, int32_t column_tiles, int32_t steps)
{
    const double reads = traffic(chosen, row_tiles, column_tiles, steps);
    const double others = traffic(other, row_tiles, column_tiles, steps);
    print_message("%d x %d tiles: %.2f, the other order %.2f\n", (int)row_tiles, (int)column_tiles, reads,
                  others);
    assert_true(reads < 0.5 * others);
}

static void many_columns_and_few_rows_do_not_go_columns_first(void **state)
{
    (void)state;
    assert_halved(moe_place_of, columns_first, 16, 128, 96);
}

static moe_place place_in_wide_tiles(int32_t tile, int32_t row_tiles, int32_t column_tiles)
{
    const moe_weight_grid grid = {row_tiles, column_tiles, 0};
    return moe_weight_place_of(tile, grid);
}

static moe_place place_in_tall_tiles(int32_t tile, int32_t row_tiles, int32_t column_tiles)
{
    const moe_weight_grid grid = {row_tiles, column_tiles, 1};
    return moe_weight_place_of(tile, grid);
}

/* dw of one expert of Mixtral-8x22B: d 6144, 32768 features, 4096 rows. Its rows are columns of d. */
static void wide_weight_gradients_go_in_bands(void **state)
{
    (void)state;
    assert_halved(place_in_wide_tiles, rows_first, 48, 128, 64);
}

/* dh of Mixtral-8x22B with random routing: about 260 row tiles, 64 column tiles, d 6144. The model has one
 * expert with all rows, so it has fewer weights than dh reads. */
static void the_list_of_wide_experts_goes_in_bands(void **state)
{
    (void)state;
    assert_halved(moe_place_in_list, columns_first, 260, 64, 96);
}

static void assert_every_tile_once(order *place, int32_t row_tiles, int32_t column_tiles)
{
    char *seen = calloc((size_t)(row_tiles * column_tiles), 1);
    assert_non_null(seen);
    for (int32_t unit = 0; unit < row_tiles * column_tiles; unit++) {
        const moe_place at = place(unit, row_tiles, column_tiles);
        assert_in_range(at.row_tile, 0, row_tiles - 1);
        assert_in_range(at.column_tile, 0, column_tiles - 1);
        assert_int_equal(seen[at.row_tile * column_tiles + at.column_tile]++, 0);
    }
    free(seen);
}

static void every_order_has_every_tile_once(void **state)
{
    (void)state;
    order *const orders[] = {moe_place_of, moe_place_in_list, place_in_wide_tiles, place_in_tall_tiles};
    for (size_t i = 0; i < sizeof orders / sizeof orders[0]; i++)
        for (int32_t row_tiles = 1; row_tiles <= 70; row_tiles++)
            for (int32_t column_tiles = 1; column_tiles <= 40; column_tiles++)
                assert_every_tile_once(orders[i], row_tiles, column_tiles);
}

/* MOE_LEAST_BANDED is the least number of row tiles that moe_band_height cuts. */
static void bands_begin_at_the_least_banded(void **state)
{
    (void)state;
    for (int32_t row_tiles = 1; row_tiles <= 200; row_tiles++)
        assert_true((moe_band_height(row_tiles) < row_tiles) == (row_tiles >= MOE_LEAST_BANDED));
}

/* The units of a band are those of its rows, and in a band a column tile's rows follow each other. */
static void a_band_has_the_units_of_its_rows(void **state)
{
    (void)state;
    for (int32_t row_tiles = 1; row_tiles <= 70; row_tiles++)
        for (int32_t column_tiles = 1; column_tiles <= 20; column_tiles++) {
            const int32_t band = MOE_BAND * column_tiles;
            for (int32_t unit = 0; unit < row_tiles / MOE_BAND * band; unit++)
                assert_int_equal(moe_place_in_list(unit, row_tiles, column_tiles).row_tile / MOE_BAND,
                                 unit / band);
        }
    const moe_place second = moe_place_in_list(1, 16, 9), next_column = moe_place_in_list(16, 16, 9);
    assert_int_equal(second.row_tile, 1);
    assert_int_equal(second.column_tile, 0);
    assert_int_equal(next_column.row_tile, 0);
    assert_int_equal(next_column.column_tile, 1);
    const moe_place rest = moe_place_in_list(16 * 9 + 1, 17, 9);
    assert_int_equal(rest.row_tile, 16);
    assert_int_equal(rest.column_tile, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_order_reads_all_of_it),
        cmocka_unit_test(many_rows_and_columns_go_in_bands),
        cmocka_unit_test(many_columns_and_few_rows_do_not_go_columns_first),
        cmocka_unit_test(wide_weight_gradients_go_in_bands),
        cmocka_unit_test(the_list_of_wide_experts_goes_in_bands),
        cmocka_unit_test(every_order_has_every_tile_once),
        cmocka_unit_test(bands_begin_at_the_least_banded),
        cmocka_unit_test(a_band_has_the_units_of_its_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
