/* train/data/tokens.h: the split; sampling, which must depend only on its arguments and give every window
 * once in an epoch; validation windows; kinds of files; errors that name the file, what was expected and what
 * was found. */
#define _DEFAULT_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/folder.h"
#include "train/data/tokens.h"
#include "train/files/file.h"

#include <sys/stat.h>
#include <zlib.h>

enum { IDS = 10000, HEADER = 1024, CONTEXT = 30 };

/* An llm.c token file of the ids 0, 1, .. IDS-1, so that a token shows its place. Returns the file's size. */
static size_t make_bin(unsigned char bytes[HEADER + 2 * IDS])
{
    const int32_t header[3] = {20240520, 1, IDS};
    memset(bytes, 0, HEADER);
    memcpy(bytes, header, sizeof header);
    for (int i = 0; i < IDS; i++) {
        bytes[HEADER + 2 * i] = (unsigned char)(i & 255);
        bytes[HEADER + 2 * i + 1] = (unsigned char)(i >> 8);
    }
    return HEADER + 2 * IDS;
}

static tokens *open_ids(unsigned char bytes[HEADER + 2 * IDS], tokens_split split)
{
    tokens *data;
    error err = {0};
    if (!tokens_parse(&data, bytes, make_bin(bytes), "ids.bin", NULL, IDS, CONTEXT, split, &err))
        fail_msg("%s", err.text);
    return data;
}

static tokens *open_paths(size_t count, const char *const *paths, int64_t context, tokens_split split)
{
    tokens *data;
    error err = {0};
    if (!tokens_open(&data, paths, count, NULL, 256, context, split, &err)) fail_msg("%s", err.text);
    return data;
}

static void a_part_is_for_validation(void **state)
{
    (void)state;
    static unsigned char bytes[HEADER + 2 * IDS];
    int32_t inputs[CONTEXT], targets[CONTEXT];
    tokens *data = open_ids(bytes, TOKENS_TRAIN);
    assert_int_equal(tokens_bytes(data, (const int32_t[]){1, 2}, 2), 0); // not known
    assert_int_equal(tokens_train_count(data), IDS - IDS / 20);
    assert_int_equal(tokens_validation_count(data), IDS / 20);
    assert_int_equal(tokens_windows(data), (IDS / 20 - 1) / CONTEXT);
    tokens_window(data, 0, 1, inputs, targets);
    assert_int_equal(inputs[0], IDS - IDS / 20); // the last 5%
    tokens_close(data);

    data = open_ids(bytes, TOKENS_EVAL);
    assert_int_equal(tokens_train_count(data), 0);
    assert_int_equal(tokens_validation_count(data), IDS);
    tokens_window(data, 2, 1, inputs, targets);
    assert_int_equal(inputs[0], 2 * CONTEXT);
    tokens_close(data);
}

/* Reads all windows and the rest in order into poisoned memory: every token but the first must be a target
 * once. */
static void windows_visit_every_token_once(void **state)
{
    (void)state;
    static unsigned char bytes[HEADER + 2 * IDS];
    enum { WINDOWS = (IDS - 1) / CONTEXT };
    static int32_t inputs[IDS], targets[IDS];
    memset(inputs, 0xff, sizeof inputs);
    memset(targets, 0xff, sizeof targets);
    tokens *data = open_ids(bytes, TOKENS_EVAL);
    assert_int_equal(tokens_windows(data), WINDOWS);
    tokens_window(data, 0, 5, inputs, targets);
    tokens_window(data, 5, WINDOWS - 5, inputs + 5 * CONTEXT, targets + 5 * CONTEXT);
    assert_int_equal(inputs[WINDOWS * CONTEXT], -1);
    assert_int_equal(targets[WINDOWS * CONTEXT], -1);
    assert_int_equal(tokens_rest(data), IDS - 1 - WINDOWS * CONTEXT);
    tokens_rest_window(data, inputs + WINDOWS * CONTEXT, targets + WINDOWS * CONTEXT);
    for (int i = 0; i < IDS - 1; i++) {
        assert_int_equal(inputs[i], i);
        assert_int_equal(targets[i], i + 1);
    }
    assert_int_equal(inputs[IDS - 1], -1);
    assert_int_equal(targets[IDS - 1], -1);
    tokens_close(data);
}

/* One epoch must have adjoining windows, each once, all inside the training corpus, in another order than the
 * corpus's. */
static void check_epoch(const tokens *data, uint64_t seed, uint64_t epoch, int32_t *first)
{
    enum { WINDOWS = (IDS - IDS / 20) / CONTEXT - 1 };
    static bool seen[IDS];
    int32_t inputs[CONTEXT], targets[CONTEXT], sorted = 0, last = -1;
    memset(seen, 0, sizeof seen);
    for (uint64_t i = 0; i < WINDOWS; i++) {
        tokens_batch(data, seed, epoch * WINDOWS + i, 1, inputs, targets);
        if (i == 0) *first = inputs[0];
        sorted += inputs[0] > last;
        last = inputs[0];
        for (int j = 0; j < CONTEXT; j++) {
            assert_int_equal(targets[j], inputs[0] + j + 1);
            assert_int_equal(inputs[j], inputs[0] + j);
            assert_false(seen[inputs[j]]);
            seen[inputs[j]] = true;
        }
        assert_true(targets[CONTEXT - 1] < IDS - IDS / 20);
    }
    int32_t from = 0, to = IDS - 1;
    while (!seen[from]) from++;
    while (!seen[to]) to--;
    assert_int_equal(to - from + 1, WINDOWS * CONTEXT); // adjoining
    assert_true(sorted > WINDOWS / 3 && sorted < WINDOWS * 2 / 3);
}

static void epochs_visit_every_window_once(void **state)
{
    (void)state;
    static unsigned char bytes[HEADER + 2 * IDS];
    int32_t first[3];
    tokens *data = open_ids(bytes, TOKENS_TRAIN);
    check_epoch(data, 1, 0, &first[0]);
    check_epoch(data, 1, 1, &first[1]);
    check_epoch(data, 2, 0, &first[2]);
    assert_true(first[0] != first[1] && first[0] != first[2] && first[1] != first[2]);
    tokens_close(data);
}

/* For resuming, a batch must depend on its arguments alone. Larger batches must have the same samples. */
static void a_batch_depends_on_its_arguments_alone(void **state)
{
    (void)state;
    static unsigned char bytes[HEADER + 2 * IDS];
    // a change of these numbers breaks the resuming of older checkpoints
    static const int32_t golden[4] = {4398, 5028, 8508, 2328};
    int32_t in[6][4 * CONTEXT], out[6][4 * CONTEXT], one[CONTEXT], one_out[CONTEXT];
    tokens *data = open_ids(bytes, TOKENS_TRAIN);
    for (uint64_t step = 0; step < 6; step++) tokens_batch(data, 42, step, 4, in[step], out[step]);
    tokens_close(data);
    data = open_ids(bytes, TOKENS_TRAIN);
    for (uint64_t sample = 24; sample-- > 0;) {
        tokens_batch(data, 42, sample, 1, one, one_out);
        assert_memory_equal(one, in[sample / 4] + sample % 4 * CONTEXT, sizeof one);
        assert_memory_equal(one_out, out[sample / 4] + sample % 4 * CONTEXT, sizeof one);
    }
    for (int row = 0; row < 4; row++) assert_int_equal(in[0][row * CONTEXT], golden[row]);
    tokens_batch(data, 42, UINT64_MAX / 3, 4, in[0], out[0]); // a very large step must work too
    tokens_close(data);
}

/* The shortest data: one window, in every epoch. */
static void the_shortest_data_has_one_window(void **state)
{
    (void)state;
    tokens *data;
    error err;
    int32_t inputs[38], targets[38];
    unsigned char bytes[780];
    for (int i = 0; i < 780; i++) bytes[i] = (unsigned char)(i % 251);
    assert_true(tokens_parse(&data, bytes, 780, "x", NULL, 256, 38, TOKENS_TRAIN, &err));
    assert_int_equal(tokens_validation_count(data), 39);
    assert_int_equal(tokens_windows(data), 1);
    tokens_window(data, 0, 1, inputs, targets);
    assert_int_equal(targets[37], bytes[779]);
    tokens_close(data);
    assert_false(tokens_parse(&data, bytes, 779, "x", NULL, 256, 38, TOKENS_TRAIN, &err));
    assert_non_null(strstr(err.text, "x: 38 tokens to validate on, context 38 needs 39"));
    assert_true(tokens_parse(&data, bytes, 39, "x", NULL, 256, 38, TOKENS_EVAL, &err));
    assert_int_equal(tokens_windows(data), 1);
    assert_int_equal(tokens_rest(data), 0);
    tokens_close(data);
    assert_true(tokens_parse(&data, bytes, 2, "x", NULL, 256, 38, TOKENS_EVAL, &err));
    assert_int_equal(tokens_windows(data), 0);
    assert_int_equal(tokens_rest(data), 1);
    tokens_rest_window(data, inputs, targets);
    assert_true(inputs[0] == bytes[0] && targets[0] == bytes[1]);
    tokens_close(data);
    assert_false(tokens_parse(&data, bytes, 1, "x", NULL, 256, 38, TOKENS_EVAL, &err));
    assert_null(data);
    assert_non_null(strstr(err.text, "x: 1 tokens to evaluate, at least 2 are needed"));
}

/* ---- files and folders ---- */

static void put_filled(void **state, const char *name, int byte, size_t size)
{
    char path[4096], *bytes = malloc(size + 1);
    memset(bytes, byte, size);
    put_file(in_folder(path, state, name), bytes, size);
    free(bytes);
}

/* With few files the end of each is for validation. Windows continue from one file to the next. */
static void few_files_give_their_ends(void **state)
{
    int32_t inputs[8], targets[8];
    put_filled(state, "a", 'a', 100);
    put_filled(state, "b", 'b', 200);
    put_filled(state, "empty", 'x', 0);
    tokens *data = open_paths(1, (const char *const *)state, 8, TOKENS_TRAIN);
    assert_int_equal(tokens_bytes(data, (const int32_t[]){1, 2}, 2), 2);
    assert_int_equal(tokens_train_count(data), 95 + 190);
    assert_int_equal(tokens_validation_count(data), 5 + 10);
    assert_int_equal(tokens_windows(data), 1);
    tokens_window(data, 0, 1, inputs, targets);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(inputs[i], i < 5 ? 'a' : 'b');
        assert_int_equal(targets[i], i < 4 ? 'a' : 'b');
    }
    tokens_close(data);
}

/* With many files of similar sizes, whole files are for validation. If one file is larger than all others
 * together, the end of each file is for validation. */
static void many_files_are_kept_whole(void **state)
{
    char name[32];
    int32_t inputs[50], targets[50];
    for (int i = 0; i < 40; i++) {
        snprintf(name, sizeof name, "%02d", i);
        put_filled(state, name, i + 1, 100); // a file of zeros would be a binary one
    }
    tokens *data = open_paths(1, (const char *const *)state, 50, TOKENS_TRAIN);
    assert_int_equal(tokens_validation_count(data), 200);
    assert_int_equal(tokens_windows(data), 3);
    for (int i = 0; i < 3; i++) {
        tokens_window(data, i, 1, inputs, targets);
        assert_int_equal(inputs[0] - 1, i < 2 ? 10 : 30); // files 10 and 30 of 40
    }
    for (uint64_t step = 0; step < 100; step++) {
        tokens_batch(data, 3, step, 1, inputs, targets);
        for (int i = 0; i < 50; i++) assert_true(inputs[i] % 20 != 11 && targets[i] % 20 != 11);
    }
    tokens_close(data);

    put_filled(state, "10", 11, 4000); // now more than half of everything
    data = open_paths(1, (const char *const *)state, 50, TOKENS_TRAIN);
    assert_int_equal(tokens_validation_count(data), 39 * 5 + 200);
    tokens_close(data);
}

/* Files of a folder that are not text are left out and counted: those with a zero byte near the beginning,
 * also inside a .gz, and a .bin that is no token file. A file that is named directly is read anyway. */
static void binary_files_are_left_out(void **state)
{
    static unsigned char picture[20000], bytes[HEADER + 2 * IDS];
    char path[4096], late[4096];
    memset(picture, 'p', sizeof picture);
    picture[6] = 0;
    put_file(in_folder(path, state, "a.png"), picture, sizeof picture);
    put_file(in_folder(path, state, "b.bin"), "no token file", 13);
    put_file(in_folder(path, state, "c.bin"), "x", 1);
    gzFile zip = gzopen(in_folder(path, state, "d.tar.gz"), "wb");
    assert_int_equal(gzwrite(zip, picture, 1000), 1000);
    assert_int_equal(gzclose(zip), Z_OK);
    const char *found;
    tokens *data;
    error err = {0};
    assert_false(tokens_open(&data, (const char *const *)state, 1, NULL, 256, 8, TOKENS_EVAL, &err));
    assert_non_null(strstr(err.text, "holds no file with data (4 binary files are left out)"));

    put_filled(state, "text", 't', 500);
    picture[6] = 'p';
    picture[sizeof picture - 1] = 0; // a zero far from the beginning: the file counts as text
    put_file(in_folder(late, state, "text-late"), picture, sizeof picture);
    data = open_paths(1, (const char *const *)state, 8, TOKENS_EVAL);
    assert_int_equal(tokens_validation_count(data), 500 + sizeof picture);
    assert_int_equal(tokens_skipped(data, &found), 4);
    assert_string_equal(found, in_folder(path, state, "a.png"));
    tokens_close(data);

    bpe table; // the same if texts are encoded with a tokenizer
    const char pairs[] = "smoe-bpe 1 257 1\n116 116 256\n";
    assert_true(bpe_parse(&table, pairs, strlen(pairs), "table", &err));
    assert_true(tokens_open(&data, (const char *const *)state, 1, &table, 257, 8, TOKENS_EVAL, &err));
    assert_int_equal(tokens_skipped(data, &found), 4);
    tokens_close(data);
    bpe_free(&table);

    const char *named[] = {path};
    data = open_paths(1, named, 8, TOKENS_EVAL);
    assert_int_equal(tokens_validation_count(data), sizeof picture);
    assert_int_equal(tokens_skipped(data, &found), 0);
    assert_null(found);
    tokens_close(data);
    in_folder(path, state, "b.bin");
    assert_false(tokens_open(&data, named, 1, NULL, 256, 8, TOKENS_EVAL, &err));
    assert_non_null(strstr(err.text, "b.bin: truncated token file: 13 bytes"));

    put_file(in_folder(path, state, "e.bin"), bytes, make_bin(bytes) - 2); // a token file, but a broken one
    assert_false(tokens_open(&data, (const char *const *)state, 1, NULL, IDS, 8, TOKENS_EVAL, &err));
    assert_non_null(strstr(err.text, "e.bin: the header counts 10000 tokens"));
}

static void gzip_is_read(void **state)
{
    char path[4096];
    unsigned char text[5000];
    for (int i = 0; i < 5000; i++) text[i] = (unsigned char)(i * i % 253);
    in_folder(path, state, "text.gz");
    for (int half = 0; half < 2; half++) { // two members
        gzFile zip = gzopen(path, "ab");
        assert_int_equal(gzwrite(zip, text + 2500 * half, 2500), 2500);
        assert_int_equal(gzclose(zip), Z_OK);
    }
    const char *paths[] = {path};
    int32_t inputs[4999], targets[4999];
    tokens *data = open_paths(1, paths, 4999, TOKENS_EVAL);
    tokens_window(data, 0, 1, inputs, targets);
    for (int i = 0; i < 4999; i++) {
        assert_int_equal(inputs[i], text[i]);
        assert_int_equal(targets[i], text[i + 1]);
    }
    tokens_close(data);
}

/* A file that is larger than the files that are copied into memory. */
static void a_large_file_is_mapped(void **state)
{
    char path[4096];
    enum { LARGE = 5 << 20 };
    unsigned char *bytes = malloc(LARGE);
    for (int i = 0; i < LARGE; i++) bytes[i] = (unsigned char)(i >> 12);
    put_file(in_folder(path, state, "large"), bytes, LARGE);
    const char *paths[] = {path, path};
    int32_t inputs[4], targets[4];
    tokens *data = open_paths(2, paths, 4, TOKENS_EVAL);
    assert_int_equal(tokens_validation_count(data), 2 * LARGE);
    tokens_window(data, 1 << 18, 1, inputs, targets);
    assert_int_equal(inputs[3], bytes[(1 << 20) + 3]);
    tokens_window(data, LARGE / 4 - 1, 1, inputs, targets);
    assert_int_equal(inputs[3], bytes[LARGE - 1]);
    assert_int_equal(targets[3], bytes[0]);
    tokens_close(data);
    free(bytes);
}

/* ---- texts encoded with a table of tokens; token files chosen by their names ---- */

static void texts_are_encoded_with_a_table(void **state)
{
    (void)state;
    static const char text[] = "smoe-bpe 1 258 1\n97 98 256\n"; // ab is 256, the end of text 257
    const int32_t wanted[] = {257, 'x', 256, 256, 'a', 'x', 256};
    bpe table;
    tokens *data;
    error err = {0};
    int32_t inputs[6], targets[6];
    assert_true(bpe_parse(&table, text, strlen(text), "table", &err));
    assert_true(tokens_parse(&data, "xababaxab", 9, "a.txt", &table, 258, 6, TOKENS_EVAL, &err));
    assert_int_equal(tokens_validation_count(data), 7);
    tokens_window(data, 0, 1, inputs, targets);
    assert_memory_equal(inputs, wanted, sizeof inputs);
    assert_memory_equal(targets, wanted + 1, sizeof targets);
    assert_int_equal(tokens_bytes(data, wanted, 7), 9);
    tokens_close(data);
    assert_false(tokens_parse(&data, "ab", 2, "a.txt", &table, 257, 6, TOKENS_EVAL, &err));
    assert_non_null(strstr(err.text, "a.txt: token 0 is 257, outside the vocabulary of 257"));

    static unsigned char bytes[HEADER + 2 * IDS];
    size_t size = make_bin(bytes);
    assert_false(tokens_parse(&data, bytes, size, "x.bin", &table, IDS, 6, TOKENS_EVAL, &err));
    assert_non_null(strstr(err.text, "x.bin: token 258 is 258, outside the tokenizer's vocabulary of 258"));
    bytes[8] = 258 & 255; // only the tokens of the table
    bytes[9] = 258 >> 8;
    size = HEADER + 2 * 258;
    assert_true(tokens_parse(&data, bytes, size, "x.bin", &table, IDS, 6, TOKENS_EVAL, &err));
    assert_int_equal(tokens_validation_count(data), 258); // a token file is not encoded
    assert_int_equal(tokens_bytes(data, (const int32_t[]){255, 256, 257}, 3), 3);
    tokens_close(data);
    bpe_free(&table);
}

static void put_ids(void **state, const char *name)
{
    static unsigned char bytes[HEADER + 2 * IDS];
    char path[4096];
    put_file(in_folder(path, state, name), bytes, make_bin(bytes));
}

static void expect_split(void **state, int64_t train, int64_t validation)
{
    tokens *data;
    error err = {0};
    if (!tokens_open(&data, (const char *const *)state, 1, NULL, IDS, 8, TOKENS_TRAIN, &err))
        fail_msg("%s", err.text);
    assert_int_equal(tokens_train_count(data), train);
    assert_int_equal(tokens_validation_count(data), validation);
    tokens_close(data);
}

static void expect_whole(void **state, int64_t train)
{
    tokens *data;
    error err = {0};
    if (!tokens_open(&data, (const char *const *)state, 1, NULL, IDS, 8, TOKENS_WHOLE, &err))
        fail_msg("%s", err.text);
    const tokens_mark mark = tokens_identify(data);
    assert_int_equal(mark.train, train);
    assert_int_equal(mark.validation, 0);
    assert_true(tokens_are_whole(&mark));
    tokens_close(data);
}

static void token_files_are_chosen_by_name(void **state)
{
    put_ids(state, "val_000.bin");
    expect_split(state, IDS - IDS / 20, IDS / 20); // there is nothing else to train on
    expect_whole(state, IDS);
    put_ids(state, "train_000.bin");
    put_ids(state, "valley.bin");
    expect_split(state, 2 * IDS, IDS);
    put_ids(state, "val.bin");
    expect_split(state, 2 * IDS, 2 * IDS);
    expect_whole(state, 2 * IDS);
}

/* The names of llm.c's files and others; words of which val is only a part are none of them. */
static void names_choose_the_validation_files(void **state)
{
    static const char *const validate[] = {"fineweb_val_000000.bin",
                                           "tiny_shakespeare_val.bin",
                                           "x-valid.bin",
                                           "valid3.bin",
                                           "2val.bin",
                                           "Validation.part.bin",
                                           "x.VAL.bin",
                                           "valid/00.bin",
                                           NULL};
    static const char *const train[] = {
        "fineweb_train_000001.bin", "interval_0.bin", "valuation.bin", "val/x/0.bin", "validated.bin", NULL};
    char path[4096];
    const char *from;
    assert_int_equal(mkdir(in_folder(path, state, "valid"), 0700), 0);
    assert_int_equal(mkdir(in_folder(path, state, "val"), 0700), 0);
    assert_int_equal(mkdir(in_folder(path, state, "val/x"), 0700), 0);
    for (int i = 0; train[i]; i++) put_ids(state, train[i]);
    expect_split(state, 5 * (IDS - IDS / 20), 5 * (IDS / 20));
    for (int i = 0; validate[i]; i++) {
        put_ids(state, validate[i]);
        tokens *data;
        error err = {0};
        if (!tokens_open(&data, (const char *const *)state, 1, NULL, IDS, 8, TOKENS_TRAIN, &err))
            fail_msg("%s", err.text);
        if (tokens_train_count(data) != 5 * IDS || tokens_validation_count(data) != IDS)
            fail_msg("%s: %lld tokens to validate on", validate[i], (long long)tokens_validation_count(data));
        from = tokens_validation_file(data, 0);
        assert_non_null(from);
        in_folder(path, state, validate[i]);
        assert_string_equal(from, path);
        assert_null(tokens_validation_file(data, 1));
        assert_int_equal(tokens_validation_kind(data), TOKENS_HELD_NAMED);
        tokens_close(data);
        remove(path);
    }
}

/* Without validations nothing is set aside, and the last token of a text is trained on. */
static void a_whole_text_is_trained_on(void **state)
{
    char text[9], name[32];
    int32_t inputs[8], targets[8];
    tokens *data;
    error err = {0};
    for (int i = 0; i < 9; i++) text[i] = (char)('a' + i);
    assert_true(tokens_parse(&data, text, 9, "x.txt", NULL, 256, 8, TOKENS_WHOLE, &err));
    tokens_batch(data, 1, 0, 1, inputs, targets);
    assert_int_equal(inputs[0], 'a');
    assert_int_equal(targets[7], 'i');
    tokens_close(data);
    assert_false(tokens_parse(&data, text, 8, "x.txt", NULL, 256, 8, TOKENS_WHOLE, &err));
    assert_string_equal(
        err.text, "x.txt: 8 tokens to train on, context 8 needs 9: give more data or a shorter context");
    assert_false(tokens_parse(&data, text, 9, "x.txt", NULL, 256, 8, TOKENS_TRAIN, &err));
    assert_string_equal(err.text, "x.txt: 0 tokens to validate on, context 8 needs 9: give more data or a "
                                  "shorter context, or --evaluations 0");

    for (int i = 0; i < 20; i++) {
        snprintf(name, sizeof name, "%02d", i);
        put_filled(state, name, 'a', 100);
    }
    data = open_paths(1, (const char *const *)state, 8, TOKENS_WHOLE);
    assert_int_equal(tokens_train_count(data), 2000);
    assert_int_equal(tokens_validation_count(data), 0);
    tokens_close(data);
}

/* ---- errors ---- */

static void assert_refused(const void *bytes, size_t size, const char *name, int64_t vocab,
                           const char *reason)
{
    tokens *data;
    error err = {0};
    assert_false(tokens_parse(&data, bytes, size, name, NULL, vocab, 8, TOKENS_TRAIN, &err));
    assert_null(data);
    assert_int_equal(err.code, ERROR_RUNTIME);
    if (strstr(err.text, reason) == NULL || strstr(err.text, name) == NULL)
        fail_msg("\"%s\" lacks \"%s\"", err.text, reason);
}

static void wrong_token_files_are_named(void **state)
{
    (void)state;
    static unsigned char bytes[HEADER + 2 * IDS + 1];
    size_t size = make_bin(bytes);
    assert_refused(bytes, 1023, "x.bin", IDS, "truncated token file: 1023 bytes, the header has 1024");
    assert_refused(bytes, size - 2, "x.bin", IDS, "counts 10000 tokens, expected 21024 bytes, found 21022");
    assert_refused(bytes, size + 1, "x.bin", IDS, "expected 21024 bytes, found 21025");
    assert_refused(bytes, size, "x.bin", IDS - 1, "token 9999 is 9999, outside the vocabulary of 9999");
    assert_refused(bytes, size, "x.bin.gz", IDS, "bad gzip data after 0 inflated bytes");
    bytes[8] = 0, bytes[9] = 0;
    assert_refused(bytes, size, "x.bin", IDS, "counts 0 tokens");
    bytes[4] = 7;
    assert_refused(bytes, size, "x.bin", IDS, "version 7, expected 1");
    bytes[0]++;
    assert_refused(bytes, size, "x.bin", IDS, "magic 20240521, expected 20240520");
}

static void wrong_texts_are_named(void **state)
{
    (void)state;
    unsigned char text[400];
    memset(text, 'a', sizeof text);
    text[399] = 200;
    assert_refused(text, 0, "x.txt", 256, "0 tokens to train on, context 8 needs 9");
    assert_refused(text, sizeof text, "x.txt", 200, "token 399 is 200, outside the vocabulary of 200");
    assert_refused(text, 0, "x.gz", 256, "truncated gzip data");
}

static void assert_unopened(size_t count, const char *const *paths, const char *reason)
{
    tokens *data;
    error err = {0};
    assert_false(tokens_open(&data, paths, count, NULL, IDS, 8, TOKENS_TRAIN, &err));
    assert_null(data);
    if (strstr(err.text, reason) == NULL) fail_msg("\"%s\" lacks \"%s\"", err.text, reason);
}

static void wrong_paths_are_named(void **state)
{
    static unsigned char bytes[HEADER + 2 * IDS];
    char path[4096];
    const char *paths[] = {path}, *folder[] = {*state};
    assert_unopened(0, paths, "no data");
    in_folder(path, state, "missing");
    assert_unopened(1, paths, "missing: cannot read: No such file");
    assert_unopened(1, folder, "holds no file with data");
    put_filled(state, "empty", 'x', 0);
    assert_unopened(1, folder, "holds no file with data");
    in_folder(path, state, "empty");
    assert_unopened(1, paths, "empty: the file is empty");
    put_filled(state, "text", 'x', 1000);
    put_file(in_folder(path, state, "ids.bin"), bytes, make_bin(bytes));
    assert_unopened(1, folder, "cannot be mixed");
    if (geteuid() == 0) return; // root reads everything
    in_folder(path, state, "text");
    chmod(path, 0);
    assert_unopened(1, paths, "text: cannot open: Permission denied");
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, folder_setup, folder_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_part_is_for_validation),
        cmocka_unit_test(windows_visit_every_token_once),
        cmocka_unit_test(epochs_visit_every_window_once),
        cmocka_unit_test(a_batch_depends_on_its_arguments_alone),
        cmocka_unit_test(the_shortest_data_has_one_window),
        IN_FOLDER(few_files_give_their_ends),
        IN_FOLDER(many_files_are_kept_whole),
        IN_FOLDER(binary_files_are_left_out),
        IN_FOLDER(gzip_is_read),
        IN_FOLDER(a_large_file_is_mapped),
        cmocka_unit_test(wrong_token_files_are_named),
        cmocka_unit_test(wrong_texts_are_named),
        IN_FOLDER(wrong_paths_are_named),
        cmocka_unit_test(texts_are_encoded_with_a_table),
        IN_FOLDER(token_files_are_chosen_by_name),
        IN_FOLDER(a_whole_text_is_trained_on),
        IN_FOLDER(names_choose_the_validation_files),
    };
    return cmocka_run_group_tests_name("tokens", tests, NULL, NULL);
}
