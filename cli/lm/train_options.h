/* The options of `smoe train`, from one table: name, place in train_settings, limits, text and (from the
 * settings themselves) the default that --help shows. */
#ifndef CLI_TRAIN_OPTIONS_H
#define CLI_TRAIN_OPTIONS_H

#include "train/run/checkpoint.h"
#include "train/run/train.h"

#include <argp.h>

enum { TRAIN_NUMBER_OPTIONS = 64 }; // at least as many as there are

typedef struct train_options {
    train_settings settings;
    const char **paths; // settings.paths: pointers into argv
    bool sizes_given;   // some option of the model's sizes, other than --context, was given
    bool vocab_given, init_given, rounding_given, score_given, compute_given;
    bool given[TRAIN_NUMBER_OPTIONS]; // those with a number
    bool dense_twin;
    const char *length; // which of steps, seconds, minutes was given; NULL: none, so the default seconds
    bool json, quiet;
    int32_t gpus;        // --gpus: ranks to start on this host
    double peer_timeout; // seconds
} train_options;

/* Fills *options from the command line. argp prints help and usage errors and exits (0, 2); other errors come
 * back. The caller frees options->paths. */
bool train_options_parse(train_options *options, int argc, char **argv, error *err);

/* The options as lines of text, in which all ranks of a run must agree; without the folder and the data. */
void train_options_summary(const train_options *options, char *text, size_t size);

/* Takes the sizes of the model that is resumed, or whose weights are the first (--from), except for options
 * that were given. */
bool train_options_adopt_sizes(train_options *options, const model_config *run, error *err);

/* Takes batch, seed and recipe of the run that is resumed, except for options that were given; and no
 * validations, if it has no text for them. */
void train_options_adopt(train_options *options, const train_state *run);

#endif
