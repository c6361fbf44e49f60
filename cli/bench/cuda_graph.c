/* See cuda_graph.h. */
#include "cli/bench/cuda_graph.h"

#include <stddef.h> // something, where there is no CUDA

#ifdef SMOE_HAVE_CUDA
#include <cuda_runtime_api.h>
#include <stdlib.h>

enum { MOST_LAUNCHES = 1024, MOST_EDGES = 2 * MOST_LAUNCHES }; // of a pass in 64 chunks: some 300

typedef struct graph_launch {
    cudaGraphNode_t node;
    int stage;
} graph_launch;

struct cuda_graph {
    cudaGraph_t recorded;
    cudaGraphExec_t ready;
    int count;
    graph_launch launches[MOST_LAUNCHES];
};

cuda_graph *cuda_graph_begin(void *stream)
{
    cuda_graph *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    if (cudaGraphCreate(&made->recorded, 0) == cudaSuccess &&
        cudaStreamBeginCaptureToGraph(stream, made->recorded, NULL, NULL, 0,
                                      cudaStreamCaptureModeThreadLocal) == cudaSuccess)
        return made;
    cuda_graph_free(made);
    return NULL;
}

static bool listed(const cuda_graph *graph, cudaGraphNode_t node)
{
    for (int i = 0; i < graph->count; i++)
        if (graph->launches[i].node == node) return true;
    return false;
}

/* The runtime lists nodes in no stated order. Nodes that are not in our list yet are new. */
void cuda_graph_mark(cuda_graph *recording, int stage)
{
    cudaGraphNode_t nodes[MOST_LAUNCHES];
    size_t count = MOST_LAUNCHES;
    if (cudaGraphGetNodes(recording->recorded, nodes, &count) != cudaSuccess) return;
    for (size_t i = 0; i < count && recording->count < MOST_LAUNCHES; i++) {
        enum cudaGraphNodeType type;
        if (listed(recording, nodes[i]) || cudaGraphNodeGetType(nodes[i], &type) != cudaSuccess ||
            type == cudaGraphNodeTypeEmpty)
            continue;
        recording->launches[recording->count].node = nodes[i];
        recording->launches[recording->count++].stage = stage;
    }
}

static bool make_ready(cuda_graph *graph)
{
    return cudaGraphInstantiate(&graph->ready, graph->recorded, 0) == cudaSuccess;
}

/* Which launches each launch waits for. */
typedef struct edges {
    cudaGraphNode_t from[MOST_EDGES], to[MOST_EDGES];
    cudaGraphEdgeData how[MOST_EDGES]; // some start before the other has ended
    size_t count;
} edges;

static bool read_edges(const cuda_graph *graph, edges *e)
{
    e->count = MOST_EDGES;
#if CUDART_VERSION >= 13000
    return cudaGraphGetEdges(graph->recorded, e->from, e->to, e->how, &e->count) == cudaSuccess;
#else
    return cudaGraphGetEdges_v2(graph->recorded, e->from, e->to, e->how, &e->count) == cudaSuccess;
#endif
}

/* Does launch `which` wait for none of [first, count)? */
static bool is_free(const cuda_graph *graph, const edges *e, int first, int which)
{
    for (size_t i = 0; i < e->count; i++)
        for (int other = first; e->to[i] == graph->launches[which].node && other < graph->count; other++)
            if (e->from[i] == graph->launches[other].node) return false;
    return true;
}

/* Orders the launches so that each comes after those it waits for. With one stream there is one such order.
 */
static bool put_in_order(cuda_graph *graph)
{
    edges e;
    if (!read_edges(graph, &e)) return false;
    for (int i = 0; i < graph->count; i++) {
        int next = i;
        while (next < graph->count && !is_free(graph, &e, i, next)) next++;
        if (next == graph->count) return false;
        const graph_launch moved = graph->launches[next];
        graph->launches[next] = graph->launches[i];
        graph->launches[i] = moved;
    }
    return true;
}

bool cuda_graph_end(cuda_graph *recorded, void *stream)
{
    cudaGraph_t same = NULL;
    if (cudaStreamEndCapture(stream, &same) != cudaSuccess || !same) return false;
    cuda_graph_mark(recorded, -1);
    if (!put_in_order(recorded)) recorded->count = 0;
    return make_ready(recorded);
}

bool cuda_graph_launch(const cuda_graph *graph, void *stream)
{
    return cudaGraphLaunch(graph->ready, stream) == cudaSuccess;
}

void cuda_graph_free(cuda_graph *freed)
{
    if (!freed) return;
    if (freed->ready) (void)cudaGraphExecDestroy(freed->ready);
    if (freed->recorded) (void)cudaGraphDestroy(freed->recorded);
    free(freed);
}

int cuda_graph_launches(const cuda_graph *recorded)
{
    return recorded->count;
}

int cuda_graph_stage(const cuda_graph *recorded, int launch)
{
    return recorded->launches[launch].stage;
}

/* A copy of the graph with the launches [first, end) and no others. */
static cudaGraph_t copy_of(const cuda_graph *recorded, int first, int end)
{
    cudaGraph_t copy = NULL;
    if (recorded->count == 0 || cudaGraphClone(&copy, recorded->recorded) != cudaSuccess) return NULL;
    for (int i = 0; i < recorded->count; i++) {
        cudaGraphNode_t node;
        if (i >= first && i < end) continue;
        if (cudaGraphNodeFindInClone(&node, recorded->launches[i].node, copy) == cudaSuccess &&
            cudaGraphDestroyNode(node) == cudaSuccess)
            continue;
        (void)cudaGraphDestroy(copy);
        return NULL;
    }
    return copy;
}

cuda_graph *cuda_graph_before(const cuda_graph *recorded, int launch)
{
    cuda_graph *made = calloc(1, sizeof *made);
    if (made && (made->recorded = copy_of(recorded, 0, launch)) && make_ready(made)) return made;
    cuda_graph_free(made);
    return NULL;
}

static bool add_times(cudaGraph_t to, cudaGraph_t child, int times)
{
    cudaGraphNode_t last = NULL, added;
    for (int i = 0; i < times; i++, last = added)
        if (cudaGraphAddChildGraphNode(&added, to, last ? &last : NULL, last != NULL, child) != cudaSuccess)
            return false;
    return true;
}

cuda_graph *cuda_graph_alone(const cuda_graph *recorded, int launch, int times)
{
    cuda_graph *made = calloc(1, sizeof *made);
    cudaGraph_t one = made ? copy_of(recorded, launch, launch + 1) : NULL;
    const bool good = one && cudaGraphCreate(&made->recorded, 0) == cudaSuccess &&
                      add_times(made->recorded, one, times) && make_ready(made);
    if (one) (void)cudaGraphDestroy(one);
    if (good) return made;
    cuda_graph_free(made);
    return NULL;
}
#endif
