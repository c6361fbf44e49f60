/* How often a run validates and on how much: within a share of its tokens, chosen before the first step, the
 * same after a resume, and told in the log. */
#define _DEFAULT_SOURCE
#include "tests/train_case.h"

#include "train/run/validation_plan.h"

#include <math.h>

static void assert_plan(validation_plan wanted, double budget, int64_t text, int64_t context,
                        validation_plan plan)
{
    const validation_plan got = validation_plan_choose(wanted, budget, text, context);
    if (got.count != plan.count || got.tokens != plan.tokens || got.last != plan.last)
        fail_msg("{%lld, %lld, %lld} instead of {%lld, %lld, %lld}", (long long)got.count,
                 (long long)got.tokens, (long long)got.last, (long long)plan.count, (long long)plan.tokens,
                 (long long)plan.last);
}

static void a_plan_is_chosen_by_the_text(void **state)
{
    (void)state;
    const validation_plan open = {-1, 0, 0};
    // A budget with room for all: the demo's, and a larger text.
    assert_plan(open, 581e3, 83968, 128, (validation_plan){10, 16384, 1 << 20});
    assert_plan(open, 1e9, 1000000000, 128, (validation_plan){10, 16384, 1 << 20});
    // Half for the last one, whole windows; the others have the rest, rather fewer than smaller ones.
    assert_plan(open, 100000, 83968, 128, (validation_plan){10, 43 * 128, 390 * 128});
    assert_plan(open, 10000, 83968, 128, (validation_plan){3, 2048, 39 * 128});
    // The last is always made, on at least one window.
    assert_plan(open, 10, 83968, 128, (validation_plan){1, 2048, 128});
    assert_plan(open, 0, 83968, 128, (validation_plan){1, 2048, 128});
    // A short text: all of it, at most nine times more.
    assert_plan(open, 50000, 1000, 128, (validation_plan){10, 16384, 1 << 20});
    // What is given stays.
    assert_plan((validation_plan){3, 0, 0}, 10000, 83968, 128, (validation_plan){3, 19 * 128, 39 * 128});
    assert_plan((validation_plan){1, 0, 0}, 10000, 83968, 128, (validation_plan){1, 128, 39 * 128});
    assert_plan((validation_plan){-1, 512, 0}, 10000, 83968, 128, (validation_plan){10, 512, 39 * 128});
    assert_plan((validation_plan){-1, 0, 9000}, 10000, 83968, 128, (validation_plan){1, 2048, 9000});
    assert_plan((validation_plan){40, 7, 8}, 1, 83968, 128, (validation_plan){40, 7, 8});
}

/* Over many lengths and texts the tokens stay within the budget, unless it is less than a window. */
static void tokens_stay_within_the_budget(void **state)
{
    (void)state;
    for (double budget = 1; budget < 1e8; budget *= 1.7)
        for (int64_t text = 20; text < 100000000; text = text * 3 + 1) {
            const validation_plan p = validation_plan_choose((validation_plan){-1, 0, 0}, budget, text, 16);
            const int64_t each = p.tokens < text ? p.tokens : text, last = p.last < text ? p.last : text;
            if ((double)((p.count - 1) * each + last) > fmax(budget, 16) || p.count < 1 || p.count > 10)
                fail_msg("%g, %lld: {%lld, %lld, %lld}", budget, (long long)text, (long long)p.count,
                         (long long)p.tokens, (long long)p.last);
        }
}

/* Tokens of all validations in the log of a run, and their number. */
static int64_t validated(const char *out, int64_t *count)
{
    log_line *lines;
    int64_t sum = 0;
    const size_t all = read_log(out, &lines);
    *count = 0;
    for (size_t i = 0; i < all; i++) {
        assert_int_equal(lines[i].val_tokens > 0, isfinite(lines[i].val_loss));
        sum += lines[i].val_tokens;
        *count += lines[i].val_tokens > 0;
    }
    free(lines);
    return sum;
}

static train_recipe recipe_in(const char *out)
{
    char path[PATH_BYTES];
    train_state state;
    error err = {0};
    snprintf(path, sizeof path, "%s/latest", out);
    if (!checkpoint_load_state(path, NULL, NULL, &state, &err)) fail_msg("%s", err.text);
    return state.recipe;
}

/* A run of steps. Resumed with more steps, and as the tool does it, it goes on as it was. */
static void a_run_of_steps_keeps_its_plan(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    int64_t count;
    s.validations = (validation_plan){-1, 0, 0};
    s.validation_share = 0.1;
    s.steps = 100;
    train_ok(&s, &result);
    const int64_t used = validated(p->out, &count);
    assert_true(used <= result.tokens / 10 && used >= result.tokens / 40);
    assert_int_equal(result.validation.tokens, result.tokens / 20 / 16 * 16);
    const train_recipe before = recipe_in(p->out);
    assert_true(before.evaluations == count && before.last_evaluation_tokens == result.validation.tokens);
    s.steps = 200;
    s.resume = true;
    s.validations = (validation_plan){(int64_t)before.evaluations, (int64_t)before.evaluation_tokens,
                                      (int64_t)before.last_evaluation_tokens};
    train_ok(&s, &result);
    const train_recipe after = recipe_in(p->out);
    assert_true(after.evaluations == before.evaluations &&
                after.evaluation_tokens == before.evaluation_tokens &&
                after.last_evaluation_tokens == before.last_evaluation_tokens);
}

/* A run of a time: its tokens are estimated before the first step. The share is so small that the estimate
 * does not matter. */
static void a_run_of_seconds_keeps_its_plan(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    int64_t count;
    s.validations = (validation_plan){-1, 0, 0};
    s.validation_share = 1e-9;
    s.steps = 0;
    s.seconds = 0.2;
    train_ok(&s, &result);
    assert_int_equal(validated(p->out, &count), 16);
    assert_int_equal(count, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plan_is_chosen_by_the_text),
        cmocka_unit_test(tokens_stay_within_the_budget),
        cmocka_unit_test_setup_teardown(a_run_of_steps_keeps_its_plan, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_run_of_seconds_keeps_its_plan, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
