// What lets races show on one thread of the host: asynchronous work is done as late as the program allows,
// and shared memory knows what was written to it through the generic proxy and has not been fenced since.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <vector>

namespace emulator
{

// A thread's TMA stores or multiplies, in groups: done in order when a wait asks for them.
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

// Times count writes and fences. What st.shared and stmatrix wrote is fenced by its writer, what cp.async
// copied by its reader.
struct generic_write {
    const uint64_t *writer_fenced; // nullptr: a copy, or nothing since TMA filled the place
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

// TMA or wgmma reads what stands at `address` for a thread whose last fence was at `fenced`.
inline void check_fenced(uint32_t address, uint64_t fenced, const char *reader)
{
    const generic_write &w = generic_writes[address / GRANULE];
    if (w.time < (w.writer_fenced ? *w.writer_fenced : fenced) || w.time == 0) return;
    fprintf(stderr, "%s reads shared memory at %u, %s with no fence_async_proxy since\n", reader, address,
            w.writer_fenced ? "stored" : "copied");
    abort();
}

} // namespace emulator
