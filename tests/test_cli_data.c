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

static void test_validation_files(void **state)
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
static void test_changed_split(void **state)
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_validation_files, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(test_changed_split, folder_setup, folder_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
