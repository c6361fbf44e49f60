/* The sgemm wrapper with small integers, whose results are exact: every transposition, strides larger than
 * the rows, and a poisoned C if beta is 0. Also the guard that sets OpenBLAS's number of threads. */
#include "cpu/blas.h"

#include <math.h>
#include <omp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Declared here, because cblas.h is a private dependency of the library. */
void openblas_set_num_threads(int threads);
int openblas_get_num_threads(void);

static float *matrix(int64_t rows, int64_t stride, int seed)
{
    float *m = malloc((size_t)(rows * stride) * sizeof *m);
    assert_non_null(m);
    for (int64_t i = 0; i < rows * stride; i++) m[i] = (float)((i * 7 + seed) % 11 - 5);
    return m;
}

/* The strides are 3 more than the widths; the elements between the rows must not change. */
static void check_product(int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k, float beta)
{
    const int64_t lda = (transpose_a ? m : k) + 3, ldb = (transpose_b ? k : n) + 3, ldc = n + 3;
    float *a = matrix(transpose_a ? k : m, lda, 1), *b = matrix(transpose_b ? n : k, ldb, 2);
    float *c = matrix(m, ldc, 3), *before = matrix(m, ldc, 3);
    for (int64_t i = 0; i < m && beta == 0.0f; i++)
        for (int64_t j = 0; j < n; j++) c[i * ldc + j] = NAN;
    moe_sgemm(transpose_a, transpose_b, m, n, k, a, lda, b, ldb, beta, c, ldc);
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < ldc; j++) {
            float sum = j < n ? beta * before[i * ldc + j] : before[i * ldc + j];
            for (int64_t l = 0; l < k && j < n; l++)
                sum += (transpose_a ? a[l * lda + i] : a[i * lda + l]) *
                       (transpose_b ? b[j * ldb + l] : b[l * ldb + j]);
            assert_true(c[i * ldc + j] == sum);
        }
    }
    free(a), free(b), free(c), free(before);
}

static void products_are_exact(void **state)
{
    (void)state;
    static const int64_t sizes[][3] = {{1, 1, 1},      {5, 8, 3}, {64, 64, 200},
                                       {130, 72, 130}, {7, 9, 0}, {0, 4, 4}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (int kind = 0; kind < 8; kind++)
            check_product(kind & 1, kind >> 1 & 1, sizes[i][0], sizes[i][1], sizes[i][2], (float)(kind >> 2));
}

/* Nested guarded sections on several threads: inside, OpenBLAS must use one thread; after the last section it
 * must have its old number of threads. */
static void a_guard_keeps_the_number_of_threads(void **state)
{
    (void)state;
    openblas_set_num_threads(3);
    assert_int_equal(openblas_get_num_threads(), 3);
    moe_blas_enter();
    assert_int_equal(openblas_get_num_threads(), 1);
    int wrong = 0;
#pragma omp parallel for num_threads(4) reduction(+ : wrong)
    for (int i = 0; i < 200; i++) {
        moe_blas_enter();
        wrong += openblas_get_num_threads() != 1;
        moe_blas_leave();
    }
    assert_int_equal(wrong, 0);
    assert_int_equal(openblas_get_num_threads(), 1);
    moe_blas_leave();
    assert_int_equal(openblas_get_num_threads(), 3);
}

/* The application sets a number of threads while a section is open. It must have this number after the last
 * section, and a section that begins later must still compute with one thread. */
static void the_applications_number_of_threads_stays(void **state)
{
    (void)state;
    openblas_set_num_threads(3);
    moe_blas_enter();
    openblas_set_num_threads(2);
    moe_blas_leave();
    assert_int_equal(openblas_get_num_threads(), 2);
    moe_blas_enter();
    openblas_set_num_threads(4);
    moe_blas_enter();
    assert_int_equal(openblas_get_num_threads(), 1);
    moe_blas_leave();
    moe_blas_leave();
    assert_int_equal(openblas_get_num_threads(), 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(products_are_exact),
                                       cmocka_unit_test(a_guard_keeps_the_number_of_threads),
                                       cmocka_unit_test(the_applications_number_of_threads_stays)};
    return cmocka_run_group_tests_name("blas", tests, NULL, NULL);
}
