// Streams, graphs and events of the CUDA runtime. Work on a stream is done at once, or becomes a node of the
// graph that is recorded from it: each after the one before.
#include "emulator.h"

#include <chrono>
#include <memory>

struct CUgraphNode_st {
    std::function<void()> work;
    const CUgraphNode_st *original; // of a node in a clone
};

struct CUgraph_st {
    std::vector<std::unique_ptr<CUgraphNode_st>> nodes;

    CUgraphNode_st *add(std::function<void()> work, const CUgraphNode_st *original = nullptr)
    {
        nodes.emplace_back(new CUgraphNode_st{std::move(work), original});
        return nodes.back().get();
    }

    std::function<void()> whole() const // stays when the graph is gone
    {
        std::vector<std::function<void()>> all;
        for (const auto &node : nodes) all.push_back(node->work);
        return [all] {
            for (const auto &work : all)
                if (work) work();
        };
    }
};

struct CUgraphExec_st {
    std::function<void()> work;
};

struct CUstream_st {
    CUgraph_st *recorded; // NULL: work is done at once
};

struct CUevent_st {
    std::chrono::steady_clock::time_point passed;
};

namespace emulator
{

void enqueue(cudaStream_t stream, std::function<void()> work)
{
    if (stream && stream->recorded)
        stream->recorded->add(std::move(work));
    else
        work();
}

} // namespace emulator

extern "C" {

// ---- Streams and events ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    *stream = new CUstream_st{};
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return stream && stream->recorded ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    *event = new CUevent_st{};
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    if (stream && stream->recorded) return cudaErrorStreamCaptureUnsupported; // nothing here records events
    event->passed = std::chrono::steady_clock::now();
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    *ms = std::chrono::duration<float, std::milli>(to->passed - from->passed).count();
    return cudaSuccess;
}

// ---- Recording ----

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned)
{
    *graph = new CUgraph_st{};
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *,
                                          const cudaGraphEdgeData *, size_t, cudaStreamCaptureMode)
{
    if (!stream || stream->recorded) return cudaErrorStreamCaptureUnsupported;
    stream->recorded = graph;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode)
{
    if (!stream || stream->recorded) return cudaErrorStreamCaptureUnsupported;
    return cudaStreamBeginCaptureToGraph(stream, new CUgraph_st{}, nullptr, nullptr, 0, mode);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    if (!stream || !stream->recorded) return cudaErrorIllegalState;
    *graph = stream->recorded;
    stream->recorded = nullptr;
    return cudaSuccess;
}

// ---- Running ----

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *run, cudaGraph_t graph, unsigned long long)
{
    *run = new CUgraphExec_st{graph->whole()};
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t run, cudaStream_t stream)
{
    emulator::enqueue(stream, run->work);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t run)
{
    delete run;
    return cudaSuccess;
}

// ---- Looking into a graph and taking it apart ----

// The runtime promises no order: the last come first.
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    size_t found = 0;
    for (size_t i = graph->nodes.size(); i-- > 0 && found < *count;) nodes[found++] = graph->nodes[i].get();
    *count = found;
    return cudaSuccess;
}

cudaError_t cudaGraphGetEdges(cudaGraph_t graph, cudaGraphNode_t *from, cudaGraphNode_t *to,
                              cudaGraphEdgeData *how, size_t *count)
{
    size_t found = 0;
    for (size_t i = 1; i < graph->nodes.size() && found < *count; i++, found++) {
        from[found] = graph->nodes[i - 1].get();
        to[found] = graph->nodes[i].get();
        how[found] = {};
    }
    *count = found;
    return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t, cudaGraphNodeType *type)
{
    *type = cudaGraphNodeTypeKernel;
    return cudaSuccess;
}

cudaError_t cudaGraphClone(cudaGraph_t *clone, cudaGraph_t graph)
{
    *clone = new CUgraph_st{};
    for (const auto &node : graph->nodes) (*clone)->add(node->work, node.get());
    return cudaSuccess;
}

cudaError_t cudaGraphNodeFindInClone(cudaGraphNode_t *found, cudaGraphNode_t original, cudaGraph_t clone)
{
    for (const auto &node : clone->nodes)
        if (node->original == original) {
            *found = node.get();
            return cudaSuccess;
        }
    return cudaErrorInvalidValue;
}

// A destroyed node stays as one without work.
cudaError_t cudaGraphDestroyNode(cudaGraphNode_t node)
{
    node->work = nullptr;
    return cudaSuccess;
}

cudaError_t cudaGraphAddChildGraphNode(cudaGraphNode_t *added, cudaGraph_t graph, const cudaGraphNode_t *,
                                       size_t, cudaGraph_t child)
{
    *added = graph->add(child->whole());
    return cudaSuccess;
}
}
