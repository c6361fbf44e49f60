/* Times work that takes microseconds. A CUDA graph holds LINKS copies of the work, here called links, one
 * after the other. So the gaps between launches count, and the time of the host does not. */
#ifndef SMOE_TESTS_CUDA_LINK_TIME_H
#define SMOE_TESTS_CUDA_LINK_TIME_H

#include "tests/cuda/gpu.h"

enum { LINKS = 20, REPLAYS = 30 };

/* Enqueues link number `i` of the work that `work` describes. */
typedef cudaError_t enqueue_link(const void *work, int i, cudaStream_t stream);

static inline int compare_floats(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Microseconds of a link: the median over the replays of the graph. */
static inline float link_time(const void *work, enqueue_link *enqueue)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t run;
    cudaEvent_t begin, end;
    float times[REPLAYS];
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < LINKS; i++) CHECK_CUDA(enqueue(work, i, stream));
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&run, graph, 0));
    for (int i = 0; i < 3; i++) CHECK_CUDA(cudaGraphLaunch(run, stream));
    for (int i = 0; i < REPLAYS; i++) {
        CHECK_CUDA(cudaEventRecord(begin, stream));
        CHECK_CUDA(cudaGraphLaunch(run, stream));
        CHECK_CUDA(cudaEventRecord(end, stream));
        CHECK_CUDA(cudaEventSynchronize(end));
        CHECK_CUDA(cudaEventElapsedTime(times + i, begin, end));
    }
    CHECK_CUDA(cudaGraphExecDestroy(run));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaEventDestroy(begin));
    CHECK_CUDA(cudaEventDestroy(end));
    CHECK_CUDA(cudaStreamDestroy(stream));
    qsort(times, REPLAYS, sizeof *times, compare_floats);
    return times[REPLAYS / 2] * 1000.0f / LINKS;
}

#endif
