/* The shape of a model and its file, Hugging Face's `config.json`.
 *
 * A model without shared expert, dense layers and another router is exactly OLMoE: it is written as
 * model_type "olmoe", which Hugging Face transformers opens as it is. Any other model is written as
 * model_type "smoe". Transformers opens it after `import smoe.transformers` (the Python package), which
 * registers the type. */
#ifndef TRAIN_CONFIG_H
#define TRAIN_CONFIG_H

#include "base/error.h"
#include "src/scores.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct model_config {    // key in config.json
    int64_t vocab;               // vocab_size: rows of the embedding and of the output head
    int64_t hidden;              // hidden_size, d: a multiple of 2 heads (RoPE turns pairs)
    int64_t intermediate;        // intermediate_size, n of one expert
    int64_t layers;              // num_hidden_layers
    int64_t heads;               // num_attention_heads = num_key_value_heads
    int64_t experts;             // num_experts, E
    int64_t topk;                // num_experts_per_tok, K <= E
    bool norm_topk_prob;         // norm_topk_prob: divide the weights of a token's experts by their sum
    int64_t score;               // scoring_func: a smoe_score
    int64_t groups, groups_kept; // n_group, topk_group: see smoe_layer; 1, 1: no groups
    double route_scale;          // routed_scaling_factor: multiplies the weights
    bool selection_bias;         // selection_bias: each expert has one, mlp.gate.e_score_correction_bias
    int64_t shared_intermediate; // shared_expert_intermediate_size, 0: no shared expert
    int64_t dense_layers;        // first_k_dense_replace: the first layers with a dense MLP, 0..layers
    int64_t dense_intermediate;  // dense_intermediate_size: of those; 0 exactly if dense_layers is 0
    int64_t context;             // max_position_embeddings, tokens of one sequence
    double rope_theta;           // rope_theta (also rope_parameters.rope_theta)
    double norm_eps;             // rms_norm_eps
    bool tied;                   // tie_word_embeddings: the output head is the embedding
    double router_aux_loss_coef; // router_aux_loss_coef, weight of the load-balance loss
    double initializer_range;    // initializer_range, standard deviation of the initial weights
} model_config;

/* The names of the scores, by smoe_score. */
extern const char *const model_score_names[MOE_SCORE_COUNT];

/* Elements of a head of the attention. */
static inline int64_t model_config_head_size(const model_config *c)
{
    return c->hidden / c->heads;
}

/* The config of a small, valid model: vocab 256, OLMoE's rope_theta, norm_eps and loss weight. */
model_config model_config_default(void);

/* True if every value is within its limits and the values fit together. Otherwise err names key, value and
 * limit. */
bool model_config_check(const model_config *config, error *err);

/* True if two models have the same tensors and the same forward pass; loss weight and initial range may
 * differ. Otherwise err names the first key that differs and both values. Used before weights are loaded. */
bool model_config_same(const model_config *have, const model_config *want, error *err);

/* Reads the text of a config.json; `name` names the file in messages. Sizes must be present. Some other keys
 * may be absent; they then have OLMoE's defaults in transformers (see config.c). Unknown keys are ignored. A
 * known key with a value that this model does not support is an error: attention_bias true, clip_qkv, another
 * activation, grouped key/value heads, scaled RoPE, another model_type. The result has passed
 * model_config_check. */
bool model_config_parse(model_config *config, const void *text, size_t size, const char *name, error *err);
bool model_config_read(model_config *config, const char *path, error *err);

/* What config.json has beside the model. */
typedef struct model_config_extra {
    const char *source; // text of the config.json of the model that the weights are from; its keys stay, but
    size_t size;        // for the context, the loss weight and the dtype. 0: none
    bool other_tokens;  // the source's ids of special tokens mean nothing: the tokenizer is another
    int64_t end;        // the end-of-text token, for eos_token_id and bos_token_id if the source has none; a
                        // text begins with it too. -1: there is none
} model_config_extra;

/* Writes config.json atomically (train/files/file.h). dtype is the type of the checkpoint's weights:
 * "float32" or "bfloat16". The source must be a text that model_config_parse has read. */
bool model_config_write(const model_config *config, const char *dtype, const model_config_extra *extra,
                        const char *path, error *err);

#endif
