/* `smoe eval` as a program: which tokens count, what it says about the length of its windows, and what broken
 * weights lead to. */
#define _DEFAULT_SOURCE
#include "tests/cli_case.h"

#include <math.h>

/* Every token but the first is a target: with a rest, of a text shorter than the context, at any context. */
static void eval_counts_every_token(void **state)
{
    char path[4096];
    put_texts(state);
    put_file(in_folder(path, state, "nine.txt"), "abcdefghi", 9);
    put_file(in_folder(path, state, "one.txt"), "a", 1);
    expect(state, "train " TINY "--steps 2 --out run text.txt", 0, "done");
    assert_true(figure(state, "eval -c run text.txt", "tokens", "") == 8191);
    assert_true(figure(state, "eval -c run nine.txt", "tokens", "") == 8);
    assert_true(figure(state, "eval -c run --context 3 text.txt", "tokens", "") == 8191);
    assert_true(figure(state, "eval -c run --context 1e2 text.txt", "tokens", "") == 8191);
    const double whole = figure(state, "eval -c run --context 8 nine.txt", "loss", "");
    const double same = figure(state, "eval -c run nine.txt", "loss", "");
    const double cut = figure(state, "eval -c run --context 3 nine.txt", "loss", "");
    assert_true(whole == same); // 8 tokens in one window, whole or partial
    assert_true(whole != cut);
    expect(state, "eval -c run one.txt", 3, "one.txt: 1 tokens to evaluate, at least 2 are needed");
}

static void set_context(void **state, int context)
{
    char command[8192];
    snprintf(command, sizeof command,
             "sed -i 's/\"max_position_embeddings\": [0-9]*/\"max_position_embeddings\": %d/' "
             "'%s/run/latest/config.json'",
             context, (const char *)*state);
    assert_int_equal(system(command), 0);
}

/* A window has no more tokens than the text. A line says so, and another one that the model was not trained
 * for windows of this length. */
static void eval_says_what_its_windows_are(void **state)
{
    static char output[OUTPUT_BYTES];
    char path[4096];
    put_texts(state);
    put_file(in_folder(path, state, "nine.txt"), "abcdefghi", 9);
    expect(state, "train " TINY "--steps 2 --out run text.txt", 0, "done");
    expect(state, "eval -c run --context 1e7 nine.txt", 0,
           "--context 10000000 is longer than the text: it is one window of 8 tokens\n");
    assert_true(figure(state, "eval -c run --context 1e7 text.txt", "loss", "") ==
                figure(state, "eval -c run --context 8191 text.txt", "loss", ""));
    expect(state, "eval -c run --context 17 text.txt", 0,
           "windows of 17 tokens, but the model was trained with a context of 16: its loss may be higher");
    expect_quiet(state, "eval -c run --context 16 text.txt");
    expect_quiet(state, "eval -c run nine.txt");
    // The memory is that of the window, not of the 1e7 tokens. A sanitizer does not start with this limit.
    const char *const limit = "ulimit -v 8000000 &&";
    if (run(state, limit, "--version", output) != 0) return;
    assert_int_equal(run(state, limit, "eval -c run --context 1e7 text.txt", output), 0);
    // A model of a long context has one window in memory, not sixteen, if the text has only one.
    set_context(state, 2000000);
    assert_int_equal(run(state, limit, "eval -c run text.txt", output), 0);
    set_context(state, 16000000);
    assert_int_equal(run(state, limit, "eval -c run text.txt", output), 3);
    assert_non_null(strstr(output, "(a shorter --context?)"));
    assert_int_equal(run(state, limit, "eval -c run --context 512 text.txt", output), 0);
}

/* Overwrites the first weight of the file's data, that of lm_head.weight, with a NaN. */
static void spoil(const char *path)
{
    const float nan = (float)NAN;
    uint64_t header = 0;
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    assert_int_equal(fread(&header, sizeof header, 1, file), 1);
    assert_int_equal(fseek(file, (long)(sizeof header + header), SEEK_SET), 0);
    assert_int_equal(fwrite(&nan, sizeof nan, 1, file), 1);
    assert_int_equal(fclose(file), 0);
}

/* A model with a NaN has no loss, and no text can be sampled from it. */
static void broken_weights_have_no_loss(void **state)
{
    char path[4096];
    put_texts(state);
    expect(state, "train " TINY "--steps 2 --out run text.txt", 0, "done");
    spoil(in_folder(path, state, "run/latest/model.safetensors"));
    expect(state, "generate -c run -n 5 --temperature 0", 3, "after 1 tokens the logit of token 0 is nan");
    expect(state, "generate -c run -n 5", 3, "no token can be sampled");
    expect(state, "eval -c run text.txt", 3, "run: its loss is nan");
    expect(state, "train " TINY "--resume --steps 4 --out run text.txt", 3,
           "the loss of step 3 is nan with the weights that the run began with (run)");
    expect(state, "train --from run --batch 2 -q --steps 4 --out next text.txt", 3,
           "the loss of step 1 is nan with the weights that the run began with (run)");
}

/* train, eval and generate say so when OpenBLAS runs kernels that are too old for the processor. */
static void slow_blas_kernels_are_named(void **state)
{
    char output[OUTPUT_BYTES];
    if (!blas_core_judge("Prescott", __builtin_cpu_supports("avx2"), 0)) skip();
    static const char *const commands[] = {
        "train --device cpu --steps 2 --out run " TINY "text.txt",
        "eval --device cpu --checkpoint run/latest text.txt",
        "generate --device cpu --checkpoint run/latest --tokens 2",
    };
    put_texts(state);
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        assert_int_equal(run(state, "OPENBLAS_CORETYPE=Prescott", commands[i], output), 0);
        if (!strstr(output, "smoe: slow kernels (Prescott)")) fail_msg("smoe %s: '%s'", commands[i], output);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(eval_counts_every_token, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(eval_says_what_its_windows_are, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(broken_weights_have_no_loss, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(slow_blas_kernels_are_named, folder_setup, folder_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
