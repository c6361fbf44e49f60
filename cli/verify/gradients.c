/* Checks that the caller may want any subset of the gradients. A gradient has the same bits as in a backward
 * that computes all. Arguments that only the other gradients need are NULL, and only the stages that the
 * wanted gradients need run. On the CPU every subset is tested, on a GPU: none, each alone, all but one, and
 * those with frozen experts or a frozen router. The bits are also the same if forward and backward run on two
 * threads that have not created the context. */
#include "cli/verify/checks.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The gradients are neighbours among the slots; bit i of a set is that of slot SLOT_DX + i. */
enum { GRADIENTS = SLOT_DROW_WEIGHTS - SLOT_DX + 1 };
#define BIT(slot) (1u << ((slot)-SLOT_DX))
_Static_assert((int)SLOT_DLOGITS > (int)SLOT_DX && (int)SLOT_DLOGITS < (int)SLOT_DROW_WEIGHTS, "their order");

typedef struct subsets {
    verify *v;
    run r;
    void *saved;           /* as the forward left it */
    void *full[GRADIENTS]; /* of a backward that computes all */
    unsigned all;          /* the gradients that this layer has */
    unsigned stages;       /* that ran: bit stage / 10 */
    bool other_stream;     /* a stage was told another stream than the call */
    int64_t tried, wrong;
} subsets;

/* The CPU backend passes any stream to the callback, so there it is a pointer to see again. */
static void *stream_of(subsets *s)
{
    return s->v->on->backend == SMOE_BACKEND_CPU ? s : NULL;
}

static void on_stage(void *user, smoe_stage stage, int end, void *stream)
{
    subsets *s = user;
    if (!end) s->stages |= 1u << (int)stage / 10;
    s->other_stream = s->other_stream || stream != stream_of(s);
}

static bool must(subsets *s, smoe_status status)
{
    if (status == SMOE_OK && s->v->on->sync()) return true;
    check_zero(s->v, NULL, -1, smoe_last_error(s->r.context));
    return false;
}

/* The arguments for some gradients, with NULL for all that none of them needs. */
static smoe_backward_args arguments_for(const subsets *s, unsigned wanted)
{
    smoe_backward_args b = s->r.backward;
    const bool router = wanted & (BIT(SLOT_DROUTER_WEIGHT) | BIT(SLOT_DROUTER_BIAS) | BIT(SLOT_DLOGITS)) ||
                        (wanted & BIT(SLOT_DX) && b.router_weight);
    const bool da = router || wanted & ~BIT(SLOT_DB2);
    if (!(wanted & BIT(SLOT_DX))) b.dx = NULL, b.w1 = NULL;
    if (!(wanted & BIT(SLOT_DW1))) b.dw1 = NULL;
    if (!(wanted & BIT(SLOT_DB1))) b.db1 = NULL;
    if (!(wanted & BIT(SLOT_DW2))) b.dw2 = NULL;
    if (!(wanted & BIT(SLOT_DB2))) b.db2 = NULL;
    if (!(wanted & BIT(SLOT_DROUTER_WEIGHT))) b.drouter_weight = NULL;
    if (!(wanted & BIT(SLOT_DROUTER_BIAS))) b.drouter_bias = NULL;
    if (!(wanted & BIT(SLOT_DLOGITS))) b.dlogits = NULL;
    if (!(wanted & BIT(SLOT_DROW_WEIGHTS))) b.drow_weights = NULL;
    if (!(wanted & BIT(SLOT_DTOPK_WEIGHTS))) b.dtopk_weights = NULL, b.topk_ids = NULL;
    const bool dw2_reads_x = b.dw2 && s->r.layer.compute == SMOE_COMPUTE_F8;
    if (!b.dw1 && !dw2_reads_x && !b.drouter_weight) b.x = NULL;
    if (!router) b.logits = NULL;
    if (!da) b.w2 = b.weights_f8 = NULL;
    if (!da && !b.db2) b.dout = NULL;
    return b;
}

/* The stages that some gradients need, by the equations of smoe.h. On the CPU A' is computed from the stored
 * H; on a GPU, and with fp8 for dw2, the stage dh writes it. */
static unsigned stages_for(const subsets *s, unsigned wanted)
{
    const bool from_logits = s->r.layer.entry == SMOE_ENTRY_FROM_LOGITS;
    const bool router = wanted & (BIT(SLOT_DROUTER_WEIGHT) | BIT(SLOT_DROUTER_BIAS) | BIT(SLOT_DLOGITS)) ||
                        (wanted & BIT(SLOT_DX) && from_logits && s->r.backward.router_weight);
    const unsigned dw2 = BIT(SLOT_DW2) | BIT(SLOT_DB2), dw1 = BIT(SLOT_DW1) | BIT(SLOT_DB1);
    const bool by_dh = s->v->on->backend == SMOE_BACKEND_CUDA || s->r.layer.compute == SMOE_COMPUTE_F8;
    unsigned stages = 0;
    if (router || wanted & ~(by_dh ? BIT(SLOT_DB2) : dw2)) stages |= 1u << SMOE_STAGE_DH / 10;
    if (wanted & dw2) stages |= 1u << SMOE_STAGE_DW2 / 10;
    if (wanted & dw1) stages |= 1u << SMOE_STAGE_DW1 / 10;
    if (router) stages |= 1u << SMOE_STAGE_ROUTER_BWD / 10;
    if (wanted & BIT(SLOT_DX)) stages |= 1u << SMOE_STAGE_DX_ROWS / 10 | 1u << SMOE_STAGE_DX / 10;
    return stages;
}

/* Gradients are NaN again, or what a backward that accumulates adds to; reuse_saved has overwritten H. */
static bool prepare(subsets *s)
{
    bool good = buffer_poison(slot_memory(&s->r, SLOT_SCRATCH_BACKWARD)) &&
                buffer_write(slot_memory(&s->r, SLOT_SAVED), s->saved, slot_memory(&s->r, SLOT_SAVED)->bytes);
    for (int i = 0; i < GRADIENTS && good; i++) {
        const slot *g = &s->r.slots[SLOT_DX + i];
        if (s->all >> i & 1)
            good = g->start ? buffer_write(&g->memory, g->start, g->memory.bytes) : buffer_poison(&g->memory);
    }
    s->stages = 0;
    return good;
}

static void compare_with_full(subsets *s, unsigned wanted, const char *how)
{
    for (int i = 0; i < GRADIENTS; i++) {
        if (!(s->all & wanted & 1u << i)) continue;
        const slot_id id = (slot_id)(SLOT_DX + i);
        void *got = slot_read(&s->r, id);
        char note[64];
        snprintf(note, sizeof note, "other bits, %s %03x", how, wanted);
        if (memcmp(got, s->full[i], slot_memory(&s->r, id)->bytes) != 0) {
            check_zero(s->v, slot_name(id), 1, note);
            s->wrong++;
        }
        free(got);
    }
}

static void try_subset(subsets *s, unsigned wanted)
{
    const smoe_backward_args b = arguments_for(s, wanted);
    char note[80];
    s->tried++;
    if (!prepare(s) || !must(s, smoe_layer_backward(s->r.context, &s->r.layer, &b, stream_of(s)))) {
        s->wrong++;
        return;
    }
    if (s->stages != stages_for(s, wanted)) {
        snprintf(note, sizeof note, "gradients %03x: stages %x, expected %x", wanted, s->stages,
                 stages_for(s, wanted));
        check_zero(s->v, NULL, 1, note);
        s->wrong++;
    }
    compare_with_full(s, wanted, "gradients");
}

static void try_subsets(subsets *s)
{
    const unsigned experts = BIT(SLOT_DW1) | BIT(SLOT_DW2) | BIT(SLOT_DB1) | BIT(SLOT_DB2);
    const unsigned router = BIT(SLOT_DROUTER_WEIGHT) | BIT(SLOT_DROUTER_BIAS) | BIT(SLOT_DLOGITS);
    if (s->v->on->backend == SMOE_BACKEND_CPU) {
        for (unsigned wanted = 0; wanted <= s->all; wanted++)
            if ((wanted & ~s->all) == 0) try_subset(s, wanted);
        return;
    }
    try_subset(s, 0);
    try_subset(s, s->all & ~experts);
    try_subset(s, s->all & ~router);
    for (int i = 0; i < GRADIENTS; i++)
        if (s->all >> i & 1) try_subset(s, 1u << i), try_subset(s, s->all & ~(1u << i));
}

/* ---- Other threads ---- */

typedef struct job {
    subsets *s;
    bool backward;
    smoe_status status;
    int before, after; /* the thread's current device, which the call must not change */
} job;

static void *run_job(void *given)
{
    job *j = given;
    subsets *s = j->s;
    run *r = &s->r;
    j->before = s->v->on->current();
    j->status = j->backward ? smoe_layer_backward(r->context, &r->layer, &r->backward, stream_of(s))
                            : smoe_layer_forward(r->context, &r->layer, &r->forward, stream_of(s));
    j->after = s->v->on->current();
    if (!s->v->on->sync()) j->status = SMOE_ERROR_DEVICE;
    return NULL;
}

static bool run_elsewhere(subsets *s, bool backward)
{
    pthread_t thread;
    job j = {.s = s, .backward = backward};
    if (pthread_create(&thread, NULL, run_job, &j) != 0) return false;
    pthread_join(thread, NULL);
    if (j.before != j.after) check_zero(s->v, NULL, 1, "a call changed the thread's current device");
    return j.before == j.after && must(s, j.status);
}

static void try_threads(subsets *s)
{
    const bool done = prepare(s) && buffer_poison(slot_memory(&s->r, SLOT_SAVED)) &&
                      buffer_poison(slot_memory(&s->r, SLOT_SCRATCH_FORWARD)) && run_elsewhere(s, false) &&
                      run_elsewhere(s, true);
    s->tried++;
    if (done) compare_with_full(s, s->all, "on other threads,");
    s->wrong += !done;
}

/* ---- The check ---- */

static bool make_full(subsets *s, smoe_context *context, const smoe_layer *layer, const oracle_drawn *drawn)
{
    const run_options options = {0};
    bool wanted[SLOTS];
    run *r = &s->r;
    run_wanted(layer, drawn, &options, wanted);
    if (!run_open(r, s->v->on, context, layer, wanted) || !run_make(r) || !run_inputs(r, drawn) ||
        !run_quantize(r) || !must(s, smoe_layer_forward(context, layer, &r->forward, stream_of(s))))
        return false;
    s->saved = slot_read(r, SLOT_SAVED);
    for (int i = 0; i < GRADIENTS; i++) s->all |= (unsigned)wanted[SLOT_DX + i] << i;
    if (!prepare(s) || !must(s, smoe_layer_backward(context, layer, &r->backward, stream_of(s))))
        return false;
    for (int i = 0; i < GRADIENTS; i++)
        if (s->all >> i & 1) s->full[i] = slot_read(r, (slot_id)(SLOT_DX + i));
    return true;
}

void check_gradients(verify *v, const layer_case *c, const smoe_layer *layer)
{
    subsets s = {.v = v};
    oracle_drawn drawn;
    char note[64];
    smoe_context *context = check_context(v, v->threads, on_stage, &s);
    if (!context) return;
    oracle_draw_inputs(layer, &c->draw, v->seed, &drawn);
    if (make_full(&s, context, layer, &drawn)) {
        try_subsets(&s);
        try_threads(&s);
        if (s.other_stream) check_zero(v, NULL, 1, "a stage was told another stream than the call");
        snprintf(note, sizeof note, "differing, of %lld subsets of gradients", (long long)s.tried);
        check_zero(v, "all", s.wrong, note);
    } else {
        check_zero(v, NULL, -1, s.r.text[0] ? s.r.text : "forward or backward failed");
    }
    for (int i = 0; i < GRADIENTS; i++) free(s.full[i]);
    free(s.saved);
    run_close(&s.r);
    oracle_drawn_free(&drawn);
    smoe_destroy(context);
}
