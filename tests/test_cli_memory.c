/* Commands that compute with OpenBLAS, with less and less address space. OpenBLAS tries forever to allocate a
 * buffer that does not fit, so each command must end: with its result, or with exit status 3 and a message.
 */
#define _DEFAULT_SOURCE
#include "tests/cli_case.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1 /* sanitizers need much address space */
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

enum { LEAST_MIB = 200, MOST_MIB = 1000, STEP_MIB = 100 };

static void expect_end(void **state, const char *arguments)
{
    static char output[OUTPUT_BYTES];
    int ended_well = 0;
    for (int mib = LEAST_MIB; mib <= MOST_MIB; mib += STEP_MIB) {
        char prefix[256];
        snprintf(prefix, sizeof prefix,
                 "rm -rf out; unset OPENBLAS_NUM_THREADS; export OMP_NUM_THREADS=2; ulimit -v %d; timeout -s "
                 "KILL 60",
                 mib << 10);
        const int status = run(state, prefix, arguments, output);
        if (status != 0 && (status != 3 || !*output))
            fail_msg("smoe %s in %d MiB: exit status %d, '%s'", arguments, mib, status, output);
        ended_well += status == 0;
    }
    if (ended_well == 0) fail_msg("smoe %s: never enough memory, '%s'", arguments, output);
}

static void training_ends_without_memory(void **state)
{
    if (SANITIZED) skip();
    put_texts(state);
    expect_end(state, "train " TINY "--device cpu --steps 1 --out out text.txt");
}

/* A model without experts has no context of the library. */
static void training_a_dense_model_ends_without_memory(void **state)
{
    if (SANITIZED) skip();
    put_texts(state);
    expect_end(state, "train " TINY "--device cpu --steps 1 --dense-twin --out out text.txt");
}

static void generate_ends_without_memory(void **state)
{
    if (SANITIZED) skip();
    put_texts(state);
    expect(state, "train " TINY "--device cpu --steps 1 --out run text.txt", 0, "");
    expect_end(state, "generate --device cpu -c run/latest --prompt a --tokens 4");
}

/* The yardstick uses OpenBLAS's own threads. */
static void bench_ends_without_memory(void **state)
{
    if (SANITIZED) skip();
    expect_end(state, "bench --device cpu --thiek 32,16,8,4,2 --repeats 1");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(training_ends_without_memory, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(training_a_dense_model_ends_without_memory, folder_setup,
                                        folder_teardown),
        cmocka_unit_test_setup_teardown(generate_ends_without_memory, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(bench_ends_without_memory, folder_setup, folder_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
