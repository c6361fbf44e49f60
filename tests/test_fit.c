/* What a run chooses on a device with little memory (train/run/fit.h), on a CPU device that pretends to have
 * as much memory as the test says. That neither choice changes a bit is tested in test_model. */
#include "train/cpu/cpu.h"
#include "train/run/fit.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <omp.h>
#include <string.h>

enum { ROWS = 6, CHOICES = 4 };
static const struct {
    model_recompute recompute;
    int32_t chunks;
} in_order[CHOICES] = {
    {RECOMPUTE_NORMS, 1}, {RECOMPUTE_NORMS, 4}, {RECOMPUTE_NORMS_QK, 4}, {RECOMPUTE_LAYERS, 4}};

static size_t left;

static size_t pretended(train_device *dv)
{
    (void)dv;
    return left;
}

typedef struct small_device {
    train_device *device;
    train_ops ops;
    train_settings settings;
    size_t bytes[CHOICES];
} small_device;

static model_options options_of(const train_settings *s)
{
    return (model_options){
        .sequences = ROWS, .parts = 1, .use = MODEL_TRAIN, .recompute = s->recompute, .chunks = s->chunks};
}

static void setup(small_device *d)
{
    error err = {0};
    omp_set_num_threads(
        4); // with fewer, the experts' scratch is less than what else uses its memory by turns
    d->device = cpu_open(&err);
    assert_non_null(d->device);
    d->ops = *d->device->ops;
    d->ops.available = pretended;
    d->device->ops = &d->ops;
    d->settings = train_settings_default();
    d->settings.config.hidden = 256;
    for (int i = 0; i < CHOICES; i++) {
        model_options o = options_of(&d->settings);
        o.recompute = in_order[i].recompute, o.chunks = in_order[i].chunks;
        if (!fit_bytes(&d->bytes[i], d->device, &d->settings.config, &o, true, &err))
            fail_msg("%s", err.text);
        assert_true(i == 0 || d->bytes[i] < d->bytes[i - 1]);
    }
}

/* Just enough for `bytes`, or one byte less. */
static size_t enough(size_t bytes)
{
    size_t all = bytes;
    while (all - all / 64 < bytes) all++;
    return all;
}

static void takes_the_first_that_fits(void **state)
{
    (void)state;
    small_device d;
    setup(&d);
    for (int i = 0; i < CHOICES; i++)
        for (int less = 0; less < 2; less++) {
            const int wanted = i + less;
            if (wanted == CHOICES) continue;
            error err = {0};
            model_options o = options_of(&d.settings);
            left = enough(d.bytes[i]) - (size_t)less;
            if (!fit_choose(&o, d.device, &d.settings, NULL, &err)) fail_msg("%s", err.text);
            assert_int_equal(o.recompute, in_order[wanted].recompute);
            assert_int_equal(o.chunks, in_order[wanted].chunks);
        }
    left = 0; // not known
    error err = {0};
    model_options o = options_of(&d.settings);
    assert_true(fit_choose(&o, d.device, &d.settings, NULL, &err));
    assert_int_equal(o.recompute, RECOMPUTE_NORMS);
    d.device->ops->close(d.device);
}

static void keeps_what_is_given(void **state)
{
    (void)state;
    small_device d;
    error err = {0};
    setup(&d);
    left = enough(d.bytes[1]);
    d.settings.keep_chunks = true; // then only more recomputation helps
    model_options o = options_of(&d.settings);
    if (!fit_choose(&o, d.device, &d.settings, NULL, &err)) fail_msg("%s", err.text);
    assert_true(o.recompute > RECOMPUTE_NORMS && o.chunks == 1);
    left = d.bytes[CHOICES - 1];
    d.settings.keep_recompute = true;
    o = options_of(&d.settings);
    assert_false(fit_choose(&o, d.device, &d.settings, NULL, &err));
    assert_true(o.recompute == RECOMPUTE_NORMS && o.chunks == 1);
    assert_non_null(strstr(err.text, "--recompute norms and --chunks 1"));
    d.device->ops->close(d.device);
}

static void names_the_micro_batches(void **state)
{
    (void)state;
    small_device d;
    error err = {0};
    size_t bytes;
    setup(&d);
    model_options o = options_of(&d.settings), fewer = o;
    fewer.recompute = RECOMPUTE_LAYERS, fewer.chunks = 4, fewer.parts = 3, fewer.sequences = ROWS / 3;
    if (!fit_bytes(&bytes, d.device, &d.settings.config, &fewer, true, &err)) fail_msg("%s", err.text);
    left = enough(bytes);
    assert_false(fit_choose(&o, d.device, &d.settings, NULL, &err));
    assert_int_equal(err.code, ERROR_RUNTIME);
    assert_non_null(strstr(err.text, "with --micro-batches 3 it fits"));
    left = 1000;
    memset(&err, 0, sizeof err);
    o = options_of(&d.settings);
    assert_false(fit_choose(&o, d.device, &d.settings, NULL, &err));
    assert_non_null(strstr(err.text, "with no number of --micro-batches it fits"));
    d.device->ops->close(d.device);
}

static int other; /* the choice of another rank */

static void add_other(train_comm *c, void *out, const void *in, comm_type type, int64_t count)
{
    (void)c, (void)in;
    assert_true(type == COMM_F64 && count == CHOICES);
    ((double *)out)[other] += 1.0;
}

static void ranks_take_the_same(void **state)
{
    (void)state;
    const comm_ops ops = {.all_reduce = add_other};
    small_device d;
    setup(&d);
    train_comm comm = {.ops = &ops, .device = d.device, .ranks = 2};
    for (int mine = 0; mine < CHOICES; mine++)
        for (other = 0; other < CHOICES; other++) {
            error err = {0};
            model_options o = options_of(&d.settings);
            const int last = mine > other ? mine : other;
            left = enough(d.bytes[mine]);
            if (!fit_choose(&o, d.device, &d.settings, &comm, &err)) fail_msg("%s", err.text);
            assert_int_equal(o.recompute, in_order[last].recompute);
            assert_int_equal(o.chunks, in_order[last].chunks);
        }
    d.device->ops->close(d.device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_the_first_that_fits),
        cmocka_unit_test(keeps_what_is_given),
        cmocka_unit_test(names_the_micro_batches),
        cmocka_unit_test(ranks_take_the_same),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
