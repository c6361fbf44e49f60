/* See progress.h. */
#include "cli/model/progress.h"

#include "common/clock.h"

#include <math.h>
#include <stdio.h>
#include <unistd.h>

progress progress_start(bool bits)
{
    return (progress){
        .terminal = isatty(STDERR_FILENO) == 1, .unit = bits ? 1.0 / log(2.0) : 1.0, .loss = NAN};
}

static void draw(const progress *p, const train_report *r)
{
    enum { WIDTH = 24 };
    char bar[WIDTH + 1];
    for (int i = 0; i < WIDTH; i++) bar[i] = (double)i < r->progress * WIDTH ? '#' : '.';
    bar[WIDTH] = 0;
    int left = (int)(r->remaining + 0.5);
    fprintf(stderr, "\r\033[K[%s] %3.0f%%  step %lld  loss %.3f %s", bar, 100.0 * r->progress,
            (long long)r->step, p->loss * p->unit, p->unit > 1.0 ? "bits/byte" : "nats");
    if (isfinite(r->val_loss)) fprintf(stderr, "  validation %.3f", r->val_loss * p->unit);
    fprintf(stderr, "  %.0f tokens/s  %d:%02d left", r->tokens_per_s, left / 60, left % 60);
    fflush(stderr);
}

void progress_show(void *user, const train_report *report)
{
    progress *p = user;
    p->loss = isfinite(p->loss) ? 0.98 * p->loss + 0.02 * report->loss : report->loss;
    double now = clock_seconds();
    if (!p->terminal || (now - p->drawn < 0.2 && report->progress < 1.0)) return;
    p->drawn = now;
    draw(p, report);
}

void progress_end(progress *p)
{
    if (p->terminal && p->drawn > 0.0) fputc('\n', stderr);
}
