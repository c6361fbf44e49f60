/* train/files/safetensors.h: written files must have the bytes of the format and be read back unchanged;
 * conversion to f32; shards; errors that name the cause. Many malformed files are in
 * tests/fuzz/corpus/safetensors. */
#define _DEFAULT_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/folder.h"
#include "train/files/file.h"
#include "train/files/safetensors.h"

#include <math.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static void assert_text(const error *err, const char *part)
{
    assert_int_equal(err->code, ERROR_RUNTIME);
    if (strstr(err->text, part) == NULL) fail_msg("\"%s\" lacks \"%s\"", err->text, part);
}

static safetensors *open_file(const char *path)
{
    safetensors *file;
    error err = {0};
    if (!safetensors_open(&file, path, &err)) fail_msg("%s", err.text);
    return file;
}

static void written_files_are_read_back(void **state)
{
    static const float weights[2][3] = {{1, -2, 3.5f}, {0, 1e-38f, -1e38f}};
    static const double scalar = 0.1;
    static const uint8_t flags[5] = {1, 0, 1, 1, 0};
    static const int64_t steps[1] = {INT64_MAX};
    const tensor tensors[] = {
        {"flags", TENSOR_BOOL, 1, {5}, flags},
        {"layers.0.weight", TENSOR_F32, 2, {2, 3}, weights},
        {"scalar", TENSOR_F64, 0, {0}, &scalar},
        {"none", TENSOR_F16, 2, {4, 0}, NULL},
        {"step \"\xc3\xa4\"", TENSOR_I64, 1, {1}, steps},
    };
    const safetensors_pair metadata[] = {{"format", "pt"}, {"step", "12"}};
    char path[4096];
    error err = {0};
    if (!safetensors_write(in_folder(path, state, "a"), tensors, COUNT(tensors), metadata, 2, &err))
        fail_msg("%s", err.text);

    safetensors *file = open_file(path);
    assert_int_equal(safetensors_count(file), COUNT(tensors));
    for (size_t i = 0; i < COUNT(tensors); i++) {
        const tensor *want = &tensors[i], *have = safetensors_find(file, want->name);
        int64_t elements, bytes;
        assert_non_null(have);
        assert_int_equal(have->dtype, want->dtype);
        assert_int_equal(have->rank, want->rank);
        assert_memory_equal(have->shape, want->shape, sizeof want->shape);
        assert_true(tensor_size(have, &elements, &bytes));
        assert_int_equal((uintptr_t)have->data % tensor_dtype_size(have->dtype), 0);
        if (bytes > 0) assert_memory_equal(have->data, want->data, (size_t)bytes);
    }
    for (size_t i = 1; i < COUNT(tensors); i++)
        assert_true(strcmp(safetensors_at(file, i - 1)->name, safetensors_at(file, i)->name) < 0);
    assert_null(safetensors_at(file, COUNT(tensors)));
    assert_string_equal(safetensors_metadata(file, "format"), "pt");
    assert_string_equal(safetensors_metadata(file, "step"), "12");
    assert_null(safetensors_metadata(file, "other"));

    const tensor *found;
    assert_null(safetensors_find(file, "layers.0"));
    assert_false(safetensors_get(file, "layers.0", &found, &err));
    assert_text(&err, "tensor layers.0 is missing");
    assert_text(&err, path);
    safetensors_close(file);
}

/* The bytes of a file must be those written out here, for any order of the tensors in the call. */
static void the_bytes_are_those_of_the_format(void **state)
{
    static const float two[2] = {1, 2};
    static const uint8_t byte = 7;
    static const char header[] = "{\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                                 "\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[8,9]}}";
    const tensor tensors[2][2] = {{{"a", TENSOR_U8, 0, {0}, &byte}, {"b", TENSOR_F32, 1, {2}, two}},
                                  {{"b", TENSOR_F32, 1, {2}, two}, {"a", TENSOR_U8, 0, {0}, &byte}}};
    size_t length = (sizeof header - 1 + 7) / 8 * 8;
    unsigned char want[256];
    memset(want, ' ', sizeof want);
    memcpy(want, (unsigned char[]){(unsigned char)length, 0, 0, 0, 0, 0, 0, 0}, 8);
    memcpy(want + 8, header, sizeof header - 1);
    memcpy(want + 8 + length, "\0\0\x80\x3f\0\0\0\x40\x07", 9);
    for (int order = 0; order < 2; order++) {
        char path[4096];
        error err;
        file_map map;
        assert_true(safetensors_write(in_folder(path, state, "a"), tensors[order], 2, NULL, 0, &err));
        assert_true(file_map_open(&map, path, &err));
        assert_int_equal(map.size, 8 + length + 9);
        assert_memory_equal(map.data, want, map.size);
        file_map_close(&map);
    }
}

/* As many tensors as OLMoE has: each must be found and have its own value. */
static void many_tensors_are_found(void **state)
{
    enum { MANY = 3219 };
    static char names[MANY][80];
    static float values[MANY];
    static tensor tensors[MANY];
    char path[4096];
    error err = {0};
    for (int i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], "model.layers.%d.mlp.experts.%d.up_proj.weight", i % 16, i / 16);
        values[i] = (float)i;
        tensors[i] = (tensor){names[i], TENSOR_F32, 1, {1}, &values[i]};
    }
    assert_true(safetensors_write(in_folder(path, state, "a"), tensors, MANY, NULL, 0, &err));
    safetensors *file = open_file(path);
    assert_int_equal(safetensors_count(file), MANY);
    for (int i = 0; i < MANY; i++) {
        float value = NAN;
        const tensor *found;
        assert_true(safetensors_get(file, names[i], &found, &err));
        assert_true(tensor_read_f32(found, 1, (int64_t[]){1}, &value, &err));
        assert_true(value == (float)i);
    }
    safetensors_close(file);
}

/* The value of an fp16 number, by its definition. */
static double half_value(unsigned bits)
{
    int exponent = (int)(bits >> 10 & 31), fraction = (int)(bits & 1023);
    double magnitude = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31) magnitude = fraction == 0 ? INFINITY : NAN;
    return bits & 0x8000 ? -magnitude : magnitude;
}

static void f16_is_converted(void **state)
{
    (void)state;
    enum { ALL = 65536 };
    static uint16_t bits[ALL];
    static float out[ALL];
    error err;
    for (int i = 0; i < ALL; i++) bits[i] = (uint16_t)i;
    memset(out, 0xff, sizeof out);
    const tensor t = {"h", TENSOR_F16, 2, {256, 256}, bits};
    assert_true(tensor_read_f32(&t, 2, (int64_t[]){256, 256}, out, &err));
    for (unsigned i = 0; i < ALL; i++) {
        double want = half_value(i);
        if (isnan(want) ? !isnan(out[i]) : out[i] != want || !signbit(out[i]) != !signbit(want))
            fail_msg("half %04x is %g, not %g", i, (double)out[i], want);
    }
}

static void values_are_read_as_f32(void **state)
{
    (void)state;
    static const uint16_t brain[4] = {0x3f80, 0xc000, 0x7f80, 0x0001}; // 1, -2, infinity, 2^-133
    static const double wide[2] = {0.1, -3};
    static const int32_t whole[2] = {1, 2};
    unsigned char shifted[9];
    float out[4], value = 1.5f;
    error err;
    const tensor b = {"b", TENSOR_BF16, 1, {4}, brain}, w = {"w", TENSOR_F64, 1, {2}, wide};
    const tensor i = {"i", TENSOR_I32, 1, {2}, whole}, unaligned = {"u", TENSOR_F32, 1, {1}, shifted + 1};
    memcpy(shifted + 1, &value, 4);
    assert_true(tensor_read_f32(&b, 1, (int64_t[]){4}, out, &err));
    assert_true(out[0] == 1 && out[1] == -2 && isinf(out[2]) && out[3] == 0x1p-133f);
    assert_true(tensor_read_f32(&w, 1, (int64_t[]){2}, out, &err));
    assert_true(out[0] == 0.1f && out[1] == -3);
    assert_true(tensor_read_f32(&unaligned, 1, (int64_t[]){1}, out, &err));
    assert_true(out[0] == 1.5f);

    assert_false(tensor_read_f32(&i, 1, (int64_t[]){2}, out, &err));
    assert_text(&err, "tensor i has dtype I32, wanted F32");
    assert_false(tensor_read_f32(&w, 2, (int64_t[]){2, 7}, out, &err));
    assert_text(&err, "tensor w has shape [2], wanted [2, 7]");
    assert_false(tensor_read_f32(&w, 1, (int64_t[]){3}, out, &err));
    assert_text(&err, "shape [2], wanted [3]");
    assert_false(tensor_read_f32(&w, 0, NULL, out, &err));
    assert_text(&err, "shape [2], wanted []");
}

/* If a file cannot be written, the old file must stay. */
static void a_failed_write_keeps_the_old_file(void **state)
{
    static const float x[4] = {0};
    static const struct {
        tensor tensors[2];
        const char *reason;
    } cases[] = {
        {{{"a", TENSOR_F32, 1, {4}, x}, {"a", TENSOR_I8, 1, {4}, x}},
         "tensor a: the name is reserved or occurs twice"},
        {{{"a", TENSOR_F32, 1, {4}, x}, {"__metadata__", TENSOR_F32, 1, {4}, x}}, "reserved"},
        {{{"a", TENSOR_F32, 1, {4}, x}, {"\xff", TENSOR_F32, 1, {4}, x}}, "not UTF-8"},
        {{{"a", TENSOR_F32, 2, {1LL << 31, 1LL << 31}, x}, {"b", TENSOR_F32, 1, {4}, x}},
         "tensor a: its bytes do not fit"},
        {{{"a", TENSOR_F32, 1, {-1}, x}, {"b", TENSOR_F32, 1, {4}, x}}, "tensor a: its bytes do not fit"},
        {{{"a", TENSOR_I8, 1, {INT64_MAX}, x}, {"b", TENSOR_I8, 1, {1}, x}},
         "tensor b: its bytes do not fit"},
        {{{"a", TENSOR_F32, 9, {1}, x}, {"b", TENSOR_F32, 1, {4}, x}}, "tensor a has rank 9, at most 8"},
    };
    char path[4096];
    error err;
    put_file(in_folder(path, state, "a"), "old", 3);
    for (size_t i = 0; i < COUNT(cases); i++) {
        assert_false(safetensors_write(path, cases[i].tensors, 2, NULL, 0, &err));
        assert_text(&err, cases[i].reason);
        assert_text(&err, path);
    }
    const safetensors_pair bad = {"k", "\xff"};
    assert_false(safetensors_write(path, NULL, 0, &bad, 1, &err));
    assert_text(&err, "metadata k is not UTF-8");
    file_map map;
    assert_true(file_map_open(&map, path, &err));
    assert_memory_equal(map.data, "old", 3);
    file_map_close(&map);
}

/* Malformed headers and their messages; each file has 8 bytes of data. */
static void messages_name_the_cause(void **state)
{
    (void)state;
    static const struct {
        const char *header, *reason;
    } cases[] = {
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,12]}}",
         "tensor a: data_offsets [0, 12] are outside the 8"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}",
         "tensor a: shape and dtype make 12 bytes, data_offsets 8"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
         "end at byte 4 of the data, which have 8"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", "hole"},
        {"{\"a\":{\"dtype\":\"I8\",\"shape\":[5],\"data_offsets\":[0,5]},"
         "\"b\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
         "tensor b begins at byte 4 of the data, overlap"},
        {"{\"a\":{\"dtype\":\"F7\",\"shape\":[2],\"data_offsets\":[0,8]}}",
         "tensor a: dtype \"F7\" is not supported"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,8]}}",
         "do not fit into 63 bits"},
        {"{\"a\":1,\"a\":1}", "duplicate"},
        {"{\"__metadata__\":{\"k\":1}}", "the value of \"k\" is not a string"},
        {"[1]", "does not start with '{'"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        unsigned char bytes[512] = {0};
        size_t length = strlen(cases[i].header);
        bytes[0] = (unsigned char)length;
        memcpy(bytes + 8, cases[i].header, length);
        safetensors *file;
        error err = {0};
        assert_false(safetensors_parse(&file, bytes, 8 + length + 8, "NAME", &err));
        assert_null(file);
        assert_text(&err, cases[i].reason);
        assert_text(&err, "NAME: ");
    }
}

static void wrong_lengths_are_refused(void **state)
{
    (void)state;
    unsigned char bytes[64] = {0};
    safetensors *file;
    error err;
    assert_false(safetensors_parse(&file, bytes, 7, "NAME", &err));
    assert_text(&err, "7 bytes are too few");
    bytes[0] = 100;
    assert_false(safetensors_parse(&file, bytes, sizeof bytes, "NAME", &err));
    assert_text(&err, "truncated: header of 100 bytes, but 56 are left");
    memcpy(bytes, "\x01\xe1\xf5\x05", 4);
    assert_false(safetensors_parse(&file, bytes, sizeof bytes, "NAME", &err));
    assert_text(&err, "header of 100000001 bytes, at most 100000000");
}

/* Two shards and an index with this weight_map. */
static void put_sharded(void **state, const char *weight_map)
{
    static const float x[2] = {1, 2};
    char path[4096], index[1024];
    error err;
    const tensor a = {"a", TENSOR_F32, 1, {2}, x},
                 b[2] = {{"b", TENSOR_F32, 1, {1}, x}, {"c", TENSOR_F32, 1, {1}, x + 1}};
    const safetensors_pair metadata = {"format", "pt"};
    assert_true(safetensors_write(in_folder(path, state, "1.safetensors"), &a, 1, &metadata, 1, &err));
    assert_true(safetensors_write(in_folder(path, state, "2.safetensors"), b, 2, NULL, 0, &err));
    snprintf(index, sizeof index, "{\"metadata\": {\"total_size\": 16}, \"weight_map\": %s}", weight_map);
    put_file(in_folder(path, state, "model.safetensors.index.json"), index, strlen(index));
}

static void shards_are_one_file(void **state)
{
    char path[4096];
    put_sharded(state, "{\"a\": \"1.safetensors\", \"b\": \"2.safetensors\", \"c\": \"2.safetensors\"}");
    safetensors *file = open_file(in_folder(path, state, "model.safetensors.index.json"));
    assert_int_equal(safetensors_count(file), 3);
    assert_string_equal(safetensors_at(file, 0)->name, "a");
    float value;
    error err;
    assert_true(tensor_read_f32(safetensors_find(file, "c"), 1, (int64_t[]){1}, &value, &err));
    assert_true(value == 2);
    assert_string_equal(safetensors_metadata(file, "format"), "pt");
    safetensors_close(file);
}

static void wrong_shards_are_refused(void **state)
{
    static const struct {
        const char *weight_map, *reason;
    } cases[] = {
        {"{\"a\": \"3.safetensors\"}", "3.safetensors: cannot open"},
        {"{\"d\": \"1.safetensors\"}", "tensor d is missing from 1.safetensors"},
        {"{\"a\": \"1.safetensors\", \"b\": \"1.safetensors\", \"c\": \"2.safetensors\"}",
         "tensor b is missing from 1.safetensors"},
        {"{\"a\": \"../1.safetensors\"}", "is not a file name"},
        {"{\"a\": \"/etc/passwd\"}", "is not a file name"},
        {"{\"a\": 1}", "is not a file name"},
        {"[]", "weight_map is missing or not an object"},
        {"{", "model.safetensors.index.json: line 1"},
    };
    char path[4096];
    error err;
    safetensors *file;
    for (size_t i = 0; i < COUNT(cases); i++) {
        put_sharded(state, cases[i].weight_map);
        assert_false(safetensors_open(&file, in_folder(path, state, "model.safetensors.index.json"), &err));
        assert_null(file);
        assert_text(&err, cases[i].reason);
    }
    put_sharded(state, "{\"a\": \"1.safetensors\", \"b\": \"2.safetensors\"}");
    const tensor again = {"a", TENSOR_I8, 1, {1}, "x"};
    assert_true(safetensors_write(in_folder(path, state, "2.safetensors"), &again, 1, NULL, 0, &err));
    assert_false(safetensors_open(&file, in_folder(path, state, "model.safetensors.index.json"), &err));
    assert_text(&err, "tensor a occurs twice");
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, folder_setup, folder_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        IN_FOLDER(written_files_are_read_back),
        IN_FOLDER(the_bytes_are_those_of_the_format),
        IN_FOLDER(many_tensors_are_found),
        cmocka_unit_test(f16_is_converted),
        cmocka_unit_test(values_are_read_as_f32),
        IN_FOLDER(a_failed_write_keeps_the_old_file),
        cmocka_unit_test(messages_name_the_cause),
        cmocka_unit_test(wrong_lengths_are_refused),
        IN_FOLDER(shards_are_one_file),
        IN_FOLDER(wrong_shards_are_refused),
    };
    return cmocka_run_group_tests_name("safetensors", tests, NULL, NULL);
}
