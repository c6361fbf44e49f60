/* Checkpoints: each is a folder such as OUT/step-0000100. OUT/latest is a symbolic link to the newest
 * finished one.
 *
 *     config.json               the model's shape (train/model/config.h says which transformers opens)
 *     model.safetensors         its weights under OLMoE's names, in f32; in bf16 where the run has no others
 *     bpe.txt, tokenizer*.json  the tokenizer; bytes have only the json files (train/data/tokenizer.h)
 *     generation_config.json, ..  from the checkpoint of --from (train/run/carried.h)
 *     state.safetensors         what else is needed to resume: the AdamW moments and train_state
 *
 * A checkpoint is written as step-0000100.tmp, synced and renamed. Only then `latest` is made to point to it,
 * by a rename too. So whenever the process is killed, `latest` is a complete checkpoint. If a checkpoint
 * cannot be written (a full disk), its files are removed.
 *
 * Weights and moments go between files and the model's device piece by piece (train/files/transfer.h). */
#ifndef TRAIN_CHECKPOINT_H
#define TRAIN_CHECKPOINT_H

#include "train/data/tokenizer.h"
#include "train/data/tokens.h"
#include "train/model/model.h"
#include "train/ranks/comm.h"
#include "train/run/carried.h"
#include "train/run/routing_report.h"

/* The options that a resumed run may change. The file has them so that a change can be told. NAN: not known,
 * in a file of an earlier program. */
typedef struct train_recipe {
    double lr, end_lr, warmup, beta1, beta2, weight_decay, clip;
    double rounding, tile, balance, z_loss, bias_rate; // rounding: a smoe_rounding
    double evaluations, evaluation_tokens, last_evaluation_tokens;
    double compute; // a smoe_compute
} train_recipe;

/* The counters of the training loop, and what the next line of the log needs. The values after loss_bytes
 * are NAN or false if they are not known. */
typedef struct train_state {
    int64_t step;           // steps done; also the counter of the sampler
    uint64_t seed;          // of the samples
    int64_t batch;          // sequences of a step
    tokens_mark text;       // what the run is trained on; zeroed by programs that did not write it
    train_recipe recipe;    // of the steps up to now
    double elapsed;         // seconds of training
    double loss_sum;        // of the steps since the last line of the log
    int64_t loss_count;     // how many these are
    int64_t loss_bytes;     // bytes of text in their targets, 0: not known
    double line_elapsed;    // elapsed at the last line of the log
    double lr, grad_norm;   // of the last step
    routing_report routing; // of the last step, if its line is due and not yet in the log
    bool line_due;          // the line of the last step, which has a validation, is not yet in the log
} train_state;

/* Writes a checkpoint of m, the optimiser's arrays and state under `out`, points `latest` to it and removes
 * the oldest beyond `keep`. `words` is the tokenizer that is saved with it; zeroed for token files without
 * one. `from` is what is taken over from an earlier checkpoint; zeroed: nothing. `comm`, unless NULL: all its
 * ranks call this and write the ranges whose states they have; rank 0 does the rest. The files are the same.
 */
bool checkpoint_save(const char *out, const model *m, const adamw_arrays *arrays, const train_state *state,
                     const tokenizer *words, const carried *from, int64_t keep, train_comm *comm, error *err);

/* Finds the checkpoint that `path` means: path itself if it contains a config.json, else path/latest. `name`
 * (of `size` bytes) receives the checkpoint's path. */
bool checkpoint_find(const char *path, char *name, size_t size, error *err);

/* Reads config.json. The caller then makes a model of this config, and checkpoint_load_weights fills it. */
bool checkpoint_load_config(const char *path, model_config *config, error *err);

/* Loads the weights from model.safetensors, or from the shards of model.safetensors.index.json, to the model.
 * With `arrays` only those whose states are here, also to the master weights. Errors: a tensor of the model
 * is missing, has another shape or is an integer; the file has a tensor that the model does not have; a model
 * with a tied embedding has a head that differs from the embedding. */
bool checkpoint_load_weights(const char *path, model *m, const adamw_arrays *arrays, error *err);

/* Reads state and, unless m is NULL, the AdamW moments into arrays. */
bool checkpoint_load_state(const char *path, const model *m, const adamw_arrays *arrays, train_state *state,
                           error *err);

#endif
