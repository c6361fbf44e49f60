/* See run_folder.h. */
#define _POSIX_C_SOURCE 200809L
#include "train/run/run_folder.h"

#include "train/files/file.h"
#include "train/run/checkpoint.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

bool run_folder_log(const train_settings *s, char *path, error *err)
{
    return file_join(path, s->out, "train.jsonl", err);
}

bool run_folder_unused(const train_settings *s, error *err)
{
    char path[FILE_PATH_BYTES];
    struct stat about;
    error none = {0};
    if (checkpoint_find(s->out, path, sizeof path, &none))
        return fail(err, ERROR_USAGE, "%s exists already: %schoose another folder", path,
                    strcmp(path, s->out) == 0 ? "" : "resume it, or ");
    if (!run_folder_log(s, path, err)) return false;
    if (stat(path, &about) != 0 || about.st_size == 0) return true;
    return fail(err, ERROR_USAGE,
                "%s exists already, the log of a run without a checkpoint: choose another folder", path);
}

/* OUT/latest must be a checkpoint of a run, and its model must have the sizes of the settings. */
static bool check_model(const char *path, const train_settings *s, error *err)
{
    model_config have;
    error why = {0};
    if (!checkpoint_load_config(path, &have, err)) return false;
    // The run would write its checkpoints into this one, and the next resume would not find them.
    if (strcmp(path, s->out) == 0)
        return fail(err, ERROR_USAGE,
                    "%s is a checkpoint, not the folder of a run: resume that folder, or start with --from",
                    path);
    return model_config_same(&have, &s->config, &why) ||
           fail(err, ERROR_USAGE, "%.200s holds a checkpoint with other sizes or settings: %.250s", path,
                why.text);
}

bool run_folder_resumed(const train_settings *s, tokens_split *split, error *err)
{
    char path[FILE_PATH_BYTES];
    train_state before;
    *split = s->validations.count != 0 ? TOKENS_TRAIN : TOKENS_WHOLE;
    if (!s->resume) return true;
    if (!checkpoint_find(s->out, path, sizeof path, err) || !check_model(path, s, err) ||
        !checkpoint_load_state(path, NULL, NULL, &before, err))
        return false;
    *split = tokens_are_whole(&before.text) ? TOKENS_WHOLE : TOKENS_TRAIN;
    return *split == TOKENS_TRAIN || s->validations.count <= 0 ||
           fail(err, ERROR_USAGE,
                "--evaluations is %lld, but %s is of a run that began with --evaluations 0 and trains on the "
                "whole text: no text is left to validate on",
                (long long)s->validations.count, path);
}
