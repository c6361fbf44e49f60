/* train/model/config.h: config.json must have OLMoE's keys, and reading a written file must give the same
 * configuration. Every refusal must name key, value and limit. More malformed files are in
 * tests/fuzz/corpus/config. */
#define _DEFAULT_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/folder.h"
#include "train/model/config.h"

#include <jansson.h>
#include <math.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const model_config odd_model = {.vocab = 50304,
                                       .hidden = 2048,
                                       .intermediate = 1000,
                                       .layers = 16,
                                       .heads = 16,
                                       .experts = 60,
                                       .topk = 7,
                                       .score = 2,
                                       .groups = 6,
                                       .groups_kept = 3,
                                       .route_scale = 2.5,
                                       .selection_bias = true,
                                       .norm_topk_prob = true,
                                       .shared_intermediate = 320,
                                       .dense_layers = 3,
                                       .dense_intermediate = 8192,
                                       .context = 4096,
                                       .rope_theta = 500000.25,
                                       .norm_eps = 1.0 / 3e5,
                                       .tied = true,
                                       .router_aux_loss_coef = 0.0123456789012345678,
                                       .initializer_range = 0.1};

static void assert_text(const error *err, int code, const char *part)
{
    assert_int_equal(err->code, code);
    if (strstr(err->text, part) == NULL) fail_msg("\"%s\" lacks \"%s\"", err->text, part);
}

static void assert_equal(const model_config *a, const model_config *b)
{
    error err = {0};
    if (!model_config_same(a, b, &err)) fail_msg("%s", err.text);
    assert_true(a->router_aux_loss_coef == b->router_aux_loss_coef);
    assert_true(a->initializer_range == b->initializer_range);
}

static void a_written_config_is_read_back(void **state)
{
    char path[4096];
    model_config models[2] = {model_config_default(), odd_model}, back;
    for (int i = 0; i < 2; i++) {
        error err = {0};
        assert_true(model_config_check(&models[i], &err));
        assert_true(model_config_write(&models[i], "float32", &(model_config_extra){.end = -1},
                                       in_folder(path, state, "config.json"), &err));
        memset(&back, 0xff, sizeof back);
        if (!model_config_read(&back, path, &err)) fail_msg("%s", err.text);
        assert_equal(&back, &models[i]);
    }
}

static json_t *written(const model_config *config, void **state)
{
    char path[4096];
    error err;
    assert_true(model_config_write(config, "float32", &(model_config_extra){.end = -1},
                                   in_folder(path, state, "config.json"), &err));
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(root);
    return root;
}

static void assert_string(const json_t *root, const char *key, const char *want)
{
    const char *have = json_string_value(json_object_get(root, key));
    if (have == NULL || strcmp(have, want) != 0) fail_msg("%s is %s, not %s", key, have, want);
}

/* The keys from which Transformers builds an OlmoeForCausalLM of this shape. */
static void the_keys_are_those_of_olmoe(void **state)
{
    static const struct {
        const char *key;
        int want;
    } integers[] = {{"vocab_size", 256},      {"hidden_size", 128},       {"intermediate_size", 128},
                    {"num_hidden_layers", 4}, {"num_attention_heads", 4}, {"num_key_value_heads", 4},
                    {"num_experts", 16},      {"num_experts_per_tok", 2}, {"max_position_embeddings", 256}};
    static const char *const nulls[] = {"clip_qkv", "bos_token_id", "eos_token_id", "pad_token_id"};
    static const char *const falses[] = {"attention_bias", "norm_topk_prob", "tie_word_embeddings"};
    model_config config = model_config_default();
    json_t *root = written(&config, state);
    assert_string(root, "model_type", "olmoe");
    assert_string(root, "hidden_act", "silu");
    assert_string(root, "dtype", "float32");
    assert_string(root, "torch_dtype", "float32");
    const json_t *architectures = json_object_get(root, "architectures");
    assert_int_equal(json_array_size(architectures), 1);
    assert_string_equal(json_string_value(json_array_get(architectures, 0)), "OlmoeForCausalLM");
    for (size_t i = 0; i < COUNT(integers); i++)
        assert_int_equal(json_integer_value(json_object_get(root, integers[i].key)), integers[i].want);
    for (size_t i = 0; i < COUNT(nulls); i++) assert_true(json_is_null(json_object_get(root, nulls[i])));
    for (size_t i = 0; i < COUNT(falses); i++) assert_true(json_is_false(json_object_get(root, falses[i])));
    assert_true(json_real_value(json_object_get(root, "rope_theta")) == 10000);
    assert_true(json_real_value(json_object_get(root, "rms_norm_eps")) == 1e-5);
    assert_true(json_real_value(json_object_get(root, "router_aux_loss_coef")) == 0.01);
    const json_t *rope = json_object_get(root, "rope_parameters");
    assert_string(rope, "rope_type", "default");
    assert_true(json_real_value(json_object_get(rope, "rope_theta")) == 10000);
    assert_null(json_object_get(root, "shared_expert_intermediate_size"));
    assert_null(json_object_get(root, "first_k_dense_replace"));
    json_decref(root);
}

/* A model with a shared expert, or with dense layers, has another model type. */
static void the_model_type_says_what_the_model_has(void **state)
{
    model_config shared = model_config_default(), dense = shared;
    shared.shared_intermediate = 64;
    dense.dense_layers = 1;
    dense.dense_intermediate = 512;
    json_t *root = written(&shared, state);
    assert_string(root, "model_type", "smoe");
    assert_int_equal(json_integer_value(json_object_get(root, "shared_expert_intermediate_size")), 64);
    json_decref(root);
    root = written(&dense, state);
    assert_string(root, "model_type", "smoe");
    assert_int_equal(json_integer_value(json_object_get(root, "dense_intermediate_size")), 512);
    json_decref(root);
}

static void assert_refused(const model_config *config, const char *part)
{
    error err = {0};
    assert_false(model_config_check(config, &err));
    assert_text(&err, ERROR_USAGE, part);
}

#define REFUSED(field, value, part)                                                                          \
    do {                                                                                                     \
        model_config changed = model_config_default();                                                       \
        changed.field = (value);                                                                             \
        assert_refused(&changed, part);                                                                      \
    } while (0)

static void limits_are_checked(void **state)
{
    (void)state;
    REFUSED(vocab, 1, "vocab_size = 1 is outside 2..16777216");
    REFUSED(hidden, 0, "hidden_size = 0 is outside 2..262144");
    REFUSED(hidden, 132, "hidden_size = 132 is not a multiple of 2 * num_attention_heads = 8");
    REFUSED(hidden, 1LL << 40, "hidden_size = 1099511627776 is outside");
    REFUSED(intermediate, -5, "intermediate_size = -5 is outside 1..");
    REFUSED(layers, 5000, "num_hidden_layers = 5000 is outside 1..4096");
    REFUSED(heads, 0, "num_attention_heads = 0 is outside 1..");
    REFUSED(experts, 0, "num_experts = 0 is outside 1..65536");
    REFUSED(topk, 17, "num_experts_per_tok = 17 is more than num_experts = 16");
    REFUSED(topk, 0, "num_experts_per_tok = 0 is outside 1..");
    REFUSED(shared_intermediate, -1, "shared_expert_intermediate_size = -1 is outside 0..");
    REFUSED(dense_layers, 5, "first_k_dense_replace = 5 is more than num_hidden_layers = 4");
    REFUSED(dense_layers, 1, "first_k_dense_replace = 1 and dense_intermediate_size = 0: both or neither");
    REFUSED(dense_intermediate, 8,
            "first_k_dense_replace = 0 and dense_intermediate_size = 8: both or neither");
    REFUSED(score, 99, "scoring_func = 99 is outside 0..");
    REFUSED(groups, 2, "n_group is 2, with scoring_func \"softmax\" it must be 1");
    REFUSED(selection_bias, true, "selection_bias is 1, with scoring_func \"softmax\" it must be 0");
    REFUSED(groups_kept, 2, "topk_group = 2 is more than n_group = 1");
    REFUSED(route_scale, 0, "routed_scaling_factor = 0 is outside");
    REFUSED(context, 0, "max_position_embeddings = 0 is outside 1..");
    REFUSED(rope_theta, 0.5, "rope_theta = 0.5 is outside 1..1e+12");
    REFUSED(rope_theta, (double)NAN, "rope_theta = ");
    REFUSED(norm_eps, 0.0, "rms_norm_eps = 0 is outside 1e-12..0.1");
    REFUSED(router_aux_loss_coef, -0.1, "router_aux_loss_coef = -0.1 is outside 0..100");
    REFUSED(initializer_range, (double)INFINITY, "initializer_range = inf is outside 0..10");
}

static void a_wrong_config_is_not_written(void **state)
{
    char path[4096];
    error err;
    model_config config = model_config_default();
    config.topk = 17;
    assert_false(model_config_write(&config, "float32", &(model_config_extra){.end = -1},
                                    in_folder(path, state, "config.json"), &err));
    assert_text(&err, ERROR_USAGE, "num_experts_per_tok");
    assert_int_equal(access(path, F_OK), -1);
}

/* Checks that a text is refused with this reason. */
static void assert_unread(const char *text, const char *part)
{
    model_config config;
    error err = {0};
    assert_false(model_config_parse(&config, text, strlen(text), "NAME", &err));
    assert_text(&err, ERROR_RUNTIME, part);
    assert_text(&err, ERROR_RUNTIME, "NAME: ");
}

#define SIZES                                                                                                \
    "\"vocab_size\":256,\"hidden_size\":64,\"intermediate_size\":32,\"num_hidden_layers\":2,"                \
    "\"num_attention_heads\":4,\"num_experts\":8,\"num_experts_per_tok\":2"

static void messages_name_key_value_and_limit(void **state)
{
    (void)state;
    assert_unread("", "line 1");
    assert_unread("{\n\n\"a\" 1}", "line 3");
    assert_unread("[]", "is not a JSON object");
    assert_unread("{}", "model_type is missing");
    assert_unread("{\"model_type\":\"llama\"}", "model_type = \"llama\" is not supported");
    assert_unread("{\"model_type\":\"olmoe\"}", "vocab_size is missing");
    assert_unread("{\"model_type\":\"olmoe\",\"vocab_size\": 2.5}", "vocab_size is not an integer");
    assert_unread("{" SIZES "}", "model_type is missing");
    assert_unread("{\"model_type\":\"llama\"," SIZES "}", "model_type = \"llama\" is not supported");
    assert_unread("{\"model_type\":\"olmoe\",\"rms_norm_eps\":\"x\"," SIZES "}",
                  "rms_norm_eps is not a number");
    assert_unread("{\"model_type\":\"olmoe\",\"norm_topk_prob\":1," SIZES "}",
                  "norm_topk_prob is neither true nor");
    assert_unread("{\"model_type\":\"olmoe\",\"num_key_value_heads\":2," SIZES "}",
                  "num_key_value_heads = 2 is not supported, only 4 (num_attention_heads)");
    assert_unread("{\"model_type\":\"olmoe\",\"hidden_act\":\"gelu\"," SIZES "}",
                  "hidden_act = \"gelu\" is not");
    assert_unread("{\"model_type\":\"olmoe\",\"shared_expert_intermediate_size\":8," SIZES "}",
                  "shared_expert_intermediate_size is set, but model_type \"olmoe\" has no such key");
    assert_unread("{\"model_type\":\"olmoe\",\"rope_theta\":5,\"rope_parameters\":{\"rope_theta\":6}," SIZES
                  "}",
                  "rope_theta = 5, but rope_parameters.rope_theta = 6");
    assert_unread("{\"model_type\":\"olmoe\",\"max_position_embeddings\":0," SIZES "}",
                  "max_position_embeddings = 0 is outside 1..");
}

#define OLMOE "{\"model_type\":\"olmoe\"," SIZES ","

/* What a config says about RoPE is computed or refused, and the message names the key. */
static void unknown_rope_is_refused(void **state)
{
    (void)state;
    static const char *const refused[][2] = {
        {"'rope_parameters':{'type':'linear','factor':2,'rope_theta':1e4}",
         "rope_parameters.type = \"linear\" is not supported, only \"default\""},
        {"'rope_parameters':{'factor':2,'rope_type':'default','type':'yarn'}",
         "rope_parameters.type = \"yarn\""},
        {"'rope_parameters':{'rope_type':7}", "rope_parameters.rope_type = 7 is not supported"},
        {"'rope_parameters':{'rope_type':'default','factor':2}",
         "rope_parameters.factor = 2 is not supported, only 1"},
        {"'rope_parameters':{'partial_rotary_factor':0.5}", "rope_parameters.partial_rotary_factor = 0.5"},
        {"'rope_parameters':{'mrope_section':[1,2]}",
         "rope_parameters.mrope_section = [1,2] is not supported"},
        {"'rope_parameters':{'full_attention':{'rope_type':'default'}}",
         "rope_parameters.full_attention = {"},
        {"'rope_parameters':[1]", "rope_parameters is not an object"},
        {"'rope_parameters':{'rope_theta':'x'}", "rope_parameters.rope_theta is not a number"},
        {"'rope_scaling':{'type':'linear','factor':2}", "rope_scaling.type = \"linear\""},
        {"'rope_scaling':{'rope_type':'llama3'}", "rope_scaling.rope_type = \"llama3\""},
        {"'rope_scaling':{'factor':4}", "rope_scaling.factor = 4"},
        {"'rope_scaling':'linear'", "rope_scaling is not an object"},
        {"'rope_theta':5,'rope_scaling':{'rope_theta':6}", "rope_theta = 5, but rope_scaling.rope_theta = 6"},
        {"'rope_parameters':{'rope_theta':5},'rope_scaling':{'rope_theta':6}",
         "rope_parameters.rope_theta = 5, but rope_scaling.rope_theta = 6"},
        {"'partial_rotary_factor':0.25", "partial_rotary_factor = 0.25 is not supported, only 1"},
        {"'rope_type':'linear'", "rope_type = \"linear\""},
        {"'rope_interleaved':true", "rope_interleaved = true is not supported, only null"},
        {"'no_rope_layers':[0,1]", "no_rope_layers = [0,1] is not supported"},
        {"'rotary_emb_base':500", "rotary_emb_base = 500 is not supported"},
    };
    char text[1024];
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        snprintf(text, sizeof text, OLMOE "%s}", refused[i][0]);
        for (char *c = text; *c; c++) *c = *c == '\'' ? '"' : *c;
        assert_unread(text, refused[i][1]);
    }
}

/* Values with which plain RoPE is meant. */
static void plain_rope_may_be_spelled_out(void **state)
{
    (void)state;
    static const char *const read[] = {
        "'rope_parameters':{'type':'default','rope_theta':77}",
        "'rope_parameters':{'rope_type':'default','type':'default','rope_theta':77,'factor':1.0,"
        "'attention_factor':null,'partial_rotary_factor':1,'original_max_position_embeddings':4096}",
        "'rope_scaling':{'type':'default'},'rope_theta':77",
        "'rope_scaling':{'rope_type':'default','rope_theta':77},'rope_parameters':{'rope_theta':77}",
        "'rope_scaling':{},'rope_parameters':null,'rope_theta':77",
        "'rope_theta':77,'partial_rotary_factor':1.0,'rope_type':'default','rope_interleaved':false,"
        "'no_rope_layers':null",
    };
    char text[1024];
    model_config config;
    error err = {0};
    for (size_t i = 0; i < sizeof read / sizeof read[0]; i++) {
        snprintf(text, sizeof text, OLMOE "%s}", read[i]);
        for (char *c = text; *c; c++) *c = *c == '\'' ? '"' : *c;
        if (!model_config_parse(&config, text, strlen(text), "NAME", &err)) fail_msg("%s", err.text);
        assert_true(config.rope_theta == 77);
    }
}

/* Keys of the source stay, whatever they are; a run changes the context, the loss weight and the dtype. */
static void keys_of_the_source_stay(void **state)
{
    static const char source[] =
        "{\"model_type\":\"olmoe\"," SIZES ",\"eos_token_id\":[7,9],\"pad_token_id\":1,\"bos_token_id\":null,"
        "\"max_position_embeddings\":32,\"router_aux_loss_coef\":0.5,\"torch_dtype\":\"bfloat16\","
        "\"rope_theta\":10000,\"note\":{\"a\":[0.01,1e-5,0.1]},\"transformers_version\":\"5.0\"}";
    char path[4096];
    error err = {0};
    model_config config;
    assert_true(model_config_parse(&config, source, strlen(source), "NAME", &err));
    config.context = 64;
    config.router_aux_loss_coef = 0.01;
    in_folder(path, state, "config.json");
    for (int other = 0; other < 2; other++) {
        const model_config_extra extra = {source, strlen(source), other == 1, 255};
        assert_true(model_config_write(&config, "float32", &extra, path, &err));
        json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, NULL);
        const json_t *eos = json_object_get(root, "eos_token_id"),
                     *pad = json_object_get(root, "pad_token_id"),
                     *note = json_object_get(json_object_get(root, "note"), "a");
        assert_int_equal(json_integer_value(other ? eos : json_array_get(eos, 1)), other ? 255 : 9);
        assert_int_equal(json_integer_value(json_object_get(root, "bos_token_id")), 255);
        assert_true(other ? json_is_null(pad) : json_integer_value(pad) == 1);
        assert_string(root, "transformers_version", "5.0");
        assert_string(root, "torch_dtype", "float32");
        assert_string(root, "dtype", "float32");
        assert_int_equal(json_integer_value(json_object_get(root, "max_position_embeddings")), 64);
        assert_true(json_real_value(json_object_get(root, "router_aux_loss_coef")) == 0.01);
        assert_true(json_real_value(json_array_get(note, 0)) == 0.01);
        json_decref(root);
    }
    FILE *file = fopen(path, "r");
    char text[4096] = "";
    assert_true(fread(text, 1, sizeof text - 1, file) > 0);
    fclose(file);
    assert_non_null(strstr(text, "0.01,")); // with no more digits than needed
    assert_non_null(strstr(text, "1e-5"));
}

static void absent_keys_have_defaults(void **state)
{
    (void)state;
    static const char text[] =
        "{\"model_type\":\"olmoe\",\"rope_parameters\":{\"rope_theta\":500000}," SIZES "}";
    model_config config;
    error err = {0};
    if (!model_config_parse(&config, text, strlen(text), "NAME", &err)) fail_msg("%s", err.text);
    assert_true(config.rope_theta == 500000);
    assert_true(config.norm_eps == 1e-5);
    assert_int_equal(config.context, 4096);
    assert_int_equal(config.shared_intermediate, 0);
    assert_false(config.tied);
}

static void equal_configs_are_the_same(void **state)
{
    (void)state;
    error err;
    model_config a = model_config_default(), b = a;
    b.router_aux_loss_coef = 0;
    b.initializer_range = 0.5;
    assert_true(model_config_same(&a, &b, &err));
    b.experts = 32;
    assert_false(model_config_same(&a, &b, &err));
    assert_text(&err, ERROR_RUNTIME, "num_experts is 16, wanted 32");
    b = a;
    b.tied = true;
    assert_false(model_config_same(&a, &b, &err));
    assert_text(&err, ERROR_RUNTIME, "tie_word_embeddings is 0, wanted 1");
    b = a;
    b.norm_eps = 1e-6;
    assert_false(model_config_same(&a, &b, &err));
    assert_text(&err, ERROR_RUNTIME, "rms_norm_eps is 1");
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, folder_setup, folder_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        IN_FOLDER(a_written_config_is_read_back),
        IN_FOLDER(the_keys_are_those_of_olmoe),
        IN_FOLDER(the_model_type_says_what_the_model_has),
        cmocka_unit_test(limits_are_checked),
        IN_FOLDER(a_wrong_config_is_not_written),
        cmocka_unit_test(messages_name_key_value_and_limit),
        cmocka_unit_test(absent_keys_have_defaults),
        cmocka_unit_test(equal_configs_are_the_same),
        IN_FOLDER(keys_of_the_source_stay),
        cmocka_unit_test(unknown_rope_is_refused),
        cmocka_unit_test(plain_rope_may_be_spelled_out),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
