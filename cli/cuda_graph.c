/* See cuda_graph.h. */
#include "cli/cuda_graph.h"

#include <stddef.h>

#ifdef SMOE_HAVE_CUDA
#include <cuda_runtime_api.h>

bool cuda_graph_begin(void *stream)
{
    return cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
}

void *cuda_graph_end(void *stream)
{
    cudaGraph_t recorded = NULL;
    cudaGraphExec_t made = NULL;
    if (cudaStreamEndCapture(stream, &recorded) != cudaSuccess || !recorded) return NULL;
    const bool good = cudaGraphInstantiate(&made, recorded, 0) == cudaSuccess;
    (void)cudaGraphDestroy(recorded);
    return good ? made : NULL;
}

bool cuda_graph_launch(void *graph, void *stream)
{
    return cudaGraphLaunch(graph, stream) == cudaSuccess;
}

void cuda_graph_free(void *graph)
{
    if (graph) (void)cudaGraphExecDestroy(graph);
}
#endif
