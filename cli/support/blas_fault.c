/* The message about slow kernels of OpenBLAS. */
#include "base/blas_core.h"
#include "cli/support/cli.h"

#include <stdio.h>

void cli_show_blas_fault(void)
{
    const char *fault = blas_core_fault();
    if (fault) fprintf(stderr, "smoe: slow kernels (%s): %s\n", blas_core(), fault);
}
