/* The log of a run, OUT/train.jsonl: one JSON object a line, flushed line by line. */
#ifndef TRAIN_LOG_H
#define TRAIN_LOG_H

#include "base/error.h"
#include "train/run/f8_report.h"
#include "train/run/routing_report.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct log_line {
    int64_t step;           // steps done
    int64_t tokens;         // trained on since the start of the run
    double seconds;         // of training since the start of the run
    double loss;            // nats a token, mean over the training batches since the line before
    double bits_per_byte;   // loss in bits over the bytes of the targets; NAN (null in the file) if these are
                            // not known
    double val_loss;        // nats a token on the validation corpus; NAN (no such key) when not measured
    int64_t val_tokens;     // targets of val_loss; 0 (no such key): none, or not known
    double tokens_per_s;    // since the line before
    double lr, grad_norm;   // of the last step, NAN (null in the file): not known; grad_norm is taken before
                            // clipping
    routing_report routing; // of the last pass; NAN (no such key) when not known
    f8_report f8;           // of the validation; likewise
} log_line;

typedef struct train_log train_log;

/* Opens `path` for appending. First it removes the lines past `step`, which a run wrote after the checkpoint
 * that is now resumed, and what is no line of a log, such as an incomplete last line of a killed process. The
 * file is replaced in one rename. *last receives the last line that stays; its step is -1 if there is none.
 */
bool log_open(train_log **log, const char *path, int64_t step, log_line *last, error *err);
bool log_write(train_log *log, const log_line *line, error *err);
bool log_sync(const train_log *log, error *err); // the lines so far are on the disk
void log_close(train_log *log);                  // NULL is fine

/* Reads all lines of a log; the caller frees *lines. For a malformed line the error names the line. */
bool log_read(const char *path, log_line **lines, size_t *count, error *err);

#endif
