/* The report. It has every line; or for each case the lines that failed, or its worst line if none failed. */
#include "cli/verify/verify.h"

#include <math.h>
#include <stdio.h>

static void write_row(verify_report *report, const verify_line *line, const char *ok)
{
    table_text(report->table, report->name);
    table_text(report->table, report->dtype);
    table_text(report->table, line->tensor);
    table_number(report->table, line->error);
    table_number(report->table, line->limit);
    table_text(report->table, ok);
    table_text(report->table, line->note);
    table_end_row(report->table);
}

void report_begin(verify_report *report, const char *name, const char *dtype)
{
    report->name = name;
    report->dtype = dtype;
    report->any = report->any_failed = false;
}

/* The error of a line divided by its limit. */
static double share(const verify_line *line)
{
    return line->limit > 0.0 ? line->error / line->limit : line->error;
}

void report_line(verify_report *report, verify_line line)
{
    if (line.ok) {
        report->passed++;
    } else {
        report->failed++;
        report->any_failed = true;
    }
    if (report->every_tensor || !line.ok) write_row(report, &line, line.ok ? "yes" : "NO");
    if (line.ok && (!report->any || share(&line) > share(&report->worst))) {
        report->worst = line;
        snprintf(report->worst_note, sizeof report->worst_note, "%s", line.note ? line.note : "");
        if (line.note) report->worst.note = report->worst_note;
        report->any = true;
    }
}

void report_skip(verify_report *report, const char *reason)
{
    report->skipped++;
    report->any_failed = true; /* so that no summary line is printed as well */
    const verify_line line = {NULL, NAN, NAN, false, reason};
    write_row(report, &line, "skipped");
}

void report_end(verify_report *report)
{
    if (!report->every_tensor && report->any && !report->any_failed) write_row(report, &report->worst, "yes");
}
