/* A run while it is open: what train.c loops over and train_open.c makes. */
#ifndef TRAIN_TRAIN_OPEN_H
#define TRAIN_TRAIN_OPEN_H

#include "train/data/tokens.h"
#include "train/run/average.h"
#include "train/run/carried.h"
#include "train/run/f8_report.h"
#include "train/run/log.h"
#include "train/run/step.h"
#include "train/run/train.h"

typedef struct train_loop {
    const train_settings *settings;
    tokenizer words; // zeroed: none
    carried from;    // of the checkpoint that is resumed or that the weights come from; zeroed: none
    tokens *data;
    train_device *device;
    model model;
    optimizer optimizer;
    train_step step;
    train_comm *comm; // NULL: one rank
    shards shards;
    int rank, ranks;
    bool stopped; // a rank was told to stop; all know it after the step
    train_state state;
    int lock; // of the folder `out`, -1: none
    train_log *log;
    int64_t rows;              // sequences of a step on this rank
    int32_t *inputs, *targets; // (rows, context)
    int64_t staged;            // the step whose batch is in them and prepared on the device, -1: none
    model_recompute recompute; // that of the run, as its chunks (fit.h)
    int32_t chunks;
    train_recipe before; // of the checkpoint that was resumed
    int64_t first;       // the step at which the run began
    double started;      // the clock when state.elapsed was elapsed_before
    double elapsed_before;
    validation_plan plan;
    f8_report f8;            // of the validation whose line is next
    double val_loss;         // newest
    log_line line;           // newest
    average step_seconds;    // of the last steps
    double loss;             // of the last step
    train_observer observer; // may be NULL
    void *user;
} train_loop;

/* Opens data, device, model and log, and joins the other ranks. train_loop_close also after a failure. */
bool train_loop_open(train_loop *r, error *err);
void train_loop_close(train_loop *r);

bool train_loop_save(train_loop *r, error *err); // a checkpoint, if the run has any

/* The tokens of a number of steps, on all ranks. */
int64_t train_loop_tokens(const train_loop *r, int64_t steps);

/* The line of the last step is in the log: the next line begins after this step. */
void train_loop_begin_line(train_state *state);

#endif
