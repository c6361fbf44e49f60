/* A training run: data, model, optimiser, log, checkpoints.
 *
 * The result of a run with `steps` depends only on its settings. If it is stopped at any checkpoint and
 * resumed, it gives the same bits and, but for the clock's values, the same lines of the log. A run with
 * `seconds` ends after this time. Its learning rate follows the time spent so far, which is stored in the
 * checkpoint. */
#ifndef TRAIN_TRAIN_H
#define TRAIN_TRAIN_H

#include "train/device.h"
#include "train/model/model.h"
#include "train/run/checkpoint.h"
#include "train/run/evaluate.h"
#include "train/run/log.h"
#include "train/run/validation_plan.h"

#include <signal.h>

/* What on_start is told before the first step. */
typedef struct train_start {
    bool resumed;
    int64_t step;        // steps done before this run
    double elapsed;      // seconds of training before this run
    train_recipe before; // the options of the run up to now; NAN: not known
    train_recipe now;
    const tokens *data;
    const char *comm; // what the ranks are connected by; NULL: one rank
    int ranks;
    const char *device;        // "cpu" or "cuda"
    model_recompute recompute; // that of the run, and its chunks: more than the settings' if the run would
    int32_t chunks;            // not fit otherwise (fit.h)
} train_start;

typedef struct train_settings train_settings;

struct train_settings {
    model_config config;
    device_options device;
    model_recompute recompute;
    smoe_compute compute;             // of the experts in training; with fp8 validations are made twice,
                                      // the losses that count are those in 16 bits
    int32_t chunks;                   // column chunks of the experts
    bool keep_recompute, keep_chunks; // they stay as they are, even if the run does not fit (fit.h)
    const char *const *paths;         // files and folders of text, or token files
    size_t path_count;
    const char *tokenizer; // table of the tokens (train/data/bpe.h); NULL: that of the checkpoint resumed or
                           // started from, or none
    const char *out;       // folder of log, curve and checkpoints; a new run must not find a checkpoint or
                           // lines of a log there
    bool resume;           // continue from OUT/latest, whose config.json must equal `config`
    const char *from;      // a checkpoint with the first weights; NULL: random weights. Its config.json
                           // must equal `config` except for the context
    int64_t batch;         // sequences of a step
    int64_t parts;         // micro-batches: passes of a step on each rank; ranks * parts must divide batch
    int64_t steps;         // length of the run in steps, or
    double seconds;        // in seconds of training when steps is 0
    double lr, end_lr;     // peak rate, and the final rate as a fraction of it
    double warmup;         // fraction of the run
    double beta1, beta2, adam_eps, weight_decay;
    double clip;                 // largest norm of the gradient
    train_routing routing;       // rounding, tile, auxiliary losses; its seed and step are set by the run
    uint64_t seed;               // of the weights, the samples and SR-f
    int64_t logs, checkpoints;   // how many of each over the run; no checkpoints: 0
    validation_plan validations; // what is to be chosen in it is chosen before the first step. A run
                                 // that begins with a count of 0 trains on the whole text and cannot be
                                 // resumed with more
    double validation_share;     // of the run's tokens, for what is chosen
    int64_t keep;                // checkpoints that stay
    struct group *group; // of several ranks (train/ranks/group.h), of which this process is one; NULL: none.
                         // The batch is that of all; each rank has batch / ranks sequences of it
    const char *summary; // with a group: the settings as lines of text, in which the ranks must agree
    bool sharded;        // without a group: as one of one rank, for tests
    const volatile sig_atomic_t *stop; // if *stop becomes not 0: finish the step, stop a validation, save,
                                       // return. The resumed run makes this validation first
    void (*on_start)(const train_settings *settings, const train_start *start); // may be NULL
};

/* Valid settings for the demo: a small model with tuned sizes. paths and out are not set. */
train_settings train_settings_default(void);

/* Standard deviation of the first weights, and peak learning rate, for a model of these sizes. At the demo's
 * sizes they are those of train_settings_default; a wider model needs smaller ones. */
double train_default_init(const model_config *config);
double train_default_lr(const model_config *config);

/* What an observer receives: after every step, after every line of the log, and during validations. */
typedef struct train_report {
    int64_t step, tokens;
    double loss;          // of this step, nats
    bool bytes;           // a token is a byte of text
    double val_loss;      // newest, NAN before the first
    double tokens_per_s;  // over the last steps
    double progress;      // 0..1
    double remaining;     // seconds of training to the end
    double validated;     // share of a validation that is done, 0..1; NAN: none is running
    const log_line *line; // what was just written into the log; NULL: nothing
} train_report;

typedef void (*train_observer)(void *user, const train_report *report);

typedef struct train_result {
    int64_t step, tokens;
    double elapsed;        // seconds of training, those before a resume included
    double loss;           // of the last line that the run wrote, or of the line of the step at which it was
                           // resumed, nats; NAN: there is none
    evaluation validation; // the last one, over validations.last tokens
    bool interrupted;      // by *stop, during training or during the last validation, which then has no loss
    bool drawn;            // curve.png is there
    size_t parameters;
    int64_t active;      // weights a token uses
    size_t device_bytes; // bytes in use on the device at the end, as its driver counts them; 0: not known
} train_result;

/* Runs to the end. If a loss or gradient is not finite, the run ends with an error that names the newest
 * checkpoint. This checkpoint is not changed. */
bool train_run(const train_settings *settings, train_observer observer, void *user, train_result *result,
               error *err);

#endif
