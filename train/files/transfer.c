/* See transfer.h. */
#include "train/files/transfer.h"

bool transfer_open(transfer *s, train_device *device, error *err)
{
    *s = (transfer){device, device->ops->allocate_host(device, TRANSFER_BYTES)};
    return s->buffer ||
           fail(err, ERROR_RUNTIME, "out of memory: a buffer of %d MB on the host", TRANSFER_BYTES / 1000000);
}

void transfer_close(transfer *s)
{
    if (s->buffer) s->device->ops->release_host(s->device, s->buffer);
    *s = (transfer){0};
}

const void *transfer_read(transfer *s, const void *from, size_t bytes, error *err)
{
    if (s->device->backend == SMOE_BACKEND_CPU) return from;
    s->device->ops->download(s->device, s->buffer, from, bytes);
    return s->device->ops->finish(s->device, err) ? s->buffer : NULL;
}

bool transfer_write(transfer *s, void *to, smoe_type type, float *master, const safetensors *file,
                    const tensor *t, int64_t first, int64_t count, error *err)
{
    const train_ops *ops = s->device->ops;
    const int64_t most = TRANSFER_BYTES / sizeof(float);
    for (int64_t done = 0; done < count; done += most) {
        const int64_t part = count - done < most ? count - done : most;
        tensor_read_part(t, first + done, part, s->buffer);
        safetensors_forget(file, t, first + done, part);
        if (to) ops->store(s->device, (char *)to + (size_t)done * type_size(type), type, s->buffer, part);
        if (master) ops->store(s->device, master + done, SMOE_TYPE_F32, s->buffer, part);
        if (!ops->finish(s->device, err)) return false; // the device is done with the buffer
    }
    return true;
}
