/* Checks that equivalent calls give the same bits: a repeated call, other numbers of threads, chunks, stage
 * by stage, dH in the place of H, inference, and a thousand calls while another stream copies memory. */
#include "cli/verify/checks.h"

#include <stdio.h>

/* Which tensors two runs have in common. */
typedef enum common { ALL_TENSORS, FORWARD_TENSORS, EXPERT_TENSORS } common;

static bool compared(common which, int id)
{
    const bool forward = id <= TENSOR_OUT;
    switch (which) {
    case ALL_TENSORS: return true;
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

/* Runs one variant and compares it with the base. */
static void try_way(verify *v, smoe_context *context, const char *way, const smoe_layer *layer,
                    const oracle_drawn *drawn, const run_options *options, const tensors *base, common which)
{
    tensors other;
    if (!check_run(v, context, layer, drawn, options, &other)) return;
    compare(v, way, base, &other, which);
    tensors_free(&other);
}

static void try_threads(verify *v, const smoe_layer *layer, const oracle_drawn *drawn, const tensors *base)
{
    const int32_t threads[] = {1, 2, 3, 7};
    const run_options options = {0};
    for (size_t i = 0; v->on->backend == SMOE_BACKEND_CPU && i < sizeof threads / sizeof threads[0]; i++) {
        char way[32];
        snprintf(way, sizeof way, "%d thread%s", (int)threads[i], threads[i] > 1 ? "s" : "");
        smoe_context *context = check_context(v, threads[i]);
        if (context) try_way(v, context, way, layer, drawn, &options, base, ALL_TENSORS);
        smoe_destroy(context);
    }
}

static void try_all(verify *v, const smoe_layer *layer, const oracle_drawn *drawn, const tensors *base)
{
    const run_options plain = {0}, stages = {.stages = true}, forward = {.forward_only = true};
    try_way(v, NULL, "again", layer, drawn, &plain, base, ALL_TENSORS);
    try_threads(v, layer, drawn, base);
    for (int32_t chunks = 2; chunks <= 64; chunks *= chunks == 4 ? 16 : 2) {
        char way[32];
        snprintf(way, sizeof way, "%d chunks", (int)chunks);
        smoe_layer chunked = *layer;
        chunked.chunks = chunks;
        try_way(v, NULL, way, &chunked, drawn, &plain, base, ALL_TENSORS);
    }
    smoe_layer reuse = *layer;
    reuse.reuse_saved = 1;
    try_way(v, NULL, "reuse_saved", &reuse, drawn, &plain, base, ALL_TENSORS);
    smoe_layer inference = *layer;
    inference.inference = 1;
    try_way(v, NULL, "inference", &inference, drawn, &forward, base, FORWARD_TENSORS);
    try_way(v, NULL, "stage by stage", layer, drawn, &stages, base, EXPERT_TENSORS);
}

void check_same_bits(verify *v, const verify_case *c, const smoe_layer *layer)
{
    const run_options plain = {0};
    oracle_drawn drawn;
    tensors base;
    oracle_draw_inputs(layer, &c->draw, v->seed, &drawn);
    if (check_run(v, NULL, layer, &drawn, &plain, &base)) {
        try_all(v, layer, &drawn, &base);
        tensors_free(&base);
    }
    oracle_drawn_free(&drawn);
}

void check_repeats(verify *v, const verify_case *c, const smoe_layer *layer)
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
