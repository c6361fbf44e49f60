// Replaces src/cuda/tma/tma.cuh.
#pragma once
#include "tma/mbarrier.cuh"

namespace moe
{

MOE_DEVICE bool elect_lane()
{
    __syncwarp();
    return (threadIdx.x & 31) == 0;
}

MOE_DEVICE void prefetch_map(const CUtensorMap *)
{
}

template <class... Coordinates>
MOE_DEVICE void load_box(uint32_t to, const CUtensorMap *map, uint32_t barrier, Coordinates... x)
{
    emulator::later([=] {
        const int coordinates[] = {x...};
        emulator::barrier &b = emulator::barrier_at(barrier);
        b.bytes -= emulator::move_box(map, to, coordinates, emulator::LOAD);
        emulator::settle(b);
    });
}

MOE_DEVICE void load_bytes(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    if (to % 16 || (uintptr_t)from % 16 || bytes % 16 || to + bytes > emulator::SHARED_BYTES) abort();
    emulator::later([=] {
        for (uint32_t i = 0; i < bytes; i += emulator::GRANULE) emulator::note_write(to + i, nullptr, false);
        memcpy(emulator::shared + to, from, bytes);
        emulator::barrier &b = emulator::barrier_at(barrier);
        b.bytes -= bytes;
        emulator::settle(b);
    });
}

template <class... Coordinates>
MOE_DEVICE void store_box(const CUtensorMap *map, uint32_t from, Coordinates... x)
{
    emulator::check_box(map, from);
    emulator::current->stores.add([=] {
        const int coordinates[] = {x...};
        emulator::move_box(map, from, coordinates, emulator::STORE);
    });
}

template <class... Coordinates>
MOE_DEVICE void store_box_evict_first(const CUtensorMap *map, uint32_t from, Coordinates... x)
{
    store_box(map, from, x...);
}

template <class... Coordinates>
MOE_DEVICE void add_box(const CUtensorMap *map, uint32_t from, Coordinates... x)
{
    emulator::check_box(map, from);
    emulator::current->stores.add([=] {
        const int coordinates[] = {x...};
        emulator::move_box(map, from, coordinates, emulator::ADD);
    });
}

MOE_DEVICE void commit_stores()
{
    emulator::current->stores.commit();
}

template <int PENDING> MOE_DEVICE void wait_stores_read()
{
    emulator::current->stores.wait(PENDING);
}

MOE_DEVICE void wait_stores_done()
{
    emulator::current->stores.wait(0);
}

} // namespace moe
