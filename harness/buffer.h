/* Buffers on a device with a canary on either side, which shows if the library writes past the end or before
 * the start. They are first filled with BUFFER_POISON. */
#ifndef HARNESS_BUFFER_H
#define HARNESS_BUFFER_H

#include "harness/device.h"

enum { BUFFER_POISON = 0xFF }; /* a byte: NaN as f32, bf16 and f16, -1 as an integer */

typedef struct buffer {
    const device *device;
    char *base; /* canary, data, canary */
    void *data; /* aligned to DEVICE_ALIGN; what the library is given */
    size_t bytes;
} buffer;

/* False when there is no memory; *made is then all zero. A buffer that is all zero may be freed. */
bool buffer_make(buffer *made, const device *on, size_t bytes);
void buffer_free(buffer *freed);

/* Fills the buffer with BUFFER_POISON again. */
bool buffer_poison(const buffer *poisoned);

bool buffer_write(const buffer *to, const void *from_host, size_t bytes);
bool buffer_read(void *to_host, const buffer *from, size_t bytes);

/* Are both canaries as they were left? */
bool buffer_intact(const buffer *checked);

#endif
