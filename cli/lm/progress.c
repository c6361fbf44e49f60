/* See progress.h. */
#include "cli/lm/progress.h"

#include "base/clock.h"

#include <math.h>
#include <stdio.h>
#include <unistd.h>

progress progress_start(void)
{
    const double now = clock_seconds();
    return (progress){.terminal = isatty(STDERR_FILENO) == 1, .started = now, .shown = now};
}

static void show_left(double seconds)
{
    const long long left = isfinite(seconds) ? (long long)(seconds + 0.5) : 0;
    fprintf(stderr, "  %lld:%02lld left", left / 60, left % 60);
}

static void show_step(const train_report *r, double loss)
{
    const double unit = r->bytes ? 1.0 / log(2.0) : 1.0; // from nats
    fprintf(stderr, "%3.0f%%  step %lld  loss %.3f %s", 100.0 * r->progress, (long long)r->step, loss * unit,
            r->bytes ? "bits/byte" : "nats");
    if (isfinite(r->val_loss)) fprintf(stderr, "  validation %.3f", r->val_loss * unit);
}

static void show_rate(const train_report *r, double tokens_per_s)
{
    if (isfinite(tokens_per_s)) fprintf(stderr, "  %.0f tokens/s", tokens_per_s);
    show_left(r->remaining);
}

static void draw_bar(progress *p, double share)
{
    enum { WIDTH = 24 };
    char bar[WIDTH + 1];
    for (int i = 0; i < WIDTH; i++) bar[i] = (double)i < share * WIDTH ? '#' : '.';
    bar[WIDTH] = 0;
    fprintf(stderr, "\r\033[K[%s] ", bar);
    p->shown = clock_seconds();
    p->drawn = true;
}

static void draw(progress *p, const train_report *r)
{
    draw_bar(p, r->progress);
    show_step(r, average_of(&p->loss));
    if (isfinite(r->validated))
        fprintf(stderr, "  validating %.0f%%", 100.0 * r->validated);
    else
        show_rate(r, r->tokens_per_s);
    fflush(stderr);
}

static void warn_of_f8(const f8_report *f8)
{
    const double lost = f8->zeros + f8->subnormals;
    if (lost > F8_REPORT_MOST)
        fprintf(stderr,
                "warning: %.0f %% of the elements of A are too small for fp8's full precision, beside "
                "others of up to %.3g: see val_loss_f8 in the log; --resume with --compute bf16?\n",
                100.0 * lost, f8->amax);
}

void progress_show(void *user, const train_report *report)
{
    progress *p = user;
    const bool after_step = !report->line && !isfinite(report->validated);
    if (after_step) average_add(&p->loss, report->loss);
    if (p->terminal) {
        if (clock_seconds() - p->shown >= 0.2 || report->line) draw(p, report);
    } else if (report->line) {
        show_step(report, report->line->loss);
        show_rate(report, report->line->tokens_per_s);
        fputc('\n', stderr);
    }
    if (report->line) warn_of_f8(&report->line->f8);
}

void progress_show_pass(void *user, double share)
{
    progress *p = user;
    const double now = clock_seconds(), left = (now - p->started) * (1.0 - share) / share;
    if (now - p->shown < (p->terminal ? 0.2 : 10.0)) return;
    if (p->terminal) draw_bar(p, share);
    fprintf(stderr, "%3.0f%%", 100.0 * share);
    show_left(left);
    if (!p->terminal) fputc('\n', stderr);
    fflush(stderr);
    p->shown = now;
}

void progress_end(progress *p)
{
    if (p->drawn) fputc('\n', stderr);
    p->drawn = false;
}
