/* smoe: Mixture-of-Experts layers, forward and backward, lean in memory and deterministic
 * (SonicMoE, arXiv 2512.14080).
 *
 * This header and smoe_ep.h are the manual: what they omit is not part of the API. Terms: docs/glossary.md.
 *
 * Symbols.
 *   T, d, n    number of tokens, hidden size, intermediate size
 *   E, K       number of experts, experts of a token (top-K)
 *   X, O       (T, d) the layer's input and output
 *   r, R       a row, and the number of rows. A row is a routed pair: a token t(r) with one of its experts e
 *   H, A, Y    one row for each r, with 2n, n and d columns. For a gated activation, such as SwiGLU, H has
 *              gate columns, then up columns, for both layouts of W1. Without a gate H has n columns
 *   Wr, br     (E, d), (E) the router's weight and bias
 *   W1, b1     (E, 2n, d), (E, 2n) the experts' first weights and biases; without a gate (E, n, d), (E, n)
 *   W2, b2     (E, d, n), (E, d) the experts' second weights and biases
 *   act        the activation; dact(h, g) is the gradient of <act(h), g> with respect to h
 *   s(r)       the row weight: the factor of row r in the sum for its token
 *   A1, B1     (E, r1, d), (E, 2n, r1) LoRA's factors beside W1, of rank r1; without a gate B1 is (E, n, r1).
 *   A2, B2     (E, r2, n), (E, d, r2) those beside W2. A layer has A1 and B1 if its lora_rank1 is not 0, A2
 *              and B2 if its lora_rank2 is not 0
 *   P1, P2     one row for each r, with r1 and r2 columns. Q1 is the gradient of P1, Q2 that of s P2
 *
 * Matrices are row-major; the last dimension is contiguous. Rows are sorted by expert, the rows of an expert
 * by token. In saved and scratch, each expert's rows are followed by pad rows (token -1, weight 0) up to the
 * next multiple of 64 rows. They add nothing to any result. A block is 64 consecutive rows of one expert, pad
 * rows included. padded_rows (in smoe_sizes) is an upper bound on the number of rows and pad rows. An array
 * of padded_rows elements begins with one for each row and pad row; the elements after these belong to no
 * row. "The padded index of a row" is its index in such an array. R follows from the entry (smoe_entry).
 *
 * Stages of the forward:
 *   router_gemm logits = X Wr^T + br (T, E)                                             smoe_route
 *   topk        top-K ids and row weights of every token                                smoe_route
 *   round       drop or add pairs so that every expert's count is a multiple of a tile  smoe_round
 *   plan        rows sorted by expert, their weights s, the map from tokens to rows     smoe_plan
 *   up          H[r] = X[t(r)] W1[e]^T + b1[e],  A[r] = act(H[r])                       smoe_experts_forward
 *   down        Y[r] = A[r] W2[e]^T + b2[e]                                             smoe_experts_forward
 *   combine     O[t] = sum over the rows r of t of s(r) Y[r]                            smoe_experts_forward
 *
 * With LoRA, up also computes P1[r] = X[t(r)] A1[e]^T and adds P1[r] B1[e]^T to H[r]; down computes P2[r] =
 * A[r] A2[e]^T and adds P2[r] B2[e]^T to Y[r]. The caller multiplies B1 and B2 by LoRA's scale, alpha / rank.
 *
 * The plan has all that up, down and combine read about the routing, and for FROM_LOGITS the results of topk.
 *
 * Stages of the backward. dO is the gradient of O, dS the gradient of s, and so on. A' is s A. dX~ has one
 * row for each r. smoe_experts_backward runs all stages but router_bwd; smoe_layer_backward runs all.
 *   dh          dA'[r] = dO[t(r)] W2[e];  dS[r] = <dA'[r], A[r]> + <dO[t(r)], b2[e]>
 *               dH[r] = dact(H[r], s(r) dA'[r]);  A'[r] = s(r) A[r]
 *   dw2         dW2[e] = sum_r dO[t(r)]^T A'[r];  db2[e] = sum_r s(r) dO[t(r)]
 *   dw1         dW1[e] = sum_r dH[r]^T X[t(r)];   db1[e] = sum_r dH[r]
 *   router_bwd  dlogits from dS through the score function; dWr = dlogits^T X;  dbr = sum_t dlogits[t]
 *   dx_rows     dX~[r] = dH[r] W1[e]
 *   dx          dX[t] = sum over the rows r of t of dX~[r]. smoe_layer_backward adds dlogits[t] Wr, which is
 *               called the router's term of dX
 * With LoRA, dh also computes Q2[r] = dO[t(r)] B2[e], adds Q2[r] A2[e] to dA'[r], and computes dB2[e] = sum_r
 * s(r) dO[t(r)]^T P2[r] and dA2[e] = sum_r Q2[r]^T A'[r]. dw1 also computes Q1[r] = dH[r] B1[e], dB1[e] =
 * sum_r dH[r]^T P1[r] and dA1[e] = sum_r Q1[r]^T X[t(r)]; dx_rows adds Q1[r] A1[e] to dX~[r].
 *
 * Rules of every call that takes a layer.
 *  - It returns a status. After anything but SMOE_OK, smoe_last_error(context) gives the reason.
 *  - `stream` is a cudaStream_t of the context's device; NULL is its legacy default stream. A call with the
 *    cuda backend enqueues its work on the stream and returns. Without the option check_offsets it allocates
 *    nothing, waits for nothing and reads no count back to the host, so a CUDA graph can capture it.
 *  - The CPU backend ignores the stream and has finished when a call returns. A call allocates nothing, with
 *    one exception: the first call of a thread starts the OpenMP threads that serve this thread.
 *  - The caller owns all memory. With the cuda backend every pointer to data is a device pointer. Tensors
 *    are aligned to 16 bytes (losses and loss_gradients to 4, token_mask to 1), saved, scratch and weights_f8
 *    to 64. It is SMOE_ERROR_ARGUMENT if memory that a call writes overlaps any other that the call is given.
 *  - The CPU backend checks what an earlier call left in `saved` and `scratch`. If it cannot come from this
 *    layer, the call returns SMOE_ERROR_ARGUMENT.
 *  - The same inputs give the same bits, for any number of threads. Another processor or kind of GPU may give
 *    other bits: OpenBLAS chooses kernels by processor, cuda cuts work by the device's SMs (not by sms).
 *  - No value in a tensor causes an error, except `offsets` against their rule (smoe_forward_args): that is
 *    SMOE_ERROR_ARGUMENT with the CPU backend, and with cuda undefined behaviour without check_offsets.
 *  - A NaN logit ranks below -inf. A token with a NaN logit among its top-K gets NaN weights and a NaN output
 *    row; no other token changes. A NaN logit outside the top-K adds 0 to the denominator of a softmax over
 *    all E. If some logits of a softmax are +inf, these logits share the weight equally, all other logits get
 *    0, and the z-loss is +inf. The sigmoid of +inf is 1.
 *  - Every struct starts with struct_size; initialise it with its _INIT macro. Later versions only append
 *    fields. The library reads what struct_size covers and uses defaults for other fields. Bytes beyond the
 *    library's own struct must be zero.
 *
 * The CPU backend and the process.
 *  - OpenBLAS has one number of threads for the whole process. A call sets it to 1, and at its end restores
 *    what it found, unless the application has set a number other than 1 during the call.
 *  - A forked child lacks the OpenMP threads of its parent. If the thread that forks has used a context with
 *    several threads, then in the child it gets SMOE_ERROR_UNSUPPORTED from every context with several
 *    threads. Other contexts work there, and a new thread of the child can use any. */
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
#define SMOE_VERSION_MINOR 2
#define SMOE_VERSION_PATCH 0
#define SMOE_VERSION       (SMOE_VERSION_MAJOR * 10000 + SMOE_VERSION_MINOR * 100 + SMOE_VERSION_PATCH)

SMOE_API int smoe_version(void); /* SMOE_VERSION of the library that is linked */

/* What this header and smoe_ep.h declare, with defaults, as JSON, from which the Python package makes its
 * bindings. Static text, never NULL; "" if the library was built on a machine without Python. */
SMOE_API const char *smoe_declarations(void);

/* ---- Status. The values never change. ------------------------------------------------------------------ */
typedef enum smoe_status {
    SMOE_OK = 0,
    SMOE_ERROR_ARGUMENT = 100,    /* a NULL pointer, a value outside its enum, arguments that contradict each
                                     other, memory that overlaps, offsets against their rule */
    SMOE_ERROR_SHAPE = 110,       /* a size of zero or above its limit, K > E, d or n not a multiple of 8 */
    SMOE_ERROR_ALIGNMENT = 120,   /* a pointer that is not aligned */
    SMOE_ERROR_BUFFER = 130,      /* saved, scratch or weights_f8 smaller than smoe_query_sizes asked for */
    SMOE_ERROR_UNSUPPORTED = 140, /* a valid description that this backend, build or process cannot run */
    SMOE_ERROR_MEMORY = 150,      /* the host is out of memory or address space (smoe_create only) */
    SMOE_ERROR_DEVICE = 160,      /* no device, or the CUDA runtime reported an error */
    SMOE_ERROR_PEER = 170         /* another rank of a layer with ranks is late or has failed (smoe_ep.h) */
} smoe_status;

SMOE_API const char *smoe_status_string(smoe_status status); /* static text, never NULL */

/* ---- Context ------------------------------------------------------------------------------------------- */
typedef enum smoe_backend { SMOE_BACKEND_CPU = 0, SMOE_BACKEND_CUDA = 10 } smoe_backend;

/* The cuda kernels that multiply. BEST: those written for the device's generation, else the portable ones.
 * PORTABLE: the portable ones, for every GPU from compute capability 8.0 on; they lack only fp8. */
typedef enum smoe_kernels { SMOE_KERNELS_BEST = 0, SMOE_KERNELS_PORTABLE = 1 } smoe_kernels;

/* What a smoe_stage_callback gets; not in the order of time. smoe_stage_string gives the names. */
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
    SMOE_STAGE_ROUTER_BWD = 120,
    SMOE_STAGE_DISPATCH = 130, /* this and the next three: layers with ranks, smoe_ep.h */
    SMOE_STAGE_COLLECT = 140,
    SMOE_STAGE_DISPATCH_BWD = 150,
    SMOE_STAGE_COLLECT_BWD = 160
} smoe_stage;

SMOE_API const char *smoe_stage_string(smoe_stage stage); /* "topk", "round", ...: static text, never NULL */

/* Called on the host before (end = 0) and after (end = 1) the work of a stage is enqueued on the call's
 * `stream`: with several chunks (smoe_layer) maybe several times, and not if no wanted result needs it. */
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
    int32_t check_offsets; /* cuda: 1, for debugging: smoe_plan and smoe_layer_forward FROM_ROWS wait for the
                              stream and check `offsets`; in a capture they are UNSUPPORTED */
    int32_t sms;           /* cuda: up, down, dh, dw2, dw1, dx_rows and the plan FROM_ROWS occupy at most this
                              many SMs, the others are free for other streams; 0: all. Same results */
    smoe_kernels kernels;  /* cuda */
} smoe_context_options;
#define SMOE_CONTEXT_OPTIONS_INIT                                                                            \
    {                                                                                                        \
        sizeof(smoe_context_options), SMOE_BACKEND_CPU, 0, 0, NULL, NULL, NULL, 0, 0, 0, SMOE_KERNELS_BEST   \
    }

/* Creates a context. options may be NULL: the CPU backend with its defaults. The call may allocate and
 * block. On failure *context is NULL. Errors: ARGUMENT, UNSUPPORTED (this build lacks the backend), MEMORY,
 * DEVICE. With the CPU backend OpenBLAS allocates 128 MiB of address space for each thread of the context,
 * more if OpenBLAS is set to several threads. They stay after smoe_destroy, for later contexts. */
SMOE_API smoe_status smoe_create(smoe_context **context, const smoe_context_options *options);

/* Destroys a context; NULL is allowed. All work enqueued through it must have finished. */
SMOE_API void smoe_destroy(smoe_context *context);

/* The text of the context's last error: the function that was called, the argument, its value and its limit.
 * "" if there was no error. The text stays valid until the next call that fails. */
SMOE_API const char *smoe_last_error(const smoe_context *context);

/* Opaque: one rank's handle of a group of ranks, each with other experts of a layer (smoe_ep.h). */
typedef struct smoe_ep smoe_ep;

/* Which kernels a cuda context has: "Hopper (9.0)", or "portable (8.0 and later): REASON". Empty for the CPU
 * backend. The text belongs to the context. Never NULL. */
SMOE_API const char *smoe_kernels_string(const smoe_context *context);

/* ---- The description of a layer ------------------------------------------------------------------------ */
typedef enum smoe_type {
    SMOE_TYPE_F32 = 0, /* as the dtype of a layer: cpu only */
    SMOE_TYPE_BF16 = 1,
    SMOE_TYPE_F16 = 2, /* cuda only */
    SMOE_TYPE_I32 = 10,
    SMOE_TYPE_I64 = 11
} smoe_type;

/* g and u are elements of the gate half and of the up half of a row of H; without a gate h is an element of
 * H. At 0 the derivative of max(h, 0) is 0. Two activations take values from the layer: cg = gate_limit, cu =
 * up_limit, a = gate_alpha, b = up_offset. The derivative of a clamp is 1 up to its limits, 0 beyond. */
typedef enum smoe_activation {
    SMOE_ACTIVATION_SWIGLU = 0,         /* silu(g) u */
    SMOE_ACTIVATION_GEGLU = 1,          /* gelu(g) u, gelu by erf */
    SMOE_ACTIVATION_GEGLU_TANH = 2,     /* gelu(g) u, gelu by its tanh approximation */
    SMOE_ACTIVATION_REGLU = 3,          /* max(g, 0) u */
    SMOE_ACTIVATION_SWIGLU_CLAMPED = 4, /* x sigmoid(a x) (y + b), x = min(g, cg), y = u clamped to -cu..cu */
    SMOE_ACTIVATION_SWIGLU_CAPPED = 5,  /* cg tanh(g/cg) sigmoid(a g) (cu tanh(u/cu) + b) */
    SMOE_ACTIVATION_SILU = 10,          /* h sigmoid(h) */
    SMOE_ACTIVATION_GELU = 11,          /* gelu(h), by erf */
    SMOE_ACTIVATION_RELU = 12,          /* max(h, 0) */
    SMOE_ACTIVATION_RELU2 = 13          /* max(h, 0)^2 */
} smoe_activation;

/* Which of the 2n rows of W1[e] are the gate row and the up row of feature j (a feature is a column of A).
 * The same holds for the elements of b1[e], dW1[e] and db1[e]. Both layouts are read in place. */
typedef enum smoe_layout {
    SMOE_LAYOUT_CONCATENATED = 0, /* gate row j, up row n + j */
    SMOE_LAYOUT_INTERLEAVED = 1   /* gate row 2j, up row 2j + 1 */
} smoe_layout;

/* In what form the caller gives the routing. */
typedef enum smoe_entry {
    SMOE_ENTRY_FROM_LOGITS = 0, /* router logits, or the router's weight from which they are computed. R is T
                                   K; with rounding it depends on the logits */
    SMOE_ENTRY_FROM_TOPK = 1, /* expert ids and row weights (T, K). Ids outside 0..E-1 are skipped, and so is
                                 an id that the token has had before: R <= T K */
    SMOE_ENTRY_FROM_ROWS = 2  /* rows already sorted by expert, with offsets (E+1). X and O have T rows in the
                                 same order: t(r) = r. R = offsets[E] */
} smoe_entry;

/* How the experts of a token and their row weights follow from its logits l. p is the softmax of l over all
 * E experts, sigma the sigmoid. SOFTMAX_TOPK and TOPK_SOFTMAX choose the K experts with the highest l.
 * SIGMOID chooses those with the highest selection score sigma(l) + selection_bias. Ties go to the lower
 * expert.
 *
 *   score            renormalize  row weight of a chosen expert                        dlogits
 *   SOFTMAX_TOPK     0            p                                                    dense
 *   SOFTMAX_TOPK     1            p / the sum of p over the token's K experts          sparse
 *   TOPK_SOFTMAX     0            the softmax of the K logits                          sparse
 *   SIGMOID          0            sigma(l)                                             sparse
 *   SIGMOID          1            sigma(l) / the sum of sigma over the K experts       sparse
 *
 * route_scale then multiplies every weight. Sparse dlogits have at most K nonzeros for each token. Rounding,
 * loss coefficients and loss_gradients make dlogits dense. */
typedef enum smoe_score {
    SMOE_SCORE_SOFTMAX_TOPK = 0,
    SMOE_SCORE_TOPK_SOFTMAX = 1, /* renormalize must be 0: the weights sum to 1 already */
    SMOE_SCORE_SIGMOID = 2
} smoe_score;

/* Token rounding changes the set of routed pairs so that every expert's count is a multiple of the tile M.
 * The count. c is the number of tokens that top-K selected for an expert. lo = M floor(c / M), and hi = M
 * ceil(c / M). A rule chooses lo or hi; if hi > T, every rule chooses lo.
 * The pairs. For each expert all T tokens are ranked: first those that top-K selected for it, then all
 * others; within both groups by falling score, of equal scores the lower token first. The score is p, for
 * SIGMOID the selection score, as f32, or rounded to bf16 if the logits are bf16. The first lo or hi tokens
 * are routed. The weights. A pair that top-K selected keeps its weight. A pair that rounding adds gets the
 * weight p (for SIGMOID: sigma) times route_scale. Gradients flow through the weights of all routed pairs. */
typedef enum smoe_rounding {
    SMOE_ROUNDING_NONE = 0,
    SMOE_ROUNDING_NR_F = 1, /* nearest: hi if c - lo > M/2 */
    SMOE_ROUNDING_SR_F = 2, /* stochastic: hi if u < (c - lo)/M, where 2^32 u is the first word of
                               Philox4x32-10 with the key words (seed, seed >> 32) and the counter words
                               (step, step >> 32, expert, 0) */
    SMOE_ROUNDING_NR_S = 3, /* nearest by score: hi if S(hi) - S(c) < S(c) - S(lo), where S(m) is the sum of
                               the first m scores of the ranking, in 64-bit fixed point */
    SMOE_ROUNDING_BALANCE_F = 4, /* nearest, with a carry q that is 0 before expert 0: experts are rounded by
                                    rising id, hi if c + q - lo > M/2; then q += c - (lo or hi, as chosen) */
    SMOE_ROUNDING_UP = 5,        /* always hi */
    SMOE_ROUNDING_DOWN = 6       /* always lo */
} smoe_rounding;

/* How the GEMMs of the experts multiply. Experimental: it may change in any version.
 * With F8 and F8_DGRAD they multiply numbers of 8 bits (e4m3), each group of which has a power of two as its
 * scale: a token's X or dO, a matrix of an expert, 128 features of a row of A, 256 of dH. The caller's
 * tensors keep their types; the weights are quantised ahead (smoe_quantize_weights). d and n must be
 * multiples of 16. UNSUPPORTED: LoRA, ranks, and on the cuda backend all but BF16 with Hopper's kernels. */
typedef enum smoe_compute {
    SMOE_COMPUTE_STORAGE = 0,  /* as dtype */
    SMOE_COMPUTE_F8 = 10,      /* up, down, dh, dx_rows, dw2 and dw1 in e4m3 */
    SMOE_COMPUTE_F8_DGRAD = 11 /* the same, but dw2 and dw1 as dtype */
} smoe_compute;

typedef struct smoe_layer {
    size_t struct_size;
    int64_t tokens; /* T, at least 1; with expert parallelism it may be 0. For FROM_ROWS an upper bound on R.
                       padded_rows < 2^31, T E <= 2^40 */
    int64_t hidden; /* d, a multiple of 8, at most 2^20 */
    int64_t intermediate; /* n, a multiple of 8, at most 2^20 */
    int64_t experts;      /* E, 1..4096 */
    int64_t topk;         /* K, 1..64, at most E; for FROM_ROWS 1 */
    smoe_type dtype;      /* storage of X, Wr, br, W1, b1, W2, b2, H, O, dO and dX. The cpu backend
                             computes in f32, the cuda kernels multiply in dtype and sum in f32.
                             SMOE_LAYER_INIT sets bf16; a layer of floats needs SMOE_TYPE_F32 */
    smoe_activation activation;
    smoe_layout layout;
    smoe_entry entry;
    smoe_type index_type;    /* topk_ids and offsets: SMOE_TYPE_I32 or SMOE_TYPE_I64 */
    smoe_type logits_type;   /* logits and dlogits: SMOE_TYPE_F32 or SMOE_TYPE_BF16 */
    smoe_type gradient_type; /* weight and bias gradients: dtype or SMOE_TYPE_F32 */
    int32_t accumulate;  /* 1: gradients of weights, biases and LoRA's factors are added to the old values in
                            f32, and the sum is rounded once; 0: they are written */
    int32_t inference;   /* 1: no backward follows. Nothing is saved; the plan is in scratch */
    int32_t reuse_saved; /* 1: the backward may overwrite the saved H with dH, and needs less scratch (no
                            effect with ranks on the CPU, and with F8 on cuda) */
    int32_t chunks;      /* a power of two, 1..64. down and combine, dx_rows and dx run once for each chunk of
                            64 ceil(d / (64 chunks)) columns (the last has the rest), so that only one chunk
                            of Y or dX~ is in scratch. Any number gives the same bits */
    /* The router, for FROM_LOGITS. For FROM_TOPK and FROM_ROWS, score, renormalize, tile and seed are
     * ignored; groups, groups_kept, route_scale and rounding must have their default values */
    smoe_score score;
    int32_t renormalize; /* 0 or 1; see smoe_score */
    int32_t groups;      /* 1: no groups. A value above 1 is for SIGMOID only: the experts are cut into
                            this many runs of consecutive experts, of equal length, which is at least 2 */
    int32_t groups_kept; /* top-K searches only this many groups: those in which the sum of the two best
                            selection scores is highest */
    float route_scale;   /* multiplies every row weight, after renormalisation */
    smoe_rounding rounding;
    int32_t tile;  /* M of the rounding rules, 1..4096 */
    uint64_t seed; /* SR_F */
    /* The values of SWIGLU_CLAMPED and SWIGLU_CAPPED; ignored for other activations. The defaults are
     * gpt-oss's clamped SwiGLU */
    float gate_limit; /* above 0, for SWIGLU_CLAMPED also +inf */
    float up_limit;   /* likewise */
    float gate_alpha; /* finite */
    float up_offset;  /* finite */
    /* Expert parallelism (smoe_ep.h). If ranks is 0, waves, max_tokens and row_capacity must be 0 */
    int32_t ranks;        /* 0: this layer has all E experts. 1..72: it has E / ranks of them, and the others
                             are on other ranks. W1, b1, W2, b2 and their gradients have E / ranks experts */
    int32_t waves;        /* the number of parts in which tokens travel: 1, 2, 4, 8, or 0: chosen from the
                             sizes. With one part a GPU computes in one wave, with p > 1 parts in p + 2 */
    int64_t max_tokens;   /* T of each rank is 0..max_tokens */
    int64_t row_capacity; /* the number of received rows, pad rows counted, whose H is kept. The backward
                             computes H of the others again. 0: 1.25 max_tokens topk, at least 16384 */
    int32_t lora_rank1;   /* LoRA beside W1: r1, a multiple of 8, at most 256; 0: none, as with ranks */
    int32_t lora_rank2;   /* the same beside W2: r2 */
    smoe_compute compute;
} smoe_layer;
#define SMOE_LAYER_INIT                                                                                      \
    {                                                                                                        \
        sizeof(smoe_layer), 0, 0, 0, 0, 1, SMOE_TYPE_BF16, SMOE_ACTIVATION_SWIGLU, SMOE_LAYOUT_CONCATENATED, \
            SMOE_ENTRY_FROM_LOGITS, SMOE_TYPE_I32, SMOE_TYPE_F32, SMOE_TYPE_F32, 0, 0, 0, 1,                 \
            SMOE_SCORE_SOFTMAX_TOPK, 0, 1, 1, 1.0f, SMOE_ROUNDING_NONE, 128, 0, 7.0f, 7.0f, 1.702f, 1.0f, 0, \
            0, 0, 0, 0, 0, SMOE_COMPUTE_STORAGE                                                              \
    }

/* Whether this context can run this layer: OK, or one of ARGUMENT, SHAPE and UNSUPPORTED with the reason in
 * smoe_last_error. The call enqueues nothing. */
SMOE_API smoe_status smoe_supports(smoe_context *context, const smoe_layer *layer);

/* ---- Sizes --------------------------------------------------------------------------------------------- */
typedef struct smoe_sizes {
    size_t struct_size;
    int64_t rows;        /* upper bound on R: T K, plus the pairs that rounding can add */
    int64_t padded_rows; /* upper bound on the number of rows and pad rows: rows + 63 min(E, rows) */
    /* saved_bytes: what is alive from forward to backward, without pad rows and logits: X, H, the plan. With
     * R standing for `rows`, in bf16: 2 T d + 4 n R + metadata_bytes, without a gate 2 n R instead of 4 n R.
     * LoRA adds P1 and P2, 2 (r1 + r2) R. In f32 X, H, P1 and P2 take twice as much */
    uint64_t saved_bytes;
    uint64_t metadata_bytes;     /* the plan's part of saved_bytes */
    uint64_t saved_buffer_bytes; /* of `saved`: the plan, and H, P1 and P2 of padded_rows rows; with ranks
                                    two plans, b1, and H of row_capacity rows. X is not in it */
    uint64_t scratch_forward_bytes;
    uint64_t scratch_backward_bytes;
    uint64_t window_bytes; /* of each rank's window (smoe_ep.h); 0 without ranks */
    /* For every T, saved_buffer_bytes <= saved_constant_bytes + T saved_token_bytes: a bound for a T that is
     * not known yet. Neither number depends on T. Both are 0 with ranks */
    uint64_t saved_constant_bytes;
    uint64_t saved_token_bytes;
    int32_t backward_reads_logits; /* Whether smoe_layer_backward reads the logits for dlogits. 1:
                                      always. 0: only if a loss has a coefficient or a gradient */
    uint64_t weights_f8_bytes;     /* F8, F8_DGRAD: about 6 E d n, without a gate 4 E d n */
} smoe_sizes;
#define SMOE_SIZES_INIT                                                                                      \
    {                                                                                                        \
        sizeof(smoe_sizes), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0                                               \
    }

/* The sizes of the buffers that a layer needs in this context. The same description gives the same sizes. */
SMOE_API smoe_status smoe_query_sizes(smoe_context *context, const smoe_layer *layer, smoe_sizes *sizes);

/* ---- Forward ------------------------------------------------------------------------------------------- */
typedef struct smoe_forward_args {
    size_t struct_size;
    const void *x; /* (T, d) dtype */
    /* FROM_LOGITS */
    const void *router_weight; /* Wr (E, d) dtype, or NULL when the caller gives the logits */
    const void *router_bias;   /* br (E) dtype, or NULL */
    void *logits; /* (T, E) logits_type: written if router_weight is given, else read. The backward may
                     read them again */
    const float *selection_bias; /* (E) or NULL; SIGMOID only: part of the selection score */
    uint64_t step;               /* SR_F: the number of the training step; the random draws depend on it */
    /* losses (2), written, or NULL. losses[0], load balance: E sum_e (count_e / C) mean_t p[t,e]; count_e is
     * before rounding, p the softmax, also for SIGMOID. losses[1], z: mean_t logsumexp(logits[t])^2. C tokens
     * are counted by token_mask; count_e and the means are over these. If C is 0, both losses are 0 */
    float *losses;
    /* FROM_TOPK */
    const void *topk_ids;      /* (T, K) index_type */
    const float *topk_weights; /* (T, K) */
    /* FROM_ROWS */
    const void *offsets;      /* (E+1) index_type: the first row of each expert. offsets[0] = 0, no element is
                                 below the one before it, offsets[E] <= T. O is 0 from row offsets[E] on */
    const float *row_weights; /* (T) row weights, or NULL: all are 1 */
    /* the experts */
    const void *w1; /* (E, 2n, d) dtype, in the order of `layout`; (E, n, d) without a gate */
    const void *b1; /* (E, 2n), without a gate (E, n); or NULL */
    const void *w2; /* (E, d, n) */
    const void *b2; /* (E, d) or NULL */
    void *out;      /* O (T, d) dtype */
    void *saved;    /* at least saved_buffer_bytes; NULL for inference */
    uint64_t saved_size;
    void *scratch; /* at least scratch_forward_bytes. After smoe_layer_forward it is free, but for inference
                      smoe_view_plan points into it. Between the four calls it must stay untouched */
    uint64_t scratch_size;
    smoe_ep *ep; /* the group of a layer with ranks */
    /* FROM_LOGITS */
    const uint8_t *token_mask; /* (T) or NULL: all tokens are counted. Tokens whose value is 0 are routed and
                                  computed as all others, but `losses` and topk_counts leave them out */
    /* the experts: LoRA's factors; with lora_rank1 the first two, with lora_rank2 the other two */
    const void *lora_a1; /* A1 (E, r1, d) dtype */
    const void *lora_b1; /* B1 (E, 2n, r1) dtype: gate rows, then up rows, in both layouts; (E, n, r1) without
                            a gate */
    const void *lora_a2; /* A2 (E, r2, n) dtype */
    const void *lora_b2; /* B2 (E, d, r2) dtype */
    const void
        *weights_f8; /* F8, F8_DGRAD: required, as smoe_quantize_weights left it. w1, w2 are not read */
    uint64_t weights_f8_size;
} smoe_forward_args;
#define SMOE_FORWARD_ARGS_INIT                                                                               \
    {                                                                                                        \
        sizeof(smoe_forward_args), NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL,      \
            NULL, NULL, NULL, NULL, NULL, 0, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0            \
    }

/* The whole forward: what those of the next four calls do that are for this layer. */
SMOE_API smoe_status smoe_layer_forward(smoe_context *context, const smoe_layer *layer,
                                        const smoe_forward_args *args, void *stream);

/* The four calls of a forward, to be made one by one, in this order and with the same args. Each call leaves
 * its results to the next one in `saved` and `scratch`. So every call needs `scratch`, and for training also
 * `saved`. Fields that a call does not need may be NULL.
 *   smoe_route            for FROM_LOGITS. Needs the fields under FROM_LOGITS
 *   smoe_round            for FROM_LOGITS with rounding. Needs the same fields
 *   smoe_plan             for every layer. Needs the fields under the layer's entry
 *   smoe_experts_forward  for every layer. Needs x and the fields under "the experts"
 * A call that needs the fields under FROM_LOGITS also needs x if router_weight is not NULL. */
SMOE_API smoe_status smoe_route(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                                void *stream);
SMOE_API smoe_status smoe_round(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                                void *stream);
SMOE_API smoe_status smoe_plan(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                               void *stream);
SMOE_API smoe_status smoe_experts_forward(smoe_context *context, const smoe_layer *layer,
                                          const smoe_forward_args *args, void *stream);

/* Where the results of routing and plan are inside saved (for inference: inside scratch). topk_ids and
 * topk_weights are valid after smoe_route, h after smoe_experts_forward, all others after smoe_plan. Without
 * FROM_LOGITS topk_ids, topk_weights and topk_counts are NULL. */
typedef struct smoe_plan_view {
    size_t struct_size;
    const int32_t *topk_ids;      /* (T, K) each token's experts by falling score */
    const float *topk_weights;    /* (T, K) their row weights */
    const int32_t *topk_counts;   /* (E) counts of the pairs that top-K selected, before rounding, for the
                                     tokens that token_mask counts */
    const int32_t *counts;        /* (E) rows of each expert */
    const int32_t *offsets;       /* (E+1) first row of each expert, pad rows not counted; R = offsets[E] */
    const int32_t *block_offsets; /* (E+1) first block of each expert */
    const int32_t *order;         /* (E) experts by falling count, then by rising id */
    const int32_t *row_token;     /* (padded_rows) t(r); -1 in pad rows and behind the last expert's rows */
    const float *row_weight;      /* (padded_rows) s(r); 0 where row_token is -1 */
    const int32_t *token_offsets; /* (T+1) where each token's rows start in token_rows */
    const int32_t *token_rows;    /* (rows) the padded indices of each token's rows, ascending */
    const void *h; /* (padded_rows, 2n) gate columns, then up columns; (padded_rows, n) without a gate; dtype;
                      NULL for inference */
} smoe_plan_view;
#define SMOE_PLAN_VIEW_INIT                                                                                  \
    {                                                                                                        \
        sizeof(smoe_plan_view), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL       \
    }

/* Fills the view and enqueues nothing. With the cuda backend the pointers in the view are device pointers.
 * Of args the call needs saved and saved_size; for inference it needs scratch and scratch_size instead. */
SMOE_API smoe_status smoe_view_plan(smoe_context *context, const smoe_layer *layer,
                                    const smoe_forward_args *args, smoe_plan_view *view);

/* Balances without an auxiliary loss: bias[e] += gamma sign(mean of counts - counts[e]). counts (E), usually
 * topk_counts of smoe_plan_view; bias (E), the next forward's selection_bias. */
SMOE_API smoe_status smoe_update_selection_bias(smoe_context *context, const smoe_layer *layer,
                                                const int32_t *counts, float *bias, float gamma,
                                                void *stream);

/* ---- Backward ------------------------------------------------------------------------------------------ */
/* Pass NULL for each gradient that is not wanted: work that only such need is not done. An input may be NULL
 * if no wanted gradient reads it and no comment requires it. If a layer with ranks can receive more than
 * row_capacity rows, every gradient but db2 reads x and w1. */
typedef struct smoe_backward_args {
    size_t struct_size;
    /* the forward's inputs and results, with the same values */
    const void *x;             /* (T, d); read for dw1, drouter_weight, dlora_a1 */
    const void *router_weight; /* (E, d), or NULL: dx does not include the router's term */
    const void *logits;        /* FROM_LOGITS: (T, E); read for dlogits, the router's gradients and its term
                                  of dx. May be NULL for sparse dlogits of a softmax */
    const void *topk_ids;      /* FROM_TOPK: (T, K); read for dtopk_weights */
    const void *w1;            /* read for dx */
    const void *w2;            /* required for every gradient except db2, even for dw2 alone */
    const void *b2;            /* the forward's b2, read for a term of dS; NULL if the forward had no b2 */
    void *saved;               /* as the forward left it; overwritten only with reuse_saved */
    uint64_t saved_size;
    /* the gradient of O, loss coefficients, and the gradients to compute */
    const void *dout;          /* dO (T, d) dtype */
    float balance_coefficient; /* dlogits include the gradient of balance_coefficient * losses[0] +
                                  z_coefficient * losses[1] */
    float z_coefficient;
    void *dx;             /* (T, d) dtype, written; smoe_layer_backward adds the router's term, if it has
                             router_weight */
    void *dw1, *dw2;      /* shaped as w1, w2; gradient_type. The gradient of an expert without rows is 0 or,
                             with accumulate, unchanged */
    void *db1, *db2;      /* shaped as b1, b2; gradient_type. db2 needs b2 */
    void *drouter_weight; /* (E, d) gradient_type. smoe_layer_backward computes drouter_weight,
                             drouter_bias and dlogits; smoe_experts_backward ignores them */
    void *drouter_bias;   /* (E) gradient_type. drouter_weight and drouter_bias need router_weight */
    void *dlogits;        /* (T, E) logits_type, written */
    float *dtopk_weights; /* FROM_TOPK: dS (T, K), written; 0 for skipped ids */
    float *drow_weights;  /* FROM_ROWS: dS (T), written; 0 from offsets[E] on. FROM_LOGITS: dS
                             (padded_rows), written; 0 for elements that are not those of a row */
    void *scratch;        /* at least scratch_backward_bytes, whichever gradients are wanted */
    uint64_t scratch_size;
    /* loss_gradients (2), or NULL: the gradients of losses[0] and losses[1], which are added to the two
     * coefficients. With cuda they are in device memory: earlier work on the stream may compute them */
    const float *loss_gradients;
    smoe_ep *ep;               /* the forward's */
    const uint8_t *token_mask; /* the forward's; read if a loss has a coefficient or a gradient */
    const void *lora_a1, *lora_b1, *lora_a2, *lora_b2; /* the forward's */
    void *dlora_a1, *dlora_b1;                         /* shaped as lora_a1 and so on; gradient_type */
    void *dlora_a2, *dlora_b2;
    const void *weights_f8; /* the forward's; required where w1 or w2 would be. With F8 dw2 also reads x */
    uint64_t weights_f8_size;
} smoe_backward_args;
#define SMOE_BACKWARD_ARGS_INIT                                                                              \
    {                                                                                                        \
        sizeof(smoe_backward_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL, 0.0f, 0.0f,     \
            NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL,     \
            NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0                                                \
    }

/* The whole backward: computes the gradients that are wanted. */
SMOE_API smoe_status smoe_layer_backward(smoe_context *context, const smoe_layer *layer,
                                         const smoe_backward_args *args, void *stream);

/* The same without dlogits, the router's gradients and the router's term of dx. For a layer FROM_TOPK or
 * FROM_ROWS, which has no router, this call and smoe_layer_backward do the same. */
SMOE_API smoe_status smoe_experts_backward(smoe_context *context, const smoe_layer *layer,
                                           const smoe_backward_args *args, void *stream);

typedef struct smoe_quantize_args {
    size_t struct_size;
    const void *w1;        /* (experts, 2n, d) in the order of `layout`, of these experts alone */
    const void *w2;        /* (experts, d, n) */
    smoe_type weight_type; /* of w1 and w2: dtype or, for master weights, SMOE_TYPE_F32 */
    int64_t first_expert;
    int64_t experts;  /* at least 1 */
    void *weights_f8; /* of all experts of the layer: at least weights_f8_bytes */
    uint64_t weights_f8_size;
} smoe_quantize_args;
#define SMOE_QUANTIZE_ARGS_INIT                                                                              \
    {                                                                                                        \
        sizeof(smoe_quantize_args), NULL, NULL, SMOE_TYPE_BF16, 0, 0, NULL, 0                                \
    }

/* Quantises experts first_expert .. first_expert + experts - 1 into weights_f8, whose other bytes stay as
 * they are. To be called after each change of the weights. */
SMOE_API smoe_status smoe_quantize_weights(smoe_context *context, const smoe_layer *layer,
                                           const smoe_quantize_args *args, void *stream);

#ifdef __cplusplus
}
#endif
#endif /* SMOE_H */
