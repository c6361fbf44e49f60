/* What `smoe train` says about its data as a program: which files it validates on, and that a resumed run
 * must have the split it began with. */
#define _DEFAULT_SOURCE
#include "tests/cli_case.h"

/* A token file of the tokens 0 .. 255, repeated. */
static void put_tokens(void **state, const char *name)
{
    enum { HEADER = 1024, TOKENS = 4096 };
    static unsigned char bytes[HEADER + 2 * TOKENS];
    const int32_t header[3] = {20240520, 1, TOKENS};
    char path[4096];
    memcpy(bytes, header, sizeof header);
    for (int i = 0; i < TOKENS; i++) bytes[HEADER + 2 * i] = (unsigned char)i;
    put_file(in_folder(path, state, name), bytes, sizeof bytes);
}

static void shell(void **state, const char *command)
{
    char whole[8192];
    snprintf(whole, sizeof whole, "cd '%s' && %s", (const char *)*state, command);
    assert_int_equal(system(whole), 0);
}

static void a_run_names_its_validation_files(void **state)
{
    static char output[OUTPUT_BYTES];
    shell(state, "mkdir data");
    put_tokens(state, "data/fineweb_train_000001.bin");
    put_tokens(state, "data/fineweb_train_000002.bin");
    expect(state, "train " TINY "--steps 2 --out tails data", 0,
           "warning: no token file is for validation by its name (val, valid or validation, as in "
           "data_val_000.bin); validates on the last 5% of each file\n");
    put_tokens(state, "data/fineweb_val_000000.bin");
    const char *shown = "validates on 1 of 3 token files, by name: data/fineweb_val_000000.bin\n";
    expect(state, "train " TINY "--steps 2 --out run data", 0, shown);
    expect(state, "train " TINY "--steps 2 --evaluations 0 --out whole data", 0,
           "does not train on 1 of 3 token files, by name: data/fineweb_val_000000.bin\n");
    assert_int_equal(run(state, "", "train " TINY "--resume --steps 3 --out run data", output), 0);
    assert_null(strstr(output, "validates on"));
    assert_int_equal(run(state, "", "train -q --resume --steps 3 --out run data data", output), 2);
    assert_non_null(strstr(output, "was trained on another text"));
}

/* The same tokens under other names: another split. */
static void a_changed_split_is_refused(void **state)
{
    shell(state, "mkdir data");
    put_tokens(state, "data/a_train.bin");
    put_tokens(state, "data/b_interval.bin");
    expect(state, "train " TINY "--steps 2 --out run data", 0, "done");
    expect(state, "train " TINY "--steps 2 --evaluations 0 --out whole data", 0, "done");
    shell(state, "mv data/b_interval.bin data/b_val.bin");
    expect(state, "train -q --resume --steps 3 --out run data", 2,
           "run/latest: the split of the text would change: the run has 7784 tokens to train on and 408 to "
           "validate on, these files give 4096 and 4096");
    expect(state, "train -q --resume --steps 3 --out whole data", 2,
           "whole/latest: the split of the text would change: the run has 8192 tokens to train on and 0 to "
           "validate on, these files give 4096 and 0");
    shell(state, "mv data/b_val.bin data/b_interval.bin");
    expect(state, "train -q --resume --steps 3 --out run data", 0, "done");
    expect(state, "train -q --resume --steps 3 --out whole data", 0, "done");
}

/* Files that are probably not meant as text are read, with a warning that says as what; clean ones without.
 */
static void doubtful_texts_are_named(void **state)
{
    static const struct {
        const char *make, *name, *said;
    } cases[] = {
        {"sed 's/^/{\"text\": \"/; s/$/\"}/' text.txt >rows.jsonl", "rows.jsonl",
         "warning: rows.jsonl is JSON: its keys, quotes and braces are read as text too\n"},
        {"cp rows.jsonl rows2.jsonl && gzip rows2.jsonl", "rows.jsonl rows2.jsonl.gz",
         "warning: rows.jsonl is JSON: its keys, quotes and braces are read as text too; so are 1 other "
         "files\n"},
        {"(printf '\\223NUMPY\\001\\000'; cat text.txt) >tokens.npy", "tokens.npy",
         "warning: tokens.npy is no text (it has a byte 0): all its bytes are read\n"},
        {"(cat text.txt; printf 'caf\\351 au lait') >latin.txt", "latin.txt",
         "warning: latin.txt is not UTF-8 (Latin-1? convert it with iconv): its bytes are read as they "
         "are\n"},
        {"gzip -k latin.txt", "latin.txt.gz", "warning: latin.txt.gz is not UTF-8"},
        {"(cat text.txt; printf '\\355\\240\\200') >surrogate.txt", "surrogate.txt", "is not UTF-8"},
        {"(cat text.txt; printf '\\300\\200') >overlong.txt", "overlong.txt", "is not UTF-8"},
        {"(cat text.txt; printf 'na\\303\\257ve \\342\\202\\254 \\360\\237\\230\\200') >fine.txt", "fine.txt",
         NULL},
        {"gzip -k text.txt", "text.txt text.txt.gz", NULL},
    };
    static char output[OUTPUT_BYTES];
    char command[512];
    put_texts(state);
    expect(state, "train " TINY "--steps 1 --out run text.txt", 0,
           "reads 1 text, a byte a token: 7783 tokens to train on, 409 to validate on, the last 5% of each "
           "file\n");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        shell(state, cases[i].make);
        snprintf(command, sizeof command, "eval -c run %s", cases[i].name);
        assert_int_equal(run(state, "", command, output), 0);
        if (cases[i].said ? !strstr(output, cases[i].said) : *output != '\0')
            fail_msg("%s: '%s'", cases[i].name, output);
    }
    expect(state, "train " TINY "--steps 1 --out zipped text.txt text.txt.gz", 0,
           "reads 2 texts (1 inflated from .gz), a byte a token: 15566 tokens to train on");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_run_names_its_validation_files, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(a_changed_split_is_refused, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(doubtful_texts_are_named, folder_setup, folder_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
