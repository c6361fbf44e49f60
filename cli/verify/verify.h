/* `smoe verify`: cases, the checks they go through, and the report they write to. A case is one line of the
 * table in verify_cases.c. */
#ifndef CLI_VERIFY_H
#define CLI_VERIFY_H

#include "cli/common/kernels.h"
#include "cli/common/table.h"
#include "harness/device.h"
#include "oracle/draw.h"

/* The report: a line for each tensor, or the worst line of each case. */
typedef struct verify_line {
    const char *tensor;
    double error, limit;
    bool ok;
    const char *note; /* or NULL */
} verify_line;

typedef struct verify_report {
    table *table;
    bool every_tensor;
    int64_t passed, failed, skipped; /* lines that passed and failed, cases that were skipped */
    const char *name, *dtype;        /* of the case that runs */
    verify_line worst;               /* the line that passed with the error nearest to its limit */
    char worst_note[96];             /* a copy of its note, which may be freed before the case ends */
    bool any, any_failed;            /* of this case */
} verify_report;

typedef struct verify {
    const device *on;
    smoe_kernels kernels;
    smoe_context *context;
    int32_t threads;
    uint64_t seed;
    int64_t repeats; // of the cases that repeat
    verify_report report;
} verify;

typedef struct verify_case verify_case;

/* Runs the case with this layer (its own, completed, with a storage type) and reports. */
typedef void verify_check(verify *v, const verify_case *c, const smoe_layer *layer);

struct verify_case {
    const char *name;
    verify_check *check; /* NULL: check_against_oracle */
    bool quick;          /* part of --quick */
    bool f32_only;       /* not once for each storage type */
    bool stages;         /* the stages one by one instead of the whole layer */
    smoe_layer layer;    /* fields that are 0 have their default, see verify_complete_layer */
    oracle_draw draw;
};

/* The table. */
const verify_case *verify_cases(size_t *count);

/* The case's layer with defaults: T = 150, d = 64, n = 32, E = 8, K = 2 (rows: 1), tile 16. */
smoe_layer verify_complete_layer(const verify_case *c, smoe_type dtype);

/* ---- Checks ---- */

verify_check check_against_oracle; /* every tensor, forward and backward */
verify_check check_exact;          /* small integers: every element is equal */
verify_check check_same_bits;   /* the same bits: repeats, stages, threads, chunks, reuse_saved, inference */
verify_check check_repeats;     /* the same bits in many runs while another stream copies memory */
verify_check check_isolation;   /* a NaN of one expert does not reach others */
verify_check check_nan_logits;  /* exactly the tokens that keep a NaN logit are NaN */
verify_check check_bias_update; /* smoe_update_selection_bias */
verify_check check_saved_bytes; /* the formula for the bytes kept */

/* ---- The report: begin, lines or one skip, end ---- */

void report_begin(verify_report *report, const char *name, const char *dtype);
void report_line(verify_report *report, verify_line line);
void report_skip(verify_report *report, const char *reason);
void report_end(verify_report *report);

#endif
