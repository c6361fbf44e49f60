/* smoe: Mixture-of-Experts layers, forward and backward, lean in memory and deterministic
 * (SonicMoE, arXiv 2512.14080).
 *
 * This header is the manual. What it does not say is not part of the API. docs/glossary.md explains the
 * terms.
 *
 * Symbols. T tokens, d hidden size, n intermediate size, E experts, K experts of a token (top-K), R rows.
 * A row r is one routed pair: a token t(r), an expert e and a row weight s(r). Rows are sorted by expert,
 * tokens ascending inside an expert. R is T K from logits without rounding. From given top-K it is at most
 * T K, since ids can be skipped. From given rows it is offsets[E]. Matrices are row-major, the last dimension
 * contiguous. X (T, d) is the layer's input, O (T, d) its output, act the activation. dact(h, g) is the
 * gradient of <act(h), g> with respect to h.
 *
 * Stages of the forward:
 *
 *   router_gemm logits = X Wr^T + br (T, E)                                             smoe_route
 *   topk        top-K ids and row weights of every token                                smoe_route
 *   round       drop or add pairs so that every expert's count is a multiple of a tile  smoe_round
 *   plan        rows sorted by expert, their weights s, the map from tokens to rows     smoe_plan
 *   up          H[r] = X[t(r)] W1[e]^T + b1[e],  A[r] = act(H[r])                       smoe_experts_forward
 *   down        Y[r] = A[r] W2[e]^T + b2[e]
 *   combine     O[t] = sum over the rows r of t of s[r] Y[r]
 *
 * Stages of the backward. dO is the gradient of O, dS that of s, and so on; A' = s A; dX~ has one row for
 * each r:
 *
 *   dh          dA'[r] = dO[t(r)] W2[e];  dS[r] = <dA'[r], A[r]> + <dO[t(r)], b2[e]>    smoe_experts_backward
 *               dH[r] = dact(H[r], s[r] dA'[r]);  A'[r] = s[r] A[r]
 *   dw2         dW2[e] = sum_r dO[t(r)]^T A'[r];  db2[e] = sum_r s[r] dO[t(r)]
 *   dx_rows     dX~[r] = dH[r] W1[e]
 *   dw1         dW1[e] = sum_r dH[r]^T X[t(r)];   db1[e] = sum_r dH[r]
 *   dx          dX[t] = sum over the rows r of t of dX~[r]  (+ the router's term dlogits Wr)
 *   router_bwd  dlogits from dS through the score function; dWr = dlogits^T X;          smoe_layer_backward
 *               dbr = sum_t dlogits
 *
 * Rules of every call.
 *  - It returns a status. After anything but SMOE_OK, smoe_last_error(context) gives the reason.
 *  - `stream` is a cudaStream_t of the context's device. NULL is that device's legacy default stream. A call
 *    that takes a stream enqueues its work there and returns. It allocates nothing, waits for nothing and
 *    reads no count back to the host, so a CUDA graph can capture it. The CPU backend ignores the stream and
 *    has finished when it returns. It allocates nothing either, except that a thread's first call starts the
 *    OpenMP threads which serve that thread.
 *  - The caller owns all memory. With the cuda backend every pointer inside an argument struct is a device
 *    pointer. Tensors are aligned to 16 bytes, `saved` and `scratch` to 64. What a call writes must not
 *    overlap anything else that it is given: `out` is not `x`, `dx` is not `dout`.
 *  - The same inputs give the same bits, for any number of threads. On another processor OpenBLAS may choose
 *    other kernels, and then the bits of the CPU backend differ.
 *  - No value in a tensor causes an error. A NaN logit ranks below -inf. A token with a NaN logit among its
 *    top-K gets NaN weights and a NaN output row; no other token changes. A NaN logit outside the top-K adds
 *    0 to the sum of a softmax over all E. In a softmax over logits that include +inf, those share the weight
 *    equally and all others get 0; the z-loss is then +inf. The sigmoid of +inf is 1.
 *  - Every struct starts with struct_size; initialise it with its _INIT macro. New fields are only ever
 *    appended. The library reads the bytes that struct_size covers and uses the default for the rest. If
 *    struct_size is larger than the library's own struct, the additional bytes must be zero.
 *
 * The CPU backend and the process. While one of its calls runs, the number of OpenBLAS threads is 1 for the
 * whole process. Afterwards it is the number from before. If the application has set a number other than 1
 * meanwhile, that number stays. If the application has set 1 meanwhile, the number from before comes back.
 * After a fork, the child lacks the OpenMP threads of its parent. If the thread that forked had made a
 * multi-threaded call before, every multi-threaded call of that thread in the child returns
 * SMOE_ERROR_UNSUPPORTED. In the child a context with threads = 1 works, and so does a new thread.
 */
#ifndef SMOE_H
#define SMOE_H

#include <stddef.h>
#include <stdint.h>

#if defined(SMOE_BUILD) && defined(__GNUC__)
#define SMOE_API __attribute__((visibility("default")))
#else
#define SMOE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version ------------------------------------------------------------------------------------------- */

#define SMOE_VERSION_MAJOR 0
#define SMOE_VERSION_MINOR 1
#define SMOE_VERSION_PATCH 0
#define SMOE_VERSION       (SMOE_VERSION_MAJOR * 10000 + SMOE_VERSION_MINOR * 100 + SMOE_VERSION_PATCH)

SMOE_API int smoe_version(void); /* SMOE_VERSION of the library that is linked */

/* ---- Status -------------------------------------------------------------------------------------------- */

/* The values never change. */
typedef enum smoe_status {
    SMOE_OK = 0,
    SMOE_ERROR_ARGUMENT = 100,    /* a NULL pointer, a value outside its enum, arguments that contradict each
                                     other, a struct of the wrong size */
    SMOE_ERROR_SHAPE = 110,       /* a size of zero or above its limit, K > E, d or n not a multiple of 8 */
    SMOE_ERROR_ALIGNMENT = 120,   /* a pointer that is not aligned */
    SMOE_ERROR_BUFFER = 130,      /* saved or scratch smaller than smoe_query_sizes asked for */
    SMOE_ERROR_UNSUPPORTED = 140, /* a valid description that this backend, build or process cannot run */
    SMOE_ERROR_MEMORY = 150,      /* the host is out of memory or address space (smoe_create only) */
    SMOE_ERROR_DEVICE = 160       /* no device, or the CUDA runtime reported an error */
} smoe_status;

SMOE_API const char *smoe_status_string(smoe_status status); /* static text, never NULL */

/* ---- Context ------------------------------------------------------------------------------------------- */

typedef enum smoe_backend { SMOE_BACKEND_CPU = 0, SMOE_BACKEND_CUDA = 10 } smoe_backend;

/* What a stage callback is told. smoe_stage_string gives the names that `smoe bench` prints. */
typedef enum smoe_stage {
    SMOE_STAGE_ROUTER_GEMM = 0, /* logits = X Wr^T + br */
    SMOE_STAGE_TOPK = 10,
    SMOE_STAGE_ROUND = 20,
    SMOE_STAGE_PLAN = 30,
    SMOE_STAGE_UP = 40,
    SMOE_STAGE_DOWN = 50,
    SMOE_STAGE_COMBINE = 60,
    SMOE_STAGE_DH = 70,
    SMOE_STAGE_DW2 = 80,
    SMOE_STAGE_DX_ROWS = 90,
    SMOE_STAGE_DW1 = 100,
    SMOE_STAGE_DX = 110,
    SMOE_STAGE_ROUTER_BWD = 120
} smoe_stage;

SMOE_API const char *smoe_stage_string(smoe_stage stage); /* "topk", "round", ...: static text, never NULL */

/* Called on the host before (end = 0) and after (end = 1) the work of a stage is enqueued on `stream`, which
 * is the stream of the call. It can record an event there or read a clock. A stage is reported several times
 * in one call when there are several chunks, and not at all when no wanted result needs it. */
typedef void (*smoe_stage_callback)(void *user, smoe_stage stage, int end, void *stream);

/* Opaque. Any thread may use a context, as long as no two calls on it overlap: the forward may run on one
 * thread and the backward on another. Threads that compute at the same time need a context each. */
typedef struct smoe_context smoe_context;

typedef struct smoe_context_options {
    size_t struct_size;
    smoe_backend backend;
    int32_t device;               /* cuda: the number of the device */
    int32_t threads;              /* cpu: number of OpenMP threads, at most 512; 0: OpenMP's default */
    smoe_stage_callback on_stage; /* optional */
    void *on_stage_user;          /* the callback's first argument */
    char *error_text;             /* optional, error_size bytes: smoe_create writes here why it failed */
    size_t error_size;
} smoe_context_options;
#define SMOE_CONTEXT_OPTIONS_INIT                                                                            \
    {                                                                                                        \
        sizeof(smoe_context_options), SMOE_BACKEND_CPU, 0, 0, NULL, NULL, NULL, 0                            \
    }

/* Creates a context. options may be NULL, for the CPU backend with its defaults. The call may allocate and
 * block. The CPU backend makes OpenBLAS allocate its buffers now, and the process keeps them. A buffer takes
 * 128 MiB of address space. There is one for each thread of each context that exists, and one for each
 * OpenBLAS thread beyond the first. On failure *context is NULL. Errors: ARGUMENT, UNSUPPORTED (this build
 * lacks the backend), MEMORY, DEVICE. */
SMOE_API smoe_status smoe_create(smoe_context **context, const smoe_context_options *options);

/* Destroys a context; NULL is allowed. All work enqueued through it must have finished. */
SMOE_API void smoe_destroy(smoe_context *context);

/* The text of the context's last error: the function that was called, the argument, its value and its limit.
 * "" if there was no error. The text stays valid until the next call that fails. */
SMOE_API const char *smoe_last_error(const smoe_context *context);

/* ---- The description of a layer ------------------------------------------------------------------------ */

typedef enum smoe_type {
    SMOE_TYPE_F32 = 0,
    SMOE_TYPE_BF16 = 1,
    SMOE_TYPE_F16 = 2, /* cuda only */
    SMOE_TYPE_I32 = 10,
    SMOE_TYPE_I64 = 11
} smoe_type;

/* Gated activations: g and u are the gate half and the up half of a row of H. Activations without a gate have
 * W1 (E, n, d), b1 (E, n) and H (R, n); h is an element of H. The slope of max(h, 0) at 0 is 0. */
typedef enum smoe_activation {
    SMOE_ACTIVATION_SWIGLU = 0,     /* silu(g) u */
    SMOE_ACTIVATION_GEGLU = 1,      /* gelu(g) u, gelu by erf */
    SMOE_ACTIVATION_GEGLU_TANH = 2, /* gelu(g) u, gelu by its tanh approximation */
    SMOE_ACTIVATION_REGLU = 3,      /* max(g, 0) u */
    SMOE_ACTIVATION_SWIGLU_OAI = 4, /* gpt-oss: with g limited to at most 7 and u to -7..7,
                                       g sigmoid(1.702 g) (u + 1). At a limit itself the slope is that of the
                                       unlimited function, beyond it 0 */
    SMOE_ACTIVATION_SILU = 10,      /* h sigmoid(h) */
    SMOE_ACTIVATION_GELU = 11,      /* gelu(h), by erf */
    SMOE_ACTIVATION_RELU = 12,      /* max(h, 0) */
    SMOE_ACTIVATION_RELU2 = 13      /* max(h, 0)^2 */
} smoe_activation;

/* Where the gate row and the up row of feature j are among the 2n rows of W1[e], and likewise in b1, dW1 and
 * db1. Both layouts are read in place, without a copy. */
typedef enum smoe_layout {
    SMOE_LAYOUT_CONCATENATED = 0, /* gate row j, up row n + j */
    SMOE_LAYOUT_INTERLEAVED = 1   /* gate row 2j, up row 2j + 1 */
} smoe_layout;

/* What the caller gives as routing. */
typedef enum smoe_entry {
    SMOE_ENTRY_FROM_LOGITS = 0, /* router logits, or the router's weight from which they are computed */
    SMOE_ENTRY_FROM_TOPK = 1,   /* expert ids and row weights (T, K). Ids outside 0..E-1 are skipped. An
                                   id that a token has twice counts once, at its first position */
    SMOE_ENTRY_FROM_ROWS = 2    /* rows already sorted by expert, with offsets (E+1). X and O have T rows
                                   in the same order: row r is the routed pair r, so t(r) = r */
} smoe_entry;

/* How row weights follow from a token's logits l. p is the softmax of l over all E experts, sigma the
 * sigmoid. Ties go to the lower expert. Where "sparse" is written, dlogits has at most K nonzeros for each
 * token, unless rounding or a loss coefficient makes it dense. */
typedef enum smoe_score {
    SMOE_SCORE_SOFTMAX_TOPK = 0, /* top-K of l, weights p (dense); with renormalize p divided by the sum of
                                    the token's K weights (sparse) */
    SMOE_SCORE_TOPK_SOFTMAX = 1, /* top-K of l, weights the softmax of the K logits (sparse). They sum to 1
                                    already, so renormalize must be 0 */
    SMOE_SCORE_SIGMOID = 2 /* top-K of sigma(l) + selection_bias, weights sigma(l), with renormalize divided
                              by the sum of the token's K weights (both sparse) */
} smoe_score;

/* Token rounding. c is an expert's count under plain top-K, M the tile. A rule rounds c to lo = M floor(c/M)
 * or to hi = M ceil(c/M); where hi > T it takes lo. If c is a multiple of M, lo = hi = c. For each expert all
 * T tokens are ranked. Those that top-K selected come first. Among equals the higher score comes first (p,
 * for SIGMOID the selection score sigma + selection_bias), then the lower token. The first lo or hi tokens
 * of this order are routed. Scores are compared as f32, or rounded to bf16 when the logits are bf16. A pair
 * that top-K selected keeps its weight. An added pair gets the weight p (SIGMOID: sigma) times route_scale.
 * Gradients flow through the weights of kept pairs and of added pairs. */
typedef enum smoe_rounding {
    SMOE_ROUNDING_NONE = 0,
    SMOE_ROUNDING_NR_F = 1, /* nearest: hi when c - lo > M/2 */
    SMOE_ROUNDING_SR_F = 2, /* stochastic: hi when u < (c - lo)/M. 2^32 u is the first word of Philox4x32-10
                               with the key words (seed, seed >> 32) and the counter words
                               (step, step >> 32, expert, 0) */
    SMOE_ROUNDING_NR_S = 3, /* nearest by score: hi when S(hi) - S(c) < S(c) - S(lo), where S(m) is the sum of
                               the first m scores of the ranking, in 64-bit fixed point */
    SMOE_ROUNDING_BALANCE_F = 4, /* the experts in order, with a residual r that starts at 0: hi when
                                    c + r - lo > M/2; then r += c - (the lo or hi that was taken) */
    SMOE_ROUNDING_UP = 5,        /* always hi */
    SMOE_ROUNDING_DOWN = 6       /* always lo */
} smoe_rounding;

typedef struct smoe_layer {
    size_t struct_size;
    int64_t tokens;       /* T >= 1; for FROM_ROWS the number of rows there is room for. Limits:
                             padded_rows < 2^31 (smoe_sizes), T E <= 2^40 */
    int64_t hidden;       /* d, a multiple of 8, at most 2^20 */
    int64_t intermediate; /* n, a multiple of 8, at most 2^20 */
    int64_t experts;      /* E, 1..4096 */
    int64_t topk;         /* K, 1..64, at most E; for FROM_ROWS 1 */
    smoe_type dtype;      /* storage of X, Wr, br, W1, b1, W2, b2, H, O, dO and dX; arithmetic is f32 */
    smoe_activation activation;
    smoe_layout layout;
    smoe_entry entry;
    smoe_type index_type;    /* topk_ids and offsets: SMOE_TYPE_I32 or SMOE_TYPE_I64 */
    smoe_type logits_type;   /* logits and dlogits: SMOE_TYPE_F32 or SMOE_TYPE_BF16 */
    smoe_type gradient_type; /* weight and bias gradients: dtype or SMOE_TYPE_F32 */
    int32_t accumulate;  /* 1: weight and bias gradients are added to what is there, in f32 and rounded once;
                            0: they are written */
    int32_t inference;   /* 1: nothing is saved, no backward follows; the plan is in scratch */
    int32_t reuse_saved; /* 1: the backward may overwrite the saved H with dH */
    int32_t chunks;      /* 1, 2, 4, ..., 64: down and combine, dx_rows and dx run once for each chunk. A
                            chunk has 64 * ceil(d / (64 * chunks)) columns, the last one what is left. More
                            chunks need less scratch and give the same bits */
    /* The router, for FROM_LOGITS. FROM_TOPK and FROM_ROWS ignore score, renormalize, tile and seed. With
     * them groups, groups_kept, route_scale and rounding must have their defaults */
    smoe_score score;
    int32_t renormalize;
    int32_t groups;      /* SIGMOID: the experts form this many equal groups of at least 2 experts */
    int32_t groups_kept; /* top-K searches this many groups, those whose two best selection scores have the
                            highest sum */
    float route_scale;   /* multiplies every row weight, after renormalisation */
    smoe_rounding rounding;
    int32_t tile;  /* M of the rounding rules, 1..4096 */
    uint64_t seed; /* SR_F */
} smoe_layer;
#define SMOE_LAYER_INIT                                                                                      \
    {                                                                                                        \
        sizeof(smoe_layer), 0, 0, 0, 0, 1, SMOE_TYPE_BF16, SMOE_ACTIVATION_SWIGLU, SMOE_LAYOUT_CONCATENATED, \
            SMOE_ENTRY_FROM_LOGITS, SMOE_TYPE_I32, SMOE_TYPE_F32, SMOE_TYPE_F32, 0, 0, 0, 1,                 \
            SMOE_SCORE_SOFTMAX_TOPK, 0, 1, 1, 1.0f, SMOE_ROUNDING_NONE, 128, 0                               \
    }

/* Can this context run this layer? OK, or ARGUMENT, SHAPE or UNSUPPORTED with the reason in smoe_last_error.
 * Enqueues nothing. */
SMOE_API smoe_status smoe_supports(smoe_context *context, const smoe_layer *layer);

/* ---- Sizes --------------------------------------------------------------------------------------------- */

typedef struct smoe_sizes {
    size_t struct_size;
    int64_t rows;                /* upper bound on R: T K, plus what rounding can add */
    int64_t padded_rows;         /* upper bound on the rows, pad rows included: rows + 63 E */
    uint64_t saved_bytes;        /* kept from forward to backward: X, H and the plan, without padding. In bf16
                                    2 T d + 4 n R + metadata_bytes (without a gate 2 n R, not 4 n R), where R
                                    is the bound `rows`. In f32 X and H take twice that */
    uint64_t metadata_bytes;     /* the plan's part of saved_bytes */
    uint64_t saved_buffer_bytes; /* the size of `saved`: H with padded_rows rows, and the plan. X is not in
                                    it: it stays where the caller has it */
    uint64_t scratch_forward_bytes;
    uint64_t scratch_backward_bytes;
} smoe_sizes;
#define SMOE_SIZES_INIT                                                                                      \
    {                                                                                                        \
        sizeof(smoe_sizes), 0, 0, 0, 0, 0, 0, 0                                                              \
    }

/* What a layer needs in this context. Enqueues nothing. The same description gives the same sizes. Errors as
 * smoe_supports, and ARGUMENT for `sizes`. */
SMOE_API smoe_status smoe_query_sizes(smoe_context *context, const smoe_layer *layer, smoe_sizes *sizes);

/* ---- Forward ------------------------------------------------------------------------------------------- */

typedef struct smoe_forward_args {
    size_t struct_size;
    const void *x; /* (T, d) dtype */
    /* FROM_LOGITS */
    const void *router_weight; /* Wr (E, d) dtype, or NULL when the caller gives the logits */
    const void *router_bias;   /* br (E) dtype, or NULL */
    void *logits; /* (T, E) logits_type: written when router_weight is given, read otherwise. The backward
                     reads it */
    const float *selection_bias; /* (E) or NULL; SIGMOID only: added for the selection, not in the weights */
    uint64_t step;               /* SR_F: every step draws other numbers */
    float *losses; /* (2) or NULL. losses[0], load balance: E sum_e (count_e / T) mean_t p[t,e], with the
                      counts of plain top-K. losses[1], z: mean_t logsumexp(logits[t])^2 */
    /* FROM_TOPK */
    const void *topk_ids;      /* (T, K) index_type */
    const float *topk_weights; /* (T, K) */
    /* FROM_ROWS */
    const void *offsets; /* (E+1) index_type: offsets[0] = 0, never falling, offsets[E] <= T. Rows of O from
                            offsets[E] on are zero */
    const float *row_weights; /* (T), or NULL: all 1 */
    /* the experts */
    const void *w1; /* (E, 2n, d) dtype, by layout; (E, n, d) without a gate */
    const void *b1; /* (E, 2n) or (E, n), or NULL */
    const void *w2; /* (E, d, n) */
    const void *b2; /* (E, d) or NULL */
    void *out;      /* O (T, d) dtype */
    void *saved;    /* at least saved_buffer_bytes; NULL for inference */
    uint64_t saved_size;
    void *scratch; /* at least scratch_forward_bytes. Nothing in it has to survive smoe_layer_forward; when
                      the stages are called one by one, it must stay untouched between them */
    uint64_t scratch_size;
} smoe_forward_args;
#define SMOE_FORWARD_ARGS_INIT                                                                               \
    {                                                                                                        \
        sizeof(smoe_forward_args), NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL,      \
            NULL, NULL, NULL, NULL, NULL, 0, NULL, 0                                                         \
    }

/* The whole layer: for FROM_LOGITS route, round, plan, experts; for the other entries plan, experts. */
SMOE_API smoe_status smoe_layer_forward(smoe_context *context, const smoe_layer *layer,
                                        const smoe_forward_args *args, void *stream);

/* The parts of the forward, to be called one by one on the same args and in this order. What one part leaves
 * to the next is in saved and scratch. smoe_route is for FROM_LOGITS only. smoe_round must be called when
 * rounding is not NONE, and only then. Each part needs saved (not for inference) and scratch. smoe_route,
 * smoe_round and smoe_plan need the fields of the layer's entry, and x if a FROM_LOGITS layer's router_weight
 * is given. smoe_experts_forward needs x and the fields of the experts. The other fields may be NULL. */
SMOE_API smoe_status smoe_route(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                                void *stream);
SMOE_API smoe_status smoe_round(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                                void *stream);
SMOE_API smoe_status smoe_plan(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                               void *stream);
SMOE_API smoe_status smoe_experts_forward(smoe_context *context, const smoe_layer *layer,
                                          const smoe_forward_args *args, void *stream);

/* Where the results of routing and plan are inside saved (for inference: inside scratch). */
typedef struct smoe_plan_view {
    size_t struct_size;
    const int32_t *topk_ids;      /* (T, K) by falling score; FROM_LOGITS, written by smoe_route */
    const float *topk_weights;    /* (T, K); FROM_LOGITS */
    const int32_t *topk_counts;   /* (E) counts of plain top-K; FROM_LOGITS, written by smoe_plan */
    const int32_t *counts;        /* (E) rows of each expert */
    const int32_t *offsets;       /* (E+1) first row of each expert, pad rows not counted; R = offsets[E] */
    const int32_t *block_offsets; /* (E+1) first block of each expert; a block is 64 rows, also pad rows */
    const int32_t *order;         /* (E) experts by falling count, then by rising id */
    const int32_t *row_token;     /* (padded_rows) t(r); -1 in pad rows and in rows after the last expert's */
    const float *row_weight;      /* (padded_rows) s(r); 0 where row_token is -1 */
    const int32_t *token_offsets; /* (T+1) where each token's rows start in token_rows */
    const int32_t *token_rows;    /* (rows) the rows of each token, as indices of padded rows, ascending */
    const void *h; /* (padded_rows, 2n or n) dtype: gate columns, then up columns; NULL for inference */
} smoe_plan_view;
#define SMOE_PLAN_VIEW_INIT                                                                                  \
    {                                                                                                        \
        sizeof(smoe_plan_view), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL       \
    }

/* Fills the view. Enqueues nothing; with the cuda backend the pointers are device pointers. Of args it needs
 * saved and saved_size, for inference scratch and scratch_size instead. */
SMOE_API smoe_status smoe_view_plan(smoe_context *context, const smoe_layer *layer,
                                    const smoe_forward_args *args, smoe_plan_view *view);

/* The aux-free bias update: bias[e] += gamma sign(mean count - counts[e]). counts (E), bias (E). */
SMOE_API smoe_status smoe_update_selection_bias(smoe_context *context, const smoe_layer *layer,
                                                const int32_t *counts, float *bias, float gamma,
                                                void *stream);

/* ---- Backward ------------------------------------------------------------------------------------------ */

/* Pass NULL for each gradient that is not wanted, for example of frozen weights or of an input without
 * gradient. Work that only such gradients need is not done. An input is required only when a wanted gradient
 * reads it; otherwise it may be NULL. Fields marked unused are never read and may be NULL. */
typedef struct smoe_backward_args {
    size_t struct_size;
    /* what the forward was given */
    const void *x;               /* (T, d); read for dw1, drouter_weight */
    const void *router_weight;   /* (E, d) if the forward had it, else NULL: then dx has no router's term */
    const void *logits;          /* FROM_LOGITS: (T, E); read by smoe_layer_backward for dlogits */
    const float *selection_bias; /* unused */
    const void *topk_ids;        /* FROM_TOPK: (T, K); read for dtopk_weights */
    const float *topk_weights;   /* unused */
    const void *offsets;         /* unused */
    const float *row_weights;    /* unused */
    const void *w1;              /* read for dx */
    const void *b1;              /* unused */
    const void *w2;              /* required if any gradient except db2 is wanted; for dw2 because in the
                                    cuda backend the stage dh, which reads w2, makes its A' */
    const void *b2;              /* given exactly when the forward had it: dS has a term with b2 */
    void *saved;                 /* as the forward left it; overwritten only with reuse_saved */
    uint64_t saved_size;
    /* the gradient of O, and what is computed from it */
    const void *dout;          /* dO (T, d) dtype */
    float balance_coefficient; /* the gradient of balance_coefficient * losses[0] + z_coefficient * losses[1]
                                  is added to dlogits */
    float z_coefficient;
    void *dx;        /* (T, d) dtype, written; includes the router's term when router_weight is given */
    void *dw1, *dw2; /* shaped as w1, w2; gradient_type. For experts without rows: zeros, or unchanged with
                        accumulate */
    void *db1, *db2; /* shaped as b1, b2; gradient_type. db2 only together with b2 */
    void *drouter_weight; /* (E, d) gradient_type. This and drouter_bias only in smoe_layer_backward and
                             together with router_weight */
    void *drouter_bias;   /* (E) gradient_type */
    void *dlogits;        /* (T, E) logits_type, written */
    float *dtopk_weights; /* FROM_TOPK: (T, K), written; 0 for skipped ids */
    float *drow_weights;  /* FROM_ROWS: (T), 0 from offsets[E] on. FROM_LOGITS: dS (padded_rows), 0 in pad
                             rows */
    void *scratch;        /* at least scratch_backward_bytes, whichever gradients are wanted */
    uint64_t scratch_size;
} smoe_backward_args;
#define SMOE_BACKWARD_ARGS_INIT                                                                              \
    {                                                                                                        \
        sizeof(smoe_backward_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,  \
            NULL, 0, NULL, 0.0f, 0.0f, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0   \
    }

/* The backward of the whole layer. It computes from dout the gradients that are wanted: dx, the experts'
 * gradients and, FROM_LOGITS, dlogits and the router's gradients. */
SMOE_API smoe_status smoe_layer_backward(smoe_context *context, const smoe_layer *layer,
                                         const smoe_backward_args *args, void *stream);

/* The experts' part alone: no dlogits, no gradients of the router, no router's term in dx. dS is written to
 * drow_weights or dtopk_weights. FROM_TOPK and FROM_ROWS have no more than this, and smoe_layer_backward does
 * the same for them. */
SMOE_API smoe_status smoe_experts_backward(smoe_context *context, const smoe_layer *layer,
                                           const smoe_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif
#endif /* SMOE_H */
