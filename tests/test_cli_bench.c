/* `smoe bench` and `smoe info` as programs: JSON with exactly the documented names, exit status, figures. */
#define _DEFAULT_SOURCE
#include "base/blas_core.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

enum { OUTPUT_BYTES = 1 << 20 };

/* Runs `smoe ARGUMENTS` and returns the exit status. `output` receives standard output, or if `errors` is
 * true standard error. */
static int run(const char *arguments, bool errors, char *output)
{
    char command[4096];
    snprintf(command, sizeof command, "'%s' %s %s", SMOE_PROGRAM, arguments, errors ? "2>&1 >/dev/null" : "");
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    const size_t length = fread(output, 1, OUTPUT_BYTES - 1, pipe);
    output[length] = '\0';
    const int status = pclose(pipe);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int make_output(void **state)
{
    *state = malloc(OUTPUT_BYTES);
    return *state ? 0 : -1;
}

static int free_output(void **state)
{
    free(*state);
    return 0;
}

/* Parses the next line of *at as a JSON object. */
static json_t *next_object(char **at)
{
    char *end = strchr(*at, '\n');
    if (!end) return NULL;
    *end = '\0';
    json_error_t why;
    json_t *object = json_loads(*at, JSON_REJECT_DUPLICATES, &why);
    if (!object) fail_msg("not JSON: %s (%s)", *at, why.text);
    *at = end + 1;
    return object;
}

typedef struct field {
    const char *name;
    char type; // s: string, i: integer, n: number, 0: number or null
} field;

/* Checks that an object has exactly these fields, in this order. */
static void check_fields(json_t *object, const field *fields, size_t count)
{
    assert_int_equal(json_object_size(object), count);
    size_t i = 0;
    const char *name;
    json_t *value;
    json_object_foreach(object, name, value)
    {
        assert_string_equal(name, fields[i].name);
        const bool good = fields[i].type == 's'   ? json_is_string(value)
                          : fields[i].type == 'i' ? json_is_integer(value)
                          : fields[i].type == 'n' ? json_is_number(value)
                                                  : json_is_number(value) || json_is_null(value);
        if (!good) fail_msg("%s has the wrong type", name);
        i++;
    }
}

static const field record[] = {{"commit", 's'},
                               {"device", 's'},
                               {"backend", 's'},
                               {"suite", 's'},
                               {"shape", 's'},
                               {"T", 'i'},
                               {"d", 'i'},
                               {"n", 'i'},
                               {"E", 'i'},
                               {"K", 'i'},
                               {"dtype", 's'},
                               {"compute", 's'},
                               {"routing", 's'},
                               {"rounding", 's'},
                               {"tile", 'i'},
                               {"pass", 's'},
                               {"kernel", 's'},
                               {"scope", 's'},
                               {"ms_median", 'n'},
                               {"ms_min", 'n'},
                               {"ms_p99", 'n'},
                               {"tflops", '0'},
                               {"gbps", 'n'},
                               {"bound_ms", '0'},
                               {"ratio", '0'},
                               {"chunks", 'i'},
                               {"saved_bytes", 'i'},
                               {"peak_bytes", 'i'},
                               {"predicted_bytes", 'i'},
                               {"max_rel_err", '0'},
                               {"reuse_saved", 'i'},
                               {"launches", '0'},
                               {"alone_ms", '0'},
                               {"alone_copy_ms", '0'},
                               {"host_ms", '0'}};
enum { RECORD_FIELDS = sizeof record / sizeof record[0] };

static const char *text_of(json_t *object, const char *name)
{
    return json_string_value(json_object_get(object, name));
}

static double number_of(json_t *object, const char *name)
{
    return json_number_value(json_object_get(object, name));
}

/* Runs a bench in JSON, checks every record, and counts those whose pass and kernel are given. */
static int bench(const char *arguments, char *output, const char *pass, const char *kernel)
{
    char full[1024];
    snprintf(full, sizeof full, "bench --json --repeats 2 %s", arguments);
    assert_int_equal(run(full, false, output), 0);
    int found = 0, records = 0;
    char *at = output;
    for (json_t *object; (object = next_object(&at)); records++) {
        check_fields(object, record, RECORD_FIELDS);
        assert_true(number_of(object, "ms_min") <= number_of(object, "ms_median"));
        assert_true(number_of(object, "ms_median") <= number_of(object, "ms_p99"));
        assert_true(number_of(object, "peak_bytes") <= number_of(object, "predicted_bytes"));
        if (json_is_number(json_object_get(object, "ratio")))
            assert_true(fabs(number_of(object, "ratio") * number_of(object, "ms_median") /
                                 number_of(object, "bound_ms") -
                             1) < 1e-6);
        found += strcmp(text_of(object, "pass"), pass) == 0 && strcmp(text_of(object, "kernel"), kernel) == 0;
        json_decref(object);
    }
    assert_true(records > 0);
    return found;
}

static void records_have_the_documented_names(void **state)
{
    char *output = *state;
    assert_int_equal(bench("--thiek 200,64,32,8,2", output, "layer", "all"), 1);
    assert_int_equal(bench("--thiek 200,64,32,8,2 --thiek 16,32,8,4,1", output, "forward", "topk"), 2);
    assert_int_equal(bench("--thiek 200,64,32,8,2 --pass forward", output, "backward", "all"), 0);
    assert_int_equal(
        bench("--thiek 200,64,32,8,2 --scope experts --pass backward", output, "backward", "dw1"), 1);
    assert_int_equal(bench("--thiek 200,64,32,8,2 --threads 1 --chunks 2", output, "layer", "gemms"), 1);
    assert_int_equal(bench("--thiek 200,128,32,8,2 --chunks 1,2", output, "layer", "all"), 2);
    assert_int_equal(bench("--thiek 200,64,32,8,2 --pass forward,backward", output, "layer", "all"), 0);
    assert_int_equal(bench("--thiek 200,64,32,8,2 --pass layer,backward", output, "layer", "all"), 1);
    assert_int_equal(bench("--thiek 200,64,32,8,2 --scope experts", output, "backward", "router_bwd"), 0);
    assert_int_equal(
        bench("--thiek 200,64,32,8,2 --scope experts --entry logits", output, "backward", "router_bwd"), 1);
    assert_int_equal(bench("--thiek 200,64,32,8,2 --no-bound --reuse", output, "layer", "all"), 1);
    assert_int_equal(bench("--thiek 200,64,32,8,2 --stage topk", output, "forward", "topk"), 1);
    assert_int_equal(bench("--thiek 200,64,32,8,2 --stage topk", output, "forward", "all"), 0);
}

/* Its errors are those of fp8, between a limit of bf16 and the program's own. */
static void fp8_is_measured(void **state)
{
    static const char *const computes[] = {"f8", "f8-dgrad"};
    for (int i = 0; i < 2; i++) {
        char *output = *state, *at = output, arguments[128];
        snprintf(arguments, sizeof arguments,
                 "bench --json --repeats 1 --thiek 200,64,32,8,2 --dtype bf16 --compute %s", computes[i]);
        assert_int_equal(run(arguments, false, output), 0);
        int quantised = 0;
        for (json_t *object; (object = next_object(&at)); json_decref(object)) {
            check_fields(object, record, RECORD_FIELDS);
            quantised += strcmp(text_of(object, "kernel"), "weights_f8") == 0;
            assert_string_equal(text_of(object, "dtype"), "bf16");
            assert_string_equal(text_of(object, "compute"), computes[i]);
            if (strcmp(text_of(object, "kernel"), "all") != 0) continue;
            assert_true(number_of(object, "max_rel_err") > 0.01 && number_of(object, "max_rel_err") < 0.12);
        }
        assert_int_equal(quantised, 1);
    }
}

/* Lists of options: the records of the layer must come in this order of the variants. */
static void lists_come_in_order(void **state)
{
    static const char *const want[] = {"uniform none 1", "uniform none 2", "uniform nr-f 1", "uniform nr-f 2",
                                       "skewed none 1",  "skewed none 2",  "skewed nr-f 1",  "skewed nr-f 2"};
    char *output = *state;
    assert_int_equal(
        run("bench --json --repeats 1 --no-bound --thiek 200,128,32,8,2 --routing uniform,skewed "
            "--rounding none,nr-f --tile 16 --chunks 1,2 --reuse --pass layer --logits bf16",
            false, output),
        0);
    size_t found = 0;
    char *at = output, got[64];
    for (json_t *object; (object = next_object(&at)); json_decref(object)) {
        check_fields(object, record, RECORD_FIELDS);
        assert_true(json_is_null(json_object_get(object, "bound_ms")));
        assert_true(json_is_null(json_object_get(object, "launches"))); // the CPU has none
        assert_int_equal(json_integer_value(json_object_get(object, "reuse_saved")), 1);
        if (strcmp(text_of(object, "kernel"), "all") != 0) continue;
        snprintf(got, sizeof got, "%s %s %d", text_of(object, "routing"), text_of(object, "rounding"),
                 (int)number_of(object, "chunks"));
        assert_true(found < 8);
        assert_string_equal(got, want[found++]);
    }
    assert_int_equal(found, 8);
}

/* With --reuse dH needs no memory, and with chunks Y and dX~ need less. Both must lower the measured peak. */
static void reuse_and_chunks_lower_the_peak(void **state)
{
    static const char *const variants[] = {"", "--reuse", "--reuse --chunks 4"};
    double last = INFINITY;
    for (int i = 0; i < 3; i++) {
        char *output = *state, *at = output, arguments[256];
        snprintf(
            arguments, sizeof arguments,
            "bench --json --repeats 1 --no-bound --thiek 2000,256,64,8,4 --scope experts --pass layer %s",
            variants[i]);
        assert_int_equal(run(arguments, false, output), 0);
        json_t *object = next_object(&at);
        const double peak = number_of(object, "peak_bytes");
        assert_true(peak < last && peak > number_of(object, "saved_bytes"));
        // --reuse saves R rows of 2n floats or more, four chunks three quarters of R rows of d floats or more
        if (i == 1) assert_true(last - peak >= 8000 * 128 * 4);
        last = peak;
        json_decref(object);
    }
}

static void a_shape_is_found_by_its_name(void **state)
{
    char *output = *state, *at = output;
    assert_int_equal(run("info --json --shape 7B-n256 --shape Qwen3-Next-80B-A3B "
                         "--shape rounding/Qwen3-Next-80B-A3B",
                         false, output),
                     0);
    static const char *const suites[] = {"paper", "models", "rounding", "rounding"};
    for (int i = 0; i < 4; i++) {
        json_t *object = next_object(&at);
        assert_string_equal(text_of(object, "suite"), suites[i]);
        json_decref(object);
    }
    assert_string_equal(at, "");
}

static void every_variant_gives_records(void **state)
{
    static const char *const variants[] = {
        "--dtype bf16 --routing random --score topk-softmax",
        "--activation relu2 --routing skewed --score softmax-topk-renorm",
        "--activation swiglu_clamped --layout interleaved --score sigmoid-renorm --routing random",
        "--rounding nr-f --tile 16 --routing random",
        "--rounding up --tile 64 --routing skewed --scope experts",
        "--rounding down --tile 64 --routing skewed --score sigmoid",
        "--rounding sr-f --tile 32 --routing skewed --score topk-softmax --seed 3",
        "--dtype bf16 --scope experts --routing uniform",
    };
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments, "--thiek 300,64,32,8,2 %s", variants[i]);
        assert_int_equal(bench(arguments, *state, "layer", "all"), 1);
    }
}

static void the_table_has_every_stage(void **state)
{
    char *output = *state;
    assert_int_equal(run("bench --repeats 1 --thiek 200,64,32,8,2", false, output), 0);
    assert_non_null(strstr(output, "expert GEMMs together: "));
    assert_non_null(strstr(output, "of the forward\n"));
    assert_int_equal(run("bench --csv --repeats 1 --thiek 200,64,32,8,2", false, output), 0);
    assert_int_equal(strncmp(output, "commit,device,backend,suite,shape,T,d,n,E,K,dtype,", 50), 0);
    assert_non_null(
        strstr(output, ",\"200,64,32,8,2\",200,64,32,8,2,f32,f32,uniform,none,128,forward,all,layer,"));
}

static void bad_input_is_named(void **state)
{
    static const struct {
        const char *arguments;
        int status;
        const char *message;
    } cases[] = {
        {"bench --thiek 4096,768,256,32,33", 2, "K = 33 is more than E = 32"},
        {"bench --thiek 4096,768,256,32", 2, "five numbers"},
        {"bench --suite nothing", 2, "'nothing' is not one of paper"},
        {"bench --dtype f64", 2, "--dtype: 'f64' is not one of f32, bf16, fp16"},
        {"bench --activation tanh", 2, "'tanh' is not one of swiglu"},
        {"bench --layout both", 2, "'both' is not one of concatenated, interleaved"},
        {"bench --score none", 2, "'none' is not one of softmax-topk"},
        {"bench --rounding nearest", 2, "'nearest' is not one of none, nr-f"},
        {"bench --routing fair", 2, "'fair' is not one of uniform, random, skewed"},
        {"bench --tile 0", 2, "--tile: 0 is outside 1..4096"},
        {"bench --chunks 3", 2, "--chunks: 3 is not a power of two"},
        {"bench --chunks 1,2,", 2, "'' is not a whole number"},
        {"bench --chunks 1,3", 2, "--chunks: 3 is not a power of two"},
        {"bench --chunks 1,1,1,1,1,1,1,1", 2, "has more than 7 values"},
        {"info --chunks 1,2 --thiek 64,32,16,8,2", 2, "'1,2' is not a whole number"},
        {"bench --repeats 0", 2, "--repeats: 0 is outside 1..1000"},
        {"bench --seconds -1", 2, "--seconds: '-1' is not"},
        {"bench --settle 0", 2, "--settle: '0' is not"},
        {"bench --threads many", 2, "'many' is not a whole number"},
        {"bench --pass sideways", 2, "'sideways' is not one of forward"},
        {"bench --scope all", 2, "'all' is neither layer nor experts"},
        {"bench --device tpu", 2, "no 'tpu' backend"},
        {"bench --pass forward,", 2, "'' is not one of forward"},
        {"bench --stage router", 2, "'router' is no stage"},
        {"bench --entry rows", 2, "'rows' is neither topk nor logits"},
        {"bench --logits fp16", 2, "'fp16' is not one of f32, bf16"},
        {"bench --routing uniform,fair", 2, "'fair' is not one of uniform"},
        {"bench --rounding none,", 2, "'' is not one of none, nr-f"},
        {"bench --shape 8B", 2, "no suite has a shape '8B'"},
        {"bench --shape models/7B-n256", 2, "no suite has a shape 'models/7B-n256'"},
        {"info --routing uniform,random --thiek 64,32,16,8,2", 2, "'uniform,random' is not one of uniform"},
        {"bench --compute e5m2", 2, "--compute: 'e5m2' is not one of f8, f8-dgrad"},
        {"bench --compute f8 --thiek 64,40,16,8,2", 2,
         "hidden is 40, with SMOE_COMPUTE_F8 it must be a multiple of 16"},
        {"bench --unknown", 2, "unrecognized option"},
        {"bench stray", 2, "'stray' is not expected"},
        {"bench --thiek 64,32,16,64,2", 2, "E <= d"},
        {"bench --dtype fp16 --thiek 64,32,16,8,2", 3, "needs the cuda backend"},
        {"bench --thiek 1000000,65536,65536,4096,8", 3, "MiB of memory are free"},
        {"info --thiek 1,2,3", 2, "five numbers"},
        {"info --chunks 3 --thiek 64,32,16,8,2", 2, "--chunks: 3 is not a power of two"},
        {"info --device tpu", 2, "neither cpu nor cuda"},
        {"info --dtype fp16 --thiek 64,32,16,8,2", 3, "needs the cuda backend"},
        {"info --json --thiek 64,32,16,8,2 2>&1 >/dev/full #", 3,
         "could not be written: No space left on device"},
        {"bench --repeats 1 --thiek 64,32,16,8,2 2>&1 >/dev/full #", 3,
         "could not be written: No space left on device"},
        {"bench --json --repeats 1 --thiek 64,32,16,8,2 2>&1 >/dev/full #", 3,
         "could not be written: No space left on device"},
        {"--help 2>&1 >/dev/full #", 3, "smoe: cannot write to standard output: No space left on device"},
        {"--version 2>&1 >/dev/full #", 3, "No space left on device"},
        {"train --help 2>&1 >/dev/full #", 3,
         "smoe: cannot write to standard output: "}, // longer than a buffer
        {"bench --help 2>&1 >/dev/full #", 3, "smoe: cannot write to standard output: "},
        {"info --usage 2>&1 >/dev/full #", 3, "No space left on device"},
        {"verify --quick --only nothing 2>&1 >/dev/full #", 3, "No space left on device"},
        {"--help 2>&1 >&- #", 3, "Bad file descriptor"},
        {"--help", 0, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *output = *state;
        const int status = run(cases[i].arguments, true, output);
        if (status != cases[i].status || !strstr(output, cases[i].message))
            fail_msg("smoe %s: exit status %d, '%s' instead of %d, '%s'", cases[i].arguments, status, output,
                     cases[i].status, cases[i].message);
    }
}

/* The 7B model of the paper, n = 256, by hand: R = 196608, X 75497472, H 201326592 bytes. */
static void info_says_what_a_problem_costs(void **state)
{
    static const char *const names[] = {
        "flops_forward",     "flops_backward",        "arithmetic_intensity",   "saved_bytes",
        "metadata_bytes",    "scratch_forward_bytes", "scratch_backward_bytes", "tile_waste",
        "tile_waste_rounded"};
    char *output = *state, *at = output;
    assert_int_equal(run("info --json --dtype bf16 --thiek 24576,1536,256,128,8", false, output), 0);
    json_t *object = next_object(&at);
    assert_non_null(object);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        assert_true(json_is_number(json_object_get(object, names[i])));
    assert_true(number_of(object, "flops_forward") == 463856467968.0);
    assert_true(number_of(object, "flops_backward") == 927712935936.0);
    assert_true(number_of(object, "saved_bytes") - number_of(object, "metadata_bytes") == 276824064.0);
    // 20 bytes of ids, weights and maps for each of 196608 pairs, and a little by expert and token
    assert_true(number_of(object, "metadata_bytes") < 24 * 196608.0);
    assert_true(number_of(object, "scatter_saved_bytes") == 983040000.0);
    assert_true(fabs(number_of(object, "arithmetic_intensity") - 271.0588) < 1e-3);
    assert_true(fabs(number_of(object, "tile_waste") - 0.0395) < 1e-3);
    assert_true(number_of(object, "tile_waste_rounded") == 0);
    json_decref(object);
    assert_string_equal(at, "");
}

/* `smoe info` must use --chunks for a problem too, not only for a --model. */
static void info_uses_the_chunks(void **state)
{
    double scratch[2];
    for (int i = 0; i < 2; i++) {
        char *output = *state, *at = output;
        assert_int_equal(run(i ? "info --json --thiek 4096,512,64,8,4 --chunks 4"
                               : "info --json --thiek 4096,512,64,8,4 --chunks 1",
                             false, output),
                         0);
        json_t *object = next_object(&at);
        assert_true(number_of(object, "chunks") == (i ? 4 : 1));
        scratch[i] = number_of(object, "scratch_forward_bytes");
        json_decref(object);
    }
    assert_true(scratch[1] < scratch[0]);
}

/* 6 T K n d = 1.3e22 FLOPs, which an int64_t cannot hold. */
static void many_flops_do_not_overflow(void **state)
{
    char *output = *state, *at = output;
    assert_int_equal(run("info --json --thiek 1000000000,1048576,1048576,64,2", false, output), 0);
    json_t *object = next_object(&at);
    assert_non_null(object);
    assert_true(fabs(number_of(object, "flops_forward") / 1.3194139533312e22 - 1) < 1e-8);
    assert_true(fabs(number_of(object, "flops_backward") / 2.6388279066624e22 - 1) < 1e-8);
    json_decref(object);
}

static void info_names_the_build(void **state)
{
    char *output = *state, *at = output;
    assert_int_equal(run("info --json", false, output), 0);
    json_t *object = next_object(&at);
    assert_non_null(object);
    assert_non_null(text_of(object, "version"));
    assert_non_null(text_of(object, "commit"));
    assert_string_equal(text_of(object, "cpu"), "available");
    json_decref(object);
    assert_int_equal(run("info --suite paper", false, output), 0);
    assert_non_null(strstr(output, "120B-n2048"));
}

/* OpenBLAS's kernels without AVX2, as its version 0.3.21 takes them on processors that it does not know. The
 * reference of `smoe bench` computes with the same kernels. */
static void slow_blas_kernels_are_named(void **state)
{
    char *output = *state, *at = output;
    const bool slow = blas_core_judge("Prescott", __builtin_cpu_supports("avx2"), 0) != NULL;
    if (!slow) skip();
    setenv("OPENBLAS_CORETYPE", "Prescott", 1);
    assert_int_equal(run("info --json", false, output), 0);
    json_t *object = next_object(&at);
    assert_non_null(strstr(text_of(object, "blas"), "Prescott"));
    assert_non_null(strstr(text_of(object, "blas"), "set OPENBLAS_CORETYPE="));
    json_decref(object);
    const char *bench = "bench --json --seconds 0.01 --device cpu --thiek 64,32,16,8,2";
    assert_int_equal(run(bench, true, output), 0);
    assert_non_null(strstr(output, "slow kernels (Prescott)"));
    assert_non_null(strstr(output, "set OPENBLAS_CORETYPE="));
    assert_int_equal(run(bench, false, output), 0);
    assert_non_null(object = next_object((at = output, &at)));
    assert_non_null(strstr(text_of(object, "device"), "slow OpenBLAS kernels (Prescott)"));
    json_decref(object);
    setenv("OPENBLAS_CORETYPE", "Haswell", 1);
    assert_int_equal(run(bench, true, output), 0);
    assert_null(strstr(output, "slow kernels"));
    unsetenv("OPENBLAS_CORETYPE");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slow_blas_kernels_are_named),
        cmocka_unit_test(records_have_the_documented_names),
        cmocka_unit_test(fp8_is_measured),
        cmocka_unit_test(lists_come_in_order),
        cmocka_unit_test(reuse_and_chunks_lower_the_peak),
        cmocka_unit_test(a_shape_is_found_by_its_name),
        cmocka_unit_test(every_variant_gives_records),
        cmocka_unit_test(the_table_has_every_stage),
        cmocka_unit_test(bad_input_is_named),
        cmocka_unit_test(info_says_what_a_problem_costs),
        cmocka_unit_test(many_flops_do_not_overflow),
        cmocka_unit_test(info_names_the_build),
        cmocka_unit_test(info_uses_the_chunks),
    };
    return cmocka_run_group_tests(tests, make_output, free_output);
}
