/* `smoe bench --device cuda` on the emulator. Every launch takes 60 ms there, so all times are known. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RECORDS = 64, LINE_BYTES = 4096, LAUNCH_MS = 60 };

typedef struct records {
    json_t *all[MOST_RECORDS];
    int count;
} records;

static records bench(const char *arguments)
{
    char command[1024], *line = malloc(LINE_BYTES);
    records r = {.count = 0};
    snprintf(command, sizeof command, "'%s' bench --device cuda --thiek 96,128,32,4,2 --repeats 1 --json %s",
             SMOE_PROGRAM, arguments);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    assert_non_null(line);
    while (fgets(line, LINE_BYTES, pipe)) {
        assert_true(r.count < MOST_RECORDS);
        assert_non_null(r.all[r.count++] = json_loads(line, JSON_REJECT_DUPLICATES, NULL));
    }
    assert_int_equal(pclose(pipe), 0);
    free(line);
    return r;
}

static void free_records(records *r)
{
    for (int i = 0; i < r->count; i++) json_decref(r->all[i]);
}

static double number_of(const json_t *record, const char *name)
{
    const json_t *value = json_object_get(record, name);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static int is(const json_t *record, const char *pass, const char *kernel)
{
    return strcmp(json_string_value(json_object_get(record, "pass")), pass) == 0 &&
           strcmp(json_string_value(json_object_get(record, "kernel")), kernel) == 0;
}

/* The one record of this pass and kernel. */
static const json_t *record_of(const records *r, const char *pass, const char *kernel)
{
    const json_t *found = NULL;
    for (int i = 0; i < r->count; i++) {
        if (!is(r->all[i], pass, kernel)) continue;
        assert_null(found);
        found = r->all[i];
    }
    if (!found) fail_msg("no record of %s %s", pass, kernel);
    return found;
}

/* Checks that a record has so many launches and that its times are their sum. */
static void check_launches(const json_t *record, int launches, int alone)
{
    const double ms = launches * LAUNCH_MS;
    assert_true(number_of(record, "launches") == launches);
    assert_true(number_of(record, "ms_min") == ms && number_of(record, "ms_median") == ms &&
                number_of(record, "ms_p99") == ms);
    if (alone) assert_true(number_of(record, "alone_ms") == ms);
}

static void check_memory(const json_t *all)
{
    assert_true(number_of(all, "peak_bytes") > 0);
    assert_true(number_of(all, "peak_bytes") <= number_of(all, "predicted_bytes"));
    assert_true(number_of(all, "max_rel_err") < 5e-3);
}

/* Forward and backward of the experts: times of stages, of passes, and of each stage alone (--alone). The
 * tokens are so few that they are one segment, so the plan is one launch. */
static void stages_of_the_experts_have_their_times(void **state)
{
    static const struct {
        const char *pass, *kernel;
        int launches;
    } expected[] = {{"forward", "plan", 1},    {"forward", "up", 1},       {"forward", "down", 1},
                    {"forward", "combine", 1}, {"forward", "all", 4},      {"backward", "dh", 3},
                    {"backward", "dw2", 1},    {"backward", "dx_rows", 1}, {"backward", "dw1", 1},
                    {"backward", "dx", 1},     {"backward", "all", 7},     {"layer", "all", 11}};
    (void)state;
    records r = bench("--scope experts --no-bound --alone");
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++)
        check_launches(record_of(&r, expected[i].pass, expected[i].kernel), expected[i].launches, 1);
    check_memory(record_of(&r, "forward", "all"));
    check_memory(record_of(&r, "backward", "all"));
    assert_true(number_of(record_of(&r, "layer", "all"), "host_ms") > 0);
    assert_true(isnan(number_of(record_of(&r, "forward", "up"), "host_ms")));
    assert_true(isnan(number_of(record_of(&r, "forward", "up"), "bound_ms")));
    free_records(&r);
}

/* With two column chunks down and combine run twice, and the peak of memory is lower. */
static void chunks_run_stages_twice_in_less_memory(void **state)
{
    (void)state;
    records r = bench("--pass forward --scope experts --dtype fp16 --no-bound --chunks 1,2");
    const json_t *whole = NULL, *half = NULL;
    for (int i = 0; i < r.count; i++) {
        if (!is(r.all[i], "forward", "all")) continue;
        if (number_of(r.all[i], "chunks") == 1) whole = r.all[i];
        if (number_of(r.all[i], "chunks") == 2) half = r.all[i];
    }
    assert_non_null(whole);
    assert_non_null(half);
    check_launches(whole, 4, 0);
    check_launches(half, 6, 0);
    assert_true(number_of(half, "peak_bytes") < number_of(whole, "peak_bytes"));
    free_records(&r);
}

/* The whole layer with rounding, and the reference (bound_ms): one GEMM for a stage. */
static void the_whole_layer_has_its_bounds(void **state)
{
    (void)state;
    records r = bench("--pass forward --rounding nr-f --tile 32 --logits bf16");
    check_launches(record_of(&r, "forward", "router_gemm"), 1, 0);
    check_launches(record_of(&r, "forward", "round"), 1, 0);
    check_launches(record_of(&r, "forward", "all"), 9, 0);
    check_memory(record_of(&r, "forward", "all"));
    /* cuBLAS multiplies a whole number of rows for each expert; the time is scaled to the actual rows */
    const double bound = number_of(record_of(&r, "forward", "up"), "bound_ms");
    assert_true(bound >= LAUNCH_MS && bound < 2 * LAUNCH_MS);
    free_records(&r);
}

/* Only the combine has the time of a copy of as many bytes (alone_copy_ms), which is that of one launch. */
static void only_the_combine_has_a_copy(void **state)
{
    (void)state;
    records r = bench("--pass forward --scope experts --alone");
    assert_true(number_of(record_of(&r, "forward", "combine"), "alone_copy_ms") == LAUNCH_MS);
    assert_true(isnan(number_of(record_of(&r, "forward", "up"), "alone_copy_ms")));
    assert_true(isnan(number_of(record_of(&r, "forward", "all"), "alone_copy_ms")));
    free_records(&r);
}

/* fp8: up quantises X too, and the kernels of weights_f8 are in no pass. */
static void fp8_has_its_times(void **state)
{
    (void)state;
    records r = bench("--pass forward --scope experts --no-bound --compute f8");
    const json_t *weights = record_of(&r, "layer", "weights_f8");
    const double ms = number_of(weights, "ms_median");
    assert_true(ms >= LAUNCH_MS && fmod(ms, LAUNCH_MS) == 0 && isnan(number_of(weights, "launches")));
    check_launches(record_of(&r, "forward", "up"), 2, 0);
    check_launches(record_of(&r, "forward", "all"), 5, 0);
    check_launches(record_of(&r, "forward", "down"), 1, 0);
    assert_true(number_of(record_of(&r, "forward", "all"), "max_rel_err") > 0.01);
    free_records(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_of_the_experts_have_their_times),
        cmocka_unit_test(chunks_run_stages_twice_in_less_memory),
        cmocka_unit_test(the_whole_layer_has_its_bounds),
        cmocka_unit_test(only_the_combine_has_a_copy),
        cmocka_unit_test(fp8_has_its_times),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
