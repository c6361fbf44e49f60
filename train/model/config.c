/* See config.h. Two tables describe the numeric keys: one row for each key with its field, limits and
 * default. */
#include "train/model/config.h"

#include "train/files/file.h"
#include "train/model/config_rope.h"

#include <jansson.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { REQUIRED = -1 }; // no default: the key must be there

typedef struct integer_key {
    const char *key;
    size_t offset; // of an int64_t in model_config
    int64_t low, high;
    int64_t absent;           // value when the key is missing or null, or REQUIRED
    bool own;                 // the type "olmoe" has no such key: its value is `absent`
    const char *const *names; // the value's text, if the key is a string
} integer_key;

typedef struct real_key {
    const char *key;
    size_t offset; // of a double in model_config
    double low, high;
    double absent;
    bool own;
} real_key;

typedef struct boolean_key {
    const char *key;
    size_t offset; // of a bool in model_config
    bool absent;
    bool own;
} boolean_key;

#define SCORE(enumerator, name, key, value, over, selection) [enumerator] = key,
const char *const model_score_names[MOE_SCORE_COUNT] = {MOE_SCORES(SCORE)};
#undef SCORE

#define FIELD(name) offsetof(model_config, name)

/* The limits keep a tensor under 2^16 experts * 2^21 rows * 2^18 columns = 2^55 weights: bytes fit
 * into 63 bits. */
static const integer_key integer_keys[] = {
    {"vocab_size", FIELD(vocab), 2, 1 << 24, REQUIRED, false, NULL},
    {"hidden_size", FIELD(hidden), 2, 1 << 18, REQUIRED, false, NULL},
    {"intermediate_size", FIELD(intermediate), 1, 1 << 20, REQUIRED, false, NULL},
    {"num_hidden_layers", FIELD(layers), 1, 1 << 12, REQUIRED, false, NULL},
    {"num_attention_heads", FIELD(heads), 1, 1 << 12, REQUIRED, false, NULL},
    {"num_experts", FIELD(experts), 1, 1 << 16, REQUIRED, false, NULL},
    {"num_experts_per_tok", FIELD(topk), 1, 1 << 16, REQUIRED, false, NULL},
    {"shared_expert_intermediate_size", FIELD(shared_intermediate), 0, 1 << 20, 0, true, NULL},
    {"first_k_dense_replace", FIELD(dense_layers), 0, 1 << 12, 0, true, NULL},
    {"dense_intermediate_size", FIELD(dense_intermediate), 0, 1 << 20, 0, true, NULL},
    {"scoring_func", FIELD(score), 0, MOE_SCORE_COUNT - 1, SMOE_SCORE_SOFTMAX_TOPK, true, model_score_names},
    {"n_group", FIELD(groups), 1, 1 << 16, 1, true, NULL},
    {"topk_group", FIELD(groups_kept), 1, 1 << 16, 1, true, NULL},
    {"max_position_embeddings", FIELD(context), 1, 1 << 24, 4096, false, NULL},
};

static const real_key real_keys[] = {
    {"rope_theta", FIELD(rope_theta), 1, 1e12, 10000, false},
    {"rms_norm_eps", FIELD(norm_eps), 1e-12, 0.1, 1e-5, false},
    {"router_aux_loss_coef", FIELD(router_aux_loss_coef), 0, 100, 0.01, false},
    {"initializer_range", FIELD(initializer_range), 0, 10, 0.02, false},
    {"routed_scaling_factor", FIELD(route_scale), 1e-6, 1e6, 1, true},
};

static const boolean_key boolean_keys[] = {
    {"norm_topk_prob", FIELD(norm_topk_prob), false, false},
    {"tie_word_embeddings", FIELD(tied), false, false},
    {"selection_bias", FIELD(selection_bias), false, true},
};

#define COUNT(table) (sizeof(table) / sizeof *(table))

static int64_t *integer_field(model_config *config, size_t i)
{
    return (int64_t *)(void *)((char *)config + integer_keys[i].offset);
}

static double *real_field(model_config *config, size_t i)
{
    return (double *)(void *)((char *)config + real_keys[i].offset);
}

static bool *boolean_field(model_config *config, size_t i)
{
    return (bool *)(void *)((char *)config + boolean_keys[i].offset);
}

model_config model_config_default(void)
{
    return (model_config){.vocab = 256,
                          .hidden = 128,
                          .intermediate = 128,
                          .layers = 4,
                          .heads = 4,
                          .experts = 16,
                          .topk = 2,
                          .groups = 1,
                          .groups_kept = 1,
                          .route_scale = 1,
                          .context = 256,
                          .rope_theta = 10000,
                          .norm_eps = 1e-5,
                          .router_aux_loss_coef = 0.01,
                          .initializer_range = 0.02};
}

/* ---- checks ---- */

static bool check_limits(model_config *config, error *err)
{
    for (size_t i = 0; i < COUNT(integer_keys); i++) {
        const integer_key *k = &integer_keys[i];
        int64_t value = *integer_field(config, i);
        if (value < k->low || value > k->high)
            return fail(err, ERROR_USAGE, "%s = %lld is outside %lld..%lld", k->key, (long long)value,
                        (long long)k->low, (long long)k->high);
    }
    for (size_t i = 0; i < COUNT(real_keys); i++) {
        const real_key *k = &real_keys[i];
        double value = *real_field(config, i);
        if (!(value >= k->low && value <= k->high)) // also NaN
            return fail(err, ERROR_USAGE, "%s = %g is outside %g..%g", k->key, value, k->low, k->high);
    }
    return true;
}

static bool check_router(const model_config *c, error *err)
{
    const char *score = model_score_names[c->score];
    if (moe_score_over_kept(c->score) && c->norm_topk_prob)
        return fail(err, ERROR_USAGE, "norm_topk_prob is true, with scoring_func \"%s\" it must be false",
                    score);
    if (!moe_score_takes_bias(c->score) && (c->groups > 1 || c->selection_bias))
        return fail(err, ERROR_USAGE, "%s is %lld, with scoring_func \"%s\" it must be %d",
                    c->groups > 1 ? "n_group" : "selection_bias", c->groups > 1 ? (long long)c->groups : 1LL,
                    score, c->groups > 1);
    if (c->groups > 1 && (c->experts % c->groups || c->experts / c->groups < 2))
        return fail(err, ERROR_USAGE,
                    "n_group = %lld does not divide num_experts = %lld into groups of 2 or more",
                    (long long)c->groups, (long long)c->experts);
    if (c->groups_kept > c->groups)
        return fail(err, ERROR_USAGE, "topk_group = %lld is more than n_group = %lld",
                    (long long)c->groups_kept, (long long)c->groups);
    if (c->topk > c->groups_kept * (c->experts / c->groups))
        return fail(err, ERROR_USAGE,
                    "num_experts_per_tok = %lld is more than the experts of topk_group = %lld groups of %lld",
                    (long long)c->topk, (long long)c->groups_kept, (long long)(c->experts / c->groups));
    return true;
}

/* The limits that relate two values. */
static bool check_relations(const model_config *c, error *err)
{
    if (c->topk > c->experts)
        return fail(err, ERROR_USAGE, "num_experts_per_tok = %lld is more than num_experts = %lld",
                    (long long)c->topk, (long long)c->experts);
    if (c->hidden % (2 * c->heads) != 0)
        return fail(
            err, ERROR_USAGE,
            "hidden_size = %lld is not a multiple of 2 * num_attention_heads = %lld (RoPE turns pairs)",
            (long long)c->hidden, 2 * (long long)c->heads);
    if (c->dense_layers > c->layers)
        return fail(err, ERROR_USAGE, "first_k_dense_replace = %lld is more than num_hidden_layers = %lld",
                    (long long)c->dense_layers, (long long)c->layers);
    if ((c->dense_layers > 0) != (c->dense_intermediate > 0))
        return fail(
            err, ERROR_USAGE,
            "first_k_dense_replace = %lld and dense_intermediate_size = %lld: both or neither must be 0",
            (long long)c->dense_layers, (long long)c->dense_intermediate);
    return check_router(c, err);
}

bool model_config_check(const model_config *config, error *err)
{
    model_config copy = *config;
    return check_limits(&copy, err) && check_relations(config, err);
}

bool model_config_same(const model_config *have, const model_config *want, error *err)
{
    model_config a = *have, b = *want;
    b.router_aux_loss_coef = a.router_aux_loss_coef;
    b.initializer_range = a.initializer_range;
    for (size_t i = 0; i < COUNT(integer_keys); i++) {
        long long x = *integer_field(&a, i), y = *integer_field(&b, i);
        if (x != y) return fail(err, ERROR_RUNTIME, "%s is %lld, wanted %lld", integer_keys[i].key, x, y);
    }
    for (size_t i = 0; i < COUNT(real_keys); i++) {
        double x = *real_field(&a, i), y = *real_field(&b, i);
        if (!(x == y)) return fail(err, ERROR_RUNTIME, "%s is %.17g, wanted %.17g", real_keys[i].key, x, y);
    }
    for (size_t i = 0; i < COUNT(boolean_keys); i++) {
        bool x = *boolean_field(&a, i), y = *boolean_field(&b, i);
        if (x != y) return fail(err, ERROR_RUNTIME, "%s is %d, wanted %d", boolean_keys[i].key, x, y);
    }
    return true;
}

/* ---- reading ---- */

static bool is_absent(const json_t *value)
{
    return value == NULL || json_is_null(value);
}

static bool read_integer(const json_t *root, const char *key, int64_t absent, int64_t *out, error *err)
{
    const json_t *value = json_object_get(root, key);
    if (is_absent(value)) {
        if (absent == REQUIRED) return fail(err, ERROR_RUNTIME, "%s is missing", key);
        *out = absent;
        return true;
    }
    if (!json_is_integer(value)) return fail(err, ERROR_RUNTIME, "%s is not an integer", key);
    *out = json_integer_value(value);
    return true;
}

static bool read_real(const json_t *root, const char *key, double absent, double *out, error *err)
{
    const json_t *value = json_object_get(root, key);
    if (!is_absent(value) && !json_is_number(value))
        return fail(err, ERROR_RUNTIME, "%s is not a number", key);
    *out = is_absent(value) ? absent : json_number_value(value);
    return true;
}

static bool read_boolean(const json_t *root, const char *key, bool absent, bool *out, error *err)
{
    const json_t *value = json_object_get(root, key);
    if (!is_absent(value) && !json_is_boolean(value))
        return fail(err, ERROR_RUNTIME, "%s is neither true nor false", key);
    *out = is_absent(value) ? absent : json_is_true(value);
    return true;
}

/* The place of a string among the names. */
static bool read_name(const json_t *root, const integer_key *k, int64_t *out, error *err)
{
    const json_t *value = json_object_get(root, k->key);
    *out = k->absent;
    if (is_absent(value)) return true;
    if (!json_is_string(value)) return fail(err, ERROR_RUNTIME, "%s is not a string", k->key);
    for (*out = k->low; *out <= k->high; ++*out)
        if (strcmp(json_string_value(value), k->names[*out]) == 0) return true;
    return fail(err, ERROR_RUNTIME, "%s = \"%.64s\" is not supported", k->key, json_string_value(value));
}

static bool read_fields(const json_t *root, model_config *c, error *err)
{
    for (size_t i = 0; i < COUNT(integer_keys); i++) {
        const integer_key *k = &integer_keys[i];
        if (!(k->names ? read_name(root, k, integer_field(c, i), err)
                       : read_integer(root, k->key, k->absent, integer_field(c, i), err)))
            return false;
    }
    for (size_t i = 0; i < COUNT(real_keys); i++)
        if (!read_real(root, real_keys[i].key, real_keys[i].absent, real_field(c, i), err)) return false;
    for (size_t i = 0; i < COUNT(boolean_keys); i++)
        if (!read_boolean(root, boolean_keys[i].key, boolean_keys[i].absent, boolean_field(c, i), err))
            return false;
    return true;
}

/* A key that, if present, must have the string `only` as its value. */
static bool expect_string(const json_t *root, const char *key, const char *only, error *err)
{
    const json_t *value = json_object_get(root, key);
    if (is_absent(value)) return true;
    if (!json_is_string(value)) return fail(err, ERROR_RUNTIME, "%s is not a string", key);
    if (strcmp(json_string_value(value), only) != 0)
        return fail(err, ERROR_RUNTIME, "%s = \"%.64s\" is not supported, only \"%s\"", key,
                    json_string_value(value), only);
    return true;
}

static bool expect_integer(const json_t *root, const char *key, int64_t only, const char *why, error *err)
{
    int64_t value = only;
    if (!read_integer(root, key, only, &value, err)) return false;
    if (value != only)
        return fail(err, ERROR_RUNTIME, "%s = %lld is not supported, only %lld (%s)", key, (long long)value,
                    (long long)only, why);
    return true;
}

/* "olmoe" or "smoe"; no other type has this forward pass. Before all else, because other types lack other
 * keys too. */
static bool read_model_type(const json_t *root, bool *olmoe, error *err)
{
    const json_t *value = json_object_get(root, "model_type");
    const char *type = json_string_value(value);
    if (is_absent(value)) return fail(err, ERROR_RUNTIME, "model_type is missing");
    if (type == NULL) return fail(err, ERROR_RUNTIME, "model_type is not a string");
    *olmoe = strcmp(type, "olmoe") == 0;
    return *olmoe || strcmp(type, "smoe") == 0 ||
           fail(err, ERROR_RUNTIME, "model_type = \"%.64s\" is not supported, only \"olmoe\" and \"smoe\"",
                type);
}

/* A key that only the type "smoe" has and that makes another model of this one; NULL: there is none. */
static const char *own_key(const model_config *config)
{
    model_config c = *config;
    for (size_t i = 0; i < COUNT(integer_keys); i++)
        if (integer_keys[i].own && *integer_field(&c, i) != integer_keys[i].absent)
            return integer_keys[i].key;
    for (size_t i = 0; i < COUNT(real_keys); i++)
        if (real_keys[i].own && *real_field(&c, i) != real_keys[i].absent) return real_keys[i].key;
    for (size_t i = 0; i < COUNT(boolean_keys); i++)
        if (boolean_keys[i].own && *boolean_field(&c, i) != boolean_keys[i].absent)
            return boolean_keys[i].key;
    return NULL;
}

static bool check_model_type(bool olmoe, const model_config *config, error *err)
{
    const char *key = own_key(config);
    return !olmoe || !key ||
           fail(err, ERROR_RUNTIME, "%s is set, but model_type \"olmoe\" has no such key, only \"smoe\" has",
                key);
}

/* Keys that would change the forward pass. Only the values that this model implements are accepted. */
static bool check_unsupported(const json_t *root, const model_config *config, error *err)
{
    bool attention_bias = false;
    double dropout = 0;
    if (!read_boolean(root, "attention_bias", false, &attention_bias, err)) return false;
    if (attention_bias) return fail(err, ERROR_RUNTIME, "attention_bias = true is not supported, only false");
    if (!read_real(root, "attention_dropout", 0, &dropout, err)) return false;
    if (dropout != 0)
        return fail(err, ERROR_RUNTIME, "attention_dropout = %g is not supported, only 0", dropout);
    if (!is_absent(json_object_get(root, "clip_qkv")))
        return fail(err, ERROR_RUNTIME, "clip_qkv is not supported, only null");
    return expect_string(root, "hidden_act", "silu", err) &&
           expect_integer(root, "num_key_value_heads", config->heads, "num_attention_heads", err) &&
           expect_integer(root, "head_dim", model_config_head_size(config),
                          "hidden_size / num_attention_heads", err);
}

static bool read_root(const json_t *root, model_config *config, error *err)
{
    if (!json_is_object(root)) return fail(err, ERROR_RUNTIME, "is not a JSON object");
    bool olmoe = false;
    return read_model_type(root, &olmoe, err) && read_fields(root, config, err) &&
           config_rope_read(root, &config->rope_theta, err) && check_model_type(olmoe, config, err) &&
           model_config_check(config, err) && check_unsupported(root, config, err);
}

bool model_config_parse(model_config *config, const void *text, size_t size, const char *name, error *err)
{
    *config = (model_config){0};
    json_error_t problem;
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &problem);
    if (root == NULL) return fail(err, ERROR_RUNTIME, "%s: line %d: %s", name, problem.line, problem.text);
    error reason;
    bool ok = read_root(root, config, &reason);
    json_decref(root);
    return ok || fail(err, ERROR_RUNTIME, "%s: %s", name, reason.text);
}

bool model_config_read(model_config *config, const char *path, error *err)
{
    file_map map;
    if (!file_map_open(&map, path, err)) return false;
    bool ok = model_config_parse(config, map.data, map.size, path, err);
    file_map_close(&map);
    return ok;
}

/* ---- writing ---- */

static json_t *build_root(const model_config *config, const char *dtype)
{
    bool olmoe = own_key(config) == NULL;
    model_config c = *config;
    json_t *root =
        json_pack("{s:[s], s:s, s:s, s:I, s:b, s:f, s:n, s:n, s:n, s:n, s:n, s:b, s:b, s:{s:s, s:f}}", //
                  "architectures", olmoe ? "OlmoeForCausalLM" : "SmoeForCausalLM",                     //
                  "model_type", olmoe ? "olmoe" : "smoe",                                              //
                  "hidden_act", "silu",                                                                //
                  "num_key_value_heads", (json_int_t)c.heads,                                          //
                  "attention_bias", 0, "attention_dropout", 0.0, "clip_qkv", "rope_scaling",           //
                  "bos_token_id", "eos_token_id", "pad_token_id",                                      //
                  "output_router_logits", 0, "use_cache", 1,                                           //
                  "rope_parameters", "rope_type", "default", "rope_theta", c.rope_theta);
    if (root == NULL) return NULL;
    bool ok = json_object_set_new(root, "dtype", json_string(dtype)) == 0 &&
              json_object_set_new(root, "torch_dtype", json_string(dtype)) == 0;
    for (size_t i = 0; i < COUNT(integer_keys); i++) {
        const integer_key *k = &integer_keys[i];
        int64_t value = *integer_field(&c, i);
        if (olmoe && k->own) continue;
        ok = ok && json_object_set_new(root, k->key,
                                       k->names ? json_string(k->names[value]) : json_integer(value)) == 0;
    }
    for (size_t i = 0; i < COUNT(real_keys); i++)
        if (!olmoe || !real_keys[i].own)
            ok = ok && json_object_set_new(root, real_keys[i].key, json_real(*real_field(&c, i))) == 0;
    for (size_t i = 0; i < COUNT(boolean_keys); i++)
        if (!olmoe || !boolean_keys[i].own)
            ok = ok &&
                 json_object_set_new(root, boolean_keys[i].key, json_boolean(*boolean_field(&c, i))) == 0;
    if (ok) return root;
    json_decref(root);
    return NULL;
}

/* Takes the keys of the source, except for those that a run changes. */
static bool merge_source(json_t *root, const model_config_extra *extra)
{
    static const char *const changed[] = {"max_position_embeddings", "router_aux_loss_coef", "dtype",
                                          "torch_dtype"};
    json_t *source = json_loadb(extra->source, extra->size, JSON_REJECT_DUPLICATES, NULL);
    bool ok = source != NULL;
    for (size_t i = 0; ok && i < COUNT(changed); i++)
        ok = json_object_set(source, changed[i], json_object_get(root, changed[i])) == 0;
    ok = ok && json_object_update(root, source) == 0;
    json_decref(source);
    return ok;
}

static bool set_special_tokens(json_t *root, const model_config_extra *extra)
{
    static const char *const keys[] = {"eos_token_id", "bos_token_id", "pad_token_id"};
    bool ok = true;
    for (int i = 0; ok && extra->other_tokens && i < 3; i++)
        ok = json_object_set_new(root, keys[i], json_null()) == 0;
    for (int i = 0; ok && extra->end >= 0 && i < 2; i++)
        if (is_absent(json_object_get(root, keys[i])))
            ok = json_object_set_new(root, keys[i], json_integer(extra->end)) == 0;
    return ok;
}

static json_t *build(const model_config *config, const char *dtype, const model_config_extra *extra)
{
    json_t *root = build_root(config, dtype);
    if (root != NULL && (extra->size == 0 || merge_source(root, extra)) && set_special_tokens(root, extra))
        return root;
    json_decref(root);
    return NULL;
}

/* The least number of digits, at least `digits`, with which every real in `value` is read back exactly, so
 * that 1e-05 is not written as 1.0000000000000001e-05. */
static int real_digits(const json_t *value, int digits)
{
    for (size_t i = 0; i < json_array_size(value); i++)
        digits = real_digits(json_array_get(value, i), digits);
    for (void *at = json_object_iter((json_t *)(uintptr_t)value); at != NULL; // it is only read
         at = json_object_iter_next((json_t *)(uintptr_t)value, at))
        digits = real_digits(json_object_iter_value(at), digits);
    for (; json_is_real(value) && digits < 17; digits++) {
        char text[32];
        snprintf(text, sizeof text, "%.*g", digits, json_real_value(value));
        if (strtod(text, NULL) == json_real_value(value)) break;
    }
    return digits;
}

bool model_config_write(const model_config *config, const char *dtype, const model_config_extra *extra,
                        const char *path, error *err)
{
    if (!model_config_check(config, err)) return false;
    json_t *root = build(config, dtype, extra);
    size_t flags = JSON_REAL_PRECISION((size_t)real_digits(root, 6));
    char *text = root == NULL ? NULL : json_dumps(root, JSON_INDENT(2) | JSON_SORT_KEYS | flags);
    json_decref(root);
    if (text == NULL) return fail(err, ERROR_RUNTIME, "%s: out of memory", path);
    size_t length = strlen(text);
    text[length] = '\n'; // replaces the terminating zero; the file is written by length
    bool ok = file_write(path, text, length + 1, err);
    free(text);
    return ok;
}
