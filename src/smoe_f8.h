/* What smoe.h gets for fp8, once fp8 has been fast enough on a GPU; until then it is private. The experts'
 * GEMMs multiply numbers of 8 bits (e4m3); f8.h says what is quantised, and how. The caller's tensors stay as
 * they are; the weights are quantised ahead, by smoe_quantize_weights.
 *
 * Until the fields are appended to smoe_layer and so on, they stand behind it: a call gets a pointer to the
 * first member, of which struct_size covers the whole. */
#ifndef SMOE_F8_H
#define SMOE_F8_H

#include <smoe.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How the GEMMs of the experts multiply. d and n must be multiples of 16, else SHAPE. LoRA and ranks are
 * UNSUPPORTED; on the CUDA backend so is all but BF16 on compute capability 9.0. With F8 a backward does not
 * overwrite H, so reuse_saved saves no memory. */
typedef enum smoe_compute {
    SMOE_COMPUTE_STORAGE = 0,  /* as dtype */
    SMOE_COMPUTE_F8 = 10,      /* e4m3: up, down, dh, dx_rows, dw2, dw1 */
    SMOE_COMPUTE_F8_DGRAD = 11 /* the same, except dw2 and dw1, as dtype */
} smoe_compute;

typedef struct smoe_layer_f8 {
    smoe_layer layer;
    smoe_compute compute;
} smoe_layer_f8;

typedef struct smoe_sizes_f8 {
    smoe_sizes sizes;
    uint64_t weights_f8_bytes; /* of weights_f8; 0 with SMOE_COMPUTE_STORAGE */
} smoe_sizes_f8;

/* With F8 or F8_DGRAD the calls read weights_f8 and neither w1 nor w2, which may be NULL. With F8 dw2 reads x
 * too. */
typedef struct smoe_forward_args_f8 {
    smoe_forward_args args;
    const void *weights_f8; /* as smoe_quantize_weights left it, aligned to 64 bytes */
    uint64_t weights_f8_size;
} smoe_forward_args_f8;

typedef struct smoe_backward_args_f8 {
    smoe_backward_args args;
    const void *weights_f8; /* the forward's; needed where w2 or w1 would be */
    uint64_t weights_f8_size;
} smoe_backward_args_f8;

typedef struct smoe_quantize_args {
    size_t struct_size;
    const void *w1; /* (experts, 2n, d) in the order of `layout`, of these experts only */
    const void *w2; /* (experts, d, n) */
    smoe_type
        weight_type; /* of w1 and w2: dtype, or SMOE_TYPE_F32 (master weights, which are rounded once) */
    int64_t first_expert;
    int64_t experts;  /* at least 1 */
    void *weights_f8; /* for all experts of the layer, at least weights_f8_bytes; aligned to 64 bytes */
    uint64_t weights_f8_size;
} smoe_quantize_args;
#define SMOE_QUANTIZE_ARGS_INIT                                                                              \
    {                                                                                                        \
        sizeof(smoe_quantize_args), NULL, NULL, SMOE_TYPE_BF16, 0, 0, NULL, 0                                \
    }

/* smoe_quantize_weights: quantises experts first_expert .. first_expert + experts - 1 into weights_f8, whose
 * other bytes stay as they are. To be called after each change of the weights. A layer with STORAGE is an
 * ARGUMENT error. */
smoe_status moe_quantize_weights(smoe_context *context, const smoe_layer *layer,
                                 const smoe_quantize_args *args, void *stream);

#ifdef __cplusplus
}
#endif
#endif
