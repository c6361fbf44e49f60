/* `smoe info --model`: computes the memory that training a model needs, without allocating it. */
#ifndef CLI_INFO_MODEL_H
#define CLI_INFO_MODEL_H

#include "cli/support/table.h"
#include "train/model/model.h"

typedef struct info_model {
    const char *path;  // config.json, or the folder of a checkpoint or of a run; NULL: not asked
    const char *given; // an option that was given and is only for a path; NULL: none
    int64_t batch;     // sequences of a step
    int64_t parts;     // micro-batches of a step, on each GPU
    int64_t gpus;      // ranks that share out the batch and AdamW's states (train/run/shards.h)
    bool bf16;         // --precision bf16
    gradient_choice gradients;
    model_recompute recompute;
    smoe_compute compute; // --compute
    double clip;          // largest norm of the gradient
} info_model;

/* `chunks`: column chunks of the experts */
bool info_model_print(const info_model *wanted, int32_t chunks, smoe_backend backend, table_format format,
                      error *err);

#endif
