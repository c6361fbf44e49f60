/* `smoe info --model`: computes the memory that training a model needs, without allocating it. */
#ifndef CLI_INFO_MODEL_H
#define CLI_INFO_MODEL_H

#include "cli/common/table.h"
#include "train/model.h"

typedef struct info_model {
    const char *path; // config.json, or a checkpoint's folder; NULL: not asked
    int64_t batch;    // sequences of a step
    int64_t parts;    // micro-batches of a step
    bool bf16;        // --precision bf16
    model_recompute recompute;
    int64_t chunks; // column chunks of the experts
    double clip;    // largest norm of the gradient
} info_model;

bool info_model_print(const info_model *wanted, smoe_backend backend, table_format format, error *err);

#endif
