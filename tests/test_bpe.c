/* Compares train/data/bpe.h with the tokens that the Python package `tokenizers` made of the same text
 * (tests/bpe/make.py). Small cases have results worked out by hand: the ends of words, the order of merges,
 * and errors with their line. A piece is what train/data/bpe.h calls a word. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "train/data/bpe.h"
#include "train/files/file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROOM = 4096 };

static bpe parse(const char *text)
{
    bpe table;
    error err = {0};
    if (!bpe_parse(&table, text, strlen(text), "table", &err)) fail_msg("%s", err.text);
    return table;
}

static file_map open_data(const char *name)
{
    char path[4096];
    file_map map;
    error err = {0};
    snprintf(path, sizeof path, SOURCE_FOLDER "/tests/bpe/%s", name);
    if (!file_map_open(&map, path, &err)) fail_msg("%s", err.text);
    return map;
}

/* The tokens must also decode to the text. */
static void tokens_are_those_of_tokenizers(void **state)
{
    (void)state;
    file_map table_file = open_data("table.txt"), text = open_data("text.txt"),
             tokens = open_data("tokens.txt");
    bpe table;
    error err = {0};
    uint16_t got[ROOM];
    if (!bpe_parse(&table, table_file.data, table_file.size, "table.txt", &err)) fail_msg("%s", err.text);
    assert_int_equal(table.tokens, 320);
    assert_int_equal(table.end, 319);
    assert_true(text.size <= ROOM);
    size_t count = bpe_encode(&table, text.data, text.size, got), at = 0, place = 0;
    const char *wanted = (const char *)tokens.data;
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const unsigned char *bytes = bpe_bytes(&table, got[i], &length);
        assert_memory_equal(bytes, text.data + place, length);
        place += length;
        assert_true(at < tokens.size);
        char *end;
        assert_int_equal(got[i], strtol(wanted + at, &end, 10));
        at = (size_t)(end + 1 - wanted);
    }
    assert_int_equal(place, text.size);
    assert_int_equal(at, tokens.size);
    bpe_free(&table);
    file_map_close(&table_file);
    file_map_close(&text);
    file_map_close(&tokens);
}

static void expect(const bpe *table, const char *text, size_t count, const uint16_t *tokens)
{
    uint16_t got[ROOM];
    assert_int_equal(bpe_encode(table, (const unsigned char *)text, strlen(text), got), count);
    assert_memory_equal(got, tokens, count * sizeof *tokens);
}

#define EXPECT(table, text, ...)                                                                             \
    expect(table, text, sizeof((const uint16_t[]){__VA_ARGS__}) / sizeof(uint16_t),                          \
           (const uint16_t[]){__VA_ARGS__})

static void merges_follow_their_order(void **state)
{
    (void)state;
    // the merges bc, ab, a + bc, ab + c (two ways to abc), aa
    bpe table = parse("smoe-bpe 1 261 5\n98 99 256\n97 98 257\n97 256 258\n257 99 258\n97 97 259\n");
    assert_int_equal(table.end, 260);
    EXPECT(&table, "abc", 258); // bc first, then a + bc
    EXPECT(&table, "abab", 257, 257);
    EXPECT(&table, "aaa", 259, 97); // the leftmost pair is merged
    EXPECT(&table, "aaab", 259, 257) /* ab is merged before aa */;
    EXPECT(&table, "ab c", 257, ' ', 'c');
    bpe_free(&table);
}

/* Each case has one merge: two bytes must become token 256 if and only if they are in the same piece. */
static void merges_stay_inside_a_piece(void **state)
{
    (void)state;
    static const struct {
        unsigned char first, second;
        const char *text;
        bool merged;
    } cases[] = {
        {'a', 'b', "ab", true},         {'a', '1', "a1", false},     {'a', ' ', "a b", false},
        {' ', 'a', " ab", true},        {' ', 'a', "\n ab", true},   {' ', ' ', "  a", false},
        {' ', ' ', "  ", true},         {' ', ' ', "   a", true},    {' ', '\n', " \n a", true},
        {'\n', ' ', "\n a", false},     {'\n', '\n', "\n\na", true}, {'\n', 'a', "\na", false},
        {' ', '1', " 12", true},        {'3', '4', "1234", false},   {'2', '3', "1234", true},
        {'=', '!', "=!", true},         {'=', 'a', "=a", false},     {0xc3, 0xa9, "\xc3\xa9", true},
        {'a', 0xc3, "a\xc3\xa9", true}, {0x7f, 1, "\x7f\x01", true}, {'\t', '\v', "\t\v", true},
        {'a', 0x80, "a\x80", true},     {'z', '{', "z{", false},     {'@', 'A', "@A", false},
        {'Z', '[', "Z[", false},        {'`', 'a', "`a", false},     {'/', '0', "/0", false},
        {'9', ':', "9:", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char line[64];
        uint16_t got[ROOM];
        snprintf(line, sizeof line, "smoe-bpe 1 257 1\n%d %d 256\n", cases[i].first, cases[i].second);
        bpe table = parse(line);
        size_t length = strlen(cases[i].text);
        size_t count = bpe_encode(&table, (const unsigned char *)cases[i].text, length, got);
        if ((count < length) != cases[i].merged) fail_msg("case %zu, '%s'", i, cases[i].text);
        assert_int_equal(table.end, -1);
        bpe_free(&table);
    }
}

static void long_pieces_are_encoded(void **state)
{
    (void)state;
    bpe table = parse("smoe-bpe 1 257 1\n97 97 256\n");
    char text[132];
    uint16_t got[ROOM];
    memset(text, 'a', sizeof text);
    assert_int_equal(bpe_encode(&table, (unsigned char *)text, 63, got), 32);
    assert_int_equal(bpe_encode(&table, (unsigned char *)text, 65, got), 33);
    assert_int_equal(bpe_encode(&table, (unsigned char *)text, 66, got), 33);
    assert_int_equal(bpe_encode(&table, (unsigned char *)text, 129, got), 65);
    text[0] = ' '; // does not count for the length of a piece
    assert_int_equal(bpe_encode(&table, (unsigned char *)text, 65, got), 33);
    assert_int_equal(bpe_encode(&table, (unsigned char *)text, 0, got), 0);
    bpe_free(&table);
}

static void errors_name_their_line(void **state)
{
    (void)state;
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"tokens 5", "table: is not a table of tokens: does not begin with 'smoe-bpe 1 '"},
        {"smoe-bpe 1 255 0\n", "table: line 1: not 256..65536 tokens"},
        {"smoe-bpe 1 256\n", "table: line 1:"},
        {"smoe-bpe 1 300 40\n1 1 256\n", "table: line 1:"},
        {"smoe-bpe 1 257 1\n1 1256\n", "table: line 2: is not LEFT RIGHT TOKEN"},
        {"smoe-bpe 1 258 2\n97 97 256\n97 x 257\n", "table: line 3: is not LEFT RIGHT TOKEN"},
        {"smoe-bpe 1 258 2\n97 97 256\n97 257 257\n", "table: line 3: names a token past the 257 so far"},
        {"smoe-bpe 1 257 2\n97 97 256\n97 98 257\n", "table: line 3: names a token past the 257 so far"},
        {"smoe-bpe 1 258 2\n97 97 256\n97 97 257\n", "table: line 3: the pair is in line 2 too"},
        {"smoe-bpe 1 258 2\n97 97 256\n97 98 256\n", "table: line 3: token 256 has other bytes"},
        {"smoe-bpe 1 259 2\n97 97 256\n97 256 256\n", "table: line 3: token 256 has other bytes"},
        {"smoe-bpe 1 257 1\n97 97 256\n97 98 257\n", "table: more tokens or lines than its 1 merges"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bpe table;
        error err = {0};
        assert_false(bpe_parse(&table, cases[i].text, strlen(cases[i].text), "table", &err));
        assert_int_equal(err.code, ERROR_RUNTIME);
        if (strncmp(err.text, cases[i].message, strlen(cases[i].message)) != 0)
            fail_msg("'%s' instead of '%s'", err.text, cases[i].message);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_are_those_of_tokenizers), cmocka_unit_test(merges_follow_their_order),
        cmocka_unit_test(merges_stay_inside_a_piece),     cmocka_unit_test(long_pieces_are_encoded),
        cmocka_unit_test(errors_name_their_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
