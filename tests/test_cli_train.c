/* `smoe train`, `generate` and `eval` as programs: the messages and exit statuses for bad input, resumed
 * runs, tokenizers, and the memory that `info` states. */
#define _DEFAULT_SOURCE
#include "tests/cli_case.h"

#include <math.h>
#include <stdbool.h>
#include <sys/stat.h>

static void bad_input_is_named(void **state)
{
    put_texts(state);
    expect(state, "train " TINY "--steps 2 --out run text.txt", 0, "done");
    static const struct {
        const char *arguments;
        int status;
        const char *message;
    } cases[] = {
        {"", 2, "Usage: smoe COMMAND"},
        {"nothing", 2, "'nothing' is no command"},
        {"train", 2, "no FILE"},
        {"train --unknown text.txt", 2, "unrecognized option"},
        {"train --steps 1.5 text.txt", 2, "--steps: '1.5' is not a whole number"},
        {"train --steps 0 text.txt", 2, "--steps: '0' is not a number in 1.."},
        {"train --steps 5 --seconds 1 text.txt", 2,
         "--seconds cannot be combined with --steps: a run ends by one of them"},
        {"train --minutes 1 --steps 5 text.txt", 2,
         "--steps cannot be combined with --minutes: a run ends by one of them"},
        {"train --seconds 9 --minutes 1 text.txt", 2, "--minutes cannot be combined with --seconds"},
        {"train " TINY "--steps 900 --steps 2 --out last text.txt", 0, "done"},
        {"train --steps 1e15 --batch 1e4 --context 1e4 text.txt", 2,
         "1000000000000000 steps of 100000000 tokens are more than 2^63 tokens"},
        {"train --lr nan text.txt", 2, "--lr: 'nan' is not a number in 0..1000"},
        {"train --init 0 text.txt", 2, "--init: '0' is not a number in 1e-06..10"},
        {"train --tile 0 text.txt", 2, "--tile: '0' is not a number in 1..4096"},
        {"train --rounding nearest text.txt", 2, "'nearest' is not one of none, nr-f"},
        {"train --experts 4 --topk 9 text.txt", 2, "--topk is 9, more than --experts, which is 4"},
        {"train --heads 2 --hidden 20 --steps 1 text.txt", 2, "hidden is 20, it must be a multiple of 8"},
        {"train " TINY "--device cpu --precision bf16 --steps 1 --out narrow text.txt", 2,
         "--precision bf16 is only for the GPU (--device cuda): the CPU computes in f32"},
        {"train " TINY "--device cpu --gradients bf16 --steps 1 --out narrow text.txt", 2,
         "--gradients bf16 is only for the GPU (--device cuda): the CPU computes in f32"},
        {"train " TINY "--device cpu --precision f32 --gradients f32 --steps 1 --out wide text.txt", 0,
         "done"},
        {"info --model run/latest --precision bf16", 2, "--precision bf16 is only for the GPU"},
        {"info --model run/latest --gradients bf16", 2, "--gradients bf16 is only for the GPU"},
        {"info --model run/latest --gradients f16", 2, "--gradients: 'f16' is neither f32 nor bf16"},
        {"info --model run/latest --precision f32", 0, ""},
        {"train " TINY "--compute fp8 text.txt", 2, "--compute: 'fp8' is not one of bf16, f8, f8-dgrad"},
        {"train " TINY "--compute f8 --steps 1 --out f8 text.txt", 2, "intermediate is 8"},
        {"info --model run/latest --compute f8", 2, "intermediate is 8"},
        {"info --model run/latest --compute e4m3", 2, "--compute: 'e4m3' is not one of bf16, f8, f8-dgrad"},
        {"train " TINY "missing.txt", 3, "missing.txt: cannot read"},
        {"train " TINY "empty.txt", 3, "empty.txt: the file is empty"},
        {"train " TINY "nothing", 3, "nothing: holds no file with data"},
        {"train " TINY "--out text.txt text.txt", 3, "text.txt: cannot make the folder"},
        {"train " TINY "--out /proc/run text.txt", 3, "/proc/run: cannot make the folder"},
        {"train " TINY "--steps 2 --out run text.txt", 2, "exists already"},
        {"train " TINY "--steps 2 --out run/latest text.txt", 2,
         "run/latest exists already: choose another folder"},
        {"train " TINY "--resume --steps 4 --out run/latest text.txt", 2,
         "run/latest is a checkpoint, not the folder of a run"},
        {"info --batch 8", 2, "--batch is only for --model"},
        {"info --precision f32 --json", 2, "--precision is only for --model"},
        {"info --model run", 0, ""},
        {"info --model run --chunks 2 --json", 0, ""},
        {"info --model run --rounding nr-f", 2, "--rounding cannot be combined with --model"},
        {"info --thiek 64,16,8,4,2 --model run", 2, "--thiek cannot be combined with --model"},
        {"train " TINY "--resume --init 0.5 --steps 4 --out run text.txt", 2,
         "--init cannot be combined with --resume: the weights are those of the run"},
        {"train " TINY "--hidden 32 --resume --steps 4 --out run text.txt", 2,
         "hidden_size is 16, wanted 32"},
        {"train " TINY "--steps 60 --lr 1000 --weight-decay 1000 --clip 1e9 --out wild text.txt", 3,
         "the last good checkpoint is wild/latest"},
        {"train " TINY
         "--steps 60 --lr 1000 --weight-decay 1000 --clip 1e9 --checkpoints 0 --out bare text.txt",
         3, "training stopped; no checkpoint was saved"},
        {"train " TINY "--steps 2 --out full text.txt >/dev/full", 3, "could not be written"},
        {"train " TINY "--steps 2 --checkpoints 0 --out run text.txt", 2, "exists already: resume it, or"},
        {"train " TINY "--steps 2 --out bare text.txt", 2,
         "bare/train.jsonl exists already, the log of a run without a checkpoint: choose another folder"},
        {"train " TINY "--steps 2 --checkpoints 0 --out bare missing.txt", 2, "bare/train.jsonl exists"},
        {"train " TINY "--steps 2 --resume --out bare text.txt", 3, "bare: no checkpoint there"},
        {"generate stray", 2, "'stray' is not expected"},
        {"generate -c missing", 3, "missing: no checkpoint there"},
        {"generate -c run -n 1.5", 2, "--tokens: '1.5' is not a whole number"},
        {"generate -c run --top-p 2", 2, "--top-p: '2' is not a number in 1e-06..1"},
        {"generate -c run -n 0 >/dev/full", 3, "cannot write"},
        {"eval -c run", 2, "no FILE"},
        {"eval -c run missing.txt", 3, "missing.txt: cannot read"},
        {"eval -c missing text.txt", 3, "missing: no checkpoint there"},
        {"eval -c run text.txt >/dev/full", 3, "could not be written"},
        {"eval -c wild text.txt", 0, ""},
        {"eval -c run --context 0 text.txt", 2, "--context: 0 is outside 1..16777216"},
        {"eval -c run --context x text.txt", 2, "--context: 'x' is not a whole number"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect(state, cases[i].arguments, cases[i].status, cases[i].message);
}

/* A resumed run must print where it resumes, or that nothing of its steps or seconds is left. */
static void a_resumed_run_says_where(void **state)
{
    put_texts(state);
    expect(state, "train " TINY "--steps 3 --out run text.txt", 0, "done");
    expect(state, "train --resume -q --steps 5 --batch 8 --out run text.txt", 2,
           "run/latest was trained with --seed 1 --batch 2, not --seed 1 --batch 8");
    expect(state, "train " TINY "--resume --steps 5 --out run text.txt", 0, "resumed at step 3 of 5\n");
    expect(state, "train " TINY "--resume --steps 5 --out run text.txt", 0,
           "resumed at step 5 of 5: nothing is left but the last validation\n");
    expect(state, "train " TINY "--resume --steps 5 --evaluations 0 --out run text.txt", 0,
           "resumed at step 5 of 5: nothing is left\n");
    // Options that are not given again are the run's; a line says so for each that differs.
    static char output[OUTPUT_BYTES];
    expect(state,
           "train " TINY "--seed 7 --lr 0.001 --rounding nr-f --balance 0.5 --z-loss 0.25 --tile 4 --steps 2 "
           "--out other text.txt",
           0, "done");
    assert_int_equal(run(state, "", "train -q --resume --steps 3 --out other text.txt", output), 0);
    // Then comes what was written, with or without a curve.
    const char *plain = "resumed at step 2 of 3\ndone: other/",
               *changed = "resumed at step 3 of 4\n--lr is 0.004 from here on, it was 0.001\n"
                          "--balance is 0 from here on, it was 0.5\n"
                          "--rounding is up from here on, it was nr-f\ndone: other/";
    if (strncmp(output, plain, strlen(plain)) != 0) fail_msg("'%s'", output);
    assert_int_equal(
        run(state, "",
            "train -q --resume --lr 0.004 --rounding up --balance 0 --steps 4 --out other text.txt", output),
        0);
    if (strncmp(output, changed, strlen(changed)) != 0) fail_msg("'%s'", output);
    // A model without experts has no router that an option could change.
    const char *dense = "resumed at step 1 of 2\n--lr is 0.002 from here on, it was 0.001\ndone: twin/";
    expect(state, "train " TINY "--dense-twin --lr 0.001 --steps 1 --out twin text.txt", 0, "done");
    assert_int_equal(
        run(state, "", "train -q --resume --lr 0.002 --rounding up --balance 0 --steps 2 --out twin text.txt",
            output),
        0);
    if (strncmp(output, dense, strlen(dense)) != 0) fail_msg("'%s'", output);
    expect(state, "train " TINY "--seconds 0.3 --out clock text.txt", 0, "done");
    assert_int_equal(run(state, "", "train " TINY "--resume --seconds 0.2 --out clock text.txt", output), 0);
    const char *spent = strstr(output, ": ");
    const double seconds = spent ? strtod(spent + 2, NULL) : 0;
    assert_true(seconds > 0.2);
    if (!strstr(output,
                " s of training are done, --seconds is 0.2: nothing is left but the last validation\n"))
        fail_msg("'%s'", output);
    char more[256], left[128]; // the seconds are rounded to 0.1
    snprintf(more, sizeof more, "train " TINY "--resume --seconds %.1f --out clock text.txt", seconds + 1.5);
    snprintf(left, sizeof left, ": %.1f of %g s of training are done, 1.", seconds, seconds + 1.5);
    expect(state, more, 0, left);
}

/* Text is refused if the model's tokens are not bytes and there is no tokenizer: the loss would be
 * meaningless. */
static void text_without_a_tokenizer_is_refused(void **state)
{
    enum { COUNT = 2000, HEADER = 256 };
    int32_t header[HEADER] = {20240520, 1, COUNT};
    unsigned char bytes[sizeof header + 2 * COUNT] = {0};
    const char *message =
        "text.txt: text without a tokenizer (bpe.txt) has 256 tokens, the model's vocabulary 300";
    char path[4096];
    put_texts(state);
    memcpy(bytes, header, sizeof header);
    for (int i = 0; i < COUNT; i++) bytes[sizeof header + 2 * (size_t)i] = (unsigned char)i;
    put_file(in_folder(path, state, "ids.bin"), bytes, sizeof bytes);
    expect(state, "train " TINY "--vocab 300 --steps 2 --out run ids.bin", 0, "done");
    expect(state, "train " TINY "--vocab 300 --steps 2 --out other text.txt", 2, message);
    expect(state, "train --from run --batch 2 -q --steps 2 --out other text.txt", 2, message);
    expect(state, "eval -c run text.txt", 2, message);
    expect(state, "eval -c run ids.bin", 0, "");
}

/* Binary files of a folder must be left out, with a message. */
static void binary_files_are_left_out(void **state)
{
    char path[4096];
    put_texts(state);
    snprintf(path, sizeof path,
             "cd '%s' && mkdir mixed && cp text.txt mixed && head -c 9000 /dev/zero >mixed/zeros",
             (const char *)*state);
    assert_int_equal(system(path), 0);
    expect(state, "train " TINY "--steps 2 --out run text.txt", 0, "done");
    expect(state, "train " TINY "--steps 2 --out other mixed", 0,
           "1 binary file is left out of the folders: mixed/zeros\n");
    const double loss = figure(state, "eval -c run text.txt", "loss", "");
    assert_true(figure(state, "eval -c other text.txt", "loss", "") == loss);
    assert_true(figure(state, "eval -c run mixed", "loss", "") == loss);
    expect(state, "eval -c run mixed", 0, "1 binary file is left out of the folders: mixed/zeros\n");
    assert_true(figure(state, "eval -c run mixed/zeros", "tokens", "") == 8999);
}

/* Messages go to no file of the run if the standard streams are closed. A log into which an earlier program
 * wrote one loses only this line. */
static void closed_streams_harm_no_file(void **state)
{
    static const char *const closed[] = {"2>&-", ">&- 2>&-", "<&- >&- 2>&-"};
    char command[8192];
    put_texts(state);
    for (size_t i = 0; i < sizeof closed / sizeof closed[0]; i++) {
        const char *const run =
            "OMP_NUM_THREADS=1 '" SMOE_PROGRAM "' train " TINY "--logs 4 --out run text.txt";
        snprintf(command, sizeof command,
                 "cd '%s' && rm -rf run && { %s --steps 2 %s; %s --resume --steps 4 %s; test $(wc -l "
                 "<run/train.jsonl) "
                 "= 4 && ! grep -v '^{' run/train.jsonl; } >/dev/null",
                 (const char *)*state, run, closed[i], run, closed[i]);
        if (system(command) != 0) fail_msg("%s", command);
    }
    snprintf(command, sizeof command, "cd '%s' && sed -i '2a resumed' run/train.jsonl", (const char *)*state);
    assert_int_equal(system(command), 0);
    expect(state, "train " TINY "--resume --steps 5 --logs 5 --out run text.txt", 0, "done");
    snprintf(command, sizeof command,
             "cd '%s' && test \"$(grep -o 'step\":[0-9]' run/train.jsonl | tr -dc 0-9)\" = 12345",
             (const char *)*state);
    assert_int_equal(system(command), 0);
}

/* A run inside the folder of its text is not part of the text, so that it can be resumed. */
static void a_run_inside_its_text_resumes(void **state)
{
    char command[8192];
    snprintf(command, sizeof command, "mkdir -p '%s/all/sub'", (const char *)*state);
    assert_int_equal(system(command), 0);
    put_texts(state);
    snprintf(command, sizeof command, "cp '%s/text.txt' '%s/all/sub'", (const char *)*state,
             (const char *)*state);
    assert_int_equal(system(command), 0);
    expect(state, "train " TINY "--steps 2 --out all/run all", 0, "done");
    expect(state, "train " TINY "--resume --steps 3 --out all/run all", 0, "resumed at step 2 of 3");
    assert_true(figure(state, "eval -c all/run all", "tokens", "") == 8191);
    assert_true(figure(state, "eval -c all/run all/run", "tokens", "") > 500); // it was named
}

/* What the help says about Transformers must agree with the model type in config.json. */
static void the_help_agrees_with_the_model_type(void **state)
{
    static char output[OUTPUT_BYTES];
    char path[4096];
    assert_int_equal(run_for(state, "", "train --help", OUTPUT, output), 0);
    assert_non_null(strstr(output, "smoe.transformers"));
    put_texts(state);
    static const struct {
        const char *options, *type;
    } cases[] = {{"", "olmoe"}, {"--shared 8", "smoe"}, {"--layers 2 --dense-layers 1", "smoe"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char arguments[512];
        snprintf(arguments, sizeof arguments, "train " TINY "%s --steps 1 --out run%zu text.txt",
                 cases[i].options, i);
        expect(state, arguments, 0, "done");
        snprintf(arguments, sizeof arguments,
                 "grep -q '\"model_type\": \"%s\"' '%s/run%zu/latest/config.json'", cases[i].type,
                 (const char *)*state, i);
        if (system(arguments) != 0)
            fail_msg("%s: not %s", in_folder(path, state, "config.json"), cases[i].type);
    }
}

/* --dense-twin, the dense model with equal active FLOPs: its checkpoint has the right sizes and evaluates. */
static void a_dense_twin_has_equal_flops(void **state)
{
    static const char *const lines[] = {"\"model_type\": \"smoe\"", "\"first_k_dense_replace\": 2",
                                        "\"dense_intermediate_size\": 32",
                                        "\"shared_expert_intermediate_size\": 0"};
    put_texts(state);
    expect(state, "train " TINY "--layers 2 --topk 3 --shared 8 --dense-twin --steps 2 --out twin text.txt",
           0, "done");
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        char command[8192];
        snprintf(command, sizeof command, "grep -q '%s' '%s/twin/latest/config.json'", lines[i],
                 (const char *)*state);
        if (system(command) != 0) fail_msg("config.json without %s", lines[i]);
    }
    expect(state, "eval -c twin text.txt", 0, "");
    expect(state,
           "train " TINY "--resume --dense-twin --layers 2 --topk 3 --shared 8 --steps 3 --out twin text.txt",
           0, "done");
    expect(state, "train " TINY "--dense-layers 1 --dense-twin --steps 2 --out other text.txt", 2,
           "--dense-twin cannot be combined with --dense-layers");
}

/* The memory that `info --model` states: the weights have a known size, and the total is the sum of all
 * parts. */
static void info_adds_up_the_memory(void **state)
{
    static const char *const parts[] = {"weights_bytes", "weights_f8_bytes", "gradients_bytes", "adamw_bytes",
                                        "layers_bytes",  "turns_bytes",      "rest_bytes"};
    put_texts(state);
    expect(state, "train " TINY "--steps 1 --out run text.txt", 0, "done");
    double sum = 0;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        sum += figure(state, "info --model run/latest", parts[i], "");
    assert_true(figure(state, "info --model run/latest", "total_bytes", "") == sum);
    // Hidden size 16, intermediate size 8, 4 experts; embedding and head for 256 tokens, five norms. In
    // memory there are gaps between the tensors.
    const double weights = 2 * 256 * 16 + 4 * 16 * 16 + 4 * 16 + 4 * 3 * 8 * 16 + 5 * 16;
    assert_true(figure(state, "info --model run/latest", "parameters", "") == weights);
    assert_true(figure(state, "info --model run/latest", "weights_bytes", "") >= 4 * weights);
    assert_true(figure(state, "info --model run/latest", "weights_bytes", "") < 4.2 * weights);
    assert_true(figure(state, "train " TINY "--steps 1 --out counted text.txt", "parameters", "") == weights);
    const char *const much = "info --model run/latest --batch 100 --recompute none",
                      *const less = "info --model run/latest/config.json --batch 100 --recompute layers";
    assert_true(figure(state, much, "layers_bytes", "") > figure(state, less, "layers_bytes", ""));
    const char *const norms = "info --model run/latest --batch 100 --recompute norms",
                      *const qk = "info --model run/latest --batch 100 --recompute norms-qk";
    assert_true(figure(state, much, "layers_bytes", "") > figure(state, norms, "layers_bytes", ""));
    assert_true(figure(state, norms, "layers_bytes", "") > figure(state, qk, "layers_bytes", ""));
    assert_true(figure(state, qk, "layers_bytes", "") > figure(state, less, "layers_bytes", ""));
    expect(state, "train " TINY "--steps 1 --recompute norms-qk --out again text.txt", 0, "done");
    const char *const wide = "info --model wide/latest --batch 64 --chunks 1",
                      *const cut = "info --model wide/latest --batch 64 --chunks 4";
    expect(state,
           "train " TINY "--hidden 512 --experts 16 --topk 16 --steps 1 --checkpoints 1 --out wide text.txt",
           0, "done");
    expect(state, "info --model wide/latest --chunks 3", 2, "chunks");
    assert_true(figure(state, wide, "turns_bytes", "") > figure(state, cut, "turns_bytes", ""));
    // 6 E d n bytes a layer, and scales
    expect(state, "train " TINY "--intermediate 16 --compute f8 --steps 1 --out f8 text.txt", 0, "done");
    assert_true(figure(state, wide, "weights_f8_bytes", "") == 0);
    const double quantized =
        figure(state, "info --model f8/latest --compute f8-dgrad", "weights_f8_bytes", "");
    assert_true(quantized >= 6 * 4 * 16 * 16 && quantized < 6 * 4 * 16 * 16 + 8192);
    expect(state, "info --model nothing", 3, "config.json");
    expect(state, "info --model run/latest --batch 0", 2, "--batch: 0 is outside");
    // With micro-batches only a part of the batch is in memory at a time; bf16 gradients are summed in f32.
    const char *const fewer = "info --model run/latest --batch 100 --recompute none --micro-batches 4";
    assert_true(figure(state, fewer, "batch", "") == 100);
    assert_true(figure(state, much, "layers_bytes", "") > 2 * figure(state, fewer, "layers_bytes", ""));
    expect(state, "info --model run/latest --batch 10 --micro-batches 3", 2, "does not divide");
    expect(state, "info --model run/latest --recompute all", 2, "--recompute: 'all'");
    // Without clipping only the gradients of one layer are in memory at a time.
    expect(state, "train " TINY "--layers 3 --steps 1 --checkpoints 1 --out deep text.txt", 0, "done");
    const char *const clipped = "info --model deep/latest", *const any = "info --model deep/latest --clip 0",
                      *const added = "info --model deep/latest --clip 0 --micro-batches 2";
    const double all = figure(state, clipped, "gradients_bytes", "");
    assert_true(figure(state, any, "gradients_bytes", "") < all);
    assert_true(figure(state, any, "total_bytes", "") < figure(state, clipped, "total_bytes", ""));
    assert_true(figure(state, added, "gradients_bytes", "") == all);
    expect(state, "info --model run/latest --clip none", 2, "--clip: 'none'");
    // Without losses, and with weights divided by their sum, the layers share the router's logits.
    expect(state, "train " TINY "--layers 3 --renormalize --steps 1 --out kept text.txt", 0, "done");
    expect(state, "train " TINY "--layers 3 --renormalize --balance 0 --steps 1 --out shared text.txt", 0,
           "done");
    assert_true(figure(state, "info --model shared/latest", "layers_bytes", "") <
                figure(state, "info --model kept/latest", "layers_bytes", ""));
}

/* - is standard input. */
static void a_dash_is_standard_input(void **state)
{
    char path[4096];
    put_texts(state);
    expect(state, "train " TINY "--steps 2 --out run text.txt", 0, "done");
    const double file = figure(state, "eval -c run text.txt", "loss", "");
    assert_true(figure(state, "eval -c run -", "loss", "<text.txt") == file);
    assert_true(figure(state, "eval -c run - text.txt", "tokens", "<text.txt") == 2 * 8192 - 1);
    expect(state, "eval -c run - </dev/null", 3, "standard input: holds no text");
    expect(state, "eval -c run - - <text.txt", 3, "standard input: holds no text");
    snprintf(path, sizeof path, "ln -s nowhere '%s/link'", (const char *)*state);
    assert_int_equal(system(path), 0);
    expect(state, "eval -c run link", 3, "link: cannot read: No such file");
    expect(state, "eval -c run - <nothing", 3, "standard input: cannot read: Is a directory");
    expect(state, "train " TINY "--steps 2 --out piped - <text.txt", 0, "done");
    assert_true(figure(state, "eval -c piped text.txt", "loss", "") == file);
}

static void expect_text(void **state, const char *arguments, const char *wanted)
{
    static char output[OUTPUT_BYTES];
    const int status = run_for(state, "", arguments, OUTPUT, output);
    if (status != 0 || !strstr(output, wanted))
        fail_msg("smoe %s: exit status %d, '%s' lacks '%s'", arguments, status, output, wanted);
}

/* The value of a key of `smoe eval --json`. */
static double eval_number(void **state, const char *arguments, const char *key)
{
    static char output[OUTPUT_BYTES];
    assert_int_equal(run_for(state, "", arguments, OUTPUT, output), 0);
    const char *at = strstr(output, key);
    assert_non_null(at);
    return strtod(at + strlen(key) + 2, NULL); // after the key's quote and the colon
}

/* A checkpoint contains its tokenizer, which encodes text. Bits per byte counts the bytes of the text. */
static void a_checkpoint_has_its_tokenizer(void **state)
{
    static const char table[] = "smoe-bpe 1 261 4\n97 98 256\n256 99 257\n257 257 258\n100 32 259\n",
                      other[] = "smoe-bpe 1 261 4\n97 99 256\n256 99 257\n257 257 258\n100 32 259\n";
    char text[7001] = "", path[4096];
    for (int i = 0; i < 1000; i++) memcpy(text + 7 * i, "abcabc\n", 7); // tokens 258, 10
    put_file(in_folder(path, state, "text.txt"), text, 7000);
    put_file(in_folder(path, state, "bpe.txt"), table, sizeof table - 1);
    put_file(in_folder(path, state, "tokenizer.json"), "{}", 2);
    put_file(in_folder(path, state, "other.txt"), other, sizeof other - 1);
    expect(state, "train " TINY "--steps 60 --lr 0.1 --tokenizer bpe.txt --out run text.txt", 0, "done");
    expect(state, "train " TINY "--steps 2 --vocab 260 --tokenizer bpe.txt --out no text.txt", 2,
           "--tokenizer bpe.txt has 261 tokens, more than the model's vocabulary of 260 (--vocab)\n");
    expect(state, "train " TINY "--steps 1 --out bytes text.txt", 0, "done"); // --vocab is no remedy here
    expect(state, "train --from bytes -q --steps 1 --tokenizer bpe.txt --out no text.txt", 2,
           "--tokenizer bpe.txt has 261 tokens, more than the model's vocabulary of 256\n");
    expect(state, "train " TINY "--steps 2 --vocab 256 --tokenizer bpe.txt --out no text.txt", 2,
           "--tokenizer bpe.txt has 261 tokens, more than the model's vocabulary of 256 (--vocab)\n");
    expect(state, "train " TINY "--steps 2 --tokenizer text.txt --out no text.txt", 3,
           "text.txt: is not a table of tokens");
    expect(state, "train --resume -q --batch 2 --steps 64 --tokenizer other.txt --out run text.txt", 2,
           "run/latest was trained with another tokenizer than other.txt");
    expect(state, "train --from run -q --batch 2 --steps 2 --tokenizer other.txt --out no text.txt", 2,
           "run/latest was trained with another tokenizer than other.txt");
    expect(state, "train --from run -q --batch 2 --steps 2 --tokenizer bpe.txt --out next text.txt", 0,
           "done");

    // From here on only the checkpoint is needed; a resumed run copies the tokenizer to its next checkpoint.
    for (int i = 0; i < 2; i++) unlink(in_folder(path, state, i ? "bpe.txt" : "tokenizer.json"));
    expect(state, "train --resume -q --batch 2 --steps 64 --out run text.txt", 0, "done");
    assert_int_equal(access(in_folder(path, state, "run/step-0000064/bpe.txt"), R_OK), 0);
    assert_int_equal(access(in_folder(path, state, "run/step-0000064/tokenizer.json"), R_OK), 0);
    expect_text(state, "generate -c run -n 3 --temperature 0 --prompt abcabc", "abcabc\nabcabc\n\n");
    const char *eval = "eval -c run --json text.txt";
    double loss = eval_number(state, eval, "\"loss"), bits = eval_number(state, eval, "bits_per_byte");
    assert_true(eval_number(state, eval, "\"tokens") == 2000); // the token <|endoftext|> is no target
    assert_float_equal(bits, loss / log(2) * 2000 / 7000, 1e-3 * bits);
}

/* Whether the gnuplot script of the curve contains `text`. The test's own gnuplot saves the script. */
static bool curve_has(void **state, const char *arguments, const char *text)
{
    static char output[OUTPUT_BYTES];
    char command[8192];
    assert_int_equal(run(state, "env PATH=\"$PWD:$PATH\"", arguments, output), 0);
    snprintf(command, sizeof command, "grep -q '%s' '%s/script'", text, (const char *)*state);
    return system(command) == 0;
}

/* If tokens have several bytes, the curve must be in nats a token, because the log has no loss for each byte.
 */
static void the_curve_is_in_nats_a_token(void **state)
{
    static const char gnuplot[] = "#!/bin/sh\ncp \"$1\" script\n", table[] = "smoe-bpe 1 258 1\n97 98 256\n";
    char path[4096];
    put_texts(state);
    put_file(in_folder(path, state, "bpe.txt"), table, sizeof table - 1);
    put_file(in_folder(path, state, "gnuplot"), gnuplot, sizeof gnuplot - 1);
    assert_int_equal(chmod(path, 0700), 0);
    assert_true(curve_has(state, "train " TINY "--steps 2 --out bytes text.txt", "ylabel .bits per byte"));
    assert_true(curve_has(state, "train " TINY "--steps 2 --tokenizer bpe.txt --out words text.txt",
                          "ylabel .loss, nats a token"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_curve_is_in_nats_a_token, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(bad_input_is_named, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(a_checkpoint_has_its_tokenizer, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(the_help_agrees_with_the_model_type, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(a_dense_twin_has_equal_flops, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(info_adds_up_the_memory, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(a_dash_is_standard_input, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(binary_files_are_left_out, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(a_run_inside_its_text_resumes, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(closed_streams_harm_no_file, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(a_resumed_run_says_where, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(text_without_a_tokenizer_is_refused, folder_setup, folder_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
