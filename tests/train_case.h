/* Shared by the tests of training runs: a folder with a short text, the settings of a small model, and a
 * comparison of checkpoints bit for bit. */
#ifndef TESTS_TRAIN_CASE_H
#define TESTS_TRAIN_CASE_H

#include "tests/folder.h"
#include "train/files/file.h"
#include "train/run/checkpoint.h"
#include "train/run/log.h"
#include "train/run/train.h"

#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { PATH_BYTES = 512 };

/* The folder of one test: it has the file text.txt, and the runs write into it. */
typedef struct place {
    char *folder, text[128], out[128];
    const char *paths[1];
} place;

static inline int set_up(void **state)
{
    static const char words[] = "the quick brown fox jumps over the lazy dog; ";
    place *p = calloc(1, sizeof *p);
    void *folder;
    if (folder_setup(&folder) != 0) return -1;
    p->folder = folder;
    snprintf(p->text, sizeof p->text, "%s/text.txt", p->folder);
    snprintf(p->out, sizeof p->out, "%s/out", p->folder);
    FILE *file = fopen(p->text, "w");
    for (int i = 0; i < 200; i++) fprintf(file, "%s%d\n", words, i * i);
    fclose(file);
    p->paths[0] = p->text;
    *state = p;
    return 0;
}

static inline int tear_down(void **state)
{
    place *p = *state;
    void *folder = p->folder;
    free(p);
    return folder_teardown(&folder);
}

static inline train_settings settings_of(const place *p)
{
    train_settings s = train_settings_default();
    s.paths = p->paths;
    s.path_count = 1;
    s.out = p->out;
    s.steps = 20;
    s.batch = 3;
    s.checkpoints = 2; // after steps 10 and 20
    s.logs = 5;
    s.validations = (validation_plan){4, 16384, 1 << 20};
    s.config.hidden = 16;
    s.config.heads = 2;
    s.config.layers = 2;
    s.config.experts = 4;
    s.config.topk = 2;
    s.config.intermediate = 8;
    s.config.context = 16;
    s.routing.rounding = SMOE_ROUNDING_SR_F; // draws depend on seed and step: resume must restore both
    s.routing.tile = 4;
    return s;
}

static inline void train_ok(const train_settings *s, train_result *result)
{
    error err = {0};
    if (!train_run(s, NULL, NULL, result, &err)) fail_msg("%s", err.text);
}

static inline void train_fails(const train_settings *s, int code, const char *part)
{
    error err = {0};
    train_result result;
    assert_false(train_run(s, NULL, NULL, &result, &err));
    if (err.code != code || !strstr(err.text, part))
        fail_msg("code %d, \"%s\"; wanted %d, ...%s...", err.code, err.text, code, part);
}

static inline void assert_same_file(const char *a, const char *b)
{
    file_map x, y;
    error err = {0};
    if (!file_map_open(&x, a, &err) || !file_map_open(&y, b, &err)) fail_msg("%s", err.text);
    assert_int_equal(x.size, y.size);
    assert_memory_equal(x.data, y.data, x.size);
    file_map_close(&x);
    file_map_close(&y);
}

/* The lines of the log in the folder `out`, which the caller frees, and their number. */
static inline size_t read_log(const char *out, log_line **lines)
{
    char path[PATH_BYTES];
    size_t count;
    error err = {0};
    snprintf(path, sizeof path, "%s/train.jsonl", out);
    if (!log_read(path, lines, &count, &err)) fail_msg("%s", err.text);
    return count;
}

/* An observer that stops a run after step number `at`. */
typedef struct stopper {
    volatile sig_atomic_t flag;
    int64_t at;
} stopper;

static inline void stop_at(void *user, const train_report *report)
{
    stopper *s = user;
    if (report->step == s->at) s->flag = 1;
}

/* Runs with a stop after step `at`; 0: with *stop set from the beginning. */
static inline void train_stopped(train_settings *s, int64_t at, train_result *result)
{
    stopper stop = {.flag = at == 0, .at = at};
    error err = {0};
    s->stop = &stop.flag;
    if (!train_run(s, stop_at, &stop, result, &err)) fail_msg("%s", err.text);
    assert_true(result->interrupted);
    s->stop = NULL;
}

static inline void assert_same_checkpoints(const char *a, const char *b)
{
    char x[PATH_BYTES], y[PATH_BYTES];
    error err = {0};
    model m[2];
    train_state state[2] = {{0}, {0}};
    adamw_arrays arrays[2];
    snprintf(x, sizeof x, "%s/latest/model.safetensors", a);
    snprintf(y, sizeof y, "%s/latest/model.safetensors", b);
    assert_same_file(x, y);
    for (int i = 0; i < 2; i++) { // the states, without the training time in them
        model_config config;
        snprintf(x, sizeof x, "%s/latest", i ? b : a);
        if (!checkpoint_load_config(x, &config, &err) ||
            !model_create(&m[i], NULL, &config, &(model_options){.sequences = 1}, &err))
            fail_msg("%s", err.text);
        arrays[i] = (adamw_arrays){.first = malloc(m[i].weights.layout.total * sizeof(float)),
                                   .second = malloc(m[i].weights.layout.total * sizeof(float)),
                                   .state_type = SMOE_TYPE_F32};
        if (!checkpoint_load_state(x, &m[i], &arrays[i], &state[i], &err)) fail_msg("%s", err.text);
    }
    assert_int_equal(state[0].step, state[1].step);
    assert_true(state[0].loss_sum == state[1].loss_sum);
    assert_memory_equal(arrays[0].first, arrays[1].first, m[0].weights.layout.total * sizeof(float));
    assert_memory_equal(arrays[0].second, arrays[1].second, m[0].weights.layout.total * sizeof(float));
    for (int i = 0; i < 2; i++) {
        model_destroy(&m[i]);
        free(arrays[i].first);
        free(arrays[i].second);
    }
}

static inline int access_in(const char *out, const char *name)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", out, name);
    return access(path, F_OK);
}

static inline int count_folders(const char *out)
{
    int count = 0;
    DIR *entries = opendir(out);
    for (struct dirent *e; (e = readdir(entries));) count += strncmp(e->d_name, "step-", 5) == 0;
    closedir(entries);
    return count;
}

#endif
