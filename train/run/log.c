/* See log.h. */
#define _POSIX_C_SOURCE 200809L
#include "train/run/log.h"

#include "train/files/file.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct train_log {
    FILE *file;
    char *path;
};

/* The length of the first line with its newline, 0 if there is no whole line. */
static size_t line_length(const char *text, size_t size)
{
    const char *end = memchr(text, '\n', size);
    return end ? (size_t)(end - text) + 1 : 0;
}

static double real_of(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : (double)NAN;
}

static bool parse_line(const char *text, size_t size, log_line *line)
{
    json_t *object = json_loadb(text, size, 0, NULL);
    bool done = json_is_object(object) && json_is_integer(json_object_get(object, "step"));
    if (done)
        *line = (log_line){.step = json_integer_value(json_object_get(object, "step")),
                           .tokens = json_integer_value(json_object_get(object, "tokens")),
                           .seconds = real_of(object, "seconds"),
                           .loss = real_of(object, "loss"),
                           .bits_per_byte = real_of(object, "bits_per_byte"),
                           .val_loss = real_of(object, "val_loss"),
                           .val_tokens = json_integer_value(json_object_get(object, "val_tokens")),
                           .tokens_per_s = real_of(object, "tokens_per_s"),
                           .lr = real_of(object, "lr"),
                           .grad_norm = real_of(object, "grad_norm"),
                           .routing = {real_of(object, "added"), real_of(object, "dropped"),
                                       real_of(object, "emptied"), real_of(object, "busiest")},
                           .f8 = {real_of(object, "val_loss_f8"), real_of(object, "a_amax"),
                                  real_of(object, "a_zeros"), real_of(object, "a_subnormals")}};
    json_decref(object);
    return done;
}

/* Copies the lines up to `step` to `kept` and returns their bytes. What is no line of a log is left out. */
static size_t keep_lines(const char *text, size_t size, int64_t step, char *kept, log_line *last)
{
    size_t bytes = 0, length;
    log_line line;
    for (size_t at = 0; (length = line_length(text + at, size - at)) > 0; at += length) {
        if (!parse_line(text + at, length, &line) || line.step > step) continue;
        memcpy(kept + bytes, text + at, length);
        bytes += length;
        *last = line;
    }
    return bytes;
}

static bool truncate_log(const char *path, int64_t step, log_line *last, error *err)
{
    struct stat status;
    *last = (log_line){.step = -1};
    if (stat(path, &status) != 0 || status.st_size == 0) return true;
    file_map map;
    if (!file_map_open(&map, path, err)) return false;
    char *kept = malloc(map.size);
    bool done = kept || fail(err, ERROR_RUNTIME, "%s: out of memory: %zu bytes", path, map.size);
    if (kept) {
        const size_t bytes = keep_lines((const char *)map.data, map.size, step, kept, last);
        done = bytes == map.size || file_write(path, kept, bytes, err);
    }
    free(kept);
    file_map_close(&map);
    return done;
}

bool log_open(train_log **log, const char *path, int64_t step, log_line *last, error *err)
{
    *log = NULL;
    if (!truncate_log(path, step, last, err)) return false;
    train_log *made = calloc(1, sizeof *made);
    if (!made) return fail(err, ERROR_RUNTIME, "out of memory: the log");
    made->path = strdup(path);
    made->file = fopen(path, "a");
    if (!made->path || !made->file) {
        fail(err, ERROR_RUNTIME, "%s: cannot append: %s", path, strerror(errno));
        log_close(made);
        return false;
    }
    *log = made;
    return true;
}

/* JSON has no NAN. */
static json_t *real_or_null(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static void set_finite(json_t *object, const char *key, double value)
{
    if (isfinite(value)) json_object_set_new(object, key, json_real(value));
}

bool log_write(train_log *log, const log_line *line, error *err)
{
    json_t *object = json_pack(
        "{s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o}", "step", (json_int_t)line->step, "tokens",
        (json_int_t)line->tokens, "seconds", real_or_null(line->seconds), "loss", real_or_null(line->loss),
        "bits_per_byte", real_or_null(line->bits_per_byte), "tokens_per_s", real_or_null(line->tokens_per_s),
        "lr", real_or_null(line->lr), "grad_norm", real_or_null(line->grad_norm));
    if (object) {
        set_finite(object, "val_loss", line->val_loss);
        if (line->val_tokens > 0) json_object_set_new(object, "val_tokens", json_integer(line->val_tokens));
        set_finite(object, "added", line->routing.added);
        set_finite(object, "dropped", line->routing.dropped);
        set_finite(object, "emptied", line->routing.emptied);
        set_finite(object, "busiest", line->routing.busiest);
        set_finite(object, "val_loss_f8", line->f8.loss);
        set_finite(object, "a_amax", line->f8.amax);
        set_finite(object, "a_zeros", line->f8.zeros);
        set_finite(object, "a_subnormals", line->f8.subnormals);
    }
    bool done = object && json_dumpf(object, log->file, JSON_COMPACT | JSON_REAL_PRECISION(9)) == 0 &&
                fputc('\n', log->file) != EOF && fflush(log->file) == 0;
    json_decref(object);
    return done || fail(err, ERROR_RUNTIME, "%s: cannot write a line: %s", log->path, strerror(errno));
}

bool log_sync(const train_log *log, error *err)
{
    if (file_sync(fileno(log->file))) return true;
    return fail(err, ERROR_RUNTIME, "%s: cannot sync: %s", log->path, strerror(errno));
}

void log_close(train_log *log)
{
    if (!log) return;
    if (log->file) fclose(log->file);
    free(log->path);
    free(log);
}

/* Counts the lines, or fills `lines` if it is not NULL. *wrong receives the number of a malformed line. */
static size_t scan(const file_map *map, log_line *lines, size_t *wrong)
{
    const char *text = (const char *)map->data;
    size_t at = 0, count = 0, length;
    log_line line;
    *wrong = 0;
    while ((length = line_length(text + at, map->size - at)) > 0) {
        if (!parse_line(text + at, length, &line)) {
            *wrong = count + 1;
            break;
        }
        if (lines) lines[count] = line;
        count++;
        at += length;
    }
    return count;
}

bool log_read(const char *path, log_line **lines, size_t *count, error *err)
{
    file_map map;
    if (!file_map_open(&map, path, err)) return false;
    size_t wrong;
    *lines = NULL;
    *count = scan(&map, NULL, &wrong);
    if (!wrong) *lines = malloc((*count + 1) * sizeof **lines);
    if (*lines) scan(&map, *lines, &wrong);
    file_map_close(&map);
    if (wrong) return fail(err, ERROR_RUNTIME, "%s: line %zu is not a line of a training log", path, wrong);
    return *lines || fail(err, ERROR_RUNTIME, "%s: out of memory: %zu lines", path, *count);
}
