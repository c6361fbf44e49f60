/* --kernels of the commands that run a layer. */
#ifndef CLI_SUPPORT_KERNELS_H
#define CLI_SUPPORT_KERNELS_H

#include "src/cuda/host/test_options.h"

#include <smoe.h>
#include <stdbool.h>
#include <string.h>

#define KERNELS_HELP                                                                                         \
    "cuda: best (default), the kernels for this GPU's generation, or portable, those for every GPU from "    \
    "8.0 on"

/* `text` as given to --kernels. false: it is no name. portable-99k is for tests (test_options.h). */
static inline bool parse_kernels(const char *text, smoe_kernels *kernels)
{
    static const struct {
        const char *name;
        int kernels;
    } names[] = {{"best", SMOE_KERNELS_BEST},
                 {"portable", SMOE_KERNELS_PORTABLE},
                 {"portable-99k", MOE_KERNELS_PORTABLE_99K}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(text, names[i].name) == 0) {
            *kernels = (smoe_kernels)names[i].kernels;
            return true;
        }
    return false;
}

#endif
