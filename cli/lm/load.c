/* See load.h. */
#include "cli/lm/load.h"

#include "train/device.h"
#include "train/run/checkpoint.h"

#include <stdio.h>
#include <string.h>

bool load_config(model_config *config, const char *path, error *err)
{
    char name[4096];
    return checkpoint_find(path, name, sizeof name, err) && checkpoint_load_config(name, config, err);
}

bool load_model(model *m, const char *path, int64_t sequences, int64_t context, model_use use,
                train_device *device, error *err)
{
    char name[4096];
    model_config config;
    *m = (model){0};
    if (!checkpoint_find(path, name, sizeof name, err) || !checkpoint_load_config(name, &config, err))
        return false;
    if (context > config.context) sequences = sequences * config.context / context;
    if (sequences < 1) sequences = 1;
    if (context > 0) config.context = context; // no weight depends on it
    if (!model_create(m, device, &config, &(model_options){.sequences = sequences, .use = use}, err))
        return false;
    if (checkpoint_load_weights(name, m, NULL, err)) return true;
    model_destroy(m);
    return false;
}

bool load_tokenizer(tokenizer *t, const char *path, int64_t vocab, error *err)
{
    char name[4096];
    *t = (tokenizer){0};
    return checkpoint_find(path, name, sizeof name, err) && tokenizer_find(t, name, vocab, err);
}

void show_device(const char *device)
{
    error why = {0};
    if (strcmp(device, "auto") == 0 && device_leaves_gpu("", &why))
        fprintf(stderr, "runs on the CPU although the machine has an NVIDIA GPU: %s\n", why.text);
}
