// Up- and down-projection of few rows: the producer copies by cp.async. See experts/few_rows.cuh.
#include "experts/few_rows.cuh"
#include "sm80/kernels.h"

namespace moe
{
namespace few_rows
{
namespace
{

// Four slots, so that a CTA's shared memory is within the 99 KB of a GPU of 8.6.
struct async_copies {
    enum { SLOTS = 4, ARRIVALS = 33 };

    // Eight lanes copy a row, 16 bytes each, and a lane has rows lane / 8 + 4 i.
    static MOE_DEVICE void copy(uint32_t slot, const weight_rows &rows, int64_t from, uint32_t bytes,
                                uint32_t)
    {
        const int lane = threadIdx.x & 31, row = lane >> 3;
        from += row * rows.stride;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const char *row_from = (i < 2 ? rows.first : rows.second) + from + i % 2 * 4 * rows.stride;
            const uint32_t to = slot + (row + 4 * i) * ROW_BYTES;
            for (uint32_t at = (lane & 7) * 16; at < bytes; at += 128)
                copy16_async_if(1, to + at, row_from + at);
        }
    }
    // Every lane arrives when its copies have landed. The first lane arrives once more: with this arrival,
    // which is behind a __syncwarp, the warp's stores become visible.
    static MOE_DEVICE void publish(uint32_t barrier, uint32_t)
    {
        barrier_arrive_after_copies(barrier);
        if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
    }
    static MOE_DEVICE void publish(uint32_t barrier)
    {
        publish(barrier, 0);
    }
};
static_assert(sizeof(shared_memory<async_copies>) <= 99 * 1024, "shared memory of a CTA on 8.6");

} // namespace
} // namespace few_rows
} // namespace moe

extern "C" cudaError_t moe_sm80_few_rows_init(const moe_device *device)
{
    return moe::few_rows::init<moe::few_rows::async_copies>(device);
}

extern "C" cudaError_t moe_sm80_up_few_rows(moe_launch *on, const moe_up *u, int64_t tiles)
{
    return moe::few_rows::launch_up<moe::few_rows::async_copies>(on, *u, tiles);
}

extern "C" cudaError_t moe_sm80_down_few_rows(moe_launch *on, const moe_down *d, int64_t tiles)
{
    return moe::few_rows::launch_down<moe::few_rows::async_copies>(on, *d, tiles);
}
