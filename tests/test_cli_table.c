/* The results printer: alignment, JSON, CSV quoting, NaN, a full disk. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/support/table.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const table_column columns[] = {{"name", COLUMN_TEXT, 0, false, "who"},
                                       {"count", COLUMN_INTEGER, 0, false, NULL},
                                       {"hidden", COLUMN_INTEGER, 0, true, NULL},
                                       {"kept", COLUMN_BYTES, 0, false, NULL},
                                       {"ms", COLUMN_NUMBER, 2, false, NULL}};

static void put_row(table *t, const char *name, int64_t count, int64_t bytes, double ms)
{
    table_text(t, name);
    table_integer(t, count);
    table_integer(t, 7);
    table_integer(t, bytes);
    table_number(t, ms);
    table_end_row(t);
}

/* The text of two rows in a format; the caller frees it. */
static char *print(table_format format)
{
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    table *t = table_open(file, format, columns, 5);
    put_row(t, "a,\"b\"\nc", INT64_C(9007199254740993), 1536, 0.125);
    put_row(t, NULL, -1, 12, NAN);
    error err = {0};
    assert_true(table_close(t, &err));
    fclose(file);
    return text;
}

static void columns_are_aligned(void **state)
{
    (void)state;
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    table *t = table_open(file, TABLE_ALIGNED, columns, 5);
    put_row(t, "short", 5, 1536, 0.125);
    put_row(t, "rather long", 12345678, 12, NAN);
    put_row(t, "tiny", 1, 3 << 20, 1.25e-6);
    assert_true(table_close(t, NULL));
    fclose(file);
    assert_string_equal(text, "name            count     kept        ms\n"
                              "short               5  1.5 KiB      0.12\n"
                              "rather long  12345678     12 B         -\n"
                              "tiny                1  3.0 MiB  1.25e-06\n");
    free(text);
}

static void one_row_is_printed_vertically(void **state)
{
    (void)state;
    char *text = print(TABLE_VERTICAL);
    assert_non_null(strstr(text, "  who\n"));
    assert_non_null(strstr(text, "9007199254740993\n"));
    assert_non_null(strstr(text, "1.5 KiB\n"));
    assert_null(strstr(text, "hidden"));
    free(text);
}

static void json_has_numbers_and_null(void **state)
{
    (void)state;
    char *text = print(TABLE_JSON);
    assert_string_equal(
        text,
        "{\"name\":\"a,\\\"b\\\"\\nc\",\"count\":9007199254740993,\"hidden\":7,\"kept\":1536,\"ms\":0.125}\n"
        "{\"name\":null,\"count\":-1,\"hidden\":7,\"kept\":12,\"ms\":null}\n");
    free(text);
}

static void csv_quotes_its_fields(void **state)
{
    (void)state;
    char *text = print(TABLE_CSV);
    assert_string_equal(text, "name,count,hidden,kept,ms\n"
                              "\"a,\"\"b\"\"\nc\",9007199254740993,7,1536,0.125\n"
                              ",-1,7,12,\n");
    free(text);
}

static void a_full_disk_is_an_error(void **state)
{
    (void)state;
    static const table_format formats[] = {TABLE_ALIGNED, TABLE_VERTICAL, TABLE_JSON, TABLE_CSV};
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        FILE *full = fopen("/dev/full", "w");
        assert_non_null(full);
        table *t = table_open(full, formats[i], columns, 5);
        put_row(t, "a", 1, 2, 3);
        error err = {0};
        assert_false(table_close(t, &err));
        assert_int_equal(err.code, ERROR_RUNTIME);
        assert_non_null(strstr(err.text, "No space left"));
        fclose(full);
    }
}

/* The message must have the reason of the write that failed, whatever fails after it. */
static void the_first_failed_write_is_the_reason(void **state)
{
    (void)state;
    static const table_format formats[] = {TABLE_ALIGNED, TABLE_VERTICAL, TABLE_JSON, TABLE_CSV};
    static char wide[1 << 16]; // longer than stdio's buffer: the cell itself is written
    memset(wide, 'x', sizeof wide - 1);
    for (size_t i = 0; i < 2 * sizeof formats / sizeof formats[0]; i++) {
        FILE *full = fopen("/dev/full", "w");
        assert_non_null(full);
        table *t = table_open(full, formats[i / 2], columns, 5);
        errno = EDOM;
        put_row(t, i % 2 ? wide : "a", 1, 2, 3);
        errno = ENOTTY;
        error err = {0};
        assert_false(table_close(t, &err));
        if (!strstr(err.text, "No space left")) fail_msg("%zu: %s", i, err.text);
        fclose(full);
    }
}

/* A whole number that int64_t does not hold, and one that it does. */
static void counts_past_int64_are_printed(void **state)
{
    (void)state;
    static const struct {
        double value;
        const char *text, *json;
    } cases[] = {
        {6e18, "6000000000000000000", "6000000000000000000"},
        {9007199254740992, "9007199254740992", "9007199254740992"},
        {9223372036854775808.0, "9223372036854775808", "9.22337204e18"},
        {0x1p73, "9444732965739290427392", "9.44473297e21"},
    };
    static const table_column column[] = {{"flops", COLUMN_INTEGER, 0, false, NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int json = 0; json < 2; json++) {
            char *text = NULL, want[64];
            size_t size = 0;
            FILE *file = open_memstream(&text, &size);
            table *t = table_open(file, json ? TABLE_JSON : TABLE_CSV, column, 1);
            table_count(t, cases[i].value);
            table_end_row(t);
            assert_true(table_close(t, NULL));
            fclose(file);
            snprintf(want, sizeof want, json ? "{\"flops\":%s}\n" : "flops\n%s\n",
                     json ? cases[i].json : cases[i].text);
            assert_string_equal(text, want);
            free(text);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(columns_are_aligned),
        cmocka_unit_test(one_row_is_printed_vertically),
        cmocka_unit_test(json_has_numbers_and_null),
        cmocka_unit_test(csv_quotes_its_fields),
        cmocka_unit_test(a_full_disk_is_an_error),
        cmocka_unit_test(the_first_failed_write_is_the_reason),
        cmocka_unit_test(counts_past_int64_are_printed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
