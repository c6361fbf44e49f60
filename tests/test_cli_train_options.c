/* `smoe train`, `eval`, `generate` and `info` as programs: what they say about options that contradict each
 * other, and about folders that were copied or half deleted. */
#define _DEFAULT_SOURCE
#include "tests/cli_case.h"

/* An option that takes a path takes no empty one, wherever that would lead. */
static void test_empty_paths(void **state)
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_empty_paths, folder_setup, folder_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
