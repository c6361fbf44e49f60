// Makes races visible although one host thread runs everything: asynchronous work is done as late as the
// program allows, and writes to shared memory through the generic proxy are recorded until they are fenced.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <vector>

namespace emulator
{

// The TMA stores or the wgmma multiplications of a thread, in groups. A wait does the groups that it waits
// for, in order.
class late_groups
{
    std::deque<std::vector<std::function<void()>>> groups; // committed, oldest first
    std::vector<std::function<void()>> open;

  public:
    void add(std::function<void()> work)
    {
        open.push_back(std::move(work));
    }
    void commit()
    {
        groups.push_back(std::move(open));
        open.clear();
    }
    void wait(size_t groups_left)
    {
        for (; groups.size() > groups_left; groups.pop_front())
            for (const std::function<void()> &work : groups.front()) work();
    }
    bool empty() const
    {
        return groups.empty() && open.empty();
    }
};

// Times are counts of writes and fences. The thread that wrote with st.shared or stmatrix must fence its
// writes. Data that cp.async copied is fenced by the thread that reads it.
struct generic_write {
    const uint64_t *writer_fenced; // nullptr: written by cp.async, or not since a TMA load
    uint64_t time;
};

enum { GRANULE = 16 };
inline std::vector<generic_write> generic_writes;
inline uint64_t hazard_time;

inline void note_write(uint32_t address, const uint64_t *writer_fenced, bool generic)
{
    generic_write &w = generic_writes[address / GRANULE];
    w = {writer_fenced, generic ? ++hazard_time : 0};
}

// TMA or wgmma reads shared memory at `address` for a thread whose last fence was at time `fenced`.
inline void check_fenced(uint32_t address, uint64_t fenced, const char *reader)
{
    const generic_write &w = generic_writes[address / GRANULE];
    if (w.time < (w.writer_fenced ? *w.writer_fenced : fenced) || w.time == 0) return;
    fprintf(stderr, "%s reads shared memory at %u, %s with no fence_async_proxy since\n", reader, address,
            w.writer_fenced ? "stored" : "copied");
    abort();
}

// How many copies of cp.async to 16 bytes of shared memory have begun and not been waited for.
inline std::vector<int> copies_begun;

// A thread reads shared memory at `address`.
inline void check_copied(uint32_t address, const char *reader)
{
    if (!copies_begun[address / GRANULE]) return;
    fprintf(stderr, "%s reads shared memory at %u, to which a cp.async is under way\n", reader, address);
    abort();
}

} // namespace emulator
