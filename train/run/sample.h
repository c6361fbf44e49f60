/* Sampling from a model, one token at a time. */
#ifndef TRAIN_SAMPLE_H
#define TRAIN_SAMPLE_H

#include "train/model/model.h"

typedef struct sampler {
    double temperature; // 0: the likeliest token
    double top_p;       // only the likeliest tokens that together have this probability, 0 < top_p <= 1
    uint64_t seed, index;
    int64_t start,
        cached; // tokens [start, start + cached) have their keys and values in the model; 0 at first
} sampler;

/* Samples the token that follows tokens (count >= 1). Between calls tokens may only be appended. m is
 * MODEL_GENERATE. The model reads the tokens from s->start on. When these are more than its context, it
 * continues with the last half of them. Logits that are not finite are an error. */
bool sample_next(sampler *s, model *m, const int32_t *tokens, int64_t count, int32_t *next, error *err);

/* Chooses a token from logits (vocab). `order` has room for vocab. Also advances the random numbers. */
int32_t sample_choose(sampler *s, const float *logits, int64_t vocab, int32_t *order);

#endif
