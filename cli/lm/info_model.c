/* See info_model.h. */
#include "cli/lm/info_model.h"

#include "train/device.h"
#include "train/run/checkpoint.h"
#include "train/run/step.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { PATH_BYTES = 4096 };

static const table_column columns[] = {
    {"parameters", COLUMN_INTEGER, 0, false, NULL},
    {"active", COLUMN_INTEGER, 0, false, "parameters that a token uses"},
    {"batch", COLUMN_INTEGER, 0, false, "sequences of a step (--batch)"},
    {"micro_batches", COLUMN_INTEGER, 0, false, "passes of a step (--micro-batches)"},
    {"context", COLUMN_INTEGER, 0, false, "tokens of a sequence"},
    {"weights_bytes", COLUMN_BYTES, 0, false, "the weights that the passes read"},
    {"weights_f8_bytes", COLUMN_BYTES, 0, false, "the experts' weights in fp8 (--compute f8, f8-dgrad)"},
    {"gradients_bytes", COLUMN_BYTES, 0, false,
     "of all weights; with --clip 0 and one pass not those of the layers, which are in turns_bytes"},
    {"adamw_bytes", COLUMN_BYTES, 0, false,
     "AdamW's two moments; on a GPU with --precision f32 also the weights in f32"},
    {"layers_bytes", COLUMN_BYTES, 0, false,
     "what the layers keep from the forward to the backward (--recompute)"},
    {"turns_bytes", COLUMN_BYTES, 0, false,
     "memory that several parts use one after the other: logits, scratch and gradients of one layer"},
    {"rest_bytes", COLUMN_BYTES, 0, false, "tokens, the last norm and small values"},
    {"total_bytes", COLUMN_BYTES, 0, false, "the sum; on a GPU the driver and the libraries need more"},
};

/* After the others, with several GPUs. */
static const table_column shared_columns[] = {
    {"gpus", COLUMN_INTEGER, 0, false, "the bytes above are those of each"},
    {"sums_bytes", COLUMN_BYTES, 0, false,
     "of the total: this GPU's part of the summed gradients, and the others' that arrive before the sum"},
    {"least_bytes", COLUMN_BYTES, 0, false,
     "of the total: what more GPUs do not lower at as many sequences on each; if a GPU has less, "
     "--micro-batches or expert parallelism is needed"},
    {"sent_bytes", COLUMN_BYTES, 0, false, "that each GPU sends in a step"},
};

enum {
    COLUMNS = sizeof columns / sizeof columns[0],
    SHARED_COLUMNS = sizeof shared_columns / sizeof shared_columns[0]
};

/* A step reduces the gradients of each pass and gathers the new weights. */
static double sent_bytes(const model *m, const shards *sh)
{
    const double ranks = (double)sh->ranks, grad = (double)type_size(m->device->grad_type),
                 weight = (double)type_size(m->device->type);
    double sum = 0.0;
    for (int64_t i = 0; i < sh->count; i++)
        sum += (ranks - 1) * (double)sh->spans[i].part * ((double)m->parts * grad + weight) +
               2 * (ranks - 1) / ranks * (double)sh->spans[i].tail * (double)m->parts * grad;
    return sum;
}

static bool read_config(model_config *config, const char *path, error *err)
{
    struct stat about;
    char inside[PATH_BYTES];
    if (stat(path, &about) != 0 || !S_ISDIR(about.st_mode)) return model_config_read(config, path, err);
    return checkpoint_find(path, inside, sizeof inside, err) && checkpoint_load_config(inside, config, err);
}

/* sh: NULL for one GPU. sums: bytes of the parts of summed gradients. */
static bool print(model *m, const shards *sh, size_t sums, table_format format, error *err)
{
    const model_bytes *b = &m->bytes;
    const size_t adamw = optimizer_bytes(m, sh), whole = model_bytes_sum(b);
    table_column shown[COLUMNS + SHARED_COLUMNS];
    memcpy(shown, columns, sizeof columns);
    memcpy(shown + COLUMNS, shared_columns, sizeof shared_columns);
    table *t = table_open(stdout, format == TABLE_ALIGNED ? TABLE_VERTICAL : format, shown,
                          sh ? COLUMNS + SHARED_COLUMNS : COLUMNS);
    if (!t) return fail(err, ERROR_RUNTIME, "info: out of memory");
    table_integer(t, (int64_t)param_count(&m->weights.layout));
    table_integer(t, model_active_weights(&m->config));
    table_integer(t, m->frame.sequences * m->parts * (sh ? sh->ranks : 1));
    table_integer(t, m->parts);
    table_integer(t, m->config.context);
    table_integer(t, (int64_t)b->weights);
    table_integer(t, (int64_t)b->quantized);
    table_integer(t, (int64_t)b->gradients);
    table_integer(t, (int64_t)adamw);
    table_integer(t, (int64_t)b->layers);
    table_integer(t, (int64_t)b->turns);
    table_integer(t, (int64_t)b->rest);
    table_integer(t, (int64_t)(whole + adamw + sums));
    if (sh) {
        table_integer(t, sh->ranks);
        table_integer(t, (int64_t)sums);
        table_integer(t, (int64_t)whole);
        table_integer(t, (int64_t)sent_bytes(m, sh));
    }
    table_end_row(t);
    return table_close(t, err);
}

static bool print_shared(model *m, const info_model *wanted, table_format format, error *err)
{
    shards sh;
    if (wanted->gpus == 1) return print(m, NULL, 0, format, err);
    if (!shards_create(&sh, &m->weights, 0, (int)wanted->gpus, err)) return false;
    const bool done = print(m, &sh, step_bytes(m, &sh, wanted->clip != 0.0), format, err);
    shards_destroy(&sh);
    return done;
}

bool info_model_print(const info_model *wanted, int32_t chunks, smoe_backend backend, table_format format,
                      error *err)
{
    // Counting needs no libraries.
    const device_options device = {.name = backend == SMOE_BACKEND_CUDA ? "cuda-plain" : "cpu",
                                   .bf16 = wanted->bf16,
                                   .sums = wanted->parts > 1,
                                   .gradients = wanted->gradients};
    train_routing routing = {.rounding = SMOE_ROUNDING_NONE};
    const model_options options = {.sequences = wanted->batch / wanted->parts / wanted->gpus,
                                   .parts = wanted->parts,
                                   .routing = &routing,
                                   .use = MODEL_TRAIN,
                                   .recompute = wanted->recompute,
                                   .compute = wanted->compute,
                                   .chunks = chunks,
                                   .one_layer = step_takes_layers(wanted->clip, wanted->parts),
                                   .sharded = wanted->gpus > 1,
                                   .ranks = (int)wanted->gpus};
    model_config config;
    model m;
    if (wanted->batch % wanted->parts)
        return fail(err, ERROR_USAGE, "--micro-batches is %lld, which does not divide the batch of %lld",
                    (long long)wanted->parts, (long long)wanted->batch);
    if (wanted->batch % (wanted->parts * wanted->gpus))
        return fail(err, ERROR_USAGE,
                    "--batch is %lld, which %lld GPUs with %lld micro-batches each do not divide",
                    (long long)wanted->batch, (long long)wanted->gpus, (long long)wanted->parts);
    if (!read_config(&config, wanted->path, err)) return false;
    routing.balance_coefficient = (float)config.router_aux_loss_coef;
    train_device *dv = device_open(&device, err);
    if (!dv) return false;
    bool done = model_measure(&m, dv, &config, &options, err);
    done = done && print_shared(&m, wanted, format, err);
    model_destroy(&m); // zeroed where it was not made
    dv->ops->close(dv);
    return done;
}
