/* The host: its processor's name, and how much memory it can still give. */
#ifndef HARNESS_HOST_H
#define HARNESS_HOST_H

#include <stddef.h>
#include <stdint.h>

/* The kernel's estimate of available memory, within the limit of the control group; UINT64_MAX if neither is
 * known. */
uint64_t host_available_bytes(void);

/* "AMD EPYC 9V74, 2 threads" */
void host_name(char *text, size_t size, int threads);

#endif
