/* Which of OpenBLAS's cores are a fault on which processor. tests/test_cli_bench.c runs the program with a
 * slow one. */
#include "base/blas_core.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void an_old_core_on_a_new_processor_is_a_fault(void **state)
{
    (void)state;
    assert_non_null(strstr(blas_core_judge("Prescott", 1, 0), "OPENBLAS_CORETYPE=Haswell"));
    assert_non_null(strstr(blas_core_judge("Prescott", 1, 1), "OPENBLAS_CORETYPE=SkylakeX"));
    assert_non_null(blas_core_judge("Sandybridge", 1, 0));
}

static void an_old_core_on_an_old_processor_is_right(void **state)
{
    (void)state;
    assert_null(blas_core_judge("Prescott", 0, 0));
    assert_null(blas_core_judge("Sandybridge", 0, 0));
}

static void a_new_core_is_right(void **state)
{
    (void)state;
    static const char *const cores[] = {"Haswell",        "Zen",      "SkylakeX", "Cooperlake",
                                        "SapphireRapids", "Excavator"};
    for (size_t i = 0; i < sizeof cores / sizeof cores[0]; i++) assert_null(blas_core_judge(cores[i], 1, 1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_old_core_on_a_new_processor_is_a_fault),
        cmocka_unit_test(an_old_core_on_an_old_processor_is_right),
        cmocka_unit_test(a_new_core_is_right),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
