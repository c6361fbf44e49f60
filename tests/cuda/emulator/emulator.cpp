// Fibers, barriers and copies of emulator.h.
#include "emulator.h"

#include <algorithm>
#include <csetjmp>
#include <deque>
#include <map>
#include <memory>
#include <ucontext.h>

// A test's function, called after every CTA: what happens while the other CTAs of the kernel still run.
extern "C" {
void (*emulator_after_cta)(void);
}

namespace emulator
{

fiber *current;
uint3 cta_index;
dim3 cta_size, grid_size;
alignas(1024) static char shared_memory[SHARED_BYTES];
char *const shared = shared_memory;
static const bool early_loads = getenv("EMULATOR_EARLY") != nullptr;

// EMULATOR_SLOW, for example "4-7": the warps of a CTA that run only when no other thread can.
static struct slow_warps {
    int first = 1, last = 0;
    slow_warps()
    {
        const char *text = getenv("EMULATOR_SLOW");
        if (text && sscanf(text, "%d-%d", &first, &last) != 2) abort();
    }
    bool has(int warp) const
    {
        return first <= warp && warp <= last;
    }
} slow;

namespace
{

enum { STACK_BYTES = 128 << 10, MOST_IDLE_ROUNDS = 1000, MOST_WARPS = 32, NAMED_BARRIERS = 16 };

// The fiber is entered once with makecontext, and after that with longjmp, in one CTA after another.
// swapcontext would make a system call at every switch.
struct running {
    fiber state;
    bool entered = false;
    ucontext_t first;
    jmp_buf context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
};

struct meeting {
    int arrived;
    uint32_t held;
};

jmp_buf scheduler;
std::vector<std::unique_ptr<running>> fibers; // kept from CTA to CTA
std::function<void()> body;
bool progress; // whether there was any since this round of all fibers began
meeting warps[MOST_WARPS], cta, named[NAMED_BARRIERS];
std::map<uint32_t, barrier> barriers;
std::deque<std::function<void()>> landings;

int threads()
{
    return (int)(cta_size.x * cta_size.y * cta_size.z);
}

running *runner()
{
    return fibers[current->warp * WARP + current->lane].get();
}

void enter()
{
    for (;;) {
        body();
        if (!current->stores.empty() || !current->multiplies.empty()) {
            fprintf(stderr, "thread %u ended before its %s\n", current->index.x,
                    current->stores.empty() ? "multiplies" : "stores");
            abort();
        }
        current->done = progress = true;
        yield();
    }
}

void make_fiber()
{
    fibers.emplace_back(new running);
    running &r = *fibers.back();
    getcontext(&r.first);
    r.first.uc_stack.ss_sp = r.stack.get();
    r.first.uc_stack.ss_size = STACK_BYTES;
    r.first.uc_link = nullptr;
    makecontext(&r.first, enter, 0);
}

void prepare(int i, int count)
{
    if ((int)fibers.size() == i) make_fiber();
    fiber &f = fibers[i]->state;
    const unsigned x = cta_size.x, y = cta_size.y;
    f = {};
    f.index = {i % x, i / x % y, i / (x * y)};
    f.warp = i / WARP;
    f.lane = i % WARP;
    f.lanes = std::min<int>(WARP, count - f.warp * WARP);
}

// Runs a fiber until it yields or ends.
__attribute__((noinline)) void run(running &r)
{
    current = &r.state;
    if (_setjmp(scheduler)) return;
    if (r.entered) _longjmp(r.context, 1);
    r.entered = true;
    setcontext(&r.first);
}

bool waits(const fiber &f)
{
    return f.done || (f.watched && *f.watched == f.seen);
}

void stuck(int left)
{
    printf("deadlock in CTA %u: %d threads left\n", cta_index.x, left);
    for (const auto &b : barriers)
        printf("  barrier at %u: phase %u, %d arrivals and %lld bytes pending\n", b.first, b.second.phase,
               b.second.pending, (long long)b.second.bytes);
    exit(1);
}

void land_oldest()
{
    const std::function<void()> landing = std::move(landings.front());
    landings.pop_front();
    landing();
}

// Runs each thread that can run once: the slow threads, or all others.
void run_turn(int count, bool slow_ones)
{
    for (int i = 0; i < count; i++) {
        running &r = *fibers[i];
        if (slow.has(r.state.warp) == slow_ones && !waits(r.state)) run(r);
    }
}

void run_cta()
{
    const int count = threads();
    std::fill(std::begin(warps), std::end(warps), meeting{});
    std::fill(std::begin(named), std::end(named), meeting{});
    cta = {};
    barriers.clear();
    std::fill_n((uint16_t *)shared, SHARED_BYTES / 2, 0x7FFF); // NaN in every type, and a large integer
    generic_writes.assign(SHARED_BYTES / GRANULE, {});
    copies_begun.assign(SHARED_BYTES / GRANULE, 0);
    for (int i = 0; i < count; i++) prepare(i, count);
    for (int left = count, idle = 0; left;) {
        progress = false;
        run_turn(count, false);
        if (!progress) run_turn(count, true);
        left = (int)std::count_if(fibers.begin(), fibers.begin() + count,
                                  [](const std::unique_ptr<running> &r) { return !r->state.done; });
        if (!progress && !landings.empty()) land_oldest();
        idle = progress ? 0 : idle + 1;
        if (idle > MOST_IDLE_ROUNDS) stuck(left);
    }
    if (landings.empty()) return;
    printf("CTA %u ended before %zu of its loads\n", cta_index.x, landings.size());
    exit(1);
}

} // namespace

void run_grid(dim3 grid, dim3 cta, const std::function<void()> &kernel)
{
    grid_size = grid;
    cta_size = cta;
    body = kernel;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                cta_index = {x, y, z};
                run_cta();
                if (emulator_after_cta) emulator_after_cta();
            }
}

__attribute__((noinline)) void yield()
{
    if (!_setjmp(runner()->context)) _longjmp(scheduler, 1);
}

void wait_for_change(const uint32_t &word)
{
    fiber *self = current;
    self->watched = &word;
    self->seen = word;
    while (word == self->seen) yield();
    self->watched = nullptr;
}

static void arrive(meeting &m, int count, bool wait)
{
    if (++m.arrived == count) {
        m.arrived = 0;
        m.held++;
        progress = true;
    } else if (wait)
        wait_for_change(m.held);
}

void meet_warp()
{
    arrive(warps[current->warp], current->lanes, true);
}

void meet_cta()
{
    arrive(cta, threads(), true);
}

void named_arrive(int number, int count, bool wait)
{
    arrive(named[number], count, wait);
}

char *exchange()
{
    alignas(16) static char places[MOST_WARPS][2][WARP * EXCHANGE_BYTES];
    return places[current->warp][current->exchanges++ % 2];
}

barrier &barrier_at(uint32_t address)
{
    return barriers[address];
}

void settle(barrier &b)
{
    if (b.pending || b.bytes) return;
    b.pending = b.arrivals;
    b.phase++;
    progress = true;
}

void later(std::function<void()> landing)
{
    if (early_loads)
        landing();
    else
        landings.push_back(std::move(landing));
}

static void land(const copy &c)
{
    if (!early_loads) copies_begun[c.to / GRANULE]--;
    note_write(c.to, nullptr, true);
    if (c.from)
        memcpy(shared + c.to, c.from, c.bytes);
    else
        memset(shared + c.to, 0, c.bytes);
}

void start_copy(copy c)
{
    if (early_loads)
        land(c);
    else {
        copies_begun[c.to / GRANULE]++;
        current->open.push_back(c);
    }
}

void land_copies(size_t groups_left, bool open_too)
{
    auto &groups = current->groups;
    for (size_t i = 0; i + groups_left < groups.size(); i++) {
        for (const copy &c : groups[i]) land(c);
        groups[i].clear();
    }
    if (!open_too) groups.erase(groups.begin(), groups.end() - std::min(groups_left, groups.size()));
    if (!open_too) return;
    for (const copy &c : current->open) land(c);
    current->open.clear();
}

} // namespace emulator
