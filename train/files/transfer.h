/* Copies arrays of a device to files and back through a buffer on the host, so that the host never holds a
 * whole array.
 */
#ifndef TRAIN_TRANSFER_H
#define TRAIN_TRANSFER_H

#include "train/files/safetensors.h"
#include "train/ops.h"

enum { TRANSFER_BYTES = 16 << 20 };

typedef struct transfer {
    train_device *device;
    void *buffer; // TRANSFER_BYTES, the device's allocate_host
} transfer;

bool transfer_open(transfer *s, train_device *device, error *err);
void transfer_close(transfer *s); // a zeroed one is fine

/* Returns at most TRANSFER_BYTES of the device's memory from `from` on; on the CPU without a copy. They are
 * valid until the next call. NULL and *err: the device failed. */
const void *transfer_read(transfer *s, const void *from, size_t bytes, error *err);

/* Copies elements [first, first + count) of a file's tensor, which tensor_is_real has accepted, to `to`
 * (type) and to `master`, either of which may be NULL. */
bool transfer_write(transfer *s, void *to, smoe_type type, float *master, const safetensors *file,
                    const tensor *t, int64_t first, int64_t count, error *err);

#endif
