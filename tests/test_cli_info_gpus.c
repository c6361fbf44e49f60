/* `smoe info --model --gpus N`: the memory of one of N ranks, and the bytes that it sends. */
#define _DEFAULT_SOURCE
#include "tests/cli_case.h"

#include <math.h>

static double of(void **state, const char *options, const char *key)
{
    char arguments[256];
    snprintf(arguments, sizeof arguments, "info --model run --batch 8 %s", options);
    return figure(state, arguments, key, "");
}

static void info_says_what_a_rank_needs(void **state)
{
    static const char *const same[] = {"total_bytes", "adamw_bytes", "gradients_bytes", "layers_bytes"};
    put_texts(state);
    expect(state, "train " TINY "--layers 3 --steps 1 --out run text.txt", 0, "done");
    for (int i = 0; i < 4; i++) assert_true(of(state, "--gpus 1", same[i]) == of(state, "", same[i]));
    const double weights = of(state, "", "weights_bytes"), adamw = of(state, "", "adamw_bytes");
    assert_true(of(state, "--gpus 4", "adamw_bytes") < adamw / 4 * 1.1 &&
                of(state, "--gpus 4", "adamw_bytes") > adamw / 4);
    assert_true(of(state, "--gpus 4", "weights_bytes") == of(state, "", "weights_bytes"));
    assert_true(of(state, "--gpus 4", "batch") == 8);
    // The parts of the sums are kept for clipping, or for several passes.
    assert_true(of(state, "--gpus 4", "sums_bytes") >= weights / 4);
    assert_true(of(state, "--gpus 4 --clip 0", "sums_bytes") <
                of(state, "--gpus 4", "sums_bytes") - weights / 5);
    assert_true(fabs(of(state, "--gpus 4", "least_bytes") + of(state, "--gpus 4", "adamw_bytes") +
                     of(state, "--gpus 4", "sums_bytes") - of(state, "--gpus 4", "total_bytes")) < 1);
    // In a ring a rank sends 3/4 of what is reduced, once for each pass, and of what is gathered.
    assert_true(fabs(of(state, "--gpus 4", "sent_bytes") / (1.5 * weights) - 1) < 0.02);
    assert_true(fabs(of(state, "--gpus 4 --micro-batches 2", "sent_bytes") / (2.25 * weights) - 1) < 0.02);
    expect(state, "info --model run --gpus 3", 2,
           "--batch is 8, which 3 GPUs with 1 micro-batches each do not divide");
    expect(state, "info --gpus 2", 2, "--gpus is only for --model");
    expect(state, "info --model run --gpus 0", 2, "--gpus: 0 is outside 1..65536");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(info_says_what_a_rank_needs, folder_setup, folder_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
