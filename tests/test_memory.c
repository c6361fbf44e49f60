/* The memory that the calls are given: pointers that are missing or misaligned, buffers that are too small,
 * memory that is given twice, and memory whose contents no earlier call can have left there. */
#include "api_case.h"

#include <stdbool.h>

/* A pool of zeros has a part for each pointer of a call. Every memory of the layers here fits into a part. */
enum { PART = 2 << 20, PARTS = 24 };

static char *make_pool(void)
{
    char *pool = aligned_alloc(256, (size_t)PART * PARTS);
    assert_non_null(pool);
    memset(pool, 0, (size_t)PART * PARTS);
    return pool;
}

/* ---- pointers and buffers ---- */

typedef struct stage {
    const char *name;
    smoe_status (*call)(smoe_context *, const smoe_layer *, const smoe_forward_args *, void *);
} stage;

static void pointers_of_the_forward_are_checked(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    const smoe_layer layer = small_layer();
    smoe_sizes sizes = SMOE_SIZES_INIT;
    assert_int_equal(smoe_query_sizes(context, &layer, &sizes), SMOE_OK);
    char *pool = make_pool();
    smoe_forward_args good = SMOE_FORWARD_ARGS_INIT;
    good.x = good.router_weight = good.w1 = good.w2 = pool;
    good.logits = pool + PART, good.out = pool + 2 * PART;
    good.saved = pool + 3 * PART, good.scratch = pool + 4 * PART;
    good.saved_size = sizes.saved_buffer_bytes;
    good.scratch_size = sizes.scratch_forward_bytes;

    const stage stages[] = {{"smoe_layer_forward", smoe_layer_forward},
                            {"smoe_experts_forward", smoe_experts_forward}};
    for (int i = 0; i < 2; i++) {
        const char *name = stages[i].name;
        smoe_forward_args args = good;
        args.x = NULL;
        assert_error(context, stages[i].call(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT, name,
                     "x is NULL");
        args = good;
        args.w2 = NULL;
        assert_error(context, stages[i].call(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT, name,
                     "w2 is NULL");
        args = good;
        args.w1 = pool + 8;
        assert_error(context, stages[i].call(context, &layer, &args, NULL), SMOE_ERROR_ALIGNMENT, "w1 is",
                     "16 bytes");
        args = good;
        args.b2 = pool + 2;
        assert_error(context, stages[i].call(context, &layer, &args, NULL), SMOE_ERROR_ALIGNMENT, "b2 is",
                     "16 bytes");
        args = good;
        args.saved = pool + 3 * PART + 32;
        assert_error(context, stages[i].call(context, &layer, &args, NULL), SMOE_ERROR_ALIGNMENT, "saved",
                     "64 bytes");
        args = good;
        args.saved_size--;
        assert_error(context, stages[i].call(context, &layer, &args, NULL), SMOE_ERROR_BUFFER, "saved has",
                     "asks for");
        args = good;
        args.scratch_size--;
        assert_error(context, stages[i].call(context, &layer, &args, NULL), SMOE_ERROR_BUFFER, "scratch has",
                     "asks for");
        args = good;
        args.scratch = NULL;
        assert_error(context, stages[i].call(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT,
                     "scratch is NULL", "bytes are needed");
        assert_error(context, stages[i].call(context, &layer, NULL, NULL), SMOE_ERROR_ARGUMENT, name,
                     "args is NULL");
        assert_error(context, stages[i].call(context, NULL, &good, NULL), SMOE_ERROR_ARGUMENT, name,
                     "layer is NULL");
        assert_int_equal(stages[i].call(NULL, &layer, &good, NULL), SMOE_ERROR_ARGUMENT);
    }
    smoe_forward_args args = good;
    args.losses = (float *)(void *)(pool + 5 * PART + 4);
    assert_int_equal(smoe_layer_forward(context, &layer, &args, NULL), SMOE_OK);
    args.losses = (float *)(void *)(pool + 5 * PART + 2);
    assert_error(context, smoe_layer_forward(context, &layer, &args, NULL), SMOE_ERROR_ALIGNMENT, "losses is",
                 "4 bytes");
    args = good;
    args.logits = NULL;
    assert_error(context, smoe_route(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT, "smoe_route",
                 "logits is NULL");
    args = good;
    args.selection_bias = (const float *)pool;
    assert_error(context, smoe_route(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT, "selection_bias",
                 "SMOE_SCORE_SIGMOID");
    args = good;
    args.router_weight = NULL;
    args.router_bias = pool;
    assert_error(context, smoe_route(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT, "router_bias",
                 "without router_weight");
    assert_error(context, smoe_round(context, &layer, &good, NULL), SMOE_ERROR_ARGUMENT, "smoe_round",
                 "SMOE_ROUNDING_NONE");
    smoe_layer given = layer;
    given.entry = SMOE_ENTRY_FROM_TOPK;
    assert_error(context, smoe_route(context, &given, &good, NULL), SMOE_ERROR_ARGUMENT,
                 "smoe_route: entry is SMOE_ENTRY_FROM_TOPK", "SMOE_ENTRY_FROM_LOGITS");
    assert_error(context, smoe_plan(context, &given, &good, NULL), SMOE_ERROR_ARGUMENT, "smoe_plan",
                 "topk_ids is NULL");
    given.entry = SMOE_ENTRY_FROM_ROWS;
    given.topk = 1;
    assert_error(context, smoe_plan(context, &given, &good, NULL), SMOE_ERROR_ARGUMENT, "smoe_plan",
                 "offsets is NULL");
    assert_error(context, smoe_view_plan(context, &layer, &good, NULL), SMOE_ERROR_ARGUMENT, "smoe_view_plan",
                 "view is NULL");
    free(pool);
    smoe_destroy(context);
}

static void pointers_of_the_backward_are_checked(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    const smoe_layer layer = small_layer();
    smoe_sizes sizes = SMOE_SIZES_INIT;
    assert_int_equal(smoe_query_sizes(context, &layer, &sizes), SMOE_OK);
    char *pool = make_pool();
    smoe_backward_args good = SMOE_BACKWARD_ARGS_INIT;
    good.x = good.router_weight = good.logits = good.w1 = good.w2 = good.dout = pool;
    good.dx = pool + PART, good.dw1 = pool + 2 * PART, good.dw2 = pool + 3 * PART;
    good.drouter_weight = pool + 4 * PART;
    good.saved = pool + 5 * PART, good.scratch = pool + 6 * PART;
    good.saved_size = sizes.saved_buffer_bytes;
    good.scratch_size = sizes.scratch_backward_bytes;

    smoe_backward_args args = good;
    args.dout = NULL;
    assert_error(context, smoe_layer_backward(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT,
                 "smoe_layer_backward", "dout is NULL");
    args = good;
    args.x = NULL;
    assert_error(context, smoe_experts_backward(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT,
                 "smoe_experts_backward", "x is NULL");
    args = good;
    args.w1 = NULL;
    assert_error(context, smoe_layer_backward(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT, "backward",
                 "w1 is NULL");
    args = good;
    args.w2 = NULL;
    assert_error(context, smoe_layer_backward(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT, "backward",
                 "w2 is NULL");
    args = good;
    args.logits = NULL;
    assert_error(context, smoe_layer_backward(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT, "backward",
                 "logits is NULL");
    args = good;
    args.dx = pool + 8;
    assert_error(context, smoe_layer_backward(context, &layer, &args, NULL), SMOE_ERROR_ALIGNMENT, "dx is",
                 "16 bytes");
    args = good;
    args.loss_gradients = (const float *)(void *)(pool + 2);
    assert_error(context, smoe_layer_backward(context, &layer, &args, NULL), SMOE_ERROR_ALIGNMENT,
                 "loss_gradients is", "4 bytes");
    args = good;
    args.db2 = pool + 7 * PART;
    assert_error(context, smoe_layer_backward(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT, "db2",
                 "without b2");
    args = good;
    args.router_weight = NULL;
    args.dlogits = pool + 7 * PART;
    assert_error(context, smoe_layer_backward(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT,
                 "drouter_weight", "without router_weight");
    args.drouter_weight = NULL;
    args.drouter_bias = pool + 8 * PART;
    assert_error(context, smoe_layer_backward(context, &layer, &args, NULL), SMOE_ERROR_ARGUMENT,
                 "drouter_bias", "without router_weight");
    args = good;
    args.scratch_size = 0;
    assert_error(context, smoe_layer_backward(context, &layer, &args, NULL), SMOE_ERROR_BUFFER,
                 "scratch has 0 bytes", "asks for");
    smoe_layer inference = layer;
    inference.inference = 1;
    assert_error(context, smoe_layer_backward(context, &inference, &good, NULL), SMOE_ERROR_ARGUMENT,
                 "inference is 1", "nothing was saved");
    free(pool);
    smoe_destroy(context);
}

/* smoe_view_plan must require the memory that contains the plan, and no other argument. */
static void a_view_needs_the_plan_alone(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    smoe_layer layer = small_layer();
    smoe_sizes sizes = SMOE_SIZES_INIT;
    assert_int_equal(smoe_query_sizes(context, &layer, &sizes), SMOE_OK);
    char *pool = make_pool();
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.saved = pool, args.saved_size = sizes.saved_buffer_bytes;
    args.scratch = pool + 1, args.w1 = pool + 1; /* misaligned, but must not be checked */
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    assert_int_equal(smoe_view_plan(context, &layer, &args, &view), SMOE_OK);
    assert_ptr_equal(view.h, pool);
    assert_true((const char *)view.counts > pool && (const char *)view.counts < pool + args.saved_size);
    args.saved_size--;
    assert_error(context, smoe_view_plan(context, &layer, &args, &view), SMOE_ERROR_BUFFER,
                 "smoe_view_plan: saved has", "asks for");
    layer.inference = 1;
    assert_int_equal(smoe_query_sizes(context, &layer, &sizes), SMOE_OK);
    args.saved = pool + 1, args.saved_size = 0;
    args.scratch = pool, args.scratch_size = sizes.scratch_forward_bytes;
    assert_int_equal(smoe_view_plan(context, &layer, &args, &view), SMOE_OK);
    assert_null(view.h);
    assert_true((const char *)view.counts > pool && (const char *)view.counts < pool + args.scratch_size);
    args.scratch = NULL;
    assert_error(context, smoe_view_plan(context, &layer, &args, &view), SMOE_ERROR_ARGUMENT,
                 "smoe_view_plan", "scratch is NULL");
    free(pool);
    smoe_destroy(context);
}

/* ---- memory that is given twice ---- */

/* A pointer of the argument structs: its place in the struct, and what the whole call does with it. */
typedef struct field {
    const char *name;
    size_t at;
    int64_t bytes; /* of small_layer() */
    bool written;
    int entries; /* bit i: layers with entry i have it */
} field;

enum { T = 64, D = 32, N = 16, E = 8, K = 2, LOGITS = 1, TOPK = 2, ROWS = 4, ALL = 7 };

#define FORWARD(name, bytes, written, entries)                                                               \
    {                                                                                                        \
#name, offsetof(smoe_forward_args, name), bytes, written, entries                                    \
    }
#define BACKWARD(name, bytes, written, entries)                                                              \
    {                                                                                                        \
#name, offsetof(smoe_backward_args, name), bytes, written, entries                                   \
    }

static const field forward_fields[] = {
    FORWARD(x, T *D * 4, false, ALL),
    FORWARD(router_weight, E *D * 4, false, LOGITS),
    FORWARD(router_bias, E * 4, false, LOGITS),
    FORWARD(logits, T *E * 4, true, LOGITS),
    FORWARD(losses, 8, true, LOGITS),
    FORWARD(token_mask, T, false, LOGITS),
    FORWARD(topk_ids, T *K * 4, false, TOPK),
    FORWARD(topk_weights, T *K * 4, false, TOPK),
    FORWARD(offsets, (E + 1) * 4, false, ROWS),
    FORWARD(row_weights, T * 4, false, ROWS),
    FORWARD(w1, E * 2 * N * D * 4, false, ALL),
    FORWARD(b1, E * 2 * N * 4, false, ALL),
    FORWARD(w2, E *D *N * 4, false, ALL),
    FORWARD(b2, E *D * 4, false, ALL),
    FORWARD(out, T *D * 4, true, ALL),
    FORWARD(saved, 0, true, ALL),
    FORWARD(scratch, 0, true, ALL),
};

static const field backward_fields[] = {
    BACKWARD(x, T *D * 4, false, ALL),
    BACKWARD(router_weight, E *D * 4, false, LOGITS),
    BACKWARD(logits, T *E * 4, false, LOGITS),
    BACKWARD(topk_ids, T *K * 4, false, TOPK),
    BACKWARD(w1, E * 2 * N * D * 4, false, ALL),
    BACKWARD(w2, E *D *N * 4, false, ALL),
    BACKWARD(b2, E *D * 4, false, ALL),
    BACKWARD(saved, 0, true, ALL), /* with reuse_saved */
    BACKWARD(dout, T *D * 4, false, ALL),
    BACKWARD(dx, T *D * 4, true, ALL),
    BACKWARD(dw1, E * 2 * N * D * 4, true, ALL),
    BACKWARD(dw2, E *D *N * 4, true, ALL),
    BACKWARD(db1, E * 2 * N * 4, true, ALL),
    BACKWARD(db2, E *D * 4, true, ALL),
    BACKWARD(drouter_weight, E *D * 4, true, LOGITS),
    BACKWARD(drouter_bias, E * 4, true, LOGITS),
    BACKWARD(dlogits, T *E * 4, true, LOGITS),
    BACKWARD(dtopk_weights, T *K * 4, true, TOPK),
    BACKWARD(drow_weights, T * 4, true, ROWS),
    BACKWARD(scratch, 0, true, ALL),
    BACKWARD(token_mask, T, false, LOGITS),
    BACKWARD(loss_gradients, 8, false, LOGITS),
};

/* A layer with its arguments, each pointer at its part of the pool. */
typedef struct call_case {
    smoe_context *context;
    smoe_layer layer;
    smoe_sizes sizes;
    smoe_forward_args forward;
    smoe_backward_args backward;
    char *pool;
} call_case;

static void point(void *args, const field *f, const char *to)
{
    memcpy((char *)args + f->at, &to, sizeof to);
}

static void point_all(void *args, const field *fields, size_t count, int entry, char *pool)
{
    for (size_t i = 0; i < count; i++)
        if (fields[i].entries >> entry & 1) point(args, &fields[i], pool + i * PART);
}

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static call_case open_call(smoe_entry entry)
{
    call_case c = {.context = open_cpu(), .layer = small_layer(), .pool = make_pool()};
    c.layer.entry = entry;
    if (entry == SMOE_ENTRY_FROM_ROWS) c.layer.topk = 1;
    c.layer.reuse_saved = 1;
    c.sizes = (smoe_sizes)SMOE_SIZES_INIT;
    assert_int_equal(smoe_query_sizes(c.context, &c.layer, &c.sizes), SMOE_OK);
    assert_true(c.sizes.saved_buffer_bytes <= PART && c.sizes.scratch_forward_bytes <= PART &&
                c.sizes.scratch_backward_bytes <= PART);
    c.forward = (smoe_forward_args)SMOE_FORWARD_ARGS_INIT;
    c.backward = (smoe_backward_args)SMOE_BACKWARD_ARGS_INIT;
    point_all(&c.forward, forward_fields, COUNT(forward_fields), (int)entry, c.pool);
    point_all(&c.backward, backward_fields, COUNT(backward_fields), (int)entry, c.pool);
    c.forward.saved_size = c.sizes.saved_buffer_bytes, c.forward.scratch_size = c.sizes.scratch_forward_bytes;
    c.forward.saved = c.backward.saved = c.pool + (PARTS - 1) * PART;
    c.backward.saved_size = c.sizes.saved_buffer_bytes;
    c.backward.scratch_size = c.sizes.scratch_backward_bytes;
    return c;
}

static void close_call(call_case *c)
{
    free(c->pool);
    smoe_destroy(c->context);
}

static smoe_status run_forward(call_case *c, const void *args)
{
    return smoe_layer_forward(c->context, &c->layer, args, NULL);
}

static smoe_status run_backward(call_case *c, const void *args)
{
    return smoe_layer_backward(c->context, &c->layer, args, NULL);
}

typedef struct kind {
    const field *fields;
    size_t count, args_bytes;
    smoe_status (*run)(call_case *c, const void *args);
    uint64_t (*scratch)(const call_case *c);
} kind;

static uint64_t forward_scratch(const call_case *c)
{
    return c->sizes.scratch_forward_bytes;
}

static uint64_t backward_scratch(const call_case *c)
{
    return c->sizes.scratch_backward_bytes;
}

static const kind forward_kind = {forward_fields, COUNT(forward_fields), sizeof(smoe_forward_args),
                                  run_forward, forward_scratch};
static const kind backward_kind = {backward_fields, COUNT(backward_fields), sizeof(smoe_backward_args),
                                   run_backward, backward_scratch};

static uint64_t bytes_of(const call_case *c, const kind *k, const field *f)
{
    if (!strcmp(f->name, "saved")) return c->sizes.saved_buffer_bytes;
    return strcmp(f->name, "scratch") ? (uint64_t)f->bytes : k->scratch(c);
}

static const char *pointer_of(const void *args, const field *f)
{
    const char *pointer;
    memcpy(&pointer, (const char *)args + f->at, sizeof pointer);
    return pointer;
}

/* Memory a starts in the last 64 bytes of memory b, and then right after it. */
static void check_pair(call_case *c, const kind *k, const void *good, const field *a, const field *b)
{
    union {
        smoe_forward_args forward;
        smoe_backward_args backward;
    } args;
    memcpy(&args, good, k->args_bytes);
    const uint64_t bytes = bytes_of(c, k, b);
    point(&args, a, pointer_of(good, b) + (bytes - 1) / 64 * 64);
    if (!a->written && !b->written) { /* weights, say, may be given twice */
        assert_int_equal(k->run(c, &args), SMOE_OK);
        return;
    }
    assert_error(c->context, k->run(c, &args), SMOE_ERROR_ARGUMENT, a->name, b->name);
    assert_non_null(strstr(smoe_last_error(c->context), " overlaps "));
    if (bytes % 64 || !strcmp(a->name, "saved")) return; /* saved has the plan, and must stay */
    point(&args, a, pointer_of(good, b) + bytes);
    assert_int_equal(k->run(c, &args), SMOE_OK);
}

static void nothing_written_overlaps(void **state)
{
    (void)state;
    for (int entry = 0; entry < 3; entry++) {
        call_case c = open_call((smoe_entry)entry);
        for (int pass = 0; pass < 2; pass++) {
            const kind *k = pass ? &backward_kind : &forward_kind;
            const void *good = pass ? (const void *)&c.backward : &c.forward;
            if (pass) assert_int_equal(run_forward(&c, &c.forward), SMOE_OK);
            for (size_t i = 0; i < k->count; i++)
                for (size_t j = 0; j < k->count; j++)
                    if (i != j && k->fields[i].entries >> entry & k->fields[j].entries >> entry & 1)
                        check_pair(&c, k, good, &k->fields[i], &k->fields[j]);
        }
        close_call(&c);
    }
}

static void a_bias_is_not_its_counts(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    const smoe_layer layer = small_layer();
    char *pool = make_pool();
    assert_error(context,
                 smoe_update_selection_bias(context, &layer, (const int32_t *)(void *)(pool + 16),
                                            (float *)(void *)pool, 0.5f, NULL),
                 SMOE_ERROR_ARGUMENT, "smoe_update_selection_bias: counts ", "bias is written");
    free(pool);
    smoe_destroy(context);
}

/* ---- offsets of rows ---- */

static void offsets_are_checked(void **state)
{
    (void)state;
    static const struct {
        int64_t at, value;
        const char *text, *limit;
    } wrong[] = {{0, 1, "offsets[0] is 1,", "must be 0"},
                 {0, -1, "offsets[0] is -1,", "must be 0"},
                 {1, -3, "offsets[1] is -3,", "below offsets[0], 0"},
                 {5, 30, "offsets[5] is 30,", "below offsets[4], 32"},
                 {8, 65, "offsets[8] is 65,", "has 64 rows"},
                 {8, INT32_MAX, "offsets[8] is 2147483647,", "has 64 rows"},
                 {8, INT32_MIN, "offsets[8] is -2147483648,", "below offsets[7], 56"}};
    for (int wide = 0; wide < 2; wide++) {
        call_case c = open_call(SMOE_ENTRY_FROM_ROWS);
        c.layer.index_type = wide ? SMOE_TYPE_I64 : SMOE_TYPE_I32;
        int32_t *narrow = (int32_t *)(uintptr_t)c.forward.offsets;
        int64_t *offsets = (int64_t *)(uintptr_t)c.forward.offsets;
        for (size_t i = 0; i < COUNT(wrong); i++) {
            for (int e = 0; e <= E; e++) {
                const int64_t value = e == wrong[i].at ? wrong[i].value : 8 * e;
                if (wide) offsets[e] = value;
                if (!wide) narrow[e] = (int32_t)value;
            }
            assert_error(c.context, run_forward(&c, &c.forward), SMOE_ERROR_ARGUMENT, wrong[i].text,
                         wrong[i].limit);
            assert_error(c.context, smoe_plan(c.context, &c.layer, &c.forward, NULL), SMOE_ERROR_ARGUMENT,
                         "smoe_plan: ", wrong[i].limit);
        }
        close_call(&c);
    }
}

/* ---- memory that no earlier call has filled ---- */

/* Every array of the plan, and a value that no plan has there. */
typedef struct spoiled {
    const char *name;
    size_t at; /* in smoe_plan_view */
    int64_t index;
    int32_t value;
    int entries;
} spoiled;

#define SPOILED(name, index, value, entries)                                                                 \
    {                                                                                                        \
#name, offsetof(smoe_plan_view, name), index, value, entries                                         \
    }

static const spoiled spoils[] = {
    SPOILED(counts, 3, -1, ALL),         SPOILED(counts, 0, 1 << 30, ALL),
    SPOILED(offsets, 0, 1, ALL),         SPOILED(offsets, 4, INT32_MIN, ALL),
    SPOILED(offsets, E, 1 << 30, ALL),   SPOILED(block_offsets, 0, -1, ALL),
    SPOILED(block_offsets, E, 99, ALL),  SPOILED(order, 2, -1, ALL),
    SPOILED(order, 2, E, ALL),           SPOILED(row_token, 0, -1, ALL),
    SPOILED(row_token, 0, T, ALL),       SPOILED(token_offsets, 0, -1, ALL),
    SPOILED(token_offsets, 9, -1, ALL),  SPOILED(token_offsets, 9, 1 << 30, ALL),
    SPOILED(token_offsets, T, 999, ALL), SPOILED(token_rows, 5, -1, ALL),
    SPOILED(token_rows, 5, 64 * E, ALL), SPOILED(topk_ids, T *K - 1, E, LOGITS),
    SPOILED(topk_ids, 7, -1, LOGITS),
};

static void fill_offsets(call_case *c)
{
    int32_t *offsets = (int32_t *)(uintptr_t)c->forward.offsets;
    for (int e = 0; offsets && e <= E; e++) offsets[e] = 8 * e;
}

static void a_spoiled_plan_is_refused(void **state)
{
    (void)state;
    for (int entry = 0; entry < 3; entry++) {
        call_case c = open_call((smoe_entry)entry);
        fill_offsets(&c);
        smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
        assert_int_equal(run_forward(&c, &c.forward), SMOE_OK);
        assert_int_equal(smoe_view_plan(c.context, &c.layer, &c.forward, &view), SMOE_OK);
        for (size_t i = 0; i < COUNT(spoils); i++) {
            const spoiled *s = &spoils[i];
            if (!(s->entries >> entry & 1)) continue;
            int32_t *array;
            memcpy(&array, (const char *)&view + s->at, sizeof array);
            const int32_t before = array[s->index];
            array[s->index] = s->value;
            assert_error(c.context, run_backward(&c, &c.backward), SMOE_ERROR_ARGUMENT, "plan", s->name);
            assert_error(c.context, smoe_experts_forward(c.context, &c.layer, &c.forward, NULL),
                         SMOE_ERROR_ARGUMENT, "smoe_experts_forward: ", s->name);
            array[s->index] = before;
            assert_int_equal(run_backward(&c, &c.backward), SMOE_OK);
        }
        close_call(&c);
    }
}

/* `saved` and scratch hold the same byte everywhere, or random bytes. */
static void fill(call_case *c, int pattern)
{
    unsigned char *at[] = {c->forward.saved, c->forward.scratch};
    const uint64_t bytes[] = {c->sizes.saved_buffer_bytes, c->sizes.scratch_forward_bytes};
    uint32_t random = 1;
    for (int b = 0; b < 2; b++)
        for (uint64_t i = 0; i < bytes[b]; i++) {
            random = random * 1664525u + 1013904223u;
            at[b][i] = pattern == 0   ? 0
                       : pattern == 1 ? 0xff
                       : pattern == 2 ? 1
                                      : (unsigned char)(random >> 24);
        }
}

/* The backward, and the stages of the forward, in memory that no call has filled. */
static void unfilled_memory_is_refused(void **state)
{
    (void)state;
    for (int entry = 0; entry < 3; entry++) {
        call_case c = open_call((smoe_entry)entry);
        for (int pattern = 0; pattern < 4; pattern++) {
            fill(&c, pattern);
            assert_error(
                c.context, run_backward(&c, &c.backward), SMOE_ERROR_ARGUMENT,
                "smoe_layer_backward: ", "the memory of the plan is not as a forward of this layer left it");
            assert_error(c.context, smoe_experts_forward(c.context, &c.layer, &c.forward, NULL),
                         SMOE_ERROR_ARGUMENT, "smoe_experts_forward: ", "the memory of the plan");
            if (entry != SMOE_ENTRY_FROM_LOGITS || pattern == 0) continue;
            assert_error(c.context, smoe_plan(c.context, &c.layer, &c.forward, NULL), SMOE_ERROR_ARGUMENT,
                         "smoe_plan: ", "scratch is not as smoe_route left it");
        }
        close_call(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pointers_of_the_forward_are_checked),
        cmocka_unit_test(a_view_needs_the_plan_alone),
        cmocka_unit_test(pointers_of_the_backward_are_checked),
        cmocka_unit_test(nothing_written_overlaps),
        cmocka_unit_test(a_bias_is_not_its_counts),
        cmocka_unit_test(offsets_are_checked),
        cmocka_unit_test(a_spoiled_plan_is_refused),
        cmocka_unit_test(unfilled_memory_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
