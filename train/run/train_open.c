/* See train_open.h: the start of a run. */
#define _POSIX_C_SOURCE 200809L
#include "train/run/train_open.h"

#include "base/clock.h"
#include "train/files/checkpoint_folder.h"
#include "train/files/file.h"
#include "train/run/checkpoint.h"
#include "train/run/fit.h"
#include "train/run/run_folder.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int64_t train_loop_tokens(const train_loop *r, int64_t steps)
{
    return steps * r->settings->batch * r->settings->config.context;
}

/* The line of the last step is in the log: the next line begins after this step. */
void train_loop_begin_line(train_state *state)
{
    state->line_elapsed = state->elapsed;
    state->loss_sum = 0.0;
    state->loss_count = 0;
    state->loss_bytes = 0;
    state->routing = routing_report_none;
    state->line_due = false;
}

/* The log first, so that it never lacks lines before a checkpoint that survives a loss of power. */
bool train_loop_save(train_loop *r, error *err)
{
    if (r->settings->checkpoints == 0) return true;
    if (r->log && !log_sync(r->log, err)) return false;
    group_writes(r->settings->group, true);
    const bool done = checkpoint_save(r->settings->out, &r->model, &r->optimizer.arrays, &r->state, &r->words,
                                      &r->from, r->settings->keep, r->comm, err);
    group_writes(r->settings->group, false);
    return done;
}

/* The tokens of the whole run are counted in 63 bits. */
static bool check_length(const train_loop *r, int64_t steps, error *err)
{
    return steps < INT64_MAX / train_loop_tokens(r, 1) ||
           fail(err, ERROR_USAGE, "%lld steps of %lld tokens are more than 2^63 tokens", (long long)steps,
                (long long)train_loop_tokens(r, 1));
}

static bool allocate(train_loop *r, error *err)
{
    size_t rows = (size_t)(r->rows * r->settings->config.context);
    const shards *sh = r->comm ? &r->shards : NULL;
    if (sh && !shards_create(&r->shards, &r->model.weights, r->rank, r->ranks, err)) return false;
    if (!optimizer_create(&r->optimizer, &r->model, sh, err) ||
        !step_open(&r->step, &r->model, &r->optimizer, sh, r->comm, r->settings->clip != 0.0, err))
        return false;
    r->inputs = malloc(2 * rows * sizeof *r->inputs);
    if (!r->inputs) return fail(err, ERROR_RUNTIME, "out of memory: a batch of %zu tokens", rows);
    r->targets = r->inputs + rows;
    return true;
}

/* The place in the text that a run has reached means nothing in another text, or in one that is split
 * otherwise. A checkpoint of an earlier program does not say what its text was. */
static bool check_text(const train_loop *r, const char *path, error *err)
{
    const tokens_mark was = r->state.text, is = tokens_identify(r->data);
    const bool same_counts = was.train == is.train && was.validation == is.validation;
    if (was.train == 0 || (same_counts && was.checksum == is.checksum)) return true;
    if (!same_counts && was.train + was.validation == tokens_all_count(r->data))
        return fail(
            err, ERROR_USAGE,
            "%.120s: the split of the text would change: the run has %lld tokens to train on and %lld "
            "to validate on, these files give %lld and %lld. The split follows from the number of the "
            "files and their names: resume with the files of the run, or start a new run with its "
            "weights (--from)",
            path, (long long)was.train, (long long)was.validation, (long long)is.train,
            (long long)is.validation);
    return fail(
        err, ERROR_USAGE,
        "%.120s was trained on another text (%lld tokens to train on, %lld to validate on, checksum "
        "%016llx) than this one (%lld, %lld, %016llx): resume with the text of the run, or start a new "
        "run with its weights (--from)",
        path, (long long)was.train, (long long)was.validation, (unsigned long long)was.checksum,
        (long long)is.train, (long long)is.validation, (unsigned long long)is.checksum);
}

static train_recipe recipe_of(const train_settings *s, const validation_plan *plan)
{
    return (train_recipe){.lr = s->lr,
                          .end_lr = s->end_lr,
                          .warmup = s->warmup,
                          .beta1 = s->beta1,
                          .beta2 = s->beta2,
                          .weight_decay = s->weight_decay,
                          .clip = s->clip,
                          .rounding = (double)s->routing.rounding,
                          .tile = (double)s->routing.tile,
                          .balance = (double)s->routing.balance_coefficient,
                          .z_loss = (double)s->routing.z_coefficient,
                          .bias_rate = (double)s->routing.bias_rate,
                          .compute = (double)s->compute,
                          .evaluations = (double)plan->count,
                          .evaluation_tokens = (double)plan->tokens,
                          .last_evaluation_tokens = (double)plan->last};
}

/* Tokens that a run of a given time will train on, roughly: a step takes about three times as long as a
 * validation of its tokens, which is measured here. The fastest of some passes counts: the first starts the
 * device, and other programs may run. */
static bool measure_length(train_loop *r, double *length, error *err)
{
    enum { PASSES = 5 };
    double fastest = INFINITY;
    evaluation pass = {0};
    for (int i = 0; i < PASSES; i++) {
        const double started = clock_seconds();
        const evaluation_watch watch = {.comm = r->comm};
        if (!evaluate(&pass, &r->model, r->data, r->ranks * r->model.frame.sequences, &watch, err))
            return false;
        fastest = fmin(fastest, clock_seconds() - started);
    }
    *length = r->rank > 0 ? 0.0 : r->settings->seconds * (double)pass.tokens / (3.0 * fastest);
    return !r->comm || comm_sum(r->comm, r->model.scalars, length, 1, err); // rank 0's
}

/* Chooses the validations of the run when its first weights are there. */
static bool plan_validations(train_loop *r, error *err)
{
    const train_settings *s = r->settings;
    const int64_t text = tokens_validation_count(r->data);
    double length = (double)train_loop_tokens(r, s->steps);
    r->plan = s->validations;
    if (text == 0) r->plan.count = 0; // all of it is trained on
    if (r->plan.count == 0 || (r->plan.count > 0 && r->plan.tokens > 0 && r->plan.last > 0)) return true;
    if (s->steps == 0 && !measure_length(r, &length, err)) return false;
    r->plan = validation_plan_choose(r->plan, s->validation_share * length, text, s->config.context);
    return true;
}

/* Loads the weights of a checkpoint. Of several ranks each reads its parts, and all gather them. */
static bool load_weights(train_loop *r, const char *path, error *err)
{
    if (!checkpoint_load_weights(path, &r->model, &r->optimizer.arrays, err)) return false;
    r->step.stale = r->comm != NULL;
    step_settle(&r->step);
    return true;
}

/* Loads OUT/latest. Its seed, its batch and its text must be those of the settings. */
static bool resume(train_loop *r, error *err)
{
    const train_settings *s = r->settings;
    char path[FILE_PATH_BYTES];
    if (!checkpoint_find(s->out, path, sizeof path, err)) return false;
    const adamw_arrays *arrays = &r->optimizer.arrays;
    if (!load_weights(r, path, err) || !checkpoint_load_state(path, &r->model, arrays, &r->state, err))
        return false;
    if (r->state.seed != s->seed || r->state.batch != s->batch)
        return fail(err, ERROR_USAGE,
                    "%s was trained with --seed %llu --batch %lld, not --seed %llu --batch %lld", path,
                    (unsigned long long)r->state.seed, (long long)r->state.batch, (unsigned long long)s->seed,
                    (long long)s->batch);
    if (!check_length(r, r->state.step, err) || !check_text(r, path, err) || !plan_validations(r, err))
        return false;
    r->before = r->state.recipe;
    r->state.recipe = recipe_of(s, &r->plan);
    r->state.text = tokens_identify(r->data); // unknown in a checkpoint of an earlier program
    return true;
}

/* Sets the first weights: those of settings->from, or random ones. */
static bool take_weights(train_loop *r, error *err)
{
    const train_settings *s = r->settings;
    char path[FILE_PATH_BYTES];
    model_config have;
    error why = {0};
    if (!s->from) {
        optimizer_draw(&r->optimizer, s->seed);
        return true;
    }
    if (!checkpoint_find(s->from, path, sizeof path, err) || !checkpoint_load_config(path, &have, err))
        return false;
    have.context = s->config.context; // no weight depends on it
    if (!model_config_same(&have, &s->config, &why))
        return fail(err, ERROR_USAGE, "%.200s has other sizes or settings: %.250s", path, why.text);
    return load_weights(r, path, err);
}

/* The folder is rank 0's: it locks it and has checked it, before the others come to write there. */
static bool resume_run(train_loop *r, error *err)
{
    const train_settings *s = r->settings;
    if ((r->rank == 0 && !file_lock_folder(&r->lock, s->out, err)) || !resume(r, err)) return false;
    if (r->comm) r->comm->ops->barrier(r->comm); // all have read
    return r->rank > 0 || s->checkpoints == 0 || checkpoint_folder_relink(s->out, r->state.step, err);
}

static bool start(train_loop *r, error *err)
{
    const train_settings *s = r->settings;
    if (s->resume) return resume_run(r, err);
    if (!take_weights(r, err)) return false;
    if (r->rank == 0 && (!file_make_folder(s->out, err) || !file_lock_folder(&r->lock, s->out, err) ||
                         !run_folder_unused(s, err))) // once more: another run may have begun since
        return false;
    if (!plan_validations(r, err)) return false;
    r->state.seed = s->seed;
    r->state.batch = s->batch;
    r->state.text = tokens_identify(r->data);
    r->state.recipe = recipe_of(s, &r->plan);
    // A checkpoint is saved before the first step. So there is always a usable checkpoint, and a full disk is
    // noticed at once.
    return train_loop_save(r, err);
}

/* Chooses the tokenizer: the one of the settings, or that of the checkpoint that is resumed or that the
 * weights come from. If both are there, they must be equal; a resumed run without one cannot get one. Also
 * opens what is carried over from that checkpoint. */
static bool open_tokenizer(train_loop *r, error *err)
{
    const train_settings *s = r->settings;
    char path[FILE_PATH_BYTES];
    tokenizer had = {0};
    if (s->tokenizer && !tokenizer_open(&r->words, s->tokenizer, err)) return false;
    const char *before = s->resume ? s->out : s->from;
    if (before && (!checkpoint_find(before, path, sizeof path, err) ||
                   !tokenizer_find(&had, path, s->config.vocab, err)))
        return false;
    const bool none = had.table.tokens == 0, bound = s->resume || !none, replaced = s->tokenizer && !bound;
    bool same = !s->tokenizer || !bound || tokenizer_same(&r->words, &had);
    if (!s->tokenizer)
        r->words = had;
    else
        tokenizer_close(&had);
    if (!same)
        return fail(err, ERROR_USAGE, "%s was trained %s %s", path,
                    none ? "without a tokenizer, not with" : "with another tokenizer than", s->tokenizer);
    if (before && !carried_open(&r->from, path, &r->words, err)) return false;
    if (replaced) carried_change_tokens(&r->from);
    return r->words.table.tokens <= s->config.vocab ||
           fail(err, ERROR_USAGE,
                "--tokenizer %s has %lld tokens, more than the model's vocabulary of %lld%s", s->tokenizer,
                (long long)r->words.table.tokens, (long long)s->config.vocab, before ? "" : " (--vocab)");
}

/* If the log has the line of the checkpoint's step, the line may have been written after the checkpoint: the
 * validation of this step was stopped and made by a resumed run, which made no further step. */
static bool open_log(train_loop *r, error *err)
{
    char path[FILE_PATH_BYTES];
    log_line last;
    if (!run_folder_log(r->settings, path, err) || !log_open(&r->log, path, r->state.step, &last, err))
        return false;
    if (last.step != r->state.step) return true;
    r->line = last;
    train_loop_begin_line(&r->state);
    return true;
}

/* Do all ranks have these settings and this text? Then opens their collectives. */
static bool join_ranks(train_loop *r, error *err)
{
    const train_settings *s = r->settings;
    const tokens_mark text = tokens_identify(r->data);
    unsigned char key[GROUP_KEY] = {0};
    char all[8192];
    if (s->sharded) return (r->comm = comm_alone(r->device, err)) != NULL;
    if (!s->group) return true;
    const int length = snprintf(
        all, sizeof all, "%s\na text of %lld tokens to train on, %lld to validate on, checksum %016llx\n",
        s->summary ? s->summary : "", (long long)text.train, (long long)text.validation,
        (unsigned long long)text.checksum);
    if (length >= (int)sizeof all)
        return fail(err, ERROR_USAGE, "the settings have more than %zu characters", sizeof all);
    if (!group_agree(s->group, all, err)) return false;
    // Not before: a key is a file of shared memory, and would stay if the ranks did not agree.
    if (r->rank == 0 && !device_comm_key(r->device, r->ranks, key, err)) return false;
    group_share_key(s->group, key);
    return (r->comm = device_comm(r->device, s->group, key, err)) != NULL;
}

static bool make_model(train_loop *r, error *err)
{
    const train_settings *s = r->settings;
    train_routing routing = s->routing;
    routing.seed = s->seed;
    model_options options = {.sequences = r->rows / s->parts,
                             .parts = s->parts,
                             .routing = &routing,
                             .use = MODEL_TRAIN,
                             .recompute = s->recompute,
                             .compute = s->compute,
                             .chunks = s->chunks,
                             .one_layer = step_takes_layers(s->clip, s->parts),
                             .sharded = r->comm != NULL,
                             .rank = r->rank,
                             .ranks = r->ranks};
    if (!fit_choose(&options, r->device, s, r->comm, err)) return false;
    r->recompute = options.recompute, r->chunks = options.chunks;
    return model_create(&r->model, r->device, &s->config, &options, err) && allocate(r, err);
}

static bool open_data(train_loop *r, error *err)
{
    const train_settings *s = r->settings;
    tokens_split split;
    if (!check_length(r, s->steps, err) || (!s->resume && !run_folder_unused(s, err)) ||
        !run_folder_resumed(s, &split, err) || !open_tokenizer(r, err) ||
        !tokens_open(&r->data, s->paths, s->path_count, r->words.table.tokens ? &r->words.table : NULL,
                     s->config.vocab, s->config.context, split, err))
        return false;
    r->words.bytes = tokens_are_bytes(r->data) && !carried_has_tokenizer(&r->from);
    return true;
}

static bool check_batch(const train_loop *r, error *err)
{
    const train_settings *s = r->settings;
    if (r->ranks > 1 && s->batch % (r->ranks * s->parts))
        return fail(err, ERROR_USAGE,
                    "--batch is %lld, which %d ranks with %lld micro-batches each do not divide",
                    (long long)s->batch, r->ranks, (long long)s->parts);
    return s->batch % s->parts == 0 ||
           fail(err, ERROR_USAGE, "--micro-batches is %lld, which does not divide the batch of %lld",
                (long long)s->parts, (long long)s->batch);
}

bool train_loop_open(train_loop *r, error *err)
{
    const train_settings *s = r->settings;
    device_options device = s->device;
    r->rank = s->group ? group_rank(s->group) : 0;
    r->ranks = s->group ? group_ranks(s->group) : 1;
    r->rows = s->batch / r->ranks;
    device.sums = s->parts > 1;
    if (s->group) device.index = group_local(s->group);
    if (!check_batch(r, err) || !open_data(r, err) || !(r->device = device_open(&device, err)) ||
        !join_ranks(r, err) || !make_model(r, err) || !start(r, err))
        return false;
    r->first = r->state.step;
    r->started = clock_seconds();
    r->elapsed_before = r->state.elapsed;
    return r->rank > 0 || open_log(r, err);
}

void train_loop_close(train_loop *r)
{
    log_close(r->log);
    if (r->lock >= 0) close(r->lock);
    step_close(&r->step);
    optimizer_destroy(&r->optimizer);
    shards_destroy(&r->shards);
    free(r->inputs);
    model_destroy(&r->model);
    if (r->comm) r->comm->ops->close(r->comm);
    if (r->device) r->device->ops->close(r->device);
    tokens_close(r->data);
    tokenizer_close(&r->words);
    carried_close(&r->from);
}
