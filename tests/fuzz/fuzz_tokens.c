/* The first three bytes choose the kind of file, the context and the vocabulary; the rest is the file. If the
 * file is accepted, all tokens of its batches and windows must be in the vocabulary, and target i must be
 * input i + 1. */
#include "tests/fuzz/fuzz.h"
#include "train/data/tokens.h"

enum { PREFIX = 3, BATCH = 3 };

static void check_window(const int32_t *inputs, const int32_t *targets, int64_t context, int64_t vocab)
{
    for (int64_t i = 0; i < context; i++) {
        PROMISE(inputs[i] >= 0 && inputs[i] < vocab && targets[i] >= 0 && targets[i] < vocab);
        PROMISE(i == 0 || inputs[i] == targets[i - 1]);
    }
}

/* `inputs` and `targets` have room for a window. */
static void check_validation(const tokens *data, int64_t context, int64_t vocab, int32_t *inputs,
                             int32_t *targets)
{
    int64_t windows = tokens_windows(data), rest = tokens_rest(data);
    PROMISE(windows > 0 || (rest > 0 && tokens_train_count(data) == 0));
    PROMISE(rest < context && windows * context + rest == tokens_validation_count(data) - 1);
    tokens_rest_window(data, inputs, targets);
    check_window(inputs, targets, rest, vocab);
    for (int64_t i = 0; i < 2 && windows > 0; i++) { // the first and the last window
        tokens_window(data, i * (windows - 1), 1, inputs, targets);
        check_window(inputs, targets, context, vocab);
    }
}

static void check_batches(const tokens *data, int64_t context, int64_t vocab, tokens_split split)
{
    size_t bytes = (size_t)(BATCH * context) * sizeof(int32_t);
    int32_t *inputs = malloc(bytes),
            *targets = malloc(bytes); // no larger, so the sanitizer sees a write past it
    PROMISE(inputs != NULL && targets != NULL);
    for (uint64_t step = 0; step < 4 && tokens_train_count(data) > 0; step++) {
        tokens_batch(data, 7, step * 0x5555555555555555u, BATCH, inputs, targets);
        for (int64_t row = 0; row < BATCH; row++)
            check_window(inputs + row * context, targets + row * context, context, vocab);
    }
    if (split == TOKENS_WHOLE)
        PROMISE(tokens_validation_count(data) == 0);
    else
        check_validation(data, context, vocab, inputs, targets);
    free(inputs);
    free(targets);
}

bool fuzz_accepts(const uint8_t *bytes, size_t size)
{
    static const char *const names[] = {"fuzz.txt", "fuzz.bin", "fuzz.gz", "fuzz.bin.gz"};
    if (size < PREFIX) return false;
    tokens *data;
    error err = {0};
    const char *name = names[bytes[0] % 4];
    tokens_split split = bytes[0] & 4 ? TOKENS_EVAL : bytes[0] & 8 ? TOKENS_WHOLE : TOKENS_TRAIN;
    int64_t context = bytes[1], vocab = 1 + 257 * bytes[2];
    uint8_t *rest = malloc(size - PREFIX + 1);
    PROMISE(rest != NULL);
    for (size_t i = PREFIX; i < size; i++) rest[i - PREFIX] = bytes[i];
    bool ok = tokens_parse(&data, rest, size - PREFIX, name, NULL, vocab, context, split, &err);
    PROMISE(ok ? data != NULL : data == NULL && err.code != 0 && err.text[0] != '\0');
    if (ok) check_batches(data, context, vocab, split);
    tokens_close(data);
    free(rest);
    return ok;
}
