/* `smoe train`, `eval`, `generate` and `info` as programs: what they say about options that contradict each
 * other, and about folders that were copied or half deleted. */
#define _DEFAULT_SOURCE
#include "tests/cli_case.h"

static void shell(void **state, const char *command)
{
    char whole[8192];
    snprintf(whole, sizeof whole, "cd '%s' && %s", (const char *)*state, command);
    assert_int_equal(system(whole), 0);
}

/* An option that takes a path takes no empty one, wherever that would lead. */
static void empty_paths_are_refused(void **state)
{
    put_texts(state);
    static const struct {
        const char *arguments, *name;
    } cases[] = {
        {"train --steps 1 --out '' text.txt", "--out"},
        {"train --steps 1 --resume --out= text.txt", "--out"},
        {"train --steps 1 --from '' text.txt", "--from"},
        {"train --steps 1 --tokenizer '' text.txt", "--tokenizer"},
        {"train --steps 1 --out run ''", "FILE"},
        {"train --steps 1 --out run text.txt ''", "FILE"},
        {"eval -c '' text.txt", "--checkpoint"},
        {"eval -c run ''", "FILE"},
        {"generate -c ''", "--checkpoint"},
        {"info --model ''", "--model"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char message[128];
        snprintf(message, sizeof message, ": %s: '' is not a path", cases[i].name);
        expect(state, cases[i].arguments, 2, message);
    }
}

/* Messages name the options that were given, not the keys of config.json. */
static void contradictions_name_the_options(void **state)
{
    put_texts(state);
    static const struct {
        const char *arguments, *message;
    } cases[] = {
        {"--experts 4 --topk 5", "--topk is 5, more than --experts, which is 4"},
        {"--hidden 24 --heads 5", "--hidden is 24, it must be a multiple of 10, twice --heads"},
        {"--layers 2 --dense-layers 3", "--dense-layers is 3, more than --layers, which is 2"},
        {"--dense-intermediate 8", "--dense-intermediate is only for --dense-layers"},
        {"--layers 2 --dense-layers 2 --shared 8",
         "--shared is 8, but no layer has experts: --dense-layers is 2, as --layers is\n"},
        {"--dense-twin --dense-intermediate 8", "--dense-intermediate is only for --dense-layers"},
        {"--device gpu", "--device: 'gpu' is not one of auto, cpu, cuda, cuda-plain"},
        {"--precision f16", "--precision: 'f16' is not one of f32, bf16"},
        {"--gradients f16", "--gradients: 'f16' is not one of f32, bf16"},
        {"--recompute all", "--recompute: 'all' is not one of none, norms, norms-qk, layers"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments, "train " TINY "--steps 1 %s --out run text.txt",
                 cases[i].arguments);
        expect(state, arguments, 2, cases[i].message);
    }
    expect(state, "train " TINY "--steps 1 --out run text.txt", 0, "done");
    // Else the checkpoint could not generate: its tokens would be fewer than the bytes.
    shell(state, "yes 0123456789 | head -200 >digits.txt");
    expect(state, "train " TINY "--steps 1 --vocab 100 --out no digits.txt", 2,
           "digits.txt: text without a tokenizer (bpe.txt) has 256 tokens, the model's vocabulary 100");
#ifndef SMOE_HAVE_CUDA
    // The device of this command has another name inside.
    expect(state, "info --model run --device cuda", 2,
           "smoe info: --device: this build has no cuda backend\n");
#endif
    expect(state, "info --model run --clip -1", 2, "--clip: '-1' is not a number in 0..1e+09");
    expect(state, "info --model run --clip inf", 2, "--clip: 'inf' is not a number in 0..1e+09");
}

/* Of the sizes of a resumed run only those that are given again are compared with the checkpoint's. */
static void only_given_sizes_are_compared(void **state)
{
    put_texts(state);
    expect(state, "train " TINY "--topk 1 --tied --renormalize --steps 1 --out run text.txt", 0, "done");
    expect(state, "train --resume -q --steps 2 --tied --out run text.txt", 0, "resumed at step 1 of 2\ndone");
    expect(state, "train --resume -q --steps 3 --renormalize --topk 1 --out run text.txt", 0,
           "resumed at step 2");
    expect(state, "train --resume -q --steps 4 --topk 2 --out run text.txt", 2,
           "num_experts_per_tok is 1, wanted 2");
    expect(state, "train --resume -q --steps 4 --topk 9 --out run text.txt", 2,
           "--topk is 9, more than --experts, which is 4");
    expect(state, "train --resume -q --steps 4 --dense-twin --out run text.txt", 2,
           "first_k_dense_replace is 0, wanted 1");
    expect(state, "train " TINY "--steps 1 --out plain text.txt", 0, "done");
    expect(state, "train --resume -q --steps 2 --tied --out plain text.txt", 2,
           "tie_word_embeddings is 0, wanted 1");
    expect(state, "train --resume -q --steps 2 --dense-intermediate 8 --out plain text.txt", 2,
           "--dense-intermediate is only for --dense-layers");

    expect(state, "train " TINY "--layers 2 --dense-layers 1 --steps 1 --out dense text.txt", 0, "done");
    expect(state, "train --resume -q --steps 2 --dense-intermediate 16 --out dense text.txt", 0, "resumed");
    expect(state, "train --resume -q --steps 3 --dense-intermediate 8 --out dense text.txt", 2,
           "dense_intermediate_size is 16, wanted 8");

    expect(state, "train " TINY "--shared 8 --dense-twin --steps 1 --out twin text.txt", 0, "done");
    expect(state, "train --resume -q --steps 2 --dense-twin --out twin text.txt", 0,
           "resumed at step 1 of 2");
    expect(state, "train " TINY "--resume --shared 8 --dense-twin --steps 3 --out twin text.txt", 0,
           "resumed at step 2");
    expect(state, "train " TINY "--resume --shared 16 --dense-twin --steps 4 --out twin text.txt", 2,
           "dense_intermediate_size is 24, wanted 32");
}

/* It is that of the run, unless it is given. The log shows whether fp8 was used. */
static void compute_is_that_of_the_run(void **state)
{
    const char *run = "train --resume -q --evaluations 1 --out run text.txt ";
    char text[256];
    put_texts(state);
    expect(state, "train " TINY "--intermediate 16 --compute f8 --evaluations 1 --steps 1 --out run text.txt",
           0, "done");
    snprintf(text, sizeof text, "%s --steps 2", run);
    expect(state, text, 0, "resumed at step 1 of 2\ndone");
    shell(state, "tail -n 1 run/train.jsonl | grep -q val_loss_f8");
    snprintf(text, sizeof text, "%s --steps 3 --compute bf16", run);
    expect(state, text, 0, "--compute is bf16 from here on, it was f8\n");
    shell(state, "! tail -n 1 run/train.jsonl | grep -q val_loss_f8");
    snprintf(text, sizeof text, "%s --steps 4 --compute f8-dgrad", run);
    expect(state, text, 0, "--compute is f8-dgrad from here on, it was bf16\n");
    shell(state, "tail -n 1 run/train.jsonl | grep -q val_loss_f8");
}

/* scp and cp -L copy a link as what it points to. Such a run is resumed, and later checkpoints are found. */
static void a_run_copied_without_links_resumes(void **state)
{
    put_texts(state);
    expect(state, "train " TINY "--steps 2 --out run text.txt", 0, "done");
    shell(state, "cp -rL run all && cp -rL run one && rm -r one/step-*");
    static const char *const copies[] = {"all", "one"};
    for (size_t i = 0; i < 2; i++) {
        char text[256];
        snprintf(text, sizeof text, "train --resume -q --steps 4 --out %s text.txt", copies[i]);
        expect(state, text, 0, "resumed at step 2 of 4\ndone");
        snprintf(text, sizeof text, "test $(readlink %s/latest) = step-0000004", copies[i]);
        shell(state, text);
        snprintf(text, sizeof text, "train --resume -q --steps 5 --out %s text.txt", copies[i]);
        expect(state, text, 0, "resumed at step 4 of 5\ndone");
    }
    // A run that writes no checkpoints leaves the folder as it is.
    shell(state, "cp -rL run none");
    expect(state, "train --resume -q --steps 3 --checkpoints 0 --out none text.txt", 0, "resumed at step 2");
    shell(state, "test ! -L none/latest && test -d none/latest");
}

/* At every moment `latest` is the checkpoint: as a folder, or as a link to a complete one. */
static void latest_is_always_a_checkpoint(void **state)
{
    const char *resume = "train --resume -q --steps 2 --out copy text.txt",
               *linked =
                   "test $(readlink copy/latest) = step-0000002 && test -d copy/step-0000002 && rm -r copy";
    put_texts(state);
    expect(state, "train " TINY "--steps 2 --out run text.txt", 0, "done");
    // No second link can be made beside the folder: `latest` must not have been moved away before.
    shell(state, "cp -rL run copy && mkdir copy/latest.tmp");
    expect(state, resume, 0, "resumed at step 2 of 2");
    shell(state, linked);
    // A process was killed when it had made its link to step-0000002, but had not yet exchanged it.
    shell(state, "cp -rL run copy && rm -r copy/step-* && ln -s step-0000002 copy/step-0000002");
    expect(state, "eval -c copy text.txt", 0, "");
    expect(state, resume, 0, "resumed at step 2 of 2");
    shell(state, linked);
}

/* Why a checkpoint is not found. */
static void a_lost_checkpoint_is_explained(void **state)
{
    put_texts(state);
    expect(state, "train " TINY "--steps 2 --out run text.txt", 0, "done");
    shell(state, "rm -r run/step-0000002 && ln -s loop loop");
    expect(state, "eval -c run text.txt", 3,
           "run: no checkpoint there: latest is a link to step-0000002, which has no config.json");
    expect(state, "generate -c nothing", 3, "nothing: no checkpoint there (neither config.json nor latest/");
    expect(state, "generate -c text.txt", 3, "text.txt: no checkpoint there (neither");
    expect(state, "eval -c loop text.txt", 3, "loop/config.json: cannot read: Too many levels");
    expect(state, "info --model run", 3, "latest is a link to step-0000002");
}

/* A large text is mapped, not copied. If it is made shorter during the run, the run ends with a message, and
 * its last checkpoint stays. */
static void a_shortened_text_ends_the_run(void **state)
{
    static char output[OUTPUT_BYTES];
    put_texts(state);
    shell(state, "yes 'a text of some words' | head -100000 >long.txt");
    const int status =
        run(state,
            "timeout -s KILL 600 sh -c '\"$@\" & p=$!; until test -e run/latest; do sleep 0.1; "
            "done; : >long.txt; wait $p' sh",
            "train " TINY "--steps 100000000 --checkpoints 100000 --out run long.txt", output);
    if (status != 3 || !strstr(output, "smoe: a file that is being read became shorter"))
        fail_msg("exit status %d, '%s'", status, output);
    expect(state, "eval -c run text.txt", 0, "");
}

/* A token file whose tokens the tokenizer does not have is of another tokenizer; a checkpoint whose tokenizer
 * has more tokens than the model is broken. */
static void other_tokenizers_are_refused(void **state)
{
    enum { COUNT = 2000, HEADER = 256 };
    static const char table[] = "smoe-bpe 1 261 4\n97 98 256\n256 99 257\n257 257 258\n100 32 259\n";
    const int32_t header[HEADER] = {20240520, 1, COUNT};
    unsigned char bytes[sizeof header + 2 * COUNT] = {0};
    const char *message = "ids.bin: token 1999 is 261, outside the tokenizer's vocabulary of 261";
    char path[4096];
    put_texts(state);
    memcpy(bytes, header, sizeof header);
    bytes[sizeof bytes - 2] = 261 & 255;
    bytes[sizeof bytes - 1] = 261 >> 8;
    put_file(in_folder(path, state, "ids.bin"), bytes, sizeof bytes);
    put_file(in_folder(path, state, "bpe.txt"), table, sizeof table - 1);
    expect(state, "train " TINY "--steps 1 --tokenizer bpe.txt --out run text.txt", 0, "done");
    expect(state, "train " TINY "--steps 1 --tokenizer bpe.txt --out no ids.bin", 3, message);
    expect(state, "eval -c run ids.bin", 3, message);

    expect(state, "train " TINY "--steps 1 --out bytes text.txt", 0, "done");
    expect(state, "train --resume -q --steps 2 --tokenizer bpe.txt --out bytes text.txt", 2,
           "bytes/latest was trained without a tokenizer, not with bpe.txt\n");
    shell(state, "cp bpe.txt bytes/latest/");
    message = "bytes/latest/bpe.txt: the tokenizer has 261 tokens, the model's vocabulary 256\n";
    expect(state, "eval -c bytes text.txt", 3, message);
    expect(state, "generate -c bytes", 3, message);
    expect(state, "train --resume -q --steps 2 --out bytes text.txt", 3, message);
    expect(state, "train --from bytes --batch 2 -q --steps 2 --out no text.txt", 3, message);
    // Here the checkpoint is whole, and the option is wrong.
    expect(state, "train --resume -q --steps 2 --vocab 256 --out run text.txt", 2,
           "vocab_size is 320, wanted 256\n");
}

/* Some options are without effect beside others, so that one can be changed in a command and the rest may
 * stay. The help says which. */
static void options_without_effect_are_allowed(void **state)
{
    static const char *const sentences[] = {
        "Without effect on the CPU and with cuda-plain\n",
        "--experts, --renormalize, --chunks and those under Routing are without effect\n",
        "; without effect if --warmup is 1 (default 0.1)\n",
        "; without effect if --rounding is none (default 16)\n",
        "; without effect if --checkpoints is 0 (default 2)\n",
        "; without effect if --evaluations is 0\n",
        "; without effect if --evaluations is less than 2\n",
    };
    static const char *const pairs[][2] = {
        {"--device cpu", "--fastest --device cpu"},
        {"--warmup 1", "--warmup 1 --end-lr 0.5"},
        {"--rounding none", "--rounding none --tile 4"},
        {"--evaluations 1", "--evaluations 1 --evaluation-tokens 1"},
        {"--dense-twin", "--dense-twin --experts 8 --renormalize --chunks 2 --rounding nr-f --tile 4 "
                         "--balance 0.5 --z-loss 0.5"},
    };
    static char output[OUTPUT_BYTES];
    run_for(state, "ARGP_HELP_FMT=rmargin=1000", "train --help", OUTPUT, output);
    for (size_t i = 0; i < sizeof sentences / sizeof sentences[0]; i++)
        if (!strstr(output, sentences[i])) fail_msg("no '%s' in '%s'", sentences[i], output);
    put_texts(state);
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        for (int k = 0; k < 2; k++) {
            char arguments[256];
            snprintf(arguments, sizeof arguments, "train " TINY "--steps 3 %s --out run%d text.txt",
                     pairs[i][k], k);
            expect(state, arguments, 0, "done");
        }
        shell(state, "cmp run0/latest/model.safetensors run1/latest/model.safetensors && rm -r run0 run1");
    }
}

/* What follows from the sizes is printed and stored, and a resumed run keeps it. */
static void values_follow_from_the_sizes(void **state)
{
    static char output[OUTPUT_BYTES];
    put_texts(state);
    expect(state, "train -q --layers 1 --steps 1 --out demo text.txt", 0, "new run: --lr 0.004 --init 0.1 ");
    shell(state, "grep -q '\"initializer_range\": 0.1,' demo/latest/config.json");
    const char *wide =
        "--layers 1 --hidden 384 --intermediate 8 --experts 2 --topk 1 --context 16 --batch 2 -q";
    char command[512];
    snprintf(command, sizeof command, "train %s --warmup 0 --steps 2 --out run text.txt", wide);
    expect(state, command, 0,
           "new run: --lr 0.001 --init 0.05 --evaluations 1 --last-evaluation-tokens 16\n");
    shell(state,
          "grep -q '\"initializer_range\": 0.05,' run/latest/config.json && head -1 run/train.jsonl | grep "
          "-q '\"lr\":0.001,'");
    assert_int_equal(run(state, "", "train -q --resume --steps 4 --out run text.txt", output), 0);
    assert_null(strstr(output, "--lr"));
    shell(state, "tail -1 run/train.jsonl | grep -q '\"lr\":0.000[0-9]*,'");
    expect(state, "train -q --from run --batch 2 --steps 1 --out next text.txt", 0,
           "new run: --lr 0.001 --evaluations 1 ");
    snprintf(command, sizeof command, "train %s --lr 0.5 --init 0.3 --steps 1 --out given text.txt", wide);
    expect(state, command, 0, "new run: --lr 0.5 --init 0.3 ");
}

/* Without validations no text is needed for them. A resumed run has none either, also without the option. */
static void a_run_without_validations_needs_no_text(void **state)
{
    static char output[OUTPUT_BYTES];
    put_texts(state);
    shell(state, "head -c 40 text.txt >short.txt");
    expect(state, "train " TINY "--steps 1 --out no short.txt", 3,
           "short.txt: 2 tokens to validate on, context 16 needs 17: give more data or a shorter context, or "
           "--evaluations 0\n");
    expect(state, "train " TINY "--steps 1 --evaluations 0 --out run short.txt", 0, "done: run/");
    expect(state, "train --resume -q --steps 2 --evaluations 1 --out run short.txt", 2,
           "--evaluations is 1, but run/latest is of a run that began with --evaluations 0");
    expect(state, "train --resume -q --steps 2 --out run short.txt", 0, "resumed at step 1 of 2\ndone");
    expect(state, "train --resume -q --steps 2 --out run short.txt", 0,
           "resumed at step 2 of 2: nothing is left\ndone");
    expect(state, "train --resume -q --steps 2 --out run text.txt", 2,
           "run/latest was trained on another text (40 tokens to train on, 0 to validate on, ");
    assert_int_equal(
        run_for(state, "", "train --resume -q --json --steps 3 --out run short.txt", OUTPUT, output), 0);
    if (!strstr(output, "\"val_loss\":null,\"val_bits_per_byte\":null,\"val_tokens\":0"))
        fail_msg("'%s'", output);
    shell(state, "test $(wc -l <run/train.jsonl) = 3 && ! grep -q val_loss run/train.jsonl");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(empty_paths_are_refused, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(contradictions_name_the_options, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(only_given_sizes_are_compared, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(compute_is_that_of_the_run, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(a_run_copied_without_links_resumes, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(latest_is_always_a_checkpoint, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(a_lost_checkpoint_is_explained, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(a_shortened_text_ends_the_run, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(other_tokenizers_are_refused, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(options_without_effect_are_allowed, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(values_follow_from_the_sizes, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(a_run_without_validations_needs_no_text, folder_setup,
                                        folder_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
