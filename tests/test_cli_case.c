/* The parts of `smoe bench`: it must make the named routing and inputs for which the library's router chooses
 * this routing. Its check must find a wrong result, peaks of memory and canaries must work, and a step must
 * allocate nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/bench/check.h"
#include "harness/check.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* ---- Counting the allocations of all statically linked code ----
 *
 * The linker replaces the library's calls of malloc by calls of these functions (--wrap,
 * tests/CMakeLists.txt). The calls of OpenBLAS, a shared library, are not replaced: its kernels for very
 * small matrices allocate and free a block. */

static atomic_int allocations;

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
int __real_posix_memalign(void **memory, size_t alignment, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
int __wrap_posix_memalign(void **memory, size_t alignment, size_t bytes);

void *__wrap_malloc(size_t bytes)
{
    atomic_fetch_add(&allocations, 1);
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    atomic_fetch_add(&allocations, 1);
    return __real_calloc(count, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes)
{
    atomic_fetch_add(&allocations, 1);
    return __real_realloc(memory, bytes);
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    atomic_fetch_add(&allocations, 1);
    return __real_aligned_alloc(alignment, bytes);
}

int __wrap_posix_memalign(void **memory, size_t alignment, size_t bytes)
{
    atomic_fetch_add(&allocations, 1);
    return __real_posix_memalign(memory, alignment, bytes);
}

/* ---- Routing ---- */

enum { T = 96, E = 16, K = 4 };

static void make_ids(routing_kind kind, int32_t *ids, int *counts)
{
    memset(ids, 0xFF, T * K * sizeof *ids);
    memset(counts, 0, E * sizeof *counts);
    assert_true(make_routing(kind, T, E, K, 5, ids));
    for (int t = 0; t < T; t++)
        for (int k = 0; k < K; k++) {
            const int32_t id = ids[t * K + k];
            assert_true(id >= 0 && id < E);
            counts[id]++;
            for (int other = 0; other < k; other++) assert_int_not_equal(ids[t * K + other], id);
        }
}

static void the_named_routing_is_made(void **state)
{
    (void)state;
    int32_t ids[T * K];
    int counts[E], least, most;
    make_ids(ROUTING_UNIFORM, ids, counts);
    for (int e = 0; e < E; e++) assert_int_equal(counts[e], T * K / E);
    make_ids(ROUTING_SKEWED, ids, counts);
    least = most = counts[0];
    for (int e = 1; e < E; e++) {
        if (counts[e] < least) least = counts[e];
        if (counts[e] > most) most = counts[e];
    }
    assert_true(most > 3 * least);
    make_ids(ROUTING_RANDOM, ids, counts);
    for (int e = 0; e < E; e++) assert_in_range(counts[e], 1, T / 2);
}

/* ---- A case ---- */

static void make_case_of(bench_case *c, bench_scope scope, smoe_entry entry, smoe_type dtype,
                         smoe_rounding rounding)
{
    problem_options options;
    problem_options_init(&options);
    options.dtype = dtype;
    options.rounding = rounding;
    options.tile = 16;
    options.routing = ROUTING_SKEWED;
    const bench_settings settings = {
        .device = device_find("cpu"), .scope = scope, .entry = entry, .backward = true, .threads = 2};
    const bench_shape shape = {"test", "small", T, 64, 24, E, K};
    error err = {0};
    if (!bench_case_make(c, &settings, &options, &shape, &err)) fail_msg("%s", err.text);
}

static void make_case(bench_case *c, bench_scope scope, smoe_type dtype, smoe_rounding rounding)
{
    make_case_of(c, scope, SMOE_ENTRY_FROM_TOPK, dtype, rounding);
}

static void step(bench_case *c)
{
    error err = {0};
    stage_clock_reset(&c->clock);
    if (!bench_prepare(c, &err) || !bench_forward(c, NULL, &err) || !bench_backward(c, NULL, &err))
        fail_msg("%s", err.text);
}

static int by_value(const void *a, const void *b)
{
    return *(const int32_t *)a - *(const int32_t *)b;
}

/* From the inputs, the library's router must choose the routing that was made. */
static void the_router_chooses_the_made_routing(void **state)
{
    (void)state;
    static const smoe_type dtypes[] = {SMOE_TYPE_F32, SMOE_TYPE_BF16};
    for (int i = 0; i < 2; i++) {
        bench_case c;
        make_case(&c, SCOPE_LAYER, dtypes[i], SMOE_ROUNDING_NONE);
        step(&c);
        int32_t want[T * K];
        assert_true(make_routing(ROUTING_SKEWED, T, E, K, 50, want));
        smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
        assert_int_equal(smoe_view_plan(c.run.context, &c.run.layer, &c.run.forward, &view), SMOE_OK);
        for (int t = 0; t < T; t++) {
            int32_t got[K];
            memcpy(got, view.topk_ids + t * K, sizeof got);
            qsort(got, K, sizeof *got, by_value);
            qsort(want + t * K, K, sizeof *want, by_value);
            assert_memory_equal(got, want + t * K, sizeof got);
        }
        bench_case_free(&c);
    }
}

static void the_check_sees_errors(void **state)
{
    (void)state;
    static const smoe_rounding roundings[] = {SMOE_ROUNDING_NONE, SMOE_ROUNDING_NR_F, SMOE_ROUNDING_UP,
                                              SMOE_ROUNDING_DOWN};
    for (int i = 0; i < 8; i++) {
        bench_case c;
        make_case(&c, i % 2 ? SCOPE_LAYER : SCOPE_EXPERTS, SMOE_TYPE_F32, roundings[i / 2]);
        step(&c);
        bench_errors errors;
        assert_true(bench_check(&c, &errors, NULL));
        assert_true(errors.forward > 0 && errors.forward < check_cap(&c.run.layer));
        assert_true(errors.backward > 0 && errors.backward < check_cap(&c.run.layer));
        ((float *)slot_data(&c.run, SLOT_OUT))[3] += 0.25f;
        ((float *)slot_data(&c.run, SLOT_DX))[5] += 0.25f;
        assert_true(bench_check(&c, &errors, NULL));
        assert_true(errors.forward > 1e-3);
        assert_true(errors.backward > 1e-3);
        ((float *)slot_data(&c.run, SLOT_OUT))[3] = NAN;
        assert_true(bench_check(&c, &errors, NULL));
        assert_false(errors.forward <= 1);
        bench_case_free(&c);
    }
}

/* Entries and types of --scope experts. The gradient of the routing must be written too. */
static void every_entry_and_type_runs(void **state)
{
    (void)state;
    static const smoe_type dtypes[] = {SMOE_TYPE_F32, SMOE_TYPE_BF16};
    static const smoe_entry entries[] = {SMOE_ENTRY_FROM_TOPK, SMOE_ENTRY_FROM_LOGITS};
    for (int i = 0; i < 4; i++) {
        bench_case c;
        bench_errors errors;
        make_case_of(&c, SCOPE_EXPERTS, entries[i / 2], dtypes[i % 2], SMOE_ROUNDING_NONE);
        assert_int_equal(c.run.layer.entry, entries[i / 2]);
        assert_int_equal(bench_prepared_apart(&c), i / 2);
        assert_true(bench_poison(&c, NULL));
        step(&c);
        assert_true(bench_check(&c, &errors, NULL));
        assert_true(errors.forward > 0 && errors.forward < check_cap(&c.run.layer));
        assert_true(errors.backward > 0 && errors.backward < check_cap(&c.run.layer));
        const buffer *back =
                         i / 2 ? slot_memory(&c.run, SLOT_DLOGITS) : slot_memory(&c.run, SLOT_DTOPK_WEIGHTS),
                     *other =
                         i / 2 ? slot_memory(&c.run, SLOT_DTOPK_WEIGHTS) : slot_memory(&c.run, SLOT_DLOGITS);
        assert_null(other->data);
        assert_int_equal(back->bytes, 4 * T * (i / 2 ? E : K));
        for (size_t j = 0; j < back->bytes / 4; j++) assert_false(isnan(((float *)back->data)[j]));
        bench_case_free(&c);
    }
}

static void the_last_written_byte_is_found(void **state)
{
    (void)state;
    bench_case c;
    make_case(&c, SCOPE_LAYER, SMOE_TYPE_F32, SMOE_ROUNDING_NONE);
    uint64_t bytes = 1;
    assert_true(bench_poison(&c, NULL));
    assert_true(bench_touched(slot_memory(&c.run, SLOT_SAVED), &bytes, NULL));
    assert_int_equal(bytes, 0);
    ((char *)slot_data(&c.run, SLOT_SAVED))[12345] = 0;
    assert_true(bench_touched(slot_memory(&c.run, SLOT_SAVED), &bytes, NULL));
    assert_int_equal(bytes, 12346);
    step(&c);
    assert_true(bench_touched(slot_memory(&c.run, SLOT_SAVED), &bytes, NULL));
    assert_true(bytes > c.run.sizes.saved_buffer_bytes / 2 && bytes <= c.run.sizes.saved_buffer_bytes);
    bench_case_free(&c);
}

static void canaries_see_writes(void **state)
{
    (void)state;
    bench_case c;
    make_case(&c, SCOPE_LAYER, SMOE_TYPE_F32, SMOE_ROUNDING_NONE);
    step(&c);
    error err = {0};
    assert_true(bench_canaries(&c, &err));
    ((char *)slot_data(&c.run, SLOT_SCRATCH_BACKWARD))[slot_memory(&c.run, SLOT_SCRATCH_BACKWARD)->bytes] ^=
        1;
    assert_false(bench_canaries(&c, &err));
    assert_int_equal(err.code, 1);
    assert_non_null(strstr(err.text, "scratch (backward)"));
    bench_case_free(&c);
}

static void a_step_allocates_nothing(void **state)
{
    (void)state;
    static const smoe_type dtypes[] = {SMOE_TYPE_F32, SMOE_TYPE_BF16};
    for (int i = 0; i < 4; i++) {
        bench_case c;
        make_case(&c, SCOPE_LAYER, dtypes[i % 2], i < 2 ? SMOE_ROUNDING_NONE : SMOE_ROUNDING_NR_S);
        step(&c);
        const int before = atomic_load(&allocations);
        step(&c);
        step(&c);
        assert_int_equal(atomic_load(&allocations), before);
        bench_case_free(&c);
        assert_true(before > 0); // the counting works: making the case has allocated memory
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_named_routing_is_made),
        cmocka_unit_test(the_router_chooses_the_made_routing),
        cmocka_unit_test(the_check_sees_errors),
        cmocka_unit_test(every_entry_and_type_runs),
        cmocka_unit_test(the_last_written_byte_is_found),
        cmocka_unit_test(canaries_see_writes),
        cmocka_unit_test(a_step_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
