/* What routing did in a training pass, for the log. */
#ifndef TRAIN_ROUTING_REPORT_H
#define TRAIN_ROUTING_REPORT_H

#include "base/error.h"
#include "train/model/model.h"

/* Means over the MoE layers; all NAN for a model without one. */
typedef struct routing_report {
    double added,
        dropped;    // pairs that token rounding added and dropped, as a share of the T K of plain top-K
    double emptied; // experts that plain top-K gave rows and rounding left none, as a share of the E experts
    double busiest; // the largest count of plain top-K over the mean count, T K / E
} routing_report;

extern const routing_report routing_report_none; // all NAN

/* Reports on the training pass that m ran last; no other pass may have run since. With RECOMPUTE_LAYERS it
 * reports on the first MoE layer only, because the layers share their memory. Waits for the device. */
bool routing_report_read(routing_report *report, model *m, error *err);

#endif
