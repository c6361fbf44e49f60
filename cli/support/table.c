/* See table.h. Cells are formatted when they are given; ALIGNED keeps the texts until it knows the widths. */
#include "cli/support/table.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct table {
    FILE *file;
    table_format format;
    int count;
    int next;       // column of the next cell
    bool headed;    // CSV: the names are written
    int reason;     // errno of the first write or allocation that failed, 0: none did
    json_t *object; // JSON: the row under construction
    char **cells;   // ALIGNED: (rows, count) texts
    size_t filled, capacity;
    table_column columns[]; // (count)
};

table *table_open(FILE *file, table_format format, const table_column *columns, int count)
{
    table *t = calloc(1, sizeof *t + (size_t)count * sizeof *columns);
    if (!t) return NULL;
    memcpy(t->columns, columns, (size_t)count * sizeof *columns);
    t->file = file;
    t->format = format;
    t->count = count;
    if (format == TABLE_JSON) t->object = json_object();
    return t;
}

/* Only the first failure is kept. Later ones may be its consequences, or have other causes. */
static void note_failure(table *t, int reason)
{
    if (t->reason == 0) t->reason = reason;
}

static void flush_file(table *t)
{
    if (fflush(t->file) != 0) note_failure(t, errno);
}

static void put_csv(FILE *file, const char *text)
{
    if (!strpbrk(text, ",\"\r\n")) {
        fputs(text, file);
        return;
    }
    fputc('"', file);
    for (; *text; text++) {
        if (*text == '"') fputc('"', file);
        fputc(*text, file);
    }
    fputc('"', file);
}

static void csv_head(table *t)
{
    for (int i = 0; i < t->count; i++) {
        if (i > 0) fputc(',', t->file);
        put_csv(t->file, t->columns[i].name);
    }
    fputc('\n', t->file);
    t->headed = true;
}

static void keep_cell(table *t, const char *text)
{
    if (t->filled == t->capacity) {
        const size_t capacity = t->capacity ? 2 * t->capacity : 256;
        char **cells = realloc(t->cells, capacity * sizeof *cells);
        if (!cells) {
            note_failure(t, ENOMEM);
            return;
        }
        t->cells = cells;
        t->capacity = capacity;
    }
    char *copy = strdup(text);
    if (!copy) {
        note_failure(t, ENOMEM);
        return;
    }
    t->cells[t->filled++] = copy;
}

static void put_line(FILE *file, const table_column *column, const char *text)
{
    if (column->note)
        fprintf(file, "%-24s %18s  %s\n", column->name, text, column->note);
    else
        fprintf(file, "%-24s %18s\n", column->name, text);
}

/* Adds a cell: `text` for tables and CSV ("" = nothing), `value` for JSON. Takes over the reference to
 * `value`. */
static void put_cell(table *t, const char *text, json_t *value)
{
    assert(t->next < t->count);
    const table_column *column = &t->columns[t->next];
    const bool sound = !ferror(t->file);
    switch (t->format) {
    case TABLE_JSON:
        if (json_object_set(t->object, column->name, value) != 0) note_failure(t, ENOMEM);
        break;
    case TABLE_CSV:
        if (!t->headed) csv_head(t);
        if (t->next > 0) fputc(',', t->file);
        put_csv(t->file, text);
        break;
    case TABLE_VERTICAL:
        if (!column->record_only) put_line(t->file, column, *text ? text : "-");
        break;
    case TABLE_ALIGNED: keep_cell(t, *text ? text : "-"); break;
    }
    if (sound && ferror(t->file)) note_failure(t, errno);
    json_decref(value);
    t->next++;
}

static json_t *json_only(const table *t, json_t *value)
{
    if (t->format == TABLE_JSON) return value;
    json_decref(value);
    return NULL;
}

void table_text(table *t, const char *value)
{
    assert(t->columns[t->next].type == COLUMN_TEXT);
    put_cell(t, value ? value : "", json_only(t, value ? json_string(value) : json_null()));
}

static bool for_people(const table *t)
{
    return t->format == TABLE_ALIGNED || t->format == TABLE_VERTICAL;
}

static void bytes_for_people(int64_t bytes, char *text, size_t size)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    int unit = 0;
    for (; unit < 4 && fabs(value) >= 1024; unit++) value /= 1024;
    snprintf(text, size, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
}

void table_integer(table *t, int64_t value)
{
    const column_type type = t->columns[t->next].type;
    assert(type == COLUMN_INTEGER || type == COLUMN_BYTES);
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, value);
    if (type == COLUMN_BYTES && for_people(t)) bytes_for_people(value, text, sizeof text);
    put_cell(t, text, json_only(t, json_integer(value)));
}

void table_count(table *t, double value)
{
    assert(t->columns[t->next].type == COLUMN_INTEGER && value == floor(value));
    if (fabs(value) < 0x1p63) {
        table_integer(t, (int64_t)value);
        return;
    }
    char text[512]; // the longest double has 310 characters
    snprintf(text, sizeof text, "%.0f", value);
    put_cell(t, text, json_only(t, json_real(value)));
}

void table_number(table *t, double value)
{
    const table_column *column = &t->columns[t->next];
    assert(column->type == COLUMN_NUMBER);
    char text[64] = "";
    if (isfinite(value)) {
        const bool tiny = value != 0 && fabs(value) < 0.5 * pow(10, -column->decimals);
        if (!for_people(t))
            snprintf(text, sizeof text, "%.9g", value);
        else if (tiny || fabs(value) >= 1e12)
            snprintf(text, sizeof text, "%.3g", value);
        else
            snprintf(text, sizeof text, "%.*f", column->decimals, value);
    }
    put_cell(t, text, json_only(t, isfinite(value) ? json_real(value) : json_null()));
}

void table_end_row(table *t)
{
    assert(t->next == t->count);
    if (t->format == TABLE_JSON) {
        if (json_dumpf(t->object, t->file, JSON_COMPACT | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9)) != 0)
            note_failure(t, errno);
        json_object_clear(t->object);
    }
    if (t->format != TABLE_ALIGNED) fputc('\n', t->file);
    if (t->format != TABLE_ALIGNED) flush_file(t);
    t->next = 0;
}

static void put_aligned(table *t, int column, int width, const char *text, bool last)
{
    const bool left = t->columns[column].type == COLUMN_TEXT;
    if (left && last)
        fputs(text, t->file);
    else
        fprintf(t->file, left ? "%-*s" : "%*s", width, text);
    fputs(last ? "\n" : "  ", t->file);
}

static int column_width(const table *t, int column, size_t rows)
{
    size_t width = strlen(t->columns[column].name);
    for (size_t r = 0; r < rows; r++) {
        const size_t length = strlen(t->cells[r * (size_t)t->count + (size_t)column]);
        if (length > width) width = length;
    }
    return (int)width;
}

static void print_aligned(table *t, size_t rows)
{
    int last = t->count - 1;
    while (last > 0 && t->columns[last].record_only) last--;
    for (size_t r = 0; r <= rows; r++) // row 0 is the header
        for (int c = 0; c <= last; c++) {
            if (t->columns[c].record_only) continue;
            const char *text = r == 0 ? t->columns[c].name : t->cells[(r - 1) * (size_t)t->count + (size_t)c];
            put_aligned(t, c, column_width(t, c, rows), text, c == last);
        }
}

void table_flush(table *t)
{
    const size_t rows = t->reason ? 0 : t->filled / (size_t)t->count;
    const bool sound = !ferror(t->file);
    if (rows > 0) print_aligned(t, rows);
    if (sound && ferror(t->file)) note_failure(t, errno);
    for (size_t i = 0; i < t->filled; i++) free(t->cells[i]);
    t->filled = 0;
    flush_file(t);
}

bool table_close(table *t, error *err)
{
    if (!t) return fail(err, ERROR_RUNTIME, "results: out of memory");
    table_flush(t);
    const bool failed = t->reason != 0 || ferror(t->file);
    const int reason = t->reason;
    free(t->cells);
    json_decref(t->object);
    free(t);
    if (!failed) return true;
    return fail(err, ERROR_RUNTIME, "results could not be written: %s",
                reason != 0 ? strerror(reason) : "a write to the output failed");
}
