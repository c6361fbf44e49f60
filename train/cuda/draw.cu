// The first weights: value i of the random numbers of a seed (base/random.h), made normal by Box and Muller,
// in double as on the host. The GPU's logarithm and cosine may differ from the host's in the last bit, so
// after rounding to f32 a rare value differs. 2 or 6 bytes for each weight.
#include "base/random.h"
#include "kernels.h"
#include "vector.cuh"

namespace
{

enum { DRAW_THREADS = 256 };

__global__ void __launch_bounds__(DRAW_THREADS)
    draw(bf16 *to, float *master, int64_t first, int64_t count, double deviation, uint64_t key)
{
    const int64_t i = (int64_t)blockIdx.x * DRAW_THREADS + threadIdx.x;
    if (i >= count) return;
    float value = 1.0f;
    if (deviation > 0.0) {
        const uint64_t at = (uint64_t)(first + i);
        const double u = 1.0 - random_uniform(key, 2 * at), v = random_uniform(key, 2 * at + 1);
        value = (float)(deviation * (sqrt(-2.0 * log(u)) * cospi(2.0 * v)));
    }
    if (master) master[i] = value;
    if (to) to_stored(to[i], value);
}

} // namespace

extern "C" cudaError_t kernel_draw(void *to, float *master, int64_t first, int64_t count, double deviation,
                                   uint64_t key, cudaStream_t stream)
{
    const unsigned ctas = (unsigned)((count + DRAW_THREADS - 1) / DRAW_THREADS);
    draw<<<ctas, DRAW_THREADS, 0, stream>>>((bf16 *)to, master, first, count, deviation, key);
    return cudaGetLastError();
}
