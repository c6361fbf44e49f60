/* Which files of weights a checkpoint may have: one file or shards; no tensor that is not part of the model
 * of config.json; with a tied head no other head than the embedding. */
#define _DEFAULT_SOURCE
#include "tests/folder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "train/files/safetensors.h"
#include "train/files/transfer.h"
#include "train/run/checkpoint.h"

#include <omp.h>

enum { MOST_TENSORS = 128 };

/* The tensors of a checkpoint, which the tests write again in other ways. */
typedef struct checkpoint {
    char folder[4096];
    model m;
    safetensors *file;
    tensor tensors[MOST_TENSORS];
    size_t count;
} checkpoint;

static model_config small_config(bool tied)
{
    model_config c = model_config_default();
    c.hidden = 16;
    c.heads = 2;
    c.layers = 1;
    c.experts = 4;
    c.topk = 2;
    c.intermediate = 8;
    c.context = 8;
    c.tied = tied;
    return c;
}

static void make_model(model *m, const model_config *config)
{
    error err = {0};
    const model_options options = {.sequences = 1, .use = MODEL_EVALUATE};
    if (!model_create(m, NULL, config, &options, &err)) fail_msg("%s", err.text);
}

static void write_checkpoint(checkpoint *c, void **state, bool tied)
{
    char path[4096], command[8192];
    error err = {0};
    const model_config config = small_config(tied);
    make_model(&c->m, &config);
    param_init(c->m.weights.host, &c->m.weights.layout, 7);
    float *moments = calloc(c->m.weights.layout.total, sizeof *moments);
    const adamw_arrays arrays = {.first = moments, .second = moments, .state_type = SMOE_TYPE_F32};
    const train_state progress = {.batch = 1};
    if (!checkpoint_save(in_folder(path, state, "out"), &c->m, &arrays, &progress, &(tokenizer){0},
                         &(carried){0}, 1, NULL, &err))
        fail_msg("%s", err.text);
    free(moments);
    snprintf(c->folder, sizeof c->folder, "%s", in_folder(path, state, "out/latest"));
    // the file is removed; its mapping keeps the tensors' bytes
    snprintf(command, sizeof command, "%s/model.safetensors", c->folder);
    if (!safetensors_open(&c->file, command, &err)) fail_msg("%s", err.text);
    assert_int_equal(remove(command), 0);
    c->count = safetensors_count(c->file);
    assert_true(c->count + 2 <= MOST_TENSORS);
    for (size_t i = 0; i < c->count; i++) c->tensors[i] = *safetensors_at(c->file, i);
}

static void close_checkpoint(checkpoint *c)
{
    safetensors_close(c->file);
    model_destroy(&c->m);
}

static void put_tensors(const checkpoint *c, const char *name, size_t from, size_t to)
{
    char path[8192];
    error err = {0};
    snprintf(path, sizeof path, "%s/%s", c->folder, name);
    if (!safetensors_write(path, c->tensors + from, to - from, NULL, 0, &err)) fail_msg("%s", err.text);
}

static void assert_loads(const checkpoint *c)
{
    model again;
    error err = {0};
    make_model(&again, &c->m.config);
    if (!checkpoint_load_weights(c->folder, &again, NULL, &err)) fail_msg("%s", err.text);
    assert_memory_equal(again.weights.host, c->m.weights.host, c->m.weights.layout.total * sizeof(float));
    model_destroy(&again);
}

static void assert_refused(const checkpoint *c, const char *reason)
{
    model again;
    error err = {0};
    make_model(&again, &c->m.config);
    assert_false(checkpoint_load_weights(c->folder, &again, NULL, &err));
    assert_int_equal(err.code, ERROR_RUNTIME);
    if (!strstr(err.text, reason)) fail_msg("\"%s\" lacks \"%s\"", err.text, reason);
    model_destroy(&again);
}

static void put_index(const checkpoint *c, size_t half)
{
    char path[8192], text[1 << 14];
    size_t at = (size_t)snprintf(text, sizeof text, "{\"metadata\": {}, \"weight_map\": {");
    for (size_t i = 0; i < c->count; i++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s\"%s\": \"%s\"", i > 0 ? ", " : "",
                               c->tensors[i].name, i < half ? "1.safetensors" : "2.safetensors");
    at += (size_t)snprintf(text + at, sizeof text - at, "}}");
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", c->folder);
    put_file(path, text, at);
}

static void one_file_has_all_weights(void **state)
{
    checkpoint c;
    write_checkpoint(&c, state, false);
    assert_refused(&c, "latest: has neither model.safetensors nor model.safetensors.index.json");
    put_tensors(&c, "model.safetensors", 0, c.count);
    assert_loads(&c);
    close_checkpoint(&c);
}

static void shards_have_all_weights(void **state)
{
    checkpoint c;
    write_checkpoint(&c, state, false);
    const size_t half = c.count / 2;
    put_tensors(&c, "1.safetensors", 0, half);
    put_tensors(&c, "2.safetensors", half, c.count);
    put_index(&c, half);
    assert_loads(&c);
    put_index(&c, half + 1);
    assert_refused(&c, "is missing from 1.safetensors");
    put_index(&c, half);
    put_tensors(&c, "2.safetensors", half, c.count - 1);
    assert_refused(&c, "is missing from 2.safetensors");
    put_tensors(&c, "model.safetensors", 0, c.count); // with both the whole file is read, as by Transformers
    assert_loads(&c);
    close_checkpoint(&c);
}

static void tensors_of_no_model_are_refused(void **state)
{
    static const float bias[16] = {0};
    checkpoint c;
    write_checkpoint(&c, state, false);
    c.tensors[c.count] = (tensor){"model.layers.0.self_attn.q_proj.bias", TENSOR_F32, 1, {16}, bias};
    put_tensors(&c, "model.safetensors", 0, c.count + 1);
    assert_refused(
        &c, "tensor model.layers.0.self_attn.q_proj.bias is not in the model that config.json describes");
    c.tensors[c.count + 1] = (tensor){"model.layers.1.mlp.gate.weight", TENSOR_F32, 1, {16}, bias};
    put_tensors(&c, "model.safetensors", 0, c.count + 2);
    assert_refused(&c, "(2 such tensors)");
    close_checkpoint(&c);
}

/* A checkpoint with a tied head may contain lm_head.weight, if it equals the embedding. */
static void a_tied_head_equals_the_embedding(void **state)
{
    checkpoint c;
    write_checkpoint(&c, state, true);
    put_tensors(&c, "model.safetensors", 0, c.count);
    assert_loads(&c);
    const tensor *embedding = safetensors_find(c.file, "model.embed_tokens.weight");
    int64_t elements, bytes;
    assert_true(tensor_size(embedding, &elements, &bytes));
    float *head = malloc((size_t)bytes);
    memcpy(head, embedding->data, (size_t)bytes);
    tensor *t = &c.tensors[c.count];
    *t = *embedding;
    t->name = "lm_head.weight";
    t->data = head;
    put_tensors(&c, "model.safetensors", 0, c.count + 1);
    assert_loads(&c);
    head[elements - 1] += 1;
    put_tensors(&c, "model.safetensors", 0, c.count + 1);
    assert_refused(&c, "tie_word_embeddings is true, but lm_head.weight is not model.embed_tokens.weight");
    t->shape[0]--;
    put_tensors(&c, "model.safetensors", 0, c.count + 1);
    assert_refused(&c, "tie_word_embeddings is true, but lm_head.weight");
    free(head);
    close_checkpoint(&c);
}

/* Tensors and moments that are larger than the buffer through which they are copied. */
static void large_tensors_are_copied_in_pieces(void **state)
{
    char path[4096];
    error err = {0};
    model_config config = small_config(true);
    config.vocab = 280000;
    model m, again;
    make_model(&m, &config);
    make_model(&again, &config);
    param_init(m.weights.host, &m.weights.layout, 7);
    const size_t total = m.weights.layout.total;
    assert_true(m.weights.layout.tensors[0].count > TRANSFER_BYTES / sizeof(float));
    float *moments = malloc(4 * total * sizeof *moments);
    for (size_t i = 0; i < 2 * total; i++) moments[i] = (float)i;
    const adamw_arrays arrays = {.first = moments, .second = moments + total, .state_type = SMOE_TYPE_F32},
                       back = {.first = moments + 2 * total,
                               .second = moments + 3 * total,
                               .state_type = SMOE_TYPE_F32};
    train_state progress = {.batch = 1};
    in_folder(path, state, "out");
    if (!checkpoint_save(path, &m, &arrays, &progress, &(tokenizer){0}, &(carried){0}, 1, NULL, &err))
        fail_msg("%s", err.text);
    in_folder(path, state, "out/latest");
    if (!checkpoint_load_weights(path, &again, NULL, &err) ||
        !checkpoint_load_state(path, &again, &back, &progress, &err))
        fail_msg("%s", err.text);
    assert_memory_equal(m.weights.host, again.weights.host, total * sizeof *moments);
    assert_memory_equal(moments, moments + 2 * total, 2 * total * sizeof *moments);
    free(moments);
    model_destroy(&m);
    model_destroy(&again);
}

/* Counters that no run can have are errors. A run that went on from them would compute with other numbers
 * than it prints, or read outside of its text. */
static void impossible_counters_are_refused(void **state)
{
    static const struct {
        const char *key, *value, *reason; // NULL: none
    } cases[] = {
        {"step", "12", NULL},
        {"step", "9223372036854775807", "\"step\" is 9223372036854775807, more than 1000000000000000000"},
        {"step", "18446744073709551615", "\"step\" is 18446744073709551615, more than"},
        {"step", "99999999999999999999", "\"step\" is \"99999999999999999999\", not a number"},
        {"step", "-1", "\"step\" is \"-1\", not a number"},
        {"step", "", "not a number"},
        {"seed", "18446744073709551615", NULL},
        {"elapsed", "-0x1p+3", "\"elapsed\" is -8, less than 0"},
        {"elapsed", "inf", "\"elapsed\" is \"inf\", not a number"},
        {"loss_count", "2000000000000000000", "\"loss_count\" is"},
        {"train_tokens", "2000000000000000000", "\"train_tokens\" is"},
        {"text_checksum", "18446744073709551615", NULL},
    };
    checkpoint c;
    char path[8192];
    write_checkpoint(&c, state, false);
    snprintf(path, sizeof path, "%s/state.safetensors", c.folder);
    float *moments = calloc(c.m.weights.layout.total, sizeof *moments);
    const adamw_arrays arrays = {.first = moments, .second = moments, .state_type = SMOE_TYPE_F32};
    const int64_t total = (int64_t)c.m.weights.layout.total;
    const tensor tensors[] = {{.name = "adamw.first", TENSOR_F32, 1, {total}, moments},
                              {.name = "adamw.second", TENSOR_F32, 1, {total}, moments}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        safetensors_pair pairs[] = {{"step", "5"},         {"seed", "1"},         {"batch", "1"},
                                    {"elapsed", "1"},      {"loss_sum", "0"},     {"loss_count", "0"},
                                    {"loss_bytes", "0"},   {"train_tokens", "1"}, {"validation_tokens", "1"},
                                    {"text_checksum", "1"}};
        enum { PAIRS = sizeof pairs / sizeof pairs[0] };
        train_state read;
        error err = {0};
        for (size_t k = 0; k < PAIRS; k++)
            if (strcmp(pairs[k].key, cases[i].key) == 0) pairs[k].value = cases[i].value;
        if (!safetensors_write(path, tensors, 2, pairs, PAIRS, &err)) fail_msg("%s", err.text);
        const bool done = checkpoint_load_state(c.folder, &c.m, &arrays, &read, &err);
        if (done == (cases[i].reason != NULL) || (!done && !strstr(err.text, cases[i].reason)))
            fail_msg("%s is %s: '%s'", cases[i].key, cases[i].value, done ? "" : err.text);
    }
    free(moments);
    close_checkpoint(&c);
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, folder_setup, folder_teardown)

int main(void)
{
    omp_set_num_threads(1);
    const struct CMUnitTest tests[] = {
        IN_FOLDER(one_file_has_all_weights),           IN_FOLDER(shards_have_all_weights),
        IN_FOLDER(tensors_of_no_model_are_refused),    IN_FOLDER(a_tied_head_equals_the_embedding),
        IN_FOLDER(large_tensors_are_copied_in_pieces), IN_FOLDER(impossible_counters_are_refused)};
    return cmocka_run_group_tests_name("checkpoint", tests, NULL, NULL);
}
