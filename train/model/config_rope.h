/* What a config.json says about RoPE. The model computes plain RoPE with one base, rope_theta. */
#ifndef TRAIN_CONFIG_ROPE_H
#define TRAIN_CONFIG_ROPE_H

#include "base/error.h"

#include <jansson.h>

/* Reads the base from the keys rope_theta, rope_parameters and rope_scaling of `root` (newer files have the
 * base in rope_parameters); those that are there must agree. *theta has the value for a file without any.
 * Errors, with the name of the key: everything else about RoPE, unless its value changes nothing, such as
 * the type "default" or a factor of 1. */
bool config_rope_read(const json_t *root, double *theta, error *err);

#endif
