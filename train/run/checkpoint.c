/* See checkpoint.h: the contents of the three files. checkpoint_folder.c handles the folders. */
#define _POSIX_C_SOURCE 200809L
#include "train/run/checkpoint.h"

#include "train/files/checkpoint_folder.h"
#include "train/files/file.h"
#include "train/files/safetensors.h"
#include "train/files/safetensors_patch.h"
#include "train/files/transfer.h"
#include "train/run/checkpoint_fill.h"
#include "train/run/shards.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PATH_BYTES = FILE_PATH_BYTES,
    COUNTERS = 7,
    VALUES = 23,
    MARKS = 3,
    MOST_PAIRS = COUNTERS + VALUES + MARKS + 1
};

/* The values that are left out of the file while they are not known. */
static const struct {
    const char *key;
    size_t offset;
} values[VALUES] = {{"line_elapsed", offsetof(train_state, line_elapsed)},
                    {"lr", offsetof(train_state, lr)},
                    {"grad_norm", offsetof(train_state, grad_norm)},
                    {"added", offsetof(train_state, routing.added)},
                    {"dropped", offsetof(train_state, routing.dropped)},
                    {"emptied", offsetof(train_state, routing.emptied)},
                    {"busiest", offsetof(train_state, routing.busiest)},
                    {"option.lr", offsetof(train_state, recipe.lr)},
                    {"option.end-lr", offsetof(train_state, recipe.end_lr)},
                    {"option.warmup", offsetof(train_state, recipe.warmup)},
                    {"option.beta1", offsetof(train_state, recipe.beta1)},
                    {"option.beta2", offsetof(train_state, recipe.beta2)},
                    {"option.weight-decay", offsetof(train_state, recipe.weight_decay)},
                    {"option.clip", offsetof(train_state, recipe.clip)},
                    {"option.rounding", offsetof(train_state, recipe.rounding)},
                    {"option.tile", offsetof(train_state, recipe.tile)},
                    {"option.balance", offsetof(train_state, recipe.balance)},
                    {"option.z-loss", offsetof(train_state, recipe.z_loss)},
                    {"option.bias-rate", offsetof(train_state, recipe.bias_rate)},
                    {"option.compute", offsetof(train_state, recipe.compute)},
                    {"option.evaluations", offsetof(train_state, recipe.evaluations)},
                    {"option.evaluation-tokens", offsetof(train_state, recipe.evaluation_tokens)},
                    {"option.last-evaluation-tokens", offsetof(train_state, recipe.last_evaluation_tokens)}};

static const uint64_t MOST_COUNTED = 1000000000000000000; // 1e18 steps or tokens

/* The fields of tokens_mark. */
static const char *const marks[MARKS] = {"train_tokens", "validation_tokens", "text_checksum"};

/* ---- writing ---- */

/* Tensors whose data are parts of arrays on the device. */
typedef struct device_source {
    transfer pieces;
    const tensor *tensors; // their data pointers are device pointers
} device_source;

static const void *read_piece(void *user, size_t index, size_t from, size_t size, error *err)
{
    device_source *s = user;
    return transfer_read(&s->pieces, (const char *)s->tensors[index].data + from, size, err);
}

/* `reserves`: leaves the tensors' bytes to checkpoint_fill. */
static bool write_tensors(const char *path, train_device *device, const tensor *tensors, size_t count,
                          const safetensors_pair *metadata, size_t pairs, bool reserves, error *err)
{
    if (reserves) return safetensors_reserve(path, tensors, count, metadata, pairs, err);
    device_source source = {.tensors = tensors};
    bool done = transfer_open(&source.pieces, device, err) &&
                safetensors_write_from(path, tensors, count, metadata, pairs, read_piece, &source,
                                       TRANSFER_BYTES, err);
    transfer_close(&source.pieces);
    return done;
}

static tensor_dtype dtype_of(smoe_type type)
{
    return type == SMOE_TYPE_F32 ? TENSOR_F32 : TENSOR_BF16;
}

/* The dtype in which the weights are saved. */
static smoe_type weight_type(const model *m, const adamw_arrays *arrays)
{
    return arrays->master ? SMOE_TYPE_F32 : m->device->type;
}

static bool write_weights(const char *folder, const model *m, const adamw_arrays *arrays, bool reserves,
                          error *err)
{
    const param_layout *layout = &m->weights.layout;
    const char *weights = arrays->master ? (const void *)arrays->master : m->weights.params;
    const smoe_type type = weight_type(m, arrays);
    char path[PATH_BYTES];
    if (!file_join(path, folder, "model.safetensors", err)) return false;
    param_tensor *biases = NULL;
    size_t count = layout->tensor_count;
    tensor *tensors = calloc(count + (size_t)m->config.layers, sizeof *tensors);
    if (tensors) biases = calloc((size_t)m->config.layers, sizeof *biases);
    if (!biases) {
        free(tensors);
        return fail(err, ERROR_RUNTIME, "out of memory: the table of the checkpoint's tensors");
    }
    for (size_t i = 0; i < layout->tensor_count; i++) {
        const param_tensor *p = &layout->tensors[i];
        tensors[i] = (tensor){.name = p->name,
                              .dtype = dtype_of(type),
                              .rank = p->rank,
                              .data = weights + p->offset * type_size(type)};
        memcpy(tensors[i].shape, p->shape, sizeof p->shape);
    }
    for (int64_t l = 0; l < m->config.layers; l++) {
        param_tensor *t = &biases[l];
        const float *bias = model_bias(m, l, t);
        if (!bias) continue;
        tensors[count++] = (tensor){.name = t->name,
                                    .dtype = TENSOR_F32,
                                    .rank = 1,
                                    .shape = {t->shape[0]},
                                    .data = (const void *)bias};
    }
    const safetensors_pair format = {"format", "pt"}; // transformers asks for it
    bool done = write_tensors(path, m->device, tensors, count, &format, 1, reserves, err);
    free(tensors);
    free(biases);
    return done;
}

/* Counters are written as text, doubles in hexadecimal, so that they are read back with the same bits. */
static bool write_state(const char *folder, const model *m, const adamw_arrays *arrays, const train_state *s,
                        bool reserves, error *err)
{
    char path[PATH_BYTES], text[MOST_PAIRS][32];
    size_t count = COUNTERS;
    if (!file_join(path, folder, "state.safetensors", err)) return false;
    snprintf(text[0], sizeof text[0], "%lld", (long long)s->step);
    snprintf(text[1], sizeof text[1], "%llu", (unsigned long long)s->seed);
    snprintf(text[2], sizeof text[2], "%lld", (long long)s->batch);
    snprintf(text[3], sizeof text[3], "%a", s->elapsed);
    snprintf(text[4], sizeof text[4], "%a", s->loss_sum);
    snprintf(text[5], sizeof text[5], "%lld", (long long)s->loss_count);
    snprintf(text[6], sizeof text[6], "%lld", (long long)s->loss_bytes);
    safetensors_pair pairs[MOST_PAIRS] = {
        {"step", text[0]},     {"seed", text[1]},       {"batch", text[2]},     {"elapsed", text[3]},
        {"loss_sum", text[4]}, {"loss_count", text[5]}, {"loss_bytes", text[6]}};
    for (size_t i = 0; i < VALUES; i++) {
        const double value = *(const double *)((const char *)s + values[i].offset);
        if (!isfinite(value)) continue;
        snprintf(text[count], sizeof text[count], "%a", value);
        pairs[count] = (safetensors_pair){values[i].key, text[count]};
        count++;
    }
    const uint64_t mark[MARKS] = {(uint64_t)s->text.train, (uint64_t)s->text.validation, s->text.checksum};
    for (size_t i = 0; i < MARKS && s->text.train > 0; i++) {
        snprintf(text[count], sizeof text[count], "%llu", (unsigned long long)mark[i]);
        pairs[count] = (safetensors_pair){marks[i], text[count]};
        count++;
    }
    if (s->line_due) pairs[count++] = (safetensors_pair){"line_due", "1"};
    int64_t total = (int64_t)m->weights.layout.total;
    const tensor_dtype dtype = dtype_of(arrays->state_type);
    const tensor moments[] = {
        {.name = "adamw.first", .dtype = dtype, .rank = 1, .shape = {total}, .data = arrays->first},
        {.name = "adamw.second", .dtype = dtype, .rank = 1, .shape = {total}, .data = arrays->second},
    };
    return write_tensors(path, m->device, moments, 2, pairs, count, reserves, err);
}

static bool write_files(const char *folder, const model *m, const adamw_arrays *arrays,
                        const train_state *state, const tokenizer *words, const carried *from, bool reserves,
                        error *err)
{
    char path[PATH_BYTES];
    const char *dtype = weight_type(m, arrays) == SMOE_TYPE_F32 ? "float32" : "bfloat16";
    const model_config_extra extra = {.source = (const char *)from->config.data,
                                      .size = from->config.size,
                                      .other_tokens = from->other_tokens,
                                      .end = words->table.tokens > 0 ? words->table.end : -1};
    return file_join(path, folder, "config.json", err) &&
           model_config_write(&m->config, dtype, &extra, path, err) &&
           write_weights(folder, m, arrays, reserves, err) &&
           write_state(folder, m, arrays, state, reserves, err) && tokenizer_save(words, folder, err) &&
           carried_save(from, folder, err);
}

bool checkpoint_save(const char *out, const model *m, const adamw_arrays *arrays, const train_state *state,
                     const tokenizer *words, const carried *from, int64_t keep, train_comm *comm, error *err)
{
    char folder[PATH_BYTES];
    const bool first = !comm || comm->rank == 0;
    if (!(first ? checkpoint_folder_begin : checkpoint_folder_name)(out, state->step, folder, err))
        return false;
    bool done = !first || write_files(folder, m, arrays, state, words, from, comm != NULL, err);
    if (comm && done) {
        comm->ops->barrier(comm);
        done = checkpoint_fill(folder, m, arrays, first, err);
    }
    if (comm && done) comm->ops->barrier(comm);
    if (done && (!first || checkpoint_folder_commit(out, state->step, keep, err))) return true;
    if (first) checkpoint_folder_abort(out, state->step);
    return false;
}

/* ---- reading ---- */

/* A link whose folder was removed is named, because the folder of the run has no other sign of it. */
static bool fail_missing(const char *path, error *err)
{
    char latest[PATH_BYTES], target[256];
    if (!file_join(latest, path, "latest", err)) return false;
    const ssize_t length = readlink(latest, target, sizeof target);
    if (length > 0)
        return fail(err, ERROR_RUNTIME,
                    "%s: no checkpoint there: latest is a link to %.*s, which has no config.json", path,
                    (int)length, target);
    return fail(err, ERROR_RUNTIME, "%s: no checkpoint there (neither config.json nor latest/config.json)",
                path);
}

bool checkpoint_find(const char *path, char *name, size_t size, error *err)
{
    const char *inside[] = {"", "/latest"};
    for (int i = 0; i < 2; i++) {
        char config[PATH_BYTES];
        struct stat status;
        int length = snprintf(config, sizeof config, "%s%s/config.json", path, inside[i]);
        if (length >= (int)sizeof config || length >= (int)size)
            return fail(err, ERROR_USAGE, "%s: the path is too long", path);
        if (stat(config, &status) == 0) {
            snprintf(name, size, "%s%s", path, inside[i]);
            return true;
        }
        if (errno != ENOENT && errno != ENOTDIR)
            return fail(err, ERROR_RUNTIME, "%s: cannot read: %s", config, strerror(errno));
    }
    return fail_missing(path, err);
}

bool checkpoint_load_config(const char *path, model_config *config, error *err)
{
    char file[PATH_BYTES];
    return file_join(file, path, "config.json", err) && model_config_read(config, file, err);
}

/* Some programs save the head of a tied model too. Then it must equal the embedding, bit for bit. */
static bool check_tied_head(const safetensors *file, const char *path, const tensor *head, error *err)
{
    const tensor *embedding;
    int64_t elements, bytes, head_bytes;
    if (!safetensors_get(file, "model.embed_tokens.weight", &embedding, err)) return false;
    tensor_size(embedding, &elements, &bytes);
    tensor_size(head, &elements, &head_bytes);
    if (head->dtype == embedding->dtype && head->rank == embedding->rank && head_bytes == bytes &&
        memcmp(head->shape, embedding->shape, sizeof head->shape) == 0 &&
        memcmp(head->data, embedding->data, (size_t)bytes) == 0)
        return true;
    return fail(err, ERROR_RUNTIME,
                "%s: tie_word_embeddings is true, but lm_head.weight is not model.embed_tokens.weight", path);
}

static bool is_of_model(const model *m, const char *name)
{
    const param_layout *layout = &m->weights.layout;
    param_tensor t;
    for (size_t i = 0; i < layout->tensor_count; i++)
        if (strcmp(layout->tensors[i].name, name) == 0) return true;
    for (int64_t l = 0; l < m->config.layers; l++)
        if (model_bias(m, l, &t) && strcmp(t.name, name) == 0) return true;
    return false;
}

/* If a file has tensors that config.json does not explain, it belongs to another model. All tensors of the
 * layout were found before this check. The message has the number of the others and the name of the first. */
static bool check_explained(const safetensors *file, const char *path, const model *m, error *err)
{
    const tensor *head = m->config.tied ? safetensors_find(file, "lm_head.weight") : NULL;
    const model_config *c = &m->config;
    const size_t biases = c->selection_bias ? (size_t)(c->layers - c->dense_layers) : 0,
                 explained = m->weights.layout.tensor_count + biases + (head != NULL),
                 count = safetensors_count(file);
    if (head != NULL && !check_tied_head(file, path, head, err)) return false;
    if (count == explained) return true;
    size_t i = 0;
    while (safetensors_at(file, i) == head || is_of_model(m, safetensors_at(file, i)->name)) i++;
    return fail(err, ERROR_RUNTIME,
                "%.200s: tensor %.128s is not in the model that config.json describes (%zu such tensors)",
                path, safetensors_at(file, i)->name, count - explained);
}

static bool read_bias(const safetensors *file, const char *path, model *m, int64_t layer, transfer *pieces,
                      error *err)
{
    param_tensor p;
    const tensor *t;
    error why = {0};
    float *bias = model_bias(m, layer, &p);
    if (!bias) return true;
    if (!safetensors_get(file, p.name, &t, err)) return false;
    return tensor_is_real(t, p.rank, p.shape, &why)
               ? transfer_write(pieces, bias, SMOE_TYPE_F32, NULL, file, t, 0, (int64_t)p.count, err)
               : fail(err, ERROR_RUNTIME, "%.200s: %.250s", path, why.text);
}

/* A tensor's weights; with arrays those whose states are here, also as master weights. */
static bool read_weight(const safetensors *file, const param_tensor *p, const tensor *t, model *m,
                        const adamw_arrays *arrays, transfer *pieces, error *err)
{
    const int64_t begin = (int64_t)p->offset, count = (int64_t)p->count;
    const smoe_type type = m->device->type;
    state_run run;
    if (!arrays)
        return transfer_write(pieces, weights_at(&m->weights, p->offset), type, NULL, file, t, 0, count, err);
    for (int64_t at = begin; state_run_next(arrays, at, begin + count, &run); at = run.first + run.count)
        if (!transfer_write(pieces, weights_at(&m->weights, (size_t)run.first), type,
                            arrays->master ? arrays->master + run.state : NULL, file, t, run.first - begin,
                            run.count, err))
            return false;
    return true;
}

static bool read_tensors(const safetensors *file, const char *path, model *m, const adamw_arrays *arrays,
                         transfer *pieces, error *err)
{
    for (size_t i = 0; i < m->weights.layout.tensor_count; i++) {
        const param_tensor *p = &m->weights.layout.tensors[i];
        const tensor *t;
        error why = {0};
        if (!safetensors_get(file, p->name, &t, err)) return false;
        if (!tensor_is_real(t, p->rank, p->shape, &why))
            return fail(err, ERROR_RUNTIME, "%.200s: %.250s", path, why.text);
        if (!read_weight(file, p, t, m, arrays, pieces, err)) return false;
    }
    for (int64_t l = 0; l < m->config.layers; l++)
        if (!read_bias(file, path, m, l, pieces, err)) return false;
    return check_explained(file, path, m, err);
}

static bool read_weights(const safetensors *file, const char *path, model *m, const adamw_arrays *arrays,
                         error *err)
{
    transfer pieces;
    bool done = transfer_open(&pieces, m->device, err) && read_tensors(file, path, m, arrays, &pieces, err);
    transfer_close(&pieces);
    return done;
}

/* Opens one file, or the index of several. If both exist, the one file is taken, as transformers does. */
static bool find_weights(const char *folder, char *path, error *err)
{
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
    struct stat status;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (!file_join(path, folder, names[i], err)) return false;
        if (stat(path, &status) == 0) return true;
    }
    return fail(err, ERROR_RUNTIME, "%s: has neither %s nor %s", folder, names[0], names[1]);
}

bool checkpoint_load_weights(const char *path, model *m, const adamw_arrays *arrays, error *err)
{
    char name[PATH_BYTES];
    safetensors *file;
    if (!find_weights(path, name, err) || !safetensors_open(&file, name, err)) return false;
    bool done = read_weights(file, name, m, arrays, err);
    safetensors_close(file);
    return done;
}

static bool find_text(const safetensors *file, const char *path, const char *key, const char **text,
                      error *err)
{
    *text = safetensors_metadata(file, key);
    return *text || fail(err, ERROR_RUNTIME, "%s: no \"%s\" among its metadata", path, key);
}

static bool read_bits(const safetensors *file, const char *path, const char *key, uint64_t *value, error *err)
{
    const char *text;
    char *end;
    if (!find_text(file, path, key, &text, err)) return false;
    errno = 0;
    *value = strtoull(text, &end, 10);
    return (end != text && !*end && errno == 0 && text[0] != '-') ||
           fail(err, ERROR_RUNTIME, "%s: \"%s\" is \"%.40s\", not a number", path, key, text);
}

static bool read_counter(const safetensors *file, const char *path, const char *key, int64_t *value,
                         error *err)
{
    uint64_t bits;
    if (!read_bits(file, path, key, &bits, err)) return false;
    *value = (int64_t)bits;
    return bits <= MOST_COUNTED || fail(err, ERROR_RUNTIME, "%s: \"%s\" is %llu, more than %llu", path, key,
                                        (unsigned long long)bits, (unsigned long long)MOST_COUNTED);
}

static bool read_real(const safetensors *file, const char *path, const char *key, double *value, error *err)
{
    const char *text;
    char *end;
    if (!find_text(file, path, key, &text, err)) return false;
    *value = strtod(text, &end);
    return (end != text && !*end && isfinite(*value)) ||
           fail(err, ERROR_RUNTIME, "%s: \"%s\" is \"%.40s\", not a number", path, key, text);
}

static bool read_moment(const safetensors *file, const char *name, void *to, const adamw_arrays *arrays,
                        int64_t total, transfer *pieces, error *err)
{
    const smoe_type type = arrays->state_type;
    const tensor *t;
    state_run run;
    if (!safetensors_get(file, name, &t, err) || !tensor_is_real(t, 1, &total, err)) return false;
    for (int64_t at = 0; state_run_next(arrays, at, total, &run); at = run.first + run.count)
        if (!transfer_write(pieces, (char *)to + (size_t)run.state * type_size(type), type, NULL, file, t,
                            run.first, run.count, err))
            return false;
    return true;
}

static bool read_moments(const safetensors *file, const model *m, const adamw_arrays *arrays, error *err)
{
    const int64_t total = (int64_t)m->weights.layout.total;
    transfer pieces;
    bool done = transfer_open(&pieces, m->device, err) &&
                read_moment(file, "adamw.first", arrays->first, arrays, total, &pieces, err) &&
                read_moment(file, "adamw.second", arrays->second, arrays, total, &pieces, err);
    transfer_close(&pieces);
    return done;
}

static bool read_mark(const safetensors *file, const char *path, tokens_mark *mark, error *err)
{
    *mark = (tokens_mark){0};
    return !safetensors_metadata(file, marks[0]) ||
           (read_counter(file, path, marks[0], &mark->train, err) &&
            read_counter(file, path, marks[1], &mark->validation, err) &&
            read_bits(file, path, marks[2], &mark->checksum, err));
}

static bool read_counters(const safetensors *file, const char *path, train_state *s, error *err)
{
    if (!read_counter(file, path, "step", &s->step, err) || !read_bits(file, path, "seed", &s->seed, err) ||
        !read_counter(file, path, "batch", &s->batch, err) ||
        !read_real(file, path, "elapsed", &s->elapsed, err) ||
        !read_real(file, path, "loss_sum", &s->loss_sum, err) ||
        !read_counter(file, path, "loss_count", &s->loss_count, err) ||
        !read_counter(file, path, "loss_bytes", &s->loss_bytes, err) || !read_mark(file, path, &s->text, err))
        return false;
    if (s->elapsed < 0.0)
        return fail(err, ERROR_RUNTIME, "%s: \"elapsed\" is %g, less than 0", path, s->elapsed);
    for (size_t i = 0; i < VALUES; i++) {
        double *value = (double *)((char *)s + values[i].offset);
        *value = (double)NAN;
        if (safetensors_metadata(file, values[i].key) && !read_real(file, path, values[i].key, value, err))
            return false;
    }
    s->line_due = safetensors_metadata(file, "line_due") != NULL;
    return true;
}

bool checkpoint_load_state(const char *path, const model *m, const adamw_arrays *arrays, train_state *state,
                           error *err)
{
    char name[PATH_BYTES];
    safetensors *file;
    if (!file_join(name, path, "state.safetensors", err) || !safetensors_open(&file, name, err)) return false;
    bool done = read_counters(file, name, state, err) && (!m || read_moments(file, m, arrays, err));
    safetensors_close(file);
    return done;
}
