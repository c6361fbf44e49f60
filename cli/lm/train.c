/* `smoe train`: trains, then prints the result. train/run/train.h has the run itself. */
#include "base/clock.h"
#include "build_info.h"
#include "cli/lm/data.h"
#include "cli/lm/load.h"
#include "cli/lm/progress.h"
#include "cli/lm/train_options.h"
#include "cli/support/cli.h"
#include "cli/support/problem.h"
#include "cli/support/table.h"
#include "train/ranks/group.h"
#include "train/ranks/launch.h"
#include "train/ranks/place.h"
#include "train/run/checkpoint.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_BYTES = 4096, SUMMARY_BYTES = 4096 };

/* The signal that was received, 0: none. It is global because a signal handler has no other way to pass it
 * on. */
static volatile sig_atomic_t stop_asked;

/* A signal within a tenth of a second of the first is the same request: `timeout` sends one to the process
 * and one to its group. A later one ends the program. */
static void ask_to_stop(int number)
{
    static double first;
    const double now = clock_seconds();
    if (!stop_asked) {
        stop_asked = number;
        first = now;
    } else if (now - first > 0.1) {
        signal(number, SIG_DFL);
        raise(number); // comes when the handler returns
    }
}

/* At the first interrupt the run finishes its step, or stops its validation, and saves a checkpoint. A second
 * interrupt, a tenth of a second later or more, ends the program at once. Finished checkpoints stay. */
static void catch_signals(void)
{
    struct sigaction action = {.sa_handler = ask_to_stop, .sa_flags = SA_RESTART}, hangup;
    sigaddset(&action.sa_mask, SIGINT); // one at a time
    sigaddset(&action.sa_mask, SIGTERM);
    sigaddset(&action.sa_mask, SIGHUP);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    // The terminal was closed. nohup has it ignored, and so it stays.
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &action, NULL);
    signal(SIGXFSZ, SIG_IGN); // so that writing past the limit of a file's size is an error of the write
}

static const table_column columns[] = {
    {"step", COLUMN_INTEGER, 0, false, NULL},
    {"tokens", COLUMN_INTEGER, 0, false, NULL},
    {"seconds", COLUMN_NUMBER, 1, false, "of training"},
    {"tokens_per_s", COLUMN_NUMBER, 0, false, NULL},
    {"parameters", COLUMN_INTEGER, 0, false, NULL},
    {"active", COLUMN_INTEGER, 0, false, "parameters that a token uses"},
    {"loss", COLUMN_NUMBER, 4, false, "training, nats a token"},
    {"val_loss", COLUMN_NUMBER, 4, false, "validation, nats a token, without token rounding"},
    {"val_bits_per_byte", COLUMN_NUMBER, 4, false, NULL},
    {"val_tokens", COLUMN_INTEGER, 0, false, "that val_loss is the mean over"},
    {"device_gb", COLUMN_NUMBER, 2, false,
     "GB of 10^9 bytes in use on the GPU, by its driver's count"}, // last
};

static bool print_result(const train_options *options, const train_result *r, error *err)
{
    const int all = sizeof columns / sizeof columns[0], count = r->device_bytes ? all : all - 1;
    table *t = table_open(stdout, options->json ? TABLE_JSON : TABLE_VERTICAL, columns, count);
    if (!t) return fail(err, ERROR_RUNTIME, "out of memory");
    const bool validated = !r->interrupted && r->validation.tokens > 0;
    table_integer(t, r->step);
    table_integer(t, r->tokens);
    table_number(t, r->elapsed);
    table_number(t, (double)r->tokens / r->elapsed);
    table_integer(t, (int64_t)r->parameters);
    table_integer(t, r->active);
    table_number(t, r->loss);
    table_number(t, validated ? r->validation.loss : (double)NAN);
    table_number(t, validated ? evaluation_bits_per_byte(&r->validation) : (double)NAN);
    table_integer(t, validated ? r->validation.tokens : 0);
    if (r->device_bytes) table_number(t, (double)r->device_bytes / 1e9);
    table_end_row(t);
    return table_close(t, err);
}

/* A resumed run goes on as it was, unless options say otherwise. */
static bool adopt_recipe(train_options *options, error *err)
{
    train_settings *s = &options->settings;
    train_state run;
    char path[PATH_BYTES];
    if (!s->resume) return true;
    if (!checkpoint_find(s->out, path, sizeof path, err) ||
        !checkpoint_load_state(path, NULL, NULL, &run, err))
        return false;
    train_options_adopt(options, &run);
    return true;
}

/* A run that starts from a checkpoint takes the model's sizes from it. */
static bool adopt_sizes(train_options *options, error *err)
{
    const train_settings *s = &options->settings;
    char path[PATH_BYTES];
    model_config run;
    if (!s->from && !s->resume) return true;
    return checkpoint_find(s->from ? s->from : s->out, path, sizeof path, err) &&
           checkpoint_load_config(path, &run, err) && train_options_adopt_sizes(options, &run, err);
}

static void show_change(const char *name, double before, double now)
{
    if (isnan(before) || before == now) return;
    fprintf(stderr, "--%s is %g from here on, it was %g\n", name, now, before);
}

static const char *rule_name(double rule)
{
    return rule >= SMOE_ROUNDING_NONE && rule <= SMOE_ROUNDING_DOWN ? rounding_name((smoe_rounding)rule)
                                                                    : "?";
}

/* Prints the options with which a resumed run differs from what it was. routed: the model has a layer with
 * experts; without one the options of the router are without effect. */
static void show_changes(const train_recipe *before, const train_recipe *now, bool routed)
{
    show_change("lr", before->lr, now->lr);
    show_change("end-lr", before->end_lr, now->end_lr);
    show_change("warmup", before->warmup, now->warmup);
    show_change("beta1", before->beta1, now->beta1);
    show_change("beta2", before->beta2, now->beta2);
    show_change("weight-decay", before->weight_decay, now->weight_decay);
    show_change("clip", before->clip, now->clip);
    show_change("evaluations", before->evaluations, now->evaluations);
    if (now->evaluations > 1)
        show_change("evaluation-tokens", before->evaluation_tokens, now->evaluation_tokens);
    if (now->evaluations > 0)
        show_change("last-evaluation-tokens", before->last_evaluation_tokens, now->last_evaluation_tokens);
    if (!routed) return;
    if (!isnan(before->compute) && before->compute != now->compute)
        fprintf(stderr, "--compute is %s from here on, it was %s\n", model_compute_name(now->compute),
                model_compute_name(before->compute));
    show_change("balance", before->balance, now->balance);
    show_change("z-loss", before->z_loss, now->z_loss);
    show_change("bias-rate", before->bias_rate, now->bias_rate);
    if (!isnan(before->rounding) && before->rounding != now->rounding)
        fprintf(stderr, "--rounding is %s from here on, it was %s\n", rule_name(now->rounding),
                rule_name(before->rounding));
    if (now->rounding != (double)SMOE_ROUNDING_NONE) show_change("tile", before->tile, now->tile);
}

/* The options of a new run that follow from its sizes and its length unless they are given. */
static void show_chosen(const train_settings *s, const train_recipe *now)
{
    fprintf(stderr, "new run: --lr %g", now->lr);
    if (!s->from) fprintf(stderr, " --init %g", s->config.initializer_range);
    fprintf(stderr, " --evaluations %.0f", now->evaluations);
    if (now->evaluations > 1) fprintf(stderr, " --evaluation-tokens %.0f", now->evaluation_tokens);
    if (now->evaluations > 0) fprintf(stderr, " --last-evaluation-tokens %.0f", now->last_evaluation_tokens);
    fputc('\n', stderr);
}

/* Where the user has not chosen GPUs: which ones a run on one leaves unused. */
static void show_free_gpus(void)
{
    const int others = getenv("CUDA_VISIBLE_DEVICES") ? 0 : device_free_gpus(NULL);
    if (others > 0)
        fprintf(stderr, "1 GPU; %d more of this host %s free (--gpus)\n", others, others == 1 ? "is" : "are");
}

/* Prints which files were left out; of a new run on which files it validates and what was chosen for it; of a
 * resumed run how much it still has to do (its steps or seconds include those before), and which options have
 * changed. */
static void show_start(const train_settings *s, const train_start *start)
{
    const double left = s->seconds - start->elapsed;
    const char *nothing =
        start->now.evaluations > 0 ? "nothing is left but the last validation" : "nothing is left";
    if (strcmp(start->device, "cpu") == 0) cli_show_blas_fault();
    if (start->comm && strcmp(start->device, "cpu") != 0)
        fprintf(stderr, "%d GPUs, %s\n", start->ranks, start->comm);
    if (start->ranks == 1 && strcmp(start->device, "cpu") != 0) show_free_gpus();
    if (start->recompute != s->recompute || start->chunks != s->chunks)
        fprintf(stderr, "chosen so that the run fits on the GPU: --recompute %s --chunks %d\n",
                model_recompute_names[start->recompute], (int)start->chunks);
    show_skipped(start->data);
    if (!start->resumed) {
        show_files(start->data);
        show_validation(start->data);
        show_chosen(s, &start->now);
        return;
    }
    fprintf(stderr, "resumed at step %lld", (long long)start->step);
    if (s->steps)
        fprintf(stderr, " of %lld%s%s\n", (long long)s->steps, start->step < s->steps ? "" : ": ",
                start->step < s->steps ? "" : nothing);
    else if (left > 0)
        fprintf(stderr, ": %.1f of %g s of training are done, %.1f s are left\n", start->elapsed, s->seconds,
                left);
    else
        fprintf(stderr, ": %.1f s of training are done, --seconds is %g: %s\n", start->elapsed, s->seconds,
                nothing);
    show_changes(&start->before, &start->now, s->config.dense_layers < s->config.layers);
}

/* What the run has written. Without checkpoints none can be resumed. */
static void show_end(const train_settings *s, const train_result *result)
{
    const char *curve = result->drawn ? ", curve.png" : "", *latest = s->checkpoints ? ", latest" : "";
    const char *state = !result->interrupted ? "done"
                        : s->checkpoints     ? "interrupted, go on with --resume"
                                             : "interrupted, no checkpoint was saved";
    const bool several = *curve || *latest;
    fprintf(stderr, "%s: %s/%strain.jsonl%s%s%s\n", state, s->out, several ? "{" : "", curve, latest,
            several ? "}" : "");
}

/* If no vocabulary is given, it is that of the tokenizer, rounded up to a multiple of 64. */
static bool adopt_vocabulary(train_options *options, error *err)
{
    train_settings *s = &options->settings;
    tokenizer words;
    if (!s->tokenizer || options->vocab_given) return true;
    if (!tokenizer_open(&words, s->tokenizer, err)) return false;
    s->config.vocab = (words.table.tokens + 63) / 64 * 64;
    tokenizer_close(&words);
    return true;
}

static bool is_shared_text(const train_settings *s, error *err)
{
    for (size_t i = 0; i < s->path_count; i++)
        if (strcmp(s->paths[i], "-") == 0)
            return fail(err, ERROR_USAGE,
                        "- is the text on standard input, which several ranks cannot share");
    return true;
}

/* Joins the other ranks of the run, if the environment says that there are any. */
static bool join_group(train_options *options, const char *name, error *err)
{
    train_settings *s = &options->settings;
    rank_place place;
    if (!rank_place_read(&place, err)) return false;
    if (place.ranks == 1) return true;
    if (options->gpus > 1 && !place.launched)
        return fail(err, ERROR_USAGE, "--gpus is %d, but the environment makes this rank %d of %d",
                    options->gpus, place.rank, place.ranks);
    return is_shared_text(s, err) && group_connect(&s->group, &place, options->peer_timeout, name, err);
}

/* In which the ranks must agree. */
static void summarize(const train_options *options, char text[SUMMARY_BYTES])
{
    const int version = smoe_version(),
              length = snprintf(text, SUMMARY_BYTES, "smoe %d.%d.%d of commit %s\n", version / 10000,
                                version / 100 % 100, version % 100, BUILD_COMMIT);
    train_options_summary(options, text + length, (size_t)(SUMMARY_BYTES - length));
}

static bool train(train_options *options, const char *name, bool *interrupted, error *err)
{
    train_settings *s = &options->settings;
    train_result result;
    char summary[SUMMARY_BYTES];
    if (!join_group(options, name, err) || !adopt_vocabulary(options, err) || !adopt_recipe(options, err) ||
        !adopt_sizes(options, err))
        return false;
    summarize(options, summary);
    s->summary = summary;
    const bool first = !s->group || group_rank(s->group) == 0; // it alone says something
    if (first) show_device(s->device.name);
    progress shown = progress_start();
    catch_signals();
    s->stop = &stop_asked;
    s->on_start = show_start;
    bool done = train_run(s, options->quiet || !first ? NULL : progress_show, &shown, &result, err);
    if (first) progress_end(&shown);
    if (!done || (first && !print_result(options, &result, err))) return false;
    *interrupted = result.interrupted;
    if (first) show_end(s, &result);
    return true;
}

/* Starts this command again as each of the ranks. */
static int launch(const train_options *options, int argc, char **argv, error *err)
{
    if (!is_shared_text(&options->settings, err)) return -1;
    char **again = calloc((size_t)argc + 2, sizeof *again);
    if (!again) {
        fail(err, ERROR_RUNTIME, "out of memory");
        return -1;
    }
    again[0] = (char[]){"smoe"};
    again[1] = (char[]){"train"};
    memcpy(again + 2, argv + 1, (size_t)(argc - 1) * sizeof *again);
    const bool cpus = strcmp(options->settings.device.name, "cpu") == 0;
    const int status = launch_ranks(options->gpus, cpus, again, argv[0], err);
    free(again);
    return status;
}

int smoe_cli_train(int argc, char **argv)
{
    enum { BY_SIGNAL = 128 }; // status = 128 + number of the signal, as a shell has it
    train_options options;
    error err = {0};
    bool interrupted = false, launches = false, done = train_options_parse(&options, argc, argv, &err);
    int status = 0;
    if (done) launches = options.gpus > 1 && !getenv("SMOE_RANK");
    if (launches)
        done = (status = launch(&options, argc, argv, &err)) >= 0;
    else
        done = done && train(&options, argv[0], &interrupted, &err);
    group *g = launches ? NULL : options.settings.group;
    if (!done && g)
        group_fail(g, &err);
    else if (!done)
        fprintf(stderr, "%s: %s\n", argv[0], err.text);
    else
        group_close(g);
    free(options.paths);
    if (!done) return err.code;
    if (interrupted)
        return BY_SIGNAL + (stop_asked ? stop_asked : SIGTERM); // another rank may have been told
    return status;
}
