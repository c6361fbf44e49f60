/* See train.h: the loop over the steps. train_open.c has the start. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */

#include "train/run/train.h"

#include "base/clock.h"
#include "train/run/plot.h"
#include "train/run/schedule.h"
#include "train/run/train_open.h"

#include <math.h>

/* ---- one step ---- */

static double progress_of(const train_loop *r)
{
    const train_settings *s = r->settings;
    double progress = s->steps ? (double)r->state.step / (double)s->steps : r->state.elapsed / s->seconds;
    return progress < 1.0 ? progress : 1.0;
}

/* The warm-up counts the current step too, so that the first step does not have rate 0. */
static double rate_now(const train_loop *r)
{
    const train_settings *s = r->settings;
    double progress = progress_of(r), one = r->state.step ? progress / (double)r->state.step : 0.0;
    if (s->steps) one = 1.0 / (double)s->steps;
    if (progress < s->warmup) progress = fmin(progress + one, s->warmup);
    return s->lr * schedule_factor(progress, s->warmup, s->end_lr);
}

static adamw_step update_of(const train_loop *r)
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
static bool stop_not_finite(const train_loop *r, const char *what, double value, error *err)
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
static void stage(train_loop *r, int64_t number)
{
    const train_settings *s = r->settings;
    const model_batch batch = {r->inputs, r->targets, r->rows, s->config.context};
    if (r->staged == number) return;
    tokens_rows(r->data, s->seed, (uint64_t)number, s->batch, r->rank * r->rows, r->rows, r->inputs,
                r->targets);
    step_stage(&r->step, &batch);
    r->staged = number;
}

static double elapsed_now(const train_loop *r)
{
    return r->elapsed_before + clock_seconds() - r->started;
}

/* What the ranks add up of a step. The time is rank 0's: in a run of a given time all must stop at the same
 * step. */
static step_shared shared_of(const train_loop *r, int64_t bytes)
{
    const train_settings *s = r->settings;
    return (step_shared){.stop = s->stop && *s->stop ? 1.0 : 0.0,
                         .seconds = r->rank == 0 ? elapsed_now(r) : 0.0,
                         .bytes = (double)bytes};
}

/* One step. The batch of the next step is read while the device works on this one. */
static bool take_step(train_loop *r, error *err)
{
    const train_settings *s = r->settings;
    r->model.routing.step = (uint64_t)r->state.step;
    r->state.lr = rate_now(r);
    adamw_step update = update_of(r);
    step_result found;
    stage(r, r->state.step);
    const int64_t bytes = tokens_bytes(r->data, r->targets, r->rows * s->config.context);
    const step_shared mine = shared_of(r, bytes);
    step_share(&r->step, &mine);
    if (!step_run(&r->step, &update, err)) return false;
    stage(r, r->state.step + 1);
    if (!step_finish(&r->step, &found, err)) return false;
    group_progress(s->group);
    r->loss = found.loss;
    r->state.grad_norm = found.norm;
    if (!isfinite(r->loss)) return stop_not_finite(r, "loss", r->loss, err);
    if (!isfinite(found.norm)) return stop_not_finite(r, "gradient's norm", found.norm, err);
    r->state.step++;
    r->state.loss_sum += r->loss;
    r->state.loss_count++;
    r->state.loss_bytes += r->comm ? (int64_t)found.shared.bytes : bytes;
    r->state.elapsed = r->ranks > 1 && !s->steps ? found.shared.seconds : elapsed_now(r);
    r->stopped = found.shared.stop > 0.0;
    return true;
}

/* Was a rank told to stop? With several, as they all know it from the last step. */
static bool stops(const train_loop *r)
{
    const train_settings *s = r->settings;
    return r->ranks > 1 ? r->stopped : s->stop && *s->stop;
}

/* ---- after a step ---- */

/* Was one of `count` evenly spaced points of the run reached by the last step, which began at the progress
 * `from`? With `steps` the points are computed from the step: (29 / 100) * 100 is less than 29 in doubles. */
static bool passes(const train_loop *r, double from, int64_t count)
{
    const double points = (double)count, steps = (double)r->settings->steps, step = (double)r->state.step;
    if (r->settings->steps) return floor(step * points / steps) > floor((step - 1.0) * points / steps);
    return floor(progress_of(r) * points) > floor(from * points);
}

/* Tells the observer where the run is. `validated` and `line` as in train_report. */
static void report(const train_loop *r, double validated, const log_line *line)
{
    const train_settings *s = r->settings;
    const double progress = progress_of(r),
                 rate = (double)train_loop_tokens(r, 1) / average_of(&r->step_seconds);
    const train_report told = {.step = r->state.step,
                               .tokens = train_loop_tokens(r, r->state.step),
                               .loss = r->loss,
                               .bytes = tokens_are_bytes(r->data),
                               .val_loss = r->val_loss,
                               .tokens_per_s = rate,
                               .progress = progress,
                               .remaining =
                                   s->steps ? (double)train_loop_tokens(r, s->steps - r->state.step) / rate
                                            : s->seconds * (1.0 - progress),
                               .validated = validated,
                               .line = line};
    if (r->observer) r->observer(r->user, &told);
}

/* `part` is the validation of this step; its loss is NAN if there was none. */
static bool write_line(train_loop *r, const evaluation *part, error *err)
{
    train_state *now = &r->state;
    const evaluation trained = {.loss = now->loss_sum / (double)now->loss_count,
                                .tokens = train_loop_tokens(r, now->loss_count),
                                .bytes = now->loss_bytes};
    r->line = (log_line){.step = now->step,
                         .tokens = train_loop_tokens(r, now->step),
                         .seconds = now->elapsed,
                         .loss = trained.loss,
                         .bits_per_byte = evaluation_bits_per_byte(&trained),
                         .val_loss = part->loss,
                         .val_tokens = isnan(part->loss) ? 0 : part->tokens,
                         .tokens_per_s = (double)trained.tokens / (now->elapsed - now->line_elapsed),
                         .lr = now->lr,
                         .grad_norm = now->grad_norm,
                         .routing = now->routing,
                         .f8 = r->f8};
    r->f8 = f8_report_none;
    train_loop_begin_line(now);
    if (r->log && !log_write(r->log, &r->line, err)) return false;
    if (!isnan(part->loss)) r->val_loss = part->loss;
    report(r, (double)NAN, &r->line);
    return true;
}

static void report_pass(void *user, double share)
{
    report(user, share, NULL);
}

/* The same validation with fp8. A stop is one of both. */
static bool validate_f8(train_loop *r, int64_t windows, evaluation_watch watch, evaluation *result,
                        error *err)
{
    evaluation found;
    watch.compute = r->settings->compute;
    if (!evaluate(&found, &r->model, r->data, windows, &watch, err)) return false;
    if (found.stopped) {
        *result = found;
        return true;
    }
    r->f8.loss = found.loss;
    return f8_report_read(&r->f8, &r->model, found.rows, err);
}

/* Validates on `count` tokens, in whole windows. */
static bool validate(train_loop *r, int64_t count, evaluation *result, error *err)
{
    int64_t context = r->settings->config.context, windows = (count + context - 1) / context;
    const evaluation_watch watch = {r->settings->stop, report_pass, r, r->comm, SMOE_COMPUTE_STORAGE};
    r->staged = -1; // the windows overwrite the prepared batch
    step_settle(&r->step);
    if (!evaluate(result, &r->model, r->data, windows, &watch, err)) return false;
    if (result->stopped || r->settings->compute == SMOE_COMPUTE_STORAGE) return true;
    return validate_f8(r, windows, watch, result, err);
}

/* Writes the line of the last step, after a validation if one is wanted. A stop during the validation leaves
 * both to the resumed run. */
static bool record(train_loop *r, bool validates, error *err)
{
    evaluation part = {.loss = NAN};
    r->state.line_due = true;
    if (validates && !validate(r, r->plan.tokens, &part, err)) return false;
    return part.stopped || write_line(r, &part, err);
}

/* Evaluation, log line and checkpoint, if they are due. After a stop finish() does them. */
static bool keep_records(train_loop *r, double from, error *err)
{
    const train_settings *s = r->settings;
    const bool end = progress_of(r) >= 1.0, validates = passes(r, from, r->plan.count),
               line = end || validates || passes(r, from, s->logs);
    // Before a validation, whose passes overwrite the results of the step's.
    if (line && !routing_report_read(&r->state.routing, &r->model, err)) return false;
    if (end) return true; // finish() does the rest
    if (line && !record(r, validates, err)) return false;
    if (r->state.line_due || !passes(r, from, s->checkpoints)) return true;
    return train_loop_save(r, err);
}

static bool loop(train_loop *r, train_result *result, error *err)
{
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
        result->interrupted = stops(r);
    }
    return true;
}

/* The last evaluation, the last line and the last checkpoint. An interrupted run only saves the checkpoint.
 * The checkpoint has the losses since the last line, and the resumed run writes the line. */
static bool finish(train_loop *r, train_result *result, error *err)
{
    const train_settings *s = r->settings;
    evaluation last = {.loss = NAN};
    if (!result->interrupted && r->plan.count > 0 && !validate(r, r->plan.last, &last, err)) return false;
    result->interrupted |= last.stopped;
    if (!result->interrupted && r->state.loss_count && !write_line(r, &last, err)) return false;
    if (r->state.step > r->first && !train_loop_save(r, err)) return false;
    *result = (train_result){.step = r->state.step,
                             .tokens = train_loop_tokens(r, r->state.step),
                             .elapsed = r->state.elapsed,
                             .loss = r->line.loss,
                             .validation = last,
                             .interrupted = result->interrupted,
                             .parameters = param_count(&r->model.weights.layout),
                             .active = model_active_weights(&s->config),
                             .device_bytes = r->device->ops->used(r->device)};
    error ignored = {0}; // a curve that cannot be drawn is no error of the run
    if (r->rank == 0) plot_curves(s->out, &result->drawn, &ignored);
    return true;
}

static void tell_start(const train_loop *r)
{
    const train_settings *s = r->settings;
    const train_start start = {.resumed = s->resume,
                               .step = r->state.step,
                               .elapsed = r->state.elapsed,
                               .before = r->before,
                               .now = r->state.recipe,
                               .data = r->data,
                               .comm = s->group ? r->comm->name : NULL,
                               .ranks = r->ranks,
                               .device = r->device->name,
                               .recompute = r->recompute,
                               .chunks = r->chunks};
    if (s->on_start && r->rank == 0) s->on_start(s, &start);
}

bool train_run(const train_settings *settings, train_observer observer, void *user, train_result *result,
               error *err)
{
    train_loop r = {.settings = settings,
                    .observer = observer,
                    .user = user,
                    .val_loss = NAN, // not known until a validation
                    .state = {.lr = NAN, .grad_norm = NAN, .routing = routing_report_none},
                    .line = {.loss = NAN},
                    .f8 = {NAN, NAN, NAN, NAN},
                    .lock = -1,
                    .staged = -1};
    *result = (train_result){0};
    bool done = train_loop_open(&r, err);
    if (done) tell_start(&r);
    done = done && loop(&r, result, err) && finish(&r, result, err);
    if (!done && settings->group) group_fail(settings->group, err);
    train_loop_close(&r);
    return done;
}
