/* One printer for results: an aligned table for people, JSON lines or CSV for programs. A row is given cell
 * by cell in the order of the columns. Numbers are never written as strings; a NaN or an infinity (nothing
 * was measured) is null in JSON, an empty field in CSV and "-" in the table. */
#ifndef CLI_TABLE_H
#define CLI_TABLE_H

#include "base/error.h"

#include <stdint.h>
#include <stdio.h>

typedef enum table_format {
    TABLE_ALIGNED,  // columns side by side, printed by table_flush
    TABLE_VERTICAL, // a line for each cell: name, value, note
    TABLE_JSON,     // one object a line
    TABLE_CSV       // a line of names, then one line a row; quoted as RFC 4180 says
} table_format;

typedef enum column_type { COLUMN_TEXT, COLUMN_INTEGER, COLUMN_BYTES, COLUMN_NUMBER } column_type;

typedef struct table_column {
    const char *name;
    column_type type;
    int decimals;     // of a NUMBER for people; JSON and CSV have 9 significant digits
    bool record_only; // in JSON and CSV, not in the aligned table
    const char *note; // for TABLE_VERTICAL: unit or formula, or NULL
} table_column;

typedef struct table table;

/* NULL when memory is out. The columns are copied, not their names. */
table *table_open(FILE *file, table_format format, const table_column *columns, int count);

/* Adds the next cell of the row; its column must have this type. The text (NULL: nothing) is copied. An
 * integer may also be given for a BYTES column. Tables show it in KiB, MiB or GiB, JSON and CSV in bytes. */
void table_text(table *t, const char *value);
void table_integer(table *t, int64_t value);

/* Adds a whole number that may need more than 63 bits, in an INTEGER column. If it does, JSON has a real
 * number instead. */
void table_count(table *t, double value);

void table_number(table *t, double value);

/* Ends the row: all cells must be there. JSON and CSV write it at once. */
void table_end_row(table *t);

/* ALIGNED: prints the header and the rows collected so far, and removes them. */
void table_flush(table *t);

/* Flushes and frees. false when something could not be written (a full disk) or memory ran out. */
bool table_close(table *t, error *err);

#endif
