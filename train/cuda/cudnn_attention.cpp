// See cudnn_attention.h. One graph for each shape and direction, built once.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include "train/cuda/cudnn_attention.h"

#include <cudnn_frontend.h>

#include <cmath>
#include <dlfcn.h>
#include <memory>
#include <unordered_map>
#include <vector>

namespace fe = cudnn_frontend;

namespace cudnn_frontend
{
void *cudnn_dlhandle = nullptr; // the frontend's own variable: where it finds cuDNN
}

namespace
{

enum tensor_id : int64_t { Q = 1, K, V, O, STATS, DO, DQ, DK, DV };

struct plan {
    pass_shape shape;
    bool backward;
    std::shared_ptr<fe::graph::Graph> graph;
};

using tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// (B, H, S, size) where rows of all heads lie `factor` d elements apart.
fe::graph::Tensor_attributes describe(const char *name, tensor_id id, const pass_shape &s, int64_t factor)
{
    const int64_t row = factor * s.heads * s.head_size;
    return fe::graph::Tensor_attributes()
        .set_name(name)
        .set_uid(id)
        .set_dim({s.sequences, s.heads, s.length, s.head_size})
        .set_stride({s.length * row, s.head_size, row, 1});
}

fe::graph::Tensor_attributes describe_stats(const pass_shape &s)
{
    return fe::graph::Tensor_attributes()
        .set_name("stats")
        .set_uid(STATS)
        .set_dim({s.sequences, s.heads, s.length, 1})
        .set_stride({s.heads * s.length, s.length, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
}

void set_output(const tensor &t, const fe::graph::Tensor_attributes &as, tensor_id id)
{
    t->set_output(true).set_dim(as.get_dim()).set_stride(as.get_stride()).set_uid(id);
}

std::shared_ptr<fe::graph::Graph> new_graph()
{
    auto graph = std::make_shared<fe::graph::Graph>();
    graph->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    return graph;
}

float scale_of(const pass_shape &s)
{
    return 1.0f / std::sqrt((float)s.head_size);
}

std::shared_ptr<fe::graph::Graph> forward_graph(const pass_shape &s)
{
    auto graph = new_graph();
    auto q = graph->tensor(describe("q", Q, s, 1)), k = graph->tensor(describe("k", K, s, 1));
    auto v = graph->tensor(describe("v", V, s, 3));
    auto how = fe::graph::SDPA_attributes()
                   .set_name("attention")
                   .set_generate_stats(true)
                   .set_attn_scale(scale_of(s));
    how.set_causal_mask(true);
    auto results = graph->sdpa(q, k, v, how);
    set_output(results[0], describe("out", O, s, 1), O);
    set_output(results[1], describe_stats(s), STATS);
    results[1]->set_data_type(fe::DataType_t::FLOAT);
    return graph;
}

std::shared_ptr<fe::graph::Graph> backward_graph(const pass_shape &s, bool deterministic)
{
    auto graph = new_graph();
    auto q = graph->tensor(describe("q", Q, s, 1)), k = graph->tensor(describe("k", K, s, 1));
    auto v = graph->tensor(describe("v", V, s, 3)), o = graph->tensor(describe("out", O, s, 1));
    auto dout = graph->tensor(describe("dout", DO, s, 1)), stats = graph->tensor(describe_stats(s));
    auto how =
        fe::graph::SDPA_backward_attributes().set_name("attention_backward").set_attn_scale(scale_of(s));
    how.set_causal_mask(true);
    how.set_deterministic_algorithm(deterministic);
    auto results = graph->sdpa_backward(q, k, v, o, dout, stats, how);
    set_output(results[0], describe("dq", DQ, s, 1), DQ);
    set_output(results[1], describe("dk", DK, s, 1), DK);
    set_output(results[2], describe("dv", DV, s, 3), DV);
    return graph;
}

bool same(const pass_shape &a, const pass_shape &b)
{
    return a.sequences == b.sequences && a.length == b.length && a.heads == b.heads &&
           a.head_size == b.head_size;
}

} // namespace

struct cudnn_attention {
    cudnnHandle_t handle;
    bool deterministic;
    void *workspace;
    int64_t workspace_bytes;
    std::vector<plan> plans;
};

static bool failed(error *err, const char *doing, const std::string &why)
{
    return fail(err, ERROR_RUNTIME, "cuDNN attention, %s: %s", doing, why.c_str());
}

static bool grow(cudnn_attention *with, int64_t bytes, error *err)
{
    if (bytes <= with->workspace_bytes) return true;
    (void)cudaDeviceSynchronize(); // because enqueued work may still use the old one
    if (with->workspace) (void)cudaFree(with->workspace);
    with->workspace = nullptr;
    with->workspace_bytes = 0;
    if (cudaMalloc(&with->workspace, (size_t)bytes) != cudaSuccess)
        return fail(err, ERROR_RUNTIME,
                    "out of memory: cuDNN's attention asks for %.2f GB besides (a smaller --batch?)",
                    (double)bytes / 1e9);
    with->workspace_bytes = bytes;
    return true;
}

static bool build(cudnn_attention *with, plan &made, error *err)
{
    made.graph = made.backward ? backward_graph(made.shape, with->deterministic) : forward_graph(made.shape);
    auto status = made.graph->build(with->handle, {fe::HeurMode_t::A});
    if (status.is_bad())
        return failed(err, made.backward ? "backward" : "forward",
                      status.get_message() + " (--device cuda-plain does without cuDNN, slowly)");
    int64_t bytes = 0;
    status = made.graph->get_workspace_size(bytes);
    if (status.is_bad()) return failed(err, "its workspace", status.get_message());
    return grow(with, bytes, err);
}

static plan *plan_of(cudnn_attention *with, const pass_shape *shape, bool backward, error *err)
{
    for (auto &p : with->plans)
        if (p.backward == backward && same(p.shape, *shape)) return &p;
    plan made = {*shape, backward, nullptr};
    if (!build(with, made, err)) return nullptr;
    with->plans.push_back(made);
    return &with->plans.back();
}

static bool run(cudnn_attention *with, plan *p, std::unordered_map<int64_t, void *> &tensors, error *err)
{
    auto status = p->graph->execute(with->handle, tensors, with->workspace);
    return status.is_good() || failed(err, p->backward ? "backward" : "forward", status.get_message());
}

extern "C" cudnn_attention *cudnn_attention_open(void *stream, bool deterministic, error *err)
{
    try {
        if (!fe::cudnn_dlhandle)
            fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
        if (!fe::cudnn_dlhandle) {
            const char *why = dlerror();
            fail(err, ERROR_RUNTIME,
                 "training on the GPU needs libcudnn.so.9 (pip install nvidia-cudnn-cu13 and its folder in "
                 "LD_LIBRARY_PATH): %s",
                 why ? why : "not found");
            return nullptr;
        }
        auto made = std::make_unique<cudnn_attention>();
        made->handle = nullptr;
        made->deterministic = deterministic;
        made->workspace = nullptr;
        made->workspace_bytes = 0;
        if (fe::detail::create_handle(&made->handle) != CUDNN_STATUS_SUCCESS ||
            fe::detail::set_stream(made->handle, (cudaStream_t)stream) != CUDNN_STATUS_SUCCESS) {
            failed(err, "its start", "no handle");
            return nullptr;
        }
        return made.release();
    } catch (const std::exception &e) {
        failed(err, "its start", e.what());
        return nullptr;
    }
}

extern "C" void cudnn_attention_close(cudnn_attention *closed)
{
    if (!closed) return;
    closed->plans.clear();
    if (closed->workspace) (void)cudaFree(closed->workspace);
    if (closed->handle) (void)fe::detail::destroy_handle(closed->handle);
    delete closed;
}

extern "C" bool cudnn_attention_prepare(cudnn_attention *with, const pass_shape *shape, bool backward,
                                        error *err)
{
    try {
        return plan_of(with, shape, backward, err) != nullptr;
    } catch (const std::exception &e) {
        return failed(err, "its plans", e.what());
    }
}

extern "C" bool cudnn_attention_forward(cudnn_attention *with, void *out, float *lse, const void *q,
                                        const void *k, const void *v, const pass_shape *shape, error *err)
{
    try {
        plan *p = plan_of(with, shape, false, err);
        if (!p) return false;
        std::unordered_map<int64_t, void *> tensors = {
            {Q, (void *)q}, {K, (void *)k}, {V, (void *)v}, {O, out}, {STATS, lse}};
        return run(with, p, tensors, err);
    } catch (const std::exception &e) {
        return failed(err, "forward", e.what());
    }
}

extern "C" bool cudnn_attention_backward(cudnn_attention *with, void *dq, void *dk, void *dv,
                                         const void *dout, const void *out, const float *lse, const void *q,
                                         const void *k, const void *v, const pass_shape *shape, error *err)
{
    try {
        plan *p = plan_of(with, shape, true, err);
        if (!p) return false;
        std::unordered_map<int64_t, void *> tensors = {
            {Q, (void *)q},     {K, (void *)k}, {V, (void *)v}, {O, (void *)out}, {STATS, (void *)lse},
            {DO, (void *)dout}, {DQ, dq},       {DK, dk},       {DV, dv}};
        return run(with, p, tensors, err);
    } catch (const std::exception &e) {
        return failed(err, "backward", e.what());
    }
}
