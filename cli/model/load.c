/* See load.h. */
#include "cli/model/load.h"

#include "train/checkpoint.h"

bool load_model(model *m, const char *path, int64_t sequences, model_use use, train_device *device,
                error *err)
{
    char name[4096];
    model_config config;
    *m = (model){0};
    if (!checkpoint_find(path, name, sizeof name, err) || !checkpoint_load_config(name, &config, err) ||
        !model_create(m, device, &config, &(model_options){.sequences = sequences, .use = use}, err))
        return false;
    if (checkpoint_load_weights(name, m, err)) {
        model_upload(m, NULL);
        return true;
    }
    model_destroy(m);
    return false;
}
