/* Buffers with canaries. */
#include "harness/buffer.h"

#include <string.h>

enum { CANARY_BYTES = 1024, CANARY = 0xA5 };
_Static_assert(CANARY_BYTES % DEVICE_ALIGN == 0, "the data between the canaries keeps the alignment");

bool buffer_make(buffer *made, const device *on, size_t bytes)
{
    *made = (buffer){0};
    char *base = on->alloc(bytes + 2 * (size_t)CANARY_BYTES);
    if (!base) return false;
    *made = (buffer){on, base, base + CANARY_BYTES, bytes};
    if (on->set(base, CANARY, CANARY_BYTES) && on->set(base + CANARY_BYTES + bytes, CANARY, CANARY_BYTES) &&
        buffer_poison(made))
        return true;
    buffer_free(made);
    return false;
}

void buffer_free(buffer *freed)
{
    if (freed->device) freed->device->release(freed->base);
    *freed = (buffer){0};
}

bool buffer_poison(const buffer *poisoned)
{
    return poisoned->device->set(poisoned->data, BUFFER_POISON, poisoned->bytes);
}

bool buffer_write(const buffer *to, const void *from_host, size_t bytes)
{
    return bytes <= to->bytes && to->device->upload(to->data, from_host, bytes);
}

bool buffer_read(void *to_host, const buffer *from, size_t bytes)
{
    return bytes <= from->bytes && from->device->download(to_host, from->data, bytes);
}

static bool canary_intact(const device *on, const char *at)
{
    unsigned char seen[CANARY_BYTES], want[CANARY_BYTES];
    memset(want, CANARY, sizeof want);
    return on->download(seen, at, sizeof seen) && memcmp(seen, want, sizeof seen) == 0;
}

bool buffer_intact(const buffer *checked)
{
    if (!checked->device) return true;
    return canary_intact(checked->device, checked->base) &&
           canary_intact(checked->device, checked->base + CANARY_BYTES + checked->bytes);
}
