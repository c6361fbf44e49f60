/* Checks that equivalent calls give the same bits: a repeated call, other numbers of threads, chunks, stage
 * by stage, dH in the place of H, inference, from a CUDA graph, and a thousand calls while another stream
 * copies memory. */
#include "cli/verify/checks.h"

#include <stdio.h>

/* Which tensors two runs have in common. */
typedef enum common { ALL_TENSORS, FORWARD_TENSORS, EXPERT_TENSORS, LESS_ROUTER } common;

static bool compared(common which, int id)
{
    const bool forward = id <= TENSOR_OUT;
    switch (which) {
    case ALL_TENSORS: return true;
    case LESS_ROUTER: return id != TENSOR_DLOGITS && id != TENSOR_DROUTER_BIAS;
    case FORWARD_TENSORS: return forward && id != TENSOR_H;
    case EXPERT_TENSORS:
        return forward || id == TENSOR_DW1 || id == TENSOR_DB1 || id == TENSOR_DW2 || id == TENSOR_DB2 ||
               id == TENSOR_DTOPK_WEIGHTS || id == TENSOR_DROW_WEIGHTS;
    }
    return false;
}

static void compare(verify *v, const char *way, const tensors *base, const tensors *other, common which)
{
    char note[64];
    snprintf(note, sizeof note, "differing bits, %s", way);
    for (int i = 0; i < TENSORS; i++)
        if (compared(which, i) && (base->at[i].bits || other->at[i].bits))
            check_zero(v, tensor_names[i], tensor_differing_bits(&base->at[i], &other->at[i]), note);
}

/* A case with its inputs, and the run that the others are compared with. */
typedef struct ways {
    verify *v;
    const smoe_layer *layer;
    oracle_drawn drawn;
    run_options options;
    tensors base;
} ways;

static bool open_ways(ways *w, verify *v, const layer_case *c, const smoe_layer *layer)
{
    *w = (ways){.v = v, .layer = layer};
    w->options.forward_only = c->forward_only || layer->inference;
    w->options.backwards = layer->accumulate ? 2 : 1;
    oracle_draw_inputs(layer, &c->draw, v->seed, &w->drawn);
    return check_run(v, NULL, layer, &w->drawn, &w->options, &w->base);
}

static void close_ways(ways *w)
{
    tensors_free(&w->base);
    oracle_drawn_free(&w->drawn);
}

/* Runs one variant and compares it with the base. */
static void try_way(const ways *w, smoe_context *context, const char *way, const smoe_layer *layer,
                    const run_options *options, common which)
{
    tensors other;
    if (!check_run(w->v, context, layer, &w->drawn, options, &other)) return;
    compare(w->v, way, &w->base, &other, which);
    tensors_free(&other);
}

static void try_threads(const ways *w)
{
    const int32_t threads[] = {1, 2, 3, 7};
    for (size_t i = 0; w->v->on->backend == SMOE_BACKEND_CPU && i < sizeof threads / sizeof *threads; i++) {
        char way[32];
        snprintf(way, sizeof way, "%d thread%s", (int)threads[i], threads[i] > 1 ? "s" : "");
        smoe_context *context = check_context(w->v, threads[i], NULL, NULL);
        if (context) try_way(w, context, way, w->layer, &w->options, ALL_TENSORS);
        smoe_destroy(context);
    }
}

static void try_chunks(const ways *w)
{
    for (int32_t chunks = 2; chunks <= 64; chunks *= chunks == 4 ? 16 : 2) {
        char way[32];
        snprintf(way, sizeof way, "%d chunks", (int)chunks);
        smoe_layer chunked = *w->layer;
        chunked.chunks = chunks;
        try_way(w, NULL, way, &chunked, &w->options, ALL_TENSORS);
    }
}

/* The graph runs both passes before `saved` is read, so H must outlast the backward. */
static void try_graph(const ways *w)
{
    run_options graph = w->options;
    smoe_layer layer = *w->layer;
    graph.graph = true;
    layer.reuse_saved = 0;
    if (w->v->on->replay) try_way(w, NULL, "in a CUDA graph", &layer, &graph, ALL_TENSORS);
}

static void try_inference(const ways *w)
{
    run_options forward = w->options;
    smoe_layer layer = *w->layer;
    forward.forward_only = true;
    layer.inference = 1;
    try_way(w, NULL, "inference", &layer, &forward, FORWARD_TENSORS);
}

static void try_reuse(const ways *w)
{
    smoe_layer layer = *w->layer;
    layer.reuse_saved = !layer.reuse_saved;
    try_way(w, NULL, "reuse_saved", &layer, &w->options, ALL_TENSORS);
}

static void try_stages(const ways *w)
{
    run_options stages = w->options;
    stages.stages = true;
    try_way(w, NULL, "stage by stage", w->layer, &stages, EXPERT_TENSORS);
}

void check_bits(verify *v, const layer_case *c, const smoe_layer *layer)
{
    ways w;
    if (open_ways(&w, v, c, layer)) {
        try_way(&w, NULL, "again", layer, &w.options, ALL_TENSORS);
        try_threads(&w);
        try_chunks(&w);
        if (!w.options.forward_only) try_reuse(&w);
        try_inference(&w);
        try_stages(&w);
        try_graph(&w);
    }
    close_ways(&w);
}

void check_other_ways(verify *v, const layer_case *c, const smoe_layer *layer)
{
    ways w;
    if (open_ways(&w, v, c, layer)) {
        smoe_layer chunked = *layer;
        run_options less = w.options;
        chunked.chunks = layer->chunks == 1 ? 8 : 1;
        less.less_router = layer->entry == SMOE_ENTRY_FROM_LOGITS && c->draw.router;
        try_way(&w, NULL, "other chunks, less asked of the router", &chunked, &less,
                less.less_router ? LESS_ROUTER : ALL_TENSORS);
        try_graph(&w);
    }
    close_ways(&w);
}

void check_repeats(verify *v, const layer_case *c, const smoe_layer *layer)
{
    int64_t differing[TENSORS] = {0};
    const run_options beside_copies = {
        .traffic = v->on->open_traffic(), .repeats = v->repeats, .differing = differing};
    oracle_drawn drawn;
    tensors got;
    char note[64];
    if (!beside_copies.traffic) {
        report_skip(&v->report, "nothing can copy memory beside it here");
        return;
    }
    oracle_draw_inputs(layer, &c->draw, v->seed, &drawn);
    if (check_run(v, NULL, layer, &drawn, &beside_copies, &got)) {
        snprintf(note, sizeof note, "differing bits, %lld runs beside copies", (long long)v->repeats);
        for (int i = 0; i < TENSORS; i++)
            if (got.at[i].bits) check_zero(v, tensor_names[i], differing[i], note);
        tensors_free(&got);
    }
    oracle_drawn_free(&drawn);
    v->on->close_traffic(beside_copies.traffic);
}
