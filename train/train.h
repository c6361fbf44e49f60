/* A training run: data, model, optimiser, log, checkpoints.
 *
 * A run with `steps` is a pure function of its settings: stopped at any checkpoint and resumed, it gives the
 * same bits. A run with `seconds` ends by the clock. Its learning rate follows the time spent so far, which
 * is in the checkpoint. */
#ifndef TRAIN_TRAIN_H
#define TRAIN_TRAIN_H

#include "train/device.h"
#include "train/evaluate.h"
#include "train/model.h"

#include <signal.h>

/* What is known before the first step. */
typedef struct train_start {
    bool resumed;
    int64_t step;   // steps done before this run
    double elapsed; // seconds of training before this run
    const tokens *data;
} train_start;

typedef struct train_settings train_settings;

struct train_settings {
    model_config config;
    device_options device;
    model_recompute recompute;
    int32_t chunks;           // column chunks of the experts
    const char *const *paths; // files and folders of text, or token files
    size_t path_count;
    const char *tokenizer; // table of the tokens (train/bpe.h); NULL: the one of the checkpoint resumed or
                           // started from, or none
    const char *out;       // folder of log, curve and checkpoints
    bool resume;           // go on from OUT/latest; its config.json must be `config`
    const char *from;  // a checkpoint whose weights the run starts with; NULL: random ones. Its config.json
                       // must be `config` but for the context
    int64_t batch;     // sequences of a step
    int64_t parts;     // micro-batches: passes that a step's batch is cut into; divides it
    int64_t steps;     // length of the run in steps, or
    double seconds;    // in seconds of training when steps is 0
    double lr, end_lr; // peak, and the fraction of it at the end
    double warmup;     // fraction of the run
    double beta1, beta2, adam_eps, weight_decay;
    double clip;         // largest norm of the gradient
    moe_routing routing; // rounding, tile, auxiliary losses; its seed and step are set by the run
    uint64_t seed;       // of the weights, the samples and SR-f
    int64_t logs, evaluations, checkpoints; // how many of each over the run; 0 of the last two: none
    int64_t evaluation_tokens;              // of the validation stream, at all evaluations but the last
    int64_t last_evaluation_tokens;         // at the last: it bounds the time after the last step
    int64_t keep;                           // checkpoints that stay
    const volatile sig_atomic_t
        *stop; // not NULL and not 0: finish the step, leave a validation, save, return
    void (*on_start)(const train_settings *settings, const train_start *start); // NULL: nobody is told
};

/* Valid settings of a demo: a small model whose sizes are the tuned ones; paths and out are missing. */
train_settings train_settings_default(void);

/* What an observer is told after every step. */
typedef struct train_report {
    int64_t step, tokens;
    double loss;         // of this step, nats
    double val_loss;     // newest, NAN before the first
    double tokens_per_s; // over the last seconds
    double progress;     // 0..1
    double remaining;    // seconds to the end, NAN when not known yet
} train_report;

typedef void (*train_observer)(void *user, const train_report *report);

typedef struct train_result {
    int64_t step, tokens;
    double elapsed;        // seconds of training, those before a resume included
    double loss;           // of the last log line, nats
    evaluation validation; // the last, over last_evaluation_tokens
    bool interrupted;      // by *stop, while training or in the last validation, which then has no loss
    bool drawn;            // curve.png is there
    size_t parameters;
    int64_t active;      // weights a token uses
    size_t device_bytes; // in use on the device at the end, by its driver's count; 0: not known
} train_result;

/* Runs to the end. A loss or gradient that is not finite ends the run with an error that names the newest
 * checkpoint, which stays as it is. */
bool train_run(const train_settings *settings, train_observer observer, void *user, train_result *result,
               error *err);

#endif
