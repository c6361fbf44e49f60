// Streams, graphs and events. A stream runs its work at once, or adds it to a graph while it is captured; the
// default stream is nullptr. The CUDA runtime does not specify the order of a graph's nodes. Here graphs list
// the newest node first, and of the nodes that can run, the newest one runs first. Only if a capture has
// several streams, whose kernels may wait for each other, do nodes run in the order of the capture. Time is
// not measured: every piece of work takes WORK_MS.
#include "emulator.h"

#include <algorithm>
#include <map>
#include <memory>

static const double WORK_MS = 60.0;

struct CUgraphNode_st {
    std::function<void()> work;
    cudaGraphNodeType type;
    bool early; // whether its edges are programmatic
    std::vector<cudaGraphNode_t> after;
    cudaGraphNode_t original; // the node from which this one was cloned
    cudaGraph_t graph;
    dim3 grid; // of a kernel
};

struct CUgraph_st {
    std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
    bool forked = false; // captured from several streams
};

struct CUgraphExec_st {
    std::vector<std::function<void()>> work; // in order
};

using node_list = std::vector<cudaGraphNode_t>;

struct CUstream_st {
    cudaGraph_t graph; // set while the stream is captured
    node_list last;    // what the next node comes after
};

struct CUevent_st {
    double ms;         // < 0: was never recorded, or only in a capture
    cudaGraph_t graph; // of the capture in which it was recorded last, and what it comes after
    node_list after;
};

static node_list joined; // what the stream whose capture ends comes after, and all before that
static std::vector<cudaStream_t> forked; // streams that a capture has reached by an event

static int captures;
static double now_ms;

static cudaGraphNode_t add_node(cudaGraph_t graph, const CUgraphNode_st &node)
{
    graph->nodes.emplace_back(new CUgraphNode_st(node));
    graph->nodes.back()->graph = graph;
    return graph->nodes.back().get();
}

static void run(const std::function<void()> &work)
{
    work();
    now_ms += WORK_MS;
}

static std::vector<std::function<void()>> in_order(const CUgraph_st &graph)
{
    std::vector<std::function<void()>> order;
    std::vector<cudaGraphNode_t> left;
    for (const auto &node : graph.nodes) left.insert(graph.forked ? left.end() : left.begin(), node.get());
    const auto is_free = [&](cudaGraphNode_t node) {
        return std::none_of(node->after.begin(), node->after.end(), [&](cudaGraphNode_t before) {
            return std::find(left.begin(), left.end(), before) != left.end();
        });
    };
    while (!left.empty()) {
        const auto next = std::find_if(left.begin(), left.end(), is_free);
        if (next == left.end()) abort(); // the graph has a cycle
        order.push_back((*next)->work);
        left.erase(next);
    }
    return order;
}

namespace emulator
{

void enqueue(cudaStream_t stream, cudaGraphNodeType type, std::function<void()> work, bool early, dim3 grid)
{
    if (!stream || !stream->graph) return run(work);
    const bool programmatic = early && !stream->last.empty();
    const CUgraphNode_st node = {std::move(work), type, programmatic, stream->last, nullptr, nullptr, grid};
    stream->last = {add_node(stream->graph, node)};
}

bool is_capturing()
{
    return captures > 0;
}

} // namespace emulator

extern "C" {

// ---- Streams

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    *stream = new CUstream_st{};
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    return cudaStreamCreate(stream);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int)
{
    return cudaStreamCreate(stream);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest)
{
    *lowest = *highest = 0;
    return cudaSuccess;
}

// Outside of a capture everything runs in the order in which it was enqueued.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    if (!event->graph || !stream) return cudaSuccess;
    if (!stream->graph) {
        *stream = {event->graph, {}};
        event->graph->forked = true;
        forked.push_back(stream);
    }
    if (stream->graph != event->graph) return cudaErrorStreamCaptureMerge;
    stream->last.insert(stream->last.end(), event->after.begin(), event->after.end());
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t)
{
    return captures ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status)
{
    *status = stream && stream->graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *,
                                          const cudaGraphEdgeData *, size_t dependencies,
                                          cudaStreamCaptureMode)
{
    if (!stream || stream->graph || dependencies) return cudaErrorStreamCaptureUnsupported;
    *stream = {graph, {}};
    captures++;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode)
{
    return cudaStreamBeginCaptureToGraph(stream, new CUgraph_st, nullptr, nullptr, 0, mode);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    if (!stream || !stream->graph) return cudaErrorIllegalState;
    *graph = stream->graph;
    joined = stream->last;
    for (size_t i = 0; i < joined.size(); i++) {
        const node_list before = joined[i]->after;
        for (const cudaGraphNode_t node : before)
            if (std::find(joined.begin(), joined.end(), node) == joined.end()) joined.push_back(node);
    }
    cudaError_t status = cudaSuccess;
    for (const cudaStream_t other : forked) {
        for (const cudaGraphNode_t node : other->last)
            if (std::find(joined.begin(), joined.end(), node) == joined.end())
                status = cudaErrorStreamCaptureUnjoined;
        *other = {};
    }
    forked.clear();
    *stream = {};
    captures--;
    return status;
}

// ---- Graphs

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned)
{
    *graph = new CUgraph_st;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphClone(cudaGraph_t *clone, cudaGraph_t graph)
{
    std::map<cudaGraphNode_t, cudaGraphNode_t> copies;
    *clone = new CUgraph_st;
    for (const auto &node : graph->nodes) {
        const cudaGraphNode_t copy = copies[node.get()] = add_node(*clone, *node);
        copy->original = node.get();
        for (cudaGraphNode_t &before : copy->after) before = copies.at(before);
    }
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

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    const size_t room = nodes ? *count : 0, all = graph->nodes.size();
    for (size_t i = 0; i < room; i++) nodes[i] = i < all ? graph->nodes[all - 1 - i].get() : nullptr;
    *count = nodes ? std::min(room, all) : all;
    return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType *type)
{
    *type = node->type;
    return cudaSuccess;
}

// Sets only the grid's size.
cudaError_t cudaGraphKernelNodeGetParams(cudaGraphNode_t node, cudaKernelNodeParams *params)
{
    if (node->type != cudaGraphNodeTypeKernel) return cudaErrorInvalidValue;
    *params = {};
    params->gridDim = node->grid;
    return cudaSuccess;
}

cudaError_t cudaGraphGetEdges(cudaGraph_t graph, cudaGraphNode_t *from, cudaGraphNode_t *to,
                              cudaGraphEdgeData *data, size_t *count)
{
    size_t found = 0;
    for (auto node = graph->nodes.rbegin(); node != graph->nodes.rend(); ++node)
        for (const cudaGraphNode_t before : (*node)->after) {
            if ((*node)->early && from && !data) return cudaErrorLossyQuery;
            if (from && found < *count) {
                from[found] = before;
                to[found] = node->get();
                if (data) data[found] = {};
                if (data && (*node)->early) data[found].type = cudaGraphDependencyTypeProgrammatic;
            }
            found++;
        }
    *count = from ? std::min(found, *count) : found;
    return cudaSuccess;
}

// Removes the node, and the edges from it to other nodes.
cudaError_t cudaGraphDestroyNode(cudaGraphNode_t node)
{
    auto &nodes = node->graph->nodes;
    for (const auto &other : nodes)
        other->after.erase(std::remove(other->after.begin(), other->after.end(), node), other->after.end());
    nodes.erase(
        std::find_if(nodes.begin(), nodes.end(), [&](const auto &other) { return other.get() == node; }));
    return cudaSuccess;
}

cudaError_t cudaGraphAddChildGraphNode(cudaGraphNode_t *added, cudaGraph_t graph,
                                       const cudaGraphNode_t *before, size_t count, cudaGraph_t child)
{
    const auto work = in_order(*child);
    const auto all = [=] {
        for (const auto &one : work) run(one);
        now_ms -= WORK_MS; // run() adds WORK_MS for the child graph, which takes only the time of its work
    };
    *added = add_node(graph, {all, cudaGraphNodeTypeGraph, false, {before, before + count}, nullptr});
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long)
{
    *ready = new CUgraphExec_st{in_order(*graph)};
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream)
{
    if (stream && stream->graph) return cudaErrorStreamCaptureUnsupported;
    for (const auto &work : ready->work) run(work);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t ready)
{
    delete ready;
    return cudaSuccess;
}

// ---- Events

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    *event = new CUevent_st{-1.0, nullptr, {}};
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    return cudaEventCreate(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

// An event that is recorded during a capture has no time.
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    const bool captured = stream && stream->graph;
    event->ms = captured ? -1.0 : now_ms;
    event->graph = captured ? stream->graph : nullptr;
    event->after = captured ? stream->last : node_list();
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t)
{
    return captures ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    if (from->ms < 0.0 || to->ms < 0.0) return cudaErrorInvalidResourceHandle;
    *ms = (float)(to->ms - from->ms);
    return cudaSuccess;
}
}
