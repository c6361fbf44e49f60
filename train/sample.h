/* Sampling from a model, one token at a time. */
#ifndef TRAIN_SAMPLE_H
#define TRAIN_SAMPLE_H

#include "train/model.h"

typedef struct sampler {
    double temperature; // 0: the likeliest token
    double top_p;       // only the likeliest tokens that together have this probability, 0 < top_p <= 1
    uint64_t seed, index;
    int64_t start,
        cached; // tokens [start, start + cached) have their keys and values in the model; 0 at first
} sampler;

/* The token after tokens (count >= 1); between calls tokens are only appended. m is MODEL_GENERATE. The model
 * sees the tokens from s->start on: once they pass its context, it goes on from the last half of them. */
bool sample_next(sampler *s, model *m, const int32_t *tokens, int64_t count, int32_t *next, error *err);

/* The choice itself, from logits (vocab); `order` has room for vocab. Also advances the random numbers. */
int32_t sample_choose(sampler *s, const float *logits, int64_t vocab, int32_t *order);

#endif
