/* smoe: Mixture-of-Experts layers, forward and backward, lean in memory and deterministic
 * (SonicMoE, arXiv 2512.14080).
 *
 * This header is the manual; what it does not say is not API.
 *
 * Terms. T tokens, d hidden, n intermediate, E experts, K top-k, R routed rows (T*K without rounding). A row
 * r is one (token, expert) pair; rows are sorted by expert, tokens ascending inside an expert. Matrices are
 * row-major, the last dimension contiguous.
 *
 *   route       logits = X Wr^T + br (T, E); top-K ids and weights of every token       smoe_route
 *   round       keep, drop or add pairs so that experts' counts are multiples of a tile smoe_round
 *   plan        rows sorted by expert, their weights s, the map from tokens to rows     smoe_plan
 *   up          H[r] = X[t(r)] W1[e]^T + b1[e],  A[r] = act(H[r])                       smoe_experts_forward
 *   down        Y[r] = A[r] W2[e]^T + b2[e]
 *   combine     O[t] = sum over the rows r of t of s[r] Y[r]
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
 *  - It returns a status. Anything but SMOE_OK leaves the reason in smoe_last_error(context).
 *  - `stream` is a cudaStream_t of the context's device; NULL is that device's legacy default stream. Calls
 *    that take one enqueue their work there and return: they allocate nothing, block on nothing, read no
 *    count back to the host and may be captured in a CUDA graph. The CPU backend ignores it and is done on
 *    return; it allocates nothing either, but a thread's first call starts the OpenMP threads that serve it.
 *  - The caller owns all memory. With the cuda backend every pointer inside an argument struct is a device
 *    pointer. Tensors are aligned to 16 bytes, `saved` and `scratch` to 64. What a call writes may overlap
 *    nothing else that it is given: `out` is not `x`, `dx` is not `dout`.
 *  - Same inputs, same bits, whatever the number of threads. On another processor OpenBLAS may choose other
 *    kernels, and the CPU backend's bits then differ.
 *  - Values are never an error. A NaN logit sorts below -inf, and a token that keeps one gets NaN weights and
 *    a NaN output row; no other token changes. In a softmax the logits that are +inf share the weight equally
 *    and all others get 0; with one the z-loss is +inf. The sigmoid of +inf is 1.
 *  - Every struct starts with struct_size and is made with its _INIT macro. Fields are only ever appended.
 *    The library reads the bytes that struct_size covers and takes the default for the rest; bytes past those
 *    that it knows must be zero.
 *
 * The CPU backend and the process. While one of its calls runs, OpenBLAS's number of threads is 1 for the
 * whole process; afterwards it is what it was, or what the application has set meanwhile (a 1 cannot be told
 * apart and is lost). In the child of a fork, a thread that ran a call with more than one thread before the
 * fork gets UNSUPPORTED for the next one, since its OpenMP threads are not there; a context with threads = 1
 * works, and so does a new thread.
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

/* Values are pinned. */
typedef enum smoe_status {
    SMOE_OK = 0,
    SMOE_ERROR_ARGUMENT = 100,    /* a NULL pointer, a value outside its enum, arguments that contradict each
                                     other, a struct of the wrong size */
    SMOE_ERROR_SHAPE = 110,       /* a size of zero or past its limit, K > E, d or n not a multiple of 8 */
    SMOE_ERROR_ALIGNMENT = 120,   /* a pointer that is not aligned */
    SMOE_ERROR_BUFFER = 130,      /* saved or scratch smaller than smoe_query_sizes asked for */
    SMOE_ERROR_UNSUPPORTED = 140, /* a valid description that this backend, build or process cannot run */
    SMOE_ERROR_MEMORY = 150,      /* the host is out of memory or address space (smoe_create only) */
    SMOE_ERROR_DEVICE = 160       /* no device, or the CUDA runtime reported an error */
} smoe_status;

SMOE_API const char *smoe_status_string(smoe_status status); /* static text, never NULL */

/* ---- Context ------------------------------------------------------------------------------------------- */

typedef enum smoe_backend { SMOE_BACKEND_CPU = 0, SMOE_BACKEND_CUDA = 10 } smoe_backend;

/* What a stage callback is told; smoe_stage_string gives the rows' names in `smoe bench`. */
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

/* Called on the host before (end = 0) and after (end = 1) the work of a stage is enqueued on `stream`, the
 * one that the call was given: record an event, read a clock. A stage may come several times in one call
 * (column chunks), and does not come when nothing that is wanted needs it. */
typedef void (*smoe_stage_callback)(void *user, smoe_stage stage, int end, void *stream);

/* Opaque. Any thread may use it, as long as no two calls on it overlap: forward on one thread and backward on
 * another is fine. Threads that compute at the same time need a context each. */
typedef struct smoe_context smoe_context;

typedef struct smoe_context_options {
    size_t struct_size;
    smoe_backend backend;
    int32_t device;               /* cuda: device ordinal */
    int32_t threads;              /* cpu: threads of the OpenMP team, at most 512; 0 = OpenMP's default */
    smoe_stage_callback on_stage; /* optional, with its first argument in on_stage_user */
    void *on_stage_user;
    char *error_text; /* optional (error_size bytes): where smoe_create says why it failed */
    size_t error_size;
} smoe_context_options;
#define SMOE_CONTEXT_OPTIONS_INIT                                                                            \
    {                                                                                                        \
        sizeof(smoe_context_options), SMOE_BACKEND_CPU, 0, 0, NULL, NULL, NULL, 0                            \
    }

/* Creates a context; options may be NULL (the CPU backend). May allocate and block: the CPU backend lets
 * OpenBLAS take its buffers now, 128 MiB of address space a thread, which the process keeps. On failure
 * *context is NULL. Errors: ARGUMENT, UNSUPPORTED (a backend this build lacks), MEMORY, DEVICE. */
SMOE_API smoe_status smoe_create(smoe_context **context, const smoe_context_options *options);

/* Destroys a context; NULL is fine. Work already enqueued must have finished. */
SMOE_API void smoe_destroy(smoe_context *context);

/* The text of the context's last error: the function that was called, argument, value, limit. "" if there was
 * none; valid until the next failing call. */
SMOE_API const char *smoe_last_error(const smoe_context *context);

/* ---- The description of a layer ------------------------------------------------------------------------ */

typedef enum smoe_type {
    SMOE_TYPE_F32 = 0,
    SMOE_TYPE_BF16 = 1,
    SMOE_TYPE_F16 = 2, /* cuda only */
    SMOE_TYPE_I32 = 10,
    SMOE_TYPE_I64 = 11
} smoe_type;

/* g and u are the gate and up halves of H. Those without a gate have W1 [E, n, d], b1 [E, n] and H (R, n).
 * The slope of max(h, 0) at 0 is 0. */
typedef enum smoe_activation {
    SMOE_ACTIVATION_SWIGLU = 0,     /* silu(g) u */
    SMOE_ACTIVATION_GEGLU = 1,      /* gelu(g) u, gelu by erf */
    SMOE_ACTIVATION_GEGLU_TANH = 2, /* gelu(g) u, gelu by its tanh approximation */
    SMOE_ACTIVATION_REGLU = 3,      /* max(g, 0) u */
    SMOE_ACTIVATION_SWIGLU_OAI = 4, /* g = min(g, 7), u = clamp(u, -7, 7): g sigmoid(1.702 g) (u + 1). The
                                       gradient passes at the limits themselves and is 0 beyond them */
    SMOE_ACTIVATION_SILU = 10,      /* h sigmoid(h) */
    SMOE_ACTIVATION_GELU = 11,      /* by erf */
    SMOE_ACTIVATION_RELU = 12,
    SMOE_ACTIVATION_RELU2 = 13 /* max(h, 0)^2 */
} smoe_activation;

/* Where the gate and up rows of feature j stand among the 2n rows of W1[e] (and of b1, dW1, db1). No copy is
 * ever made. */
typedef enum smoe_layout {
    SMOE_LAYOUT_CONCATENATED = 0, /* gate row j, up row n + j */
    SMOE_LAYOUT_INTERLEAVED = 1   /* gate row 2j, up row 2j + 1 */
} smoe_layout;

/* The three ways in. */
typedef enum smoe_entry {
    SMOE_ENTRY_FROM_LOGITS = 0, /* tokens with router logits, or with the router's weight */
    SMOE_ENTRY_FROM_TOPK = 1,   /* tokens with given ids and weights (T, K); ids outside 0..E-1 are skipped,
                                   and a repeated id of one token counts once, at its lowest k */
    SMOE_ENTRY_FROM_ROWS = 2    /* rows already sorted by expert, with offsets [E+1]: T rows in, T rows out in
                                   the same order */
} smoe_entry;

/* Weights from logits l; p is the softmax of l over all E, sigma the sigmoid. Ties go to the lower
 * expert. dlogits has K nonzeros a token where marked sparse, unless rounding or a loss coefficient
 * makes it dense. */
typedef enum smoe_score {
    SMOE_SCORE_SOFTMAX_TOPK = 0, /* top-K of l, weights p (dense); with renormalize p over the sum of the K
                                    kept (sparse) */
    SMOE_SCORE_TOPK_SOFTMAX = 1, /* top-K of l, weights their softmax (sparse); they sum to one already, so
                                    renormalize must be 0 */
    SMOE_SCORE_SIGMOID = 2 /* top-K of sigma(l) + selection_bias, weights sigma(l), with renormalize over
                              their sum (sparse) */
} smoe_score;

/* Token rounding: c = an expert's count under plain top-K, M the tile, lo = M floor(c/M), hi = M ceil(c/M);
 * hi > T becomes lo, and a multiple of M stays. Inside an expert selected tokens rank first, then by score
 * (p, or for SIGMOID the selection score), then the lower token; the first lo or hi are taken. Scores are
 * compared as f32, or rounded to bf16 when the logits are bf16. A kept pair has the weight that plain top-K
 * gives it; an added pair has p (SIGMOID: sigma), times route_scale. Both are differentiated. */
typedef enum smoe_rounding {
    SMOE_ROUNDING_NONE = 0,
    SMOE_ROUNDING_NR_F = 1, /* nearest: hi when c - lo > M/2 */
    SMOE_ROUNDING_SR_F = 2, /* stochastic: hi when u < (c - lo)/M; 2^32 u is the first word of Philox4x32-10,
                               key words (seed, seed >> 32), counter words (step, step >> 32, expert, 0) */
    SMOE_ROUNDING_NR_S = 3, /* nearest by score: hi when S(hi) - S(c) < S(c) - S(lo), S(m) the sum of the
                               first m scores in 64-bit fixed point */
    SMOE_ROUNDING_BALANCE_F = 4, /* experts in order with a residual r = 0: hi when c + r - lo > M/2; then
                                    r += c - picked */
    SMOE_ROUNDING_UP = 5,        /* always hi */
    SMOE_ROUNDING_DOWN = 6       /* always lo */
} smoe_rounding;

typedef struct smoe_layer {
    size_t struct_size;
    int64_t tokens;       /* T >= 1; for FROM_ROWS the capacity in rows. padded_rows < 2^31, T E <= 2^40 */
    int64_t hidden;       /* d, a multiple of 8, at most 2^20 */
    int64_t intermediate; /* n, a multiple of 8, at most 2^20 */
    int64_t experts;      /* E, 1..4096 */
    int64_t topk;         /* K, 1..64, at most E; for FROM_ROWS 1 */
    smoe_type dtype;      /* storage of X, W, b, H, O and their gradients; arithmetic is f32 */
    smoe_activation activation;
    smoe_layout layout;
    smoe_entry entry;
    smoe_type index_type;    /* given ids and offsets: SMOE_TYPE_I32 or SMOE_TYPE_I64 */
    smoe_type logits_type;   /* logits and dlogits: SMOE_TYPE_F32 or SMOE_TYPE_BF16 */
    smoe_type gradient_type; /* weight and bias gradients: dtype, or SMOE_TYPE_F32 for a main-grad */
    int32_t accumulate;  /* 1: weight and bias gradients are added to what is there, 0: they are written */
    int32_t inference;   /* 1: nothing is saved (the plan lives in scratch), no backward follows */
    int32_t reuse_saved; /* 1: the backward may destroy the saved H (dH takes its place) */
    int32_t chunks;      /* 1, 2, 4, ..., 64: down + combine and dx_rows + dx go by chunks of
                            64 ceil(d / (64 chunks)) columns; scratch falls, the bits of the results stay */
    /* FROM_LOGITS: the router. Other entries ignore score, renormalize, tile and seed; groups, route_scale
     * and rounding must have their defaults */
    smoe_score score;
    int32_t renormalize;
    int32_t groups;      /* SIGMOID: experts in this many equal groups of at least 2 ... */
    int32_t groups_kept; /* ... of which those with the highest sum of their two best selection scores are
                            searched */
    float route_scale;   /* multiplies every weight, after renormalisation */
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

/* Does this context run this layer? OK, or ARGUMENT, SHAPE, UNSUPPORTED with the reason in smoe_last_error.
 * Host only. */
SMOE_API smoe_status smoe_supports(smoe_context *context, const smoe_layer *layer);

/* ---- Sizes --------------------------------------------------------------------------------------------- */

typedef struct smoe_sizes {
    size_t struct_size;
    int64_t rows;            /* bound on R: T K, plus what rounding can add */
    int64_t padded_rows;     /* bound on the rows with every expert padded to a multiple of 64: rows + 63 E */
    uint64_t saved_bytes;    /* kept from forward to backward, X included, unpadded: 2 T d + 4 n R +
                                metadata_bytes (bf16, gated; 2 n R without a gate; f32 doubles both) */
    uint64_t metadata_bytes; /* the plan's part of it */
    uint64_t saved_buffer_bytes; /* what to allocate as `saved`: H at padded_rows and the plan; X stays the
                                    caller's */
    uint64_t scratch_forward_bytes;
    uint64_t scratch_backward_bytes;
} smoe_sizes;
#define SMOE_SIZES_INIT                                                                                      \
    {                                                                                                        \
        sizeof(smoe_sizes), 0, 0, 0, 0, 0, 0, 0                                                              \
    }

/* What a layer needs in this context. Host only; the same for the same description. Errors as smoe_supports,
 * and ARGUMENT for sizes. */
SMOE_API smoe_status smoe_query_sizes(smoe_context *context, const smoe_layer *layer, smoe_sizes *sizes);

/* ---- Forward ------------------------------------------------------------------------------------------- */

typedef struct smoe_forward_args {
    size_t struct_size;
    const void *x; /* (T, d) dtype */
    /* FROM_LOGITS */
    const void *router_weight; /* Wr (E, d) dtype, or NULL: then the logits are given */
    const void *router_bias;   /* br (E) dtype, or NULL */
    void *logits; /* (T, E) logits_type: written when router_weight is given, read otherwise. The caller
                     keeps it for the backward */
    const float *selection_bias; /* (E) or NULL; SIGMOID only: moves the selection, never the weights */
    uint64_t step;               /* SR_F: a new draw for every step */
    float *losses; /* (2) or NULL: load balance E sum_e (count_e / T) mean_t p[t,e] with counts of plain
                      top-K, and z mean_t logsumexp(logits[t])^2 */
    /* FROM_TOPK */
    const void *topk_ids;      /* (T, K) index_type */
    const float *topk_weights; /* (T, K) */
    /* FROM_ROWS */
    const void *offsets; /* (E+1) index_type: offsets[0] = 0, never falling, offsets[E] <= T; rows past it
                            give zeros */
    const float *row_weights; /* (T), or NULL for ones */
    /* the experts */
    const void *w1; /* (E, 2n, d) dtype, by layout; (E, n, d) without a gate */
    const void *b1; /* (E, 2n) or (E, n), or NULL */
    const void *w2; /* (E, d, n) */
    const void *b2; /* (E, d) or NULL */
    void *out;      /* O (T, d) dtype */
    void *saved;    /* saved_buffer_bytes; NULL for inference */
    uint64_t saved_size;
    void *scratch; /* scratch_forward_bytes; between calls it holds only what a stage leaves to the next */
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

/* Its stages, one by one, on the same args and in this order; what one leaves to the next stands in saved and
 * scratch. smoe_route is for FROM_LOGITS only; smoe_round comes exactly when rounding is not NONE. A stage
 * needs the args it reads; the others may be NULL. */
SMOE_API smoe_status smoe_route(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                                void *stream);
SMOE_API smoe_status smoe_round(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                                void *stream);
SMOE_API smoe_status smoe_plan(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                               void *stream);
SMOE_API smoe_status smoe_experts_forward(smoe_context *context, const smoe_layer *layer,
                                          const smoe_forward_args *args, void *stream);

/* Where the stages' results stand inside saved (for inference: scratch). */
typedef struct smoe_plan_view {
    size_t struct_size;
    const int32_t *topk_ids;    /* (T, K) by falling score; FROM_LOGITS, from smoe_route */
    const float *topk_weights;  /* (T, K); FROM_LOGITS */
    const int32_t *topk_counts; /* (E) tokens of each expert under plain top-K; FROM_LOGITS, from smoe_plan */
    const int32_t *counts;      /* (E) rows of each expert */
    const int32_t *offsets;     /* (E+1) their sums: R = offsets[E] */
    const int32_t *block_offsets; /* (E+1) first 64-row block of each expert among the padded rows */
    const int32_t *order;         /* (E) experts by falling count, then by rising id */
    const int32_t *row_token; /* (padded_rows) t(r), -1 in every pad row, those past the last expert too */
    const float *row_weight;  /* (padded_rows) s(r), 0 in pad rows */
    const int32_t *token_offsets; /* (T+1) into token_rows */
    const int32_t *token_rows;    /* (rows) padded rows of each token, ascending */
    const void *h; /* (padded_rows, 2n or n) dtype: gate columns, then up columns; NULL for inference */
} smoe_plan_view;
#define SMOE_PLAN_VIEW_INIT                                                                                  \
    {                                                                                                        \
        sizeof(smoe_plan_view), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL       \
    }

/* Host only; with the cuda backend the pointers are device pointers. Of args it needs saved and saved_size,
 * for inference scratch and scratch_size instead. */
SMOE_API smoe_status smoe_view_plan(smoe_context *context, const smoe_layer *layer,
                                    const smoe_forward_args *args, smoe_plan_view *view);

/* The aux-free balancing step: bias[e] += gamma sign(mean count - counts[e]). counts (E), bias (E). */
SMOE_API smoe_status smoe_update_selection_bias(smoe_context *context, const smoe_layer *layer,
                                                const int32_t *counts, float *bias, float gamma,
                                                void *stream);

/* ---- Backward ------------------------------------------------------------------------------------------ */

/* A gradient that is not wanted is NULL, each by itself: frozen weights, a frozen router, inputs without
 * gradient. What only it needs is not computed, and its inputs may be NULL too: an input is required when a
 * wanted gradient reads it. Fields marked unused are read by nothing and may be NULL. */
typedef struct smoe_backward_args {
    size_t struct_size;
    /* what the forward was given */
    const void *x;             /* (T, d); read for dw1, drouter_weight */
    const void *router_weight; /* (E, d) when the forward had it, else NULL: then dx has no router's term */
    const void *logits;        /* (T, E); smoe_layer_backward from logits, for all that comes from dlogits */
    const float *selection_bias; /* unused */
    const void *topk_ids;        /* FROM_TOPK: (T, K); read for dtopk_weights */
    const float *topk_weights;   /* unused */
    const void *offsets;         /* unused */
    const float *row_weights;    /* unused */
    const void *w1;              /* read for dx */
    const void *b1;              /* unused */
    const void *w2;              /* read for all but db2 */
    const void *b2;              /* exactly when the forward had it: dS has a part of it */
    void *saved;                 /* as the forward left it; changed only with reuse_saved */
    uint64_t saved_size;
    /* what comes back */
    const void *dout;          /* dO (T, d) dtype */
    float balance_coefficient; /* the gradient of balance_coefficient losses[0] + z_coefficient losses[1] is
                                  added */
    float z_coefficient;
    void *dx;             /* (T, d) dtype, written; with the router's term when router_weight is given */
    void *dw1, *dw2;      /* as w1, w2, gradient_type; experts without rows get zeros (accumulate: stay) */
    void *db1, *db2;      /* as b1, b2, gradient_type; db2 with b2 only */
    void *drouter_weight; /* (E, d) gradient_type; this and the next: smoe_layer_backward with router_weight
                             only */
    void *drouter_bias;   /* (E) gradient_type */
    void *dlogits;        /* (T, E) logits_type, written */
    float *dtopk_weights; /* FROM_TOPK: (T, K), written, 0 for skipped ids */
    float *drow_weights;  /* FROM_ROWS: (T), rows past offsets[E] 0; FROM_LOGITS: dS (padded_rows), pads 0 */
    void *scratch;        /* scratch_backward_bytes, whatever is wanted */
    uint64_t scratch_size;
} smoe_backward_args;
#define SMOE_BACKWARD_ARGS_INIT                                                                              \
    {                                                                                                        \
        sizeof(smoe_backward_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,  \
            NULL, 0, NULL, 0.0f, 0.0f, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0   \
    }

/* The whole layer back: dout to dx, the experts' gradients and, from logits, dlogits and the router's
 * gradients, of these what is wanted. */
SMOE_API smoe_status smoe_layer_backward(smoe_context *context, const smoe_layer *layer,
                                         const smoe_backward_args *args, void *stream);

/* The experts' part alone: no dlogits, no router gradients, no router term in dx; dS in drow_weights or
 * dtopk_weights. For FROM_TOPK and FROM_ROWS this is all there is, and smoe_layer_backward does the same. */
SMOE_API smoe_status smoe_experts_backward(smoe_context *context, const smoe_layer *layer,
                                           const smoe_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif
#endif /* SMOE_H */
