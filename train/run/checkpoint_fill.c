/* See checkpoint_fill.h. */
#include "train/run/checkpoint_fill.h"

#include "train/files/file.h"
#include "train/files/safetensors_patch.h"
#include "train/files/transfer.h"
#include "train/run/shards.h"

/* Copies `bytes` of the device's memory to a tensor, from its byte `at` on. */
static bool fill_bytes(safetensors_patch *patch, transfer *pieces, const char *name, size_t at,
                       const void *from, size_t bytes, error *err)
{
    for (size_t done = 0; done < bytes; done += TRANSFER_BYTES) {
        const size_t size = bytes - done < TRANSFER_BYTES ? bytes - done : TRANSFER_BYTES;
        const void *piece = transfer_read(pieces, (const char *)from + done, size, err);
        if (!piece || !safetensors_patch_write(patch, name, at + done, piece, size, err)) return false;
    }
    return true;
}

/* The runs of weights [begin, end), which are tensor `name`. `states`: `from` has the states alone, else all.
 */
static bool fill_runs(safetensors_patch *patch, transfer *pieces, const char *name,
                      const adamw_arrays *arrays, int64_t begin, int64_t end, const void *from,
                      smoe_type type, bool states, error *err)
{
    const size_t size = type_size(type);
    state_run run;
    for (int64_t at = begin; state_run_next(arrays, at, end, &run); at = run.first + run.count) {
        const char *data = (const char *)from + (size_t)(states ? run.state : run.first) * size;
        if (!run.copy && !fill_bytes(patch, pieces, name, (size_t)(run.first - begin) * size, data,
                                     (size_t)run.count * size, err))
            return false;
    }
    return true;
}

static bool fill_weights(safetensors_patch *patch, transfer *pieces, const model *m,
                         const adamw_arrays *arrays, bool first, error *err)
{
    const param_layout *layout = &m->weights.layout;
    const bool master = arrays->master != NULL;
    param_tensor t;
    for (size_t i = 0; i < layout->tensor_count; i++) {
        const param_tensor *p = &layout->tensors[i];
        if (!fill_runs(patch, pieces, p->name, arrays, (int64_t)p->offset, (int64_t)(p->offset + p->count),
                       master ? (const void *)arrays->master : m->weights.params,
                       master ? SMOE_TYPE_F32 : m->device->type, master, err))
            return false;
    }
    for (int64_t l = 0; first && l < m->config.layers; l++) {
        const float *bias = model_bias(m, l, &t);
        if (bias && !fill_bytes(patch, pieces, t.name, 0, bias, t.count * sizeof *bias, err)) return false;
    }
    return true;
}

static bool fill_moments(safetensors_patch *patch, transfer *pieces, const model *m,
                         const adamw_arrays *arrays, error *err)
{
    const int64_t total = (int64_t)m->weights.layout.total;
    const smoe_type type = arrays->state_type;
    return fill_runs(patch, pieces, "adamw.first", arrays, 0, total, arrays->first, type, true, err) &&
           fill_runs(patch, pieces, "adamw.second", arrays, 0, total, arrays->second, type, true, err);
}

static bool fill_file(const char *folder, const char *name, const model *m, const adamw_arrays *arrays,
                      bool weights, bool first, error *err)
{
    char path[FILE_PATH_BYTES];
    safetensors_patch *patch;
    transfer pieces = {0};
    if (!file_join(path, folder, name, err) || !safetensors_patch_open(&patch, path, err)) return false;
    const bool done = transfer_open(&pieces, m->device, err) &&
                      (weights ? fill_weights(patch, &pieces, m, arrays, first, err)
                               : fill_moments(patch, &pieces, m, arrays, err));
    transfer_close(&pieces);
    if (done) return safetensors_patch_commit(&patch, err);
    safetensors_patch_abort(&patch);
    return false;
}

bool checkpoint_fill(const char *folder, const model *m, const adamw_arrays *arrays, bool first, error *err)
{
    return fill_file(folder, "model.safetensors", m, arrays, true, first, err) &&
           fill_file(folder, "state.safetensors", m, arrays, false, first, err);
}
