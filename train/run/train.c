/* See train.h. */
#define _POSIX_C_SOURCE 200809L
#include "train/run/train.h"

#include "common/clock.h"
#include "train/files/checkpoint_folder.h"
#include "train/files/file.h"
#include "train/run/average.h"
#include "train/run/checkpoint.h"
#include "train/run/log.h"
#include "train/run/plot.h"
#include "train/run/run_folder.h"
#include "train/run/schedule.h"
#include "train/run/step.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

typedef struct run {
    const train_settings *settings;
    tokenizer words; // zeroed: none
    carried from;    // of the checkpoint that is resumed or that the weights come from; zeroed: none
    tokens *data;
    train_device *device;
    model model;
    optimizer optimizer;
    train_step step;
    train_state state;
    int lock; // of the folder `out`, -1: none
    train_log *log;
    int32_t *inputs, *targets; // (batch, context)
    int64_t staged;            // the step whose batch is in them and prepared on the device, -1: none
    train_recipe before;       // of the checkpoint that was resumed
    int64_t first;             // the step at which the run began
    double started;            // the clock when state.elapsed was elapsed_before
    double elapsed_before;
    validation_plan plan;
    double val_loss;         // newest
    log_line line;           // newest
    average step_seconds;    // of the last steps
    double loss;             // of the last step
    train_observer observer; // may be NULL
    void *user;
} run;

static int64_t tokens_of(const run *r, int64_t steps)
{
    return steps * r->settings->batch * r->settings->config.context;
}

/* The line of the last step is in the log: the next line begins after this step. */
static void begin_line(train_state *state)
{
    state->line_elapsed = state->elapsed;
    state->loss_sum = 0.0;
    state->loss_count = 0;
    state->loss_bytes = 0;
    state->routing = routing_report_none;
    state->line_due = false;
}

/* ---- start ---- */

/* The tokens of the whole run are counted in 63 bits. */
static bool check_length(const run *r, int64_t steps, error *err)
{
    return steps < INT64_MAX / tokens_of(r, 1) ||
           fail(err, ERROR_USAGE, "%lld steps of %lld tokens are more than 2^63 tokens", (long long)steps,
                (long long)tokens_of(r, 1));
}

static bool allocate(run *r, error *err)
{
    size_t rows = (size_t)(r->settings->batch * r->settings->config.context);
    if (!optimizer_create(&r->optimizer, &r->model, err)) return false;
    step_open(&r->step, &r->model, &r->optimizer);
    r->inputs = malloc(2 * rows * sizeof *r->inputs);
    if (!r->inputs) return fail(err, ERROR_RUNTIME, "out of memory: a batch of %zu tokens", rows);
    r->targets = r->inputs + rows;
    return true;
}

/* The place in the text that a run has reached means nothing in another text, or in one that is split
 * otherwise. A checkpoint of an earlier program does not say what its text was. */
static bool check_text(const run *r, const char *path, error *err)
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
                          .evaluations = (double)plan->count,
                          .evaluation_tokens = (double)plan->tokens,
                          .last_evaluation_tokens = (double)plan->last};
}

/* Tokens that a run of a given time will train on, roughly: a step takes about three times as long as a
 * validation of its tokens, which is measured here. The fastest of some passes counts: the first starts the
 * device, and other programs may run. */
static bool measure_length(run *r, double *length, error *err)
{
    enum { PASSES = 5 };
    double fastest = INFINITY;
    evaluation pass = {0};
    for (int i = 0; i < PASSES; i++) {
        const double started = clock_seconds();
        if (!evaluate(&pass, &r->model, r->data, r->model.frame.sequences, &(evaluation_watch){0}, err))
            return false;
        fastest = fmin(fastest, clock_seconds() - started);
    }
    *length = r->settings->seconds * (double)pass.tokens / (3.0 * fastest);
    return true;
}

/* Chooses the validations of the run when its first weights are there. */
static bool plan_validations(run *r, error *err)
{
    const train_settings *s = r->settings;
    const int64_t text = tokens_validation_count(r->data);
    double length = (double)tokens_of(r, s->steps);
    r->plan = s->validations;
    if (text == 0) r->plan.count = 0; // all of it is trained on
    if (r->plan.count == 0 || (r->plan.count > 0 && r->plan.tokens > 0 && r->plan.last > 0)) return true;
    if (s->steps == 0 && !measure_length(r, &length, err)) return false;
    r->plan = validation_plan_choose(r->plan, s->validation_share * length, text, s->config.context);
    return true;
}

/* Loads OUT/latest. Its seed, its batch and its text must be those of the settings. */
static bool resume(run *r, error *err)
{
    const train_settings *s = r->settings;
    char path[PATH_BYTES];
    if (!checkpoint_find(s->out, path, sizeof path, err)) return false;
    const adamw_arrays *arrays = &r->optimizer.arrays;
    if (!checkpoint_load_weights(path, &r->model, arrays->master, err) ||
        !checkpoint_load_state(path, &r->model, arrays, &r->state, err))
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
static bool take_weights(run *r, error *err)
{
    const train_settings *s = r->settings;
    char path[PATH_BYTES];
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
    return checkpoint_load_weights(path, &r->model, r->optimizer.arrays.master, err);
}

/* The log first, so that it never lacks lines before a checkpoint that survives a loss of power. */
static bool save(run *r, error *err)
{
    if (r->settings->checkpoints == 0) return true;
    if (r->log && !log_sync(r->log, err)) return false;
    return checkpoint_save(r->settings->out, &r->model, &r->optimizer.arrays, &r->state, &r->words, &r->from,
                           r->settings->keep, err);
}

static bool start(run *r, error *err)
{
    const train_settings *s = r->settings;
    if (s->resume)
        return file_lock_folder(&r->lock, s->out, err) && resume(r, err) &&
               (s->checkpoints == 0 || checkpoint_folder_relink(s->out, r->state.step, err));
    if (!take_weights(r, err) || !file_make_folder(s->out, err) || !file_lock_folder(&r->lock, s->out, err) ||
        !run_folder_unused(s, err) || // once more: another run may have begun since
        !plan_validations(r, err))
        return false;
    r->state.seed = s->seed;
    r->state.batch = s->batch;
    r->state.text = tokens_identify(r->data);
    r->state.recipe = recipe_of(s, &r->plan);
    // A checkpoint is saved before the first step. So there is always a usable checkpoint, and a full disk is
    // noticed at once.
    return save(r, err);
}

/* Chooses the tokenizer: the one of the settings, or that of the checkpoint that is resumed or that the
 * weights come from. If both are there, they must be equal; a resumed run without one cannot get one. Also
 * opens what is carried over from that checkpoint. */
static bool open_tokenizer(run *r, error *err)
{
    const train_settings *s = r->settings;
    char path[PATH_BYTES];
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
static bool open_log(run *r, error *err)
{
    char path[PATH_BYTES];
    log_line last;
    if (!run_folder_log(r->settings, path, sizeof path, err) ||
        !log_open(&r->log, path, r->state.step, &last, err))
        return false;
    if (last.step != r->state.step) return true;
    r->line = last;
    begin_line(&r->state);
    return true;
}

static bool open_run(run *r, error *err)
{
    const train_settings *s = r->settings;
    moe_routing routing = s->routing;
    routing.seed = s->seed;
    device_options device = s->device;
    device.sums = s->parts > 1;
    model_options options = {.sequences = s->batch / s->parts,
                             .parts = s->parts,
                             .routing = &routing,
                             .use = MODEL_TRAIN,
                             .recompute = s->recompute,
                             .chunks = s->chunks,
                             .one_layer = step_takes_layers(s->clip, s->parts)};
    tokens_split split;
    if (s->batch % s->parts)
        return fail(err, ERROR_USAGE, "--micro-batches is %lld, which does not divide the batch of %lld",
                    (long long)s->parts, (long long)s->batch);
    if (!check_length(r, s->steps, err) || (!s->resume && !run_folder_unused(s, err)) ||
        !run_folder_resumed(s, &split, err) || !open_tokenizer(r, err) ||
        !tokens_open(&r->data, s->paths, s->path_count, r->words.table.tokens ? &r->words.table : NULL,
                     s->config.vocab, s->config.context, split, err))
        return false;
    r->words.bytes = tokens_are_bytes(r->data) && !carried_has_tokenizer(&r->from);
    if (!(r->device = device_open(&device, err)) ||
        !model_create(&r->model, r->device, &s->config, &options, err) || !allocate(r, err) || !start(r, err))
        return false;
    r->first = r->state.step;
    r->started = clock_seconds();
    r->elapsed_before = r->state.elapsed;
    return open_log(r, err);
}

static void close_run(run *r)
{
    log_close(r->log);
    if (r->lock >= 0) close(r->lock);
    step_close(&r->step);
    optimizer_destroy(&r->optimizer);
    free(r->inputs);
    model_destroy(&r->model);
    if (r->device) r->device->ops->close(r->device);
    tokens_close(r->data);
    tokenizer_close(&r->words);
    carried_close(&r->from);
}

/* ---- one step ---- */

static double progress_of(const run *r)
{
    const train_settings *s = r->settings;
    double progress = s->steps ? (double)r->state.step / (double)s->steps : r->state.elapsed / s->seconds;
    return progress < 1.0 ? progress : 1.0;
}

/* The warm-up counts the current step too, so that the first step does not have rate 0. */
static double rate_now(const run *r)
{
    const train_settings *s = r->settings;
    double progress = progress_of(r), one = r->state.step ? progress / (double)r->state.step : 0.0;
    if (s->steps) one = 1.0 / (double)s->steps;
    if (progress < s->warmup) progress = fmin(progress + one, s->warmup);
    return s->lr * schedule_factor(progress, s->warmup, s->end_lr);
}

static adamw_step update_of(const run *r)
{
    const train_settings *s = r->settings;
    return (adamw_step){.lr = r->state.lr,
                        .beta1 = s->beta1,
                        .beta2 = s->beta2,
                        .eps = s->adam_eps,
                        .weight_decay = s->weight_decay,
                        .clip = s->clip,
                        .step = r->state.step + 1};
}

/* The error for a value that is not finite. It names the newest checkpoint, if there is one; or, if this run
 * has not changed the weights yet, where they are from. */
static bool stop_not_finite(const run *r, const char *what, double value, error *err)
{
    const train_settings *s = r->settings;
    if (r->state.step == r->first)
        return fail(err, ERROR_RUNTIME,
                    "the %s of step %lld is %g with the weights that the run began with (%s)", what,
                    (long long)r->state.step + 1, value,
                    s->resume ? s->out
                    : s->from ? s->from
                              : "random; a smaller --init?");
    if (s->checkpoints || s->resume)
        return fail(err, ERROR_RUNTIME,
                    "the %s of step %lld is %g: training stopped; the last good checkpoint is %s/latest (a "
                    "lower --lr?)",
                    what, (long long)r->state.step + 1, value, s->out);
    return fail(err, ERROR_RUNTIME,
                "the %s of step %lld is %g: training stopped; no checkpoint was saved (a lower --lr?)", what,
                (long long)r->state.step + 1, value);
}

/* Reads the batch of a step. */
static void stage(run *r, int64_t number)
{
    const train_settings *s = r->settings;
    const model_batch batch = {r->inputs, r->targets, s->batch, s->config.context};
    if (r->staged == number) return;
    tokens_batch(r->data, s->seed, (uint64_t)number, s->batch, r->inputs, r->targets);
    step_stage(&r->step, &batch);
    r->staged = number;
}

/* One step. The batch of the next step is read while the device works on this one. */
static bool take_step(run *r, error *err)
{
    const train_settings *s = r->settings;
    r->model.routing.step = (uint64_t)r->state.step;
    r->state.lr = rate_now(r);
    adamw_step update = update_of(r);
    step_result found;
    stage(r, r->state.step);
    if (!step_run(&r->step, &update, err)) return false;
    const int64_t bytes = tokens_bytes(r->data, r->targets, s->batch * s->config.context);
    stage(r, r->state.step + 1);
    if (!step_finish(&r->step, &found, err)) return false;
    r->loss = found.loss;
    r->state.grad_norm = found.norm;
    if (!isfinite(r->loss)) return stop_not_finite(r, "loss", r->loss, err);
    if (!isfinite(found.norm)) return stop_not_finite(r, "gradient's norm", found.norm, err);
    r->state.step++;
    r->state.loss_sum += r->loss;
    r->state.loss_count++;
    r->state.loss_bytes += bytes;
    r->state.elapsed = r->elapsed_before + clock_seconds() - r->started;
    return true;
}

/* ---- after a step ---- */

/* Was one of `count` evenly spaced points of the run reached by the last step, which began at the progress
 * `from`? With `steps` the points are computed from the step: (29 / 100) * 100 is less than 29 in doubles. */
static bool passes(const run *r, double from, int64_t count)
{
    const double points = (double)count, steps = (double)r->settings->steps, step = (double)r->state.step;
    if (r->settings->steps) return floor(step * points / steps) > floor((step - 1.0) * points / steps);
    return floor(progress_of(r) * points) > floor(from * points);
}

/* Tells the observer where the run is. `validated` and `line` as in train_report. */
static void report(const run *r, double validated, const log_line *line)
{
    const train_settings *s = r->settings;
    const double progress = progress_of(r), rate = (double)tokens_of(r, 1) / average_of(&r->step_seconds);
    const train_report told = {.step = r->state.step,
                               .tokens = tokens_of(r, r->state.step),
                               .loss = r->loss,
                               .val_loss = r->val_loss,
                               .tokens_per_s = rate,
                               .progress = progress,
                               .remaining = s->steps ? (double)tokens_of(r, s->steps - r->state.step) / rate
                                                     : s->seconds * (1.0 - progress),
                               .validated = validated,
                               .line = line};
    if (r->observer) r->observer(r->user, &told);
}

/* `part` is the validation of this step; its loss is NAN if there was none. */
static bool write_line(run *r, const evaluation *part, error *err)
{
    train_state *now = &r->state;
    const evaluation trained = {.loss = now->loss_sum / (double)now->loss_count,
                                .tokens = tokens_of(r, now->loss_count),
                                .bytes = now->loss_bytes};
    r->line = (log_line){.step = now->step,
                         .tokens = tokens_of(r, now->step),
                         .seconds = now->elapsed,
                         .loss = trained.loss,
                         .bits_per_byte = evaluation_bits_per_byte(&trained),
                         .val_loss = part->loss,
                         .val_tokens = isnan(part->loss) ? 0 : part->tokens,
                         .tokens_per_s = (double)trained.tokens / (now->elapsed - now->line_elapsed),
                         .lr = now->lr,
                         .grad_norm = now->grad_norm,
                         .routing = now->routing};
    begin_line(now);
    if (!log_write(r->log, &r->line, err)) return false;
    if (!isnan(part->loss)) r->val_loss = part->loss;
    report(r, (double)NAN, &r->line);
    return true;
}

static void report_pass(void *user, double share)
{
    report(user, share, NULL);
}

/* Validates on `count` tokens, in whole windows. */
static bool validate(run *r, int64_t count, evaluation *result, error *err)
{
    int64_t context = r->settings->config.context, windows = (count + context - 1) / context;
    const evaluation_watch watch = {r->settings->stop, report_pass, r};
    r->staged = -1; // the windows overwrite the prepared batch
    return evaluate(result, &r->model, r->data, windows, &watch, err);
}

/* Writes the line of the last step, after a validation if one is wanted. A stop during the validation leaves
 * both to the resumed run. */
static bool record(run *r, bool validates, error *err)
{
    evaluation part = {.loss = NAN};
    r->state.line_due = true;
    if (validates && !validate(r, r->plan.tokens, &part, err)) return false;
    return part.stopped || write_line(r, &part, err);
}

/* Evaluation, log line and checkpoint, if they are due. After a stop finish() does them. */
static bool keep_records(run *r, double from, error *err)
{
    const train_settings *s = r->settings;
    const bool end = progress_of(r) >= 1.0, validates = passes(r, from, r->plan.count),
               line = end || validates || passes(r, from, s->logs);
    // Before a validation, whose passes overwrite the results of the step's.
    if (line && !routing_report_read(&r->state.routing, &r->model, err)) return false;
    if (end) return true; // finish() does the rest
    if (line && !record(r, validates, err)) return false;
    if (r->state.line_due || !passes(r, from, s->checkpoints)) return true;
    return save(r, err);
}

static bool loop(run *r, train_result *result, error *err)
{
    const train_settings *s = r->settings;
    if (r->state.line_due && progress_of(r) < 1.0) {
        if (!record(r, r->plan.count > 0, err)) return false;
        result->interrupted = r->state.line_due;
    }
    for (double from = progress_of(r); from < 1.0 && !result->interrupted; from = progress_of(r)) {
        const double before = clock_seconds();
        if (!take_step(r, err)) return false;
        average_add(&r->step_seconds, clock_seconds() - before);
        report(r, (double)NAN, NULL);
        if (!keep_records(r, from, err)) return false;
        result->interrupted = s->stop && *s->stop;
    }
    return true;
}

/* The last evaluation, the last line and the last checkpoint. An interrupted run only saves the checkpoint.
 * The checkpoint has the losses since the last line, and the resumed run writes the line. */
static bool finish(run *r, train_result *result, error *err)
{
    const train_settings *s = r->settings;
    evaluation last = {.loss = NAN};
    if (!result->interrupted && r->plan.count > 0 && !validate(r, r->plan.last, &last, err)) return false;
    result->interrupted |= last.stopped;
    if (!result->interrupted && r->state.loss_count && !write_line(r, &last, err)) return false;
    if (r->state.step > r->first && !save(r, err)) return false;
    *result = (train_result){.step = r->state.step,
                             .tokens = tokens_of(r, r->state.step),
                             .elapsed = r->state.elapsed,
                             .loss = r->line.loss,
                             .validation = last,
                             .interrupted = result->interrupted,
                             .parameters = param_count(&r->model.weights.layout),
                             .active = model_active_weights(&s->config),
                             .device_bytes = r->device->ops->used(r->device)};
    error ignored = {0}; // a curve that cannot be drawn is no error of the run
    plot_curves(s->out, &result->drawn, &ignored);
    return true;
}

static void tell_start(const run *r)
{
    const train_settings *s = r->settings;
    const train_start start = {.resumed = s->resume,
                               .step = r->state.step,
                               .elapsed = r->state.elapsed,
                               .before = r->before,
                               .now = r->state.recipe,
                               .data = r->data,
                               .device = r->device->name};
    if (s->on_start) s->on_start(s, &start);
}

bool train_run(const train_settings *settings, train_observer observer, void *user, train_result *result,
               error *err)
{
    run r = {.settings = settings,
             .observer = observer,
             .user = user,
             .val_loss = NAN, // not known until a validation
             .state = {.lr = NAN, .grad_norm = NAN, .routing = routing_report_none},
             .line = {.loss = NAN},
             .lock = -1,
             .staged = -1};
    *result = (train_result){0};
    bool done = open_run(&r, err);
    if (done) tell_start(&r);
    done = done && loop(&r, result, err) && finish(&r, result, err);
    close_run(&r);
    return done;
}
