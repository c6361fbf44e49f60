/* See fit.h. */
#include "train/run/fit.h"

#include "train/run/optimizer.h"
#include "train/run/step.h"

/* The share of the free memory that is left to what the GPU's libraries allocate during the run: 1 / RESERVE.
 */
enum { RESERVE = 64 };

/* In the order of the time that they cost. */
static const struct {
    model_recompute recompute;
    int32_t chunks;
} choices[] = {{RECOMPUTE_NORMS, 1}, {RECOMPUTE_NORMS, 4}, {RECOMPUTE_NORMS_QK, 4}, {RECOMPUTE_LAYERS, 4}};
enum { CHOICES = sizeof choices / sizeof *choices };

static bool measured_bytes(size_t *bytes, model *m, const model_options *options, bool clips, error *err)
{
    shards sh;
    *bytes = model_bytes_sum(&m->bytes);
    if (!options->sharded) {
        *bytes += optimizer_bytes(m, NULL);
        return true;
    }
    if (!shards_create(&sh, &m->weights, options->rank, options->ranks ? options->ranks : 1, err))
        return false;
    *bytes += optimizer_bytes(m, &sh) + step_bytes(m, &sh, clips);
    shards_destroy(&sh);
    return true;
}

bool fit_bytes(size_t *bytes, train_device *device, const model_config *config, const model_options *options,
               bool clips, error *err)
{
    model m = {0};
    const bool done =
        model_measure(&m, device, config, options, err) && measured_bytes(bytes, &m, options, clips, err);
    model_destroy(&m);
    return done;
}

/* The least number of micro-batches with which the run takes at most `most` bytes; 0: there is none. */
static int64_t parts_that_fit(const model_options *options, train_device *device,
                              const train_settings *settings, size_t most)
{
    const int64_t rows = options->sequences * options->parts;
    const device_options counting = {
        .name = "cuda-plain", .bf16 = settings->device.bf16, .index = settings->device.index, .sums = true};
    error ignored = {0};
    train_device *own = device->grad_type == SMOE_TYPE_F32 ? NULL : device_open(&counting, &ignored);
    int64_t found = 0;
    for (int64_t parts = options->parts + 1; parts <= rows && !found; parts++) {
        size_t bytes = 0;
        model_options fewer = *options;
        if (rows % parts) continue;
        fewer.parts = parts, fewer.sequences = rows / parts;
        fewer.one_layer = step_takes_layers(settings->clip, parts);
        if (!fit_bytes(&bytes, own ? own : device, &settings->config, &fewer, settings->clip != 0.0,
                       &ignored))
            break;
        if (bytes <= most) found = parts;
    }
    if (own) own->ops->close(own);
    return found;
}

static bool refuse(const model_options *options, train_device *device, const train_settings *settings,
                   size_t bytes, size_t available, error *err)
{
    const int64_t parts = parts_that_fit(options, device, settings, available - available / RESERVE);
    char way_out[96] = "with no number of --micro-batches it fits";
    if (parts) snprintf(way_out, sizeof way_out, "with --micro-batches %lld it fits", (long long)parts);
    return fail(err, ERROR_RUNTIME,
                "out of memory: with --recompute %s and --chunks %d the run takes %.2f GB, the device has "
                "%.2f GB left; %s%s",
                model_recompute_names[options->recompute], (int)options->chunks, (double)bytes / 1e9,
                (double)available / 1e9, way_out,
                device->master ? " (--precision bf16 takes less, too)" : "");
}

/* At least what is set: a run with --recompute layers as its setting never keeps more. */
static void take(model_options *options, const train_settings *settings, int choice)
{
    if (!settings->keep_recompute && choices[choice].recompute > options->recompute)
        options->recompute = choices[choice].recompute;
    if (!settings->keep_chunks && choices[choice].chunks > options->chunks)
        options->chunks = choices[choice].chunks;
}

/* Takes the last of the ranks' choices. */
static bool agree(model_options *options, const train_settings *settings, int choice, train_comm *comm,
                  error *err)
{
    double ranks[CHOICES] = {[0] = 0.0}; // with each choice
    train_device *device = comm->device;
    double *scratch = device->ops->allocate(device, sizeof ranks);
    if (!scratch) return fail(err, ERROR_RUNTIME, "out of memory: %zu bytes", sizeof ranks);
    ranks[choice] = 1.0;
    const bool done = comm_sum(comm, scratch, ranks, CHOICES, err);
    device->ops->release(device, scratch);
    for (int i = choice; i < CHOICES; i++)
        if (ranks[i] > 0.0) take(options, settings, i);
    return done;
}

bool fit_choose(model_options *options, train_device *device, const train_settings *settings,
                train_comm *comm, error *err)
{
    const size_t available = device->ops->available(device);
    size_t bytes = 0;
    if (!available) return true;
    int choice = 0;
    for (;; choice++) {
        take(options, settings, choice);
        if (!fit_bytes(&bytes, device, &settings->config, options, settings->clip != 0.0, err)) return false;
        if (bytes <= available - available / RESERVE || choice + 1 == CHOICES) break;
    }
    if (bytes > available) return refuse(options, device, settings, bytes, available, err);
    return !comm || agree(options, settings, choice, comm, err);
}
