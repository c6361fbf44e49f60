/* `smoe train --from CHECKPOINT` as a program: the sizes and everything else that a run does not change are
 * the checkpoint's, also after --resume. */
#define _DEFAULT_SOURCE
#include "tests/cli_case.h"

static void shell(void **state, const char *command)
{
    char whole[8192];
    snprintf(whole, sizeof whole, "cd '%s' && %s", (const char *)*state, command);
    if (system(whole) != 0) fail_msg("%s", command);
}

/* --from: the sizes are the checkpoint's, the context may differ, and some options are refused with it. */
static void sizes_come_from_the_checkpoint(void **state)
{
    char command[4096];
    put_texts(state);
    expect(state, "train " TINY "--topk 3 --tied --steps 3 --out run text.txt", 0, "done");
    expect(state, "train --from run --context 8 --batch 2 -q --steps 2 --out next text.txt", 0, "done");
    expect(state, "train --resume --batch 2 -q --steps 3 --out next text.txt", 0, "resumed at step 2 of 3\n");
    // --context is no size of the model; config.json must have the --balance that was used last.
    expect(state, "train --resume --context 8 --balance 0.5 --batch 2 -q --steps 4 --out next text.txt", 0,
           "done");
    expect(state, "train --resume --context 16 --batch 2 -q --steps 5 --out next text.txt", 2,
           "max_position_embeddings is 8, wanted 16");
    snprintf(command, sizeof command, "grep -q '\"router_aux_loss_coef\": 0.5' '%s/next/latest/config.json'",
             (const char *)*state);
    assert_int_equal(system(command), 0);
    expect(state, "train --from run --batch 2 -q --resume --steps 3 --out next text.txt", 2,
           "--from cannot be combined with --resume");
    expect(state, "train --from run --layers 1 --steps 3 --out other text.txt", 2,
           "--from cannot be combined with options of the model's sizes");
    expect(state, "train --from run --init 0.2 --steps 3 --out other text.txt", 2,
           "--from cannot be combined with --init: the first weights are the checkpoint's");
    expect(state, "train --from nothing --steps 3 --out other text.txt", 3, "nothing: no checkpoint");
}

/* What another program has written into a checkpoint is in every checkpoint of the runs that begin with it.
 */
static void keys_and_files_of_others_are_carried_along(void **state)
{
    put_texts(state);
    expect(state, "train " TINY "--steps 2 --out run text.txt", 0, "done");
    shell(state, "grep -q '\"router_aux_loss_coef\": 0.01,' run/latest/config.json");
    shell(
        state,
        "sed -i 's/\"eos_token_id\": null/\"eos_token_id\": 0,\\n  \"note\": 0.3/; s/\"pad_token_id\": null/"
        "\"pad_token_id\": 1/; s/\"router_aux_loss_coef\": 0.01/\"router_aux_loss_coef\": 0.001/' "
        "run/latest/config.json && echo '{\"eos_token_id\": 0}' >run/latest/generation_config.json && "
        "echo '{\"chat\": 1}' >run/latest/tokenizer.json && : >run/latest/merges.txt");
    expect(state, "train --from run --batch 2 -q --steps 2 --keep 1 --out next text.txt", 0, "done");
    expect(state, "train --resume -q --steps 3 --keep 1 --out next text.txt", 0, "done");
    shell(state,
          "for name in generation_config.json tokenizer.json tokenizer_config.json; do cmp run/latest/$name "
          "next/latest/$name || exit 1; done; ! test -e next/latest/merges.txt");
    shell(state,
          "sort run/latest/config.json >a && sort next/latest/config.json | cmp - a"); // the coefficient too
    expect(state, "train --from run --batch 2 -q --steps 2 --balance 0.3 --out third text.txt", 0, "done");
    shell(state, "grep -q '\"router_aux_loss_coef\": 0.3,' third/latest/config.json");
}

/* A tokenizer that the checkpoint does not have: the ids of its special tokens are others. */
static void another_tokenizer_is_refused(void **state)
{
    static const char end[] = "smoe-bpe 1 257 0\n";
    char path[4096];
    put_texts(state);
    put_file(in_folder(path, state, "end.txt"), end, sizeof end - 1);
    expect(state, "train " TINY "--steps 2 --tokenizer end.txt --out words text.txt", 0, "done");
    shell(state,
          "grep -q '\"eos_token_id\": 256' words/latest/config.json && grep -q '\"bos_token_id\": 256' "
          "words/latest/config.json && grep -q '\"pad_token_id\": null' words/latest/config.json");
    shell(state,
          "cp -r words run && rm run/latest/bpe.txt && sed -i 's/\"eos_token_id\": 256/\"eos_token_id\": 9/' "
          "run/latest/config.json && echo '{}' >run/latest/generation_config.json");
    expect(state, "train --from run --tokenizer end.txt --batch 2 -q --steps 2 --out next text.txt", 0,
           "done");
    shell(state, "grep -q '\"eos_token_id\": 256' next/latest/config.json && ! test -e "
                 "next/latest/generation_config.json");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(sizes_come_from_the_checkpoint, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(keys_and_files_of_others_are_carried_along, folder_setup,
                                        folder_teardown),
        cmocka_unit_test_setup_teardown(another_tokenizer_is_refused, folder_setup, folder_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
