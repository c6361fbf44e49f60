/* See config_rope.h. */
#include "train/model/config_rope.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_absent(const json_t *value)
{
    return value == NULL || json_is_null(value);
}

static bool is_one_of(const char *key, const char *const *keys)
{
    for (; *keys != NULL; keys++)
        if (strcmp(key, *keys) == 0) return true;
    return false;
}

/* `in` stands before the key in messages, such as "rope_parameters.". */
static bool fail_key(const char *in, const char *key, const json_t *value, const char *only, error *err)
{
    char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
    (fail)(err, ERROR_RUNTIME, "%s%.64s = %.64s is not supported, only %s", in, key, text ? text : "?", only);
    free(text);
    return false;
}

static bool check_type(const char *in, const char *key, const json_t *value, error *err)
{
    if (is_absent(value)) return true;
    const char *type = json_string_value(value);
    return (type != NULL && strcmp(type, "default") == 0) || fail_key(in, key, value, "\"default\"", err);
}

/* A factor of RoPE: of positions, of the turned part of a head or of attention. */
static bool check_factor(const char *in, const char *key, const json_t *value, error *err)
{
    return is_absent(value) || (json_is_number(value) && json_number_value(value) == 1.0) ||
           fail_key(in, key, value, "1", err);
}

static bool read_theta(const char *in, const json_t *value, double *theta, error *err)
{
    if (is_absent(value)) return true;
    if (!json_is_number(value)) return fail(err, ERROR_RUNTIME, "%srope_theta is not a number", in);
    *theta = json_number_value(value);
    return true;
}

/* rope_parameters or rope_scaling. The types first: what the other keys mean depends on them. */
static bool check_object(const char *name, const char *in, const json_t *rope, error *err)
{
    static const char *const types[] = {"rope_type", "type", NULL};
    static const char *const factors[] = {"factor", "attention_factor", "partial_rotary_factor", NULL};
    const char *key;
    json_t *value;
    if (!json_is_object(rope)) return fail(err, ERROR_RUNTIME, "%s is not an object", name);
    for (int i = 0; types[i] != NULL; i++)
        if (!check_type(in, types[i], json_object_get(rope, types[i]), err)) return false;
    json_object_foreach((json_t *)(uintptr_t)rope, key, value) // it is only read
    {
        if (is_one_of(key, factors)) {
            if (!check_factor(in, key, value, err)) return false;
        } else if (!is_absent(value) && !is_one_of(key, types) && strcmp(key, "rope_theta") != 0 &&
                   strcmp(key, "original_max_position_embeddings") != 0) // read by scaled types only
            return fail_key(in, key, value, "null", err);
    }
    return true;
}

/* The keys of the file itself. Those with rope or rotary in their names that are not known are of a model
 * that turns in another way. */
static bool check_root(const json_t *root, error *err)
{
    static const char *const factors[] = {"partial_rotary_factor", "rotary_pct", "rope_ratio", NULL};
    static const char *const read[] = {"rope_theta", "rope_parameters", "rope_scaling", NULL};
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)root, key, value) // it is only read
    {
        const bool names_rope = strstr(key, "rope") != NULL || strstr(key, "rotary") != NULL;
        if (is_one_of(key, factors)) {
            if (!check_factor("", key, value, err)) return false;
        } else if (strcmp(key, "rope_type") == 0) {
            if (!check_type("", key, value, err)) return false;
        } else if (names_rope && !is_one_of(key, read) && !is_absent(value) && !json_is_false(value))
            return fail_key("", key, value, "null", err);
    }
    return true;
}

bool config_rope_read(const json_t *root, double *theta, error *err)
{
    static const char *const objects[] = {"rope_parameters", "rope_scaling"};
    const json_t *base = json_object_get(root, "rope_theta");
    const char *from = is_absent(base) ? NULL : "rope_theta"; // the key that *theta is from
    if (!check_root(root, err) || !read_theta("", base, theta, err)) return false;
    const double outer = *theta;
    for (int i = 0; i < 2; i++) {
        const json_t *rope = json_object_get(root, objects[i]);
        double inner = outer;
        char in[32];
        if (is_absent(rope) || (json_is_object(rope) && json_object_size(rope) == 0)) continue;
        snprintf(in, sizeof in, "%s.", objects[i]);
        if (!check_object(objects[i], in, rope, err) ||
            !read_theta(in, json_object_get(rope, "rope_theta"), &inner, err))
            return false;
        if (from != NULL && inner != *theta)
            return fail(err, ERROR_RUNTIME, "%s = %g, but %srope_theta = %g", from, *theta, in, inner);
        *theta = inner;
        from = i == 0 ? "rope_parameters.rope_theta" : from;
    }
    return true;
}
