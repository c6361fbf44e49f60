/* How the experts' blocks route tokens. */
#ifndef TRAIN_ROUTING_H
#define TRAIN_ROUTING_H

#include "smoe.h"

#include <stdint.h>

/* How a pass routes its tokens, and the coefficients of its auxiliary losses. Validation uses the zeroed
 * struct: plain top-K. */
typedef struct train_routing {
    smoe_rounding rounding;
    int32_t tile;
    uint64_t seed, step; // the draws of SR-f
    float balance_coefficient, z_coefficient;
    float bias_rate; // by which a step changes the selection biases; 0: it does not
} train_routing;

#endif
