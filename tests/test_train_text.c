/* A run can be resumed only with the text that it was trained on. */
#define _DEFAULT_SOURCE
#include "train_case.h"

#include <cblas.h>
#include <omp.h>

static void put_text(const char *path, int lines, int first)
{
    FILE *file = fopen(path, "w");
    for (int i = 0; i < lines; i++) fprintf(file, "the quick brown fox jumps over it; %d\n", first + i);
    fclose(file);
}

/* A run is resumed with the same text under another name. With more text, or with another text of the same
 * length, this is an error. */
static void a_run_keeps_its_text(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    char other[PATH_BYTES];
    const char *paths[] = {other};
    snprintf(other, sizeof other, "%s/renamed.txt", p->folder);
    put_text(p->text, 100, 1000);
    train_ok(&s, &result);
    s.paths = paths;
    s.resume = true;
    s.steps = 24;
    put_text(other, 100, 1000);
    train_ok(&s, &result);
    assert_int_equal(result.step, 24);
    put_text(other, 101, 1000); // 40 bytes a line, a twentieth of them for validation
    train_fails(&s, ERROR_USAGE, "another text (3800 tokens to train on, 200 to validate on, checksum ");
    train_fails(&s, ERROR_USAGE, ") than this one (3838, 202, ");
    train_fails(&s, ERROR_USAGE, "start a new run with its weights (--from)");
    put_text(other, 100, 1001);
    train_fails(&s, ERROR_USAGE, ") than this one (3800, 200, ");
}

/* The state of an earlier program has no mark of the text. */
static void a_state_without_a_text_resumes(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    char command[2 * PATH_BYTES];
    train_ok(&s, &result);
    snprintf(command, sizeof command,
             "sed -i 's/\"train_tokens\"/\"train_tokenz\"/' '%s/latest/state.safetensors'", p->out);
    assert_int_equal(system(command), 0);
    s.resume = true;
    s.steps = 24;
    put_text(p->text, 100, 1000);
    train_ok(&s, &result);
    s.steps = 28; // from here on the text is known
    train_ok(&s, &result);
    put_text(p->text, 99, 1000);
    train_fails(&s, ERROR_USAGE, "another text");
}

/* A run without validations trains on the whole text, of which nothing need be left to validate on. When it
 * is resumed, the text is not split either, and nothing can be validated. */
static void a_run_without_validations_trains_on_all(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    char out[128];
    put_text(p->text, 2, 1000); // 80 tokens, of which 4 would be set aside
    train_fails(&s, ERROR_RUNTIME, "text.txt: 4 tokens to validate on, context 16 needs 17: ");
    s.validations.count = 0;
    train_ok(&s, &result);
    assert_int_equal(result.validation.tokens, 0);
    snprintf(out, sizeof out, "%s/parts", p->folder);
    s.out = out;
    train_stopped(&s, 7, &result);
    assert_int_equal(result.step, 7);
    s.resume = true;
    s.validations.count = 3;
    train_fails(&s, ERROR_USAGE, "--evaluations is 3, but ");
    train_fails(&s, ERROR_USAGE, "parts/latest is of a run that began with --evaluations 0");
    s.validations.count = 0;
    train_ok(&s, &result);
    assert_int_equal(result.step, 20);
    assert_same_checkpoints(p->out, out);
}

/* A run that set text aside goes on without it when it is resumed without validations: no sample moves. So do
 * the runs without validations of earlier programs, which set text aside. */
static void a_resumed_run_keeps_its_split(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    char out[128];
    train_ok(&s, &result);
    snprintf(out, sizeof out, "%s/parts", p->folder);
    s.out = out;
    train_stopped(&s, 10, &result);
    assert_int_equal(result.step, 10);
    s.resume = true;
    s.validations.count = 0;
    train_ok(&s, &result);
    assert_same_checkpoints(p->out, out);
}

/* The checksum has the first and the last token of both corpora in it, and changes if two tokens change
 * places. */
static void the_checksum_reads_both_corpora(void **state)
{
    enum { SIZE = 100000, CUT = SIZE - SIZE / 20 };
    static const int places[] = {0, CUT - 2, CUT, SIZE - 2};
    static char text[SIZE];
    tokens_mark first, mark;
    (void)state;
    for (size_t i = 0; i <= sizeof places / sizeof places[0]; i++) {
        tokens *data;
        error err = {0};
        memset(text, 'a', SIZE);
        for (size_t k = 0; k < sizeof places / sizeof places[0]; k++) {
            text[places[k] + (k + 1 == i)] = 'b';
        }
        if (!tokens_parse(&data, text, SIZE, "x", NULL, 256, 16, TOKENS_TRAIN, &err))
            fail_msg("%s", err.text);
        mark = tokens_identify(data);
        tokens_close(data);
        if (i == 0) first = mark;
        assert_int_equal(mark.train, CUT);
        assert_int_equal(mark.validation, SIZE - CUT);
        assert_int_equal(mark.checksum == first.checksum, i == 0);
    }
}

int main(void)
{
    openblas_set_num_threads(1);
    omp_set_num_threads(1); // the models are so small that a second thread would only wait
#define RUN(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        RUN(a_run_keeps_its_text),
        RUN(a_state_without_a_text_resumes),
        RUN(a_run_without_validations_trains_on_all),
        RUN(a_resumed_run_keeps_its_split),
        cmocka_unit_test(the_checksum_reads_both_corpora),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
