/* The settings of `smoe train` without options, for two to three minutes on two cores and a few megabytes of
 * text. Among runs of equal time these settings gave the lowest loss: many small steps (1,000 to 2,000
 * tokens), a narrow model (d = 96 rather than 128 or more), first weights with standard deviation 0.1 rather
 * than 0.02, and 16 experts rather than 8 or 32. */
#include "train/run/train.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { DEMO_HIDDEN = 96 };

/* Three digits, so that the value can be printed and given again. */
static double short_value(double value)
{
    char text[32];
    snprintf(text, sizeof text, "%.3g", value);
    return strtod(text, NULL);
}

/* The first weights give logits and projections about the same size at every hidden size: their sum over D
 * values has the standard deviation init sqrt(D). */
double train_default_init(const model_config *config)
{
    return short_value(0.1 * fmin(1.0, sqrt((double)DEMO_HIDDEN / (double)config->hidden)));
}

/* AdamW changes every weight by about the rate, so a sum over D values by about D times the rate. */
double train_default_lr(const model_config *config)
{
    return short_value(4e-3 * fmin(1.0, (double)DEMO_HIDDEN / (double)config->hidden));
}

train_settings train_settings_default(void)
{
    train_settings s = {
        .config = model_config_default(),
        .device = {.name = "auto"},
        .out = "smoe-out",
        .batch = 8,
        .parts = 1,
        .seconds = 140,
        .end_lr = 0.1,
        .warmup = 0.05,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .adam_eps = 1e-8,
        .weight_decay = 0.1,
        .clip = 1.0,
        .routing = {.rounding = SMOE_ROUNDING_NONE, .tile = 16, .balance_coefficient = 0.01f},
        .seed = 1,
        .logs = 200,
        .checkpoints = 10,
        .validations = {.count = -1},
        .validation_share = 0.1,
        .keep = 2,
        .recompute = RECOMPUTE_NORMS,
        .chunks = 1,
    };
    s.config.layers = 3;
    s.config.hidden = DEMO_HIDDEN;
    s.config.heads = 4;
    s.config.experts = 16;
    s.config.topk = 2;
    s.config.intermediate = 128;
    s.config.context = 128;
    s.config.initializer_range = train_default_init(&s.config);
    s.lr = train_default_lr(&s.config);
    return s;
}
