// Up- and down-projection of few rows on Hopper: the producer copies by bulk copies. See
// experts/few_rows.cuh.
#include "experts/few_rows.cuh"
#include "sm90/kernels.h"
#include "tma/tma.cuh"

namespace moe
{
namespace few_rows
{
namespace
{

struct bulk_copies {
    enum { SLOTS = 5, ARRIVALS = 1 };

    // `bytes` of each row, from byte `from` on.
    static MOE_DEVICE void copy(uint32_t slot, const weight_rows &rows, int64_t from, uint32_t bytes,
                                uint32_t barrier)
    {
        if (!elect_lane()) return;
        const char *first = rows.first + from, *second = rows.second + from;
        for (int i = 0; i < 8; i++, first += rows.stride, second += rows.stride) {
            load_bytes(slot + i * ROW_BYTES, first, bytes, barrier);
            load_bytes(slot + (i + 8) * ROW_BYTES, second, bytes, barrier);
        }
    }
    static MOE_DEVICE void publish(uint32_t barrier, uint32_t bytes)
    {
        if (elect_lane()) barrier_expect(barrier, bytes);
    }
    static MOE_DEVICE void publish(uint32_t barrier)
    {
        if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
    }
};

} // namespace
} // namespace few_rows
} // namespace moe

extern "C" cudaError_t moe_sm90_few_rows_init(const moe_device *device)
{
    return moe::few_rows::init<moe::few_rows::bulk_copies>(device);
}

extern "C" cudaError_t moe_sm90_up_few_rows(moe_launch *on, const moe_up *u, int64_t tiles)
{
    return moe::few_rows::launch_up<moe::few_rows::bulk_copies>(on, *u, tiles);
}

extern "C" cudaError_t moe_sm90_down_few_rows(moe_launch *on, const moe_down *d, int64_t tiles)
{
    return moe::few_rows::launch_down<moe::few_rows::bulk_copies>(on, *d, tiles);
}
