// From a type that is known at run time to the instance of a kernel, for the host side of a .cu file. A type
// without an instance is an error: every type must be in one of the lists below.
//
//     return for_type(storage_types(), dtype, [&](auto t) {
//         using T = typename decltype(t)::type;
//         return enqueue(kernel<T>, ctas, threads, bytes, stream, p);
//     });
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <smoe.h>

namespace moe
{

// The value in the API of an element type.
template <typename T> struct type_value;
template <> struct type_value<float> {
    static constexpr smoe_type VALUE = SMOE_TYPE_F32;
};
template <> struct type_value<__nv_bfloat16> {
    static constexpr smoe_type VALUE = SMOE_TYPE_BF16;
};
template <> struct type_value<__half> {
    static constexpr smoe_type VALUE = SMOE_TYPE_F16;
};

template <typename... T> struct type_list {
};
template <typename T> struct type_of {
    using type = T;
};
template <typename... T> constexpr int length_of(type_list<T...>)
{
    return sizeof...(T);
}

using storage_types = type_list<__nv_bfloat16, __half>; // smoe_layer.dtype; each has a storage<T>
using logits_types = type_list<float, __nv_bfloat16>;   // smoe_layer.logits_type; each has a logits_of<L>
template <typename T> using gradient_types = type_list<float, T>; // smoe_layer.gradient_type, dtype T

// run(type_of<T>()) for the T of the list whose value is `type`.
template <typename... T, typename F> cudaError_t for_type(type_list<T...>, smoe_type type, const F &run)
{
    cudaError_t status = cudaErrorInvalidValue;
    (void)((type == type_value<T>::VALUE && (status = run(type_of<T>()), true)) || ...);
    return status;
}

// run(type_of<T>()) for every T of the list, up to the first error.
template <typename... T, typename F> cudaError_t for_every_type(type_list<T...>, const F &run)
{
    cudaError_t status = cudaSuccess;
    (void)(((status = run(type_of<T>())) == cudaSuccess) && ...);
    return status;
}

} // namespace moe
