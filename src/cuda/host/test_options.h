/* A value of smoe_context_options.kernels that is for tests: the portable kernels with no more shared memory
 * than the GPUs of 8.6, 8.9 and 12.x have, on a GPU with more. */
#ifndef MOE_CUDA_TEST_OPTIONS_H
#define MOE_CUDA_TEST_OPTIONS_H

enum { MOE_KERNELS_PORTABLE_99K = 99, MOE_SHARED_99K = 99 * 1024 };

#endif
