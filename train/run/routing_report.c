/* See routing_report.h. A rounding rule either adds rows to an expert or drops rows of it, never both. So the
 * counts are sufficient. */
#include "train/run/routing_report.h"

#include "train/model/experts.h"

#include <math.h>
#include <stdlib.h>

const routing_report routing_report_none = {(double)NAN, (double)NAN, (double)NAN, (double)NAN};

static void add_layer(routing_report *sum, const int32_t *plain, const int32_t *routed, int64_t experts,
                      double pairs)
{
    int64_t added = 0, dropped = 0, emptied = 0, most = 0;
    for (int64_t e = 0; e < experts; e++) {
        if (routed[e] > plain[e]) added += routed[e] - plain[e];
        if (routed[e] < plain[e]) dropped += plain[e] - routed[e];
        if (plain[e] > 0 && routed[e] == 0) emptied++;
        if (plain[e] > most) most = plain[e];
    }
    sum->added += (double)added / pairs;
    sum->dropped += (double)dropped / pairs;
    sum->emptied += (double)emptied / (double)experts;
    sum->busiest += (double)most * (double)experts / pairs;
}

bool routing_report_read(routing_report *report, model *m, error *err)
{
    const model_config *c = &m->config;
    const int64_t tokens = m->frame.rows, layers = c->layers - c->dense_layers;
    *report = routing_report_none;
    if (layers == 0) return true;
    int32_t *counts = malloc(2 * (size_t)c->experts * sizeof *counts);
    if (!counts)
        return fail(err, ERROR_RUNTIME, "out of memory: the counts of %lld experts", (long long)c->experts);
    routing_report sum = {0};
    bool done = true;
    for (int64_t l = c->dense_layers; done && l < c->layers; l++) {
        done = experts_counts(model_experts(m, l), tokens, counts, counts + c->experts, err);
        if (done) add_layer(&sum, counts, counts + c->experts, c->experts, (double)(tokens * c->topk));
    }
    free(counts);
    const double n = (double)layers;
    if (done) *report = (routing_report){sum.added / n, sum.dropped / n, sum.emptied / n, sum.busiest / n};
    return done;
}
