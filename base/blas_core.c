/* See blas_core.h. */
#include "base/blas_core.h"

#include <cblas.h>
#include <stddef.h>
#include <string.h>

const char *blas_core(void)
{
    return openblas_get_corename();
}

#define FAULT(cure)                                                                                          \
    "OpenBLAS does not know this processor and computes at half its speed or less; set "                     \
    "OPENBLAS_CORETYPE=" cure " or install a newer OpenBLAS"

const char *blas_core_judge(const char *core, int avx2, int avx512)
{
    /* OpenBLAS's x86 cores that have no kernels for AVX2 */
    static const char *const old[] = {"Katmai", "Coppermine", "Northwood",  "Prescott",     "Banias",
                                      "Core2",  "Penryn",     "Dunnington", "Nehalem",      "Sandybridge",
                                      "Atom",   "Athlon",     "Opteron",    "Opteron_SSE3", "Barcelona",
                                      "Bobcat", "Bulldozer",  "Piledriver", "Nano",         "Generic"};
    for (size_t i = 0; i < sizeof old / sizeof old[0]; i++)
        if (avx2 && strcmp(core, old[i]) == 0) return avx512 ? FAULT("SkylakeX") : FAULT("Haswell");
    return NULL;
}

const char *blas_core_fault(void)
{
#if defined(__x86_64__)
    return blas_core_judge(blas_core(), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
                           __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"));
#else
    return NULL;
#endif
}
