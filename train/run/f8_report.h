/* What fp8 makes of A, for the log. */
#ifndef TRAIN_F8_REPORT_H
#define TRAIN_F8_REPORT_H

#include "base/error.h"
#include "train/model/model.h"

/* Of A in some blocks of rows of every MoE layer. NAN: not known. */
typedef struct f8_report {
    double loss;       // of the validation with fp8, nats a token
    double amax;       // the largest magnitude
    double zeros;      // share of elements that e4m3 rounds to 0
    double subnormals; // and to fewer than its 4 significant bits
} f8_report;

extern const f8_report f8_report_none; // all NAN

/* Above this share of zeros and subnormals the observer is warned: a few features are so large that the
 * others of their group lose precision. */
static const double F8_REPORT_MOST = 0.1;

/* Fills in all but the loss after a forward of `rows` tokens with plain top-K, if no other pass has run
 * since; all NAN if rows is 0. With RECOMPUTE_LAYERS the layers share their memory, and the last one counts
 * for all. Waits for the device. */
bool f8_report_read(f8_report *report, model *m, int64_t rows, error *err);

#endif
