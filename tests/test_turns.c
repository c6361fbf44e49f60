/* The order of turns, and the median of what is measured in them. */
#include "base/turns.h"
#include "bench/median.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

enum { ROUNDS = 4000 };

static void every_job_has_one_turn_in_a_round(void **state)
{
    (void)state;
    for (int count = 1; count <= TURNS_MOST; count++)
        for (int round = 0; round < 6; round++) {
            int seen[TURNS_MOST] = {0};
            for (int i = 0; i < count; i++) {
                const int job = turn_of(7, round, i, count);
                assert_in_range(job, 0, count - 1);
                assert_int_equal(seen[job]++, 0);
            }
        }
}

static void the_second_of_two_rounds_is_reversed(void **state)
{
    (void)state;
    for (int round = 0; round < 40; round += 2)
        for (int i = 0; i < 9; i++)
            assert_int_equal(turn_of(3, round, i, 9), turn_of(3, round + 1, 8 - i, 9));
}

/* Of 4 jobs each begins a quarter of the rounds, and follows each of the others in a quarter. */
static void every_job_follows_every_other_as_often(void **state)
{
    enum { COUNT = 4 };
    (void)state;
    int follows[COUNT][COUNT] = {{0}}, first[COUNT] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        first[turn_of(1, round, 0, COUNT)]++;
        for (int i = 1; i < COUNT; i++)
            follows[turn_of(1, round, i, COUNT)][turn_of(1, round, i - 1, COUNT)]++;
    }
    for (int job = 0; job < COUNT; job++) {
        assert_in_range(first[job], ROUNDS / 4 - 150, ROUNDS / 4 + 150);
        for (int before = 0; before < COUNT; before++)
            if (job != before) assert_in_range(follows[job][before], ROUNDS / 4 - 150, ROUNDS / 4 + 150);
    }
}

static void seeds_and_rounds_give_other_orders(void **state)
{
    (void)state;
    int equal_seeds = 0, equal_rounds = 0;
    for (int round = 0; round < 200; round += 2) {
        int seeds = 0, rounds = 0;
        for (int i = 0; i < 8; i++) {
            seeds += turn_of(1, round, i, 8) == turn_of(2, round, i, 8);
            rounds += turn_of(1, round, i, 8) == turn_of(1, round + 2, i, 8);
        }
        equal_seeds += seeds == 8, equal_rounds += rounds == 8;
    }
    assert_in_range(equal_seeds, 0, 1);
    assert_in_range(equal_rounds, 0, 1);
}

/* The quartiles of 1 to 7 are 2 and 6, as Python's statistics.quantiles says. */
static void medians_and_errors_are_those_of_quartiles(void **state)
{
    (void)state;
    double seven[] = {7, 1, 4, 2, 6, 3, 5}, disturbed[] = {7e9, 1, 4, 2, 6, 3, 5}, four[] = {4, 1, 3, 2},
           one[] = {5};
    const middle m = middle_of(seven, 7), d = middle_of(disturbed, 7);
    assert_true(m.median == 4);
    assert_true(fabs(m.error - 1.2533 / 1.349 * 4 / sqrt(7)) < 1e-12);
    assert_true(d.median == m.median && d.error == m.error);
    const middle f = middle_of(four, 4);
    assert_true(f.median == 2.5);
    assert_true(fabs(f.error - 1.2533 / 1.349 * 2.5 / 2) < 1e-12);
    assert_true(middle_of(one, 1).median == 5);
    assert_true(isnan(middle_of(one, 1).error));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_job_has_one_turn_in_a_round),
        cmocka_unit_test(the_second_of_two_rounds_is_reversed),
        cmocka_unit_test(every_job_follows_every_other_as_often),
        cmocka_unit_test(seeds_and_rounds_give_other_orders),
        cmocka_unit_test(medians_and_errors_are_those_of_quartiles),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
