/* Flags between ranks: setting them, waiting for them, and what ends a wait. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime, nanosleep */
#include "ep_cpu.h"

#include <assert.h>
#include <sched.h>
#include <string.h>
#include <time.h>

/* Flags are shared between processes, so they must work by address alone. */
static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "64-bit atomics are lock-free");
static_assert(sizeof(_Atomic uint64_t) == sizeof(uint64_t), "a flag is 8 bytes");
static_assert(sizeof(moe_ep_fault) <= MOE_EP_LINE, "a fault fits a line");
static_assert(offsetof(moe_ep_fault, reason) == 0, "the reason is the flag of a fault");

enum { POLLS_BEFORE_SLEEP = 200, SLEEP_NS = 20000 };

static char *line_at(const smoe_ep *ep, int rank, moe_ep_flag flag, int source)
{
    return ep->windows[rank] + ((int)flag * MOE_EP_MAX_RANKS + source) * MOE_EP_LINE;
}

static _Atomic uint64_t *flag_at(const smoe_ep *ep, int rank, moe_ep_flag flag, int source)
{
    return (_Atomic uint64_t *)(void *)line_at(ep, rank, flag, source);
}

char *moe_cpu_ep_row(const smoe_ep *ep, const moe_problem *problem, int rank, uint64_t region, int source,
                     int64_t row)
{
    const int64_t bytes = problem->layer.hidden * problem->element;
    return ep->windows[rank] + region + (source * ep->window.max_tokens + row) * bytes;
}

void moe_cpu_ep_signal(smoe_ep *ep, int rank, moe_ep_flag flag, uint64_t mark)
{
    atomic_store_explicit(flag_at(ep, rank, flag, ep->rank), mark, memory_order_release);
}

/* ---- Failure ---- */

static void tell(const smoe_ep *ep, int rank)
{
    moe_ep_fault fault = ep->fault;
    char *line = line_at(ep, rank, MOE_EP_FAULT, ep->rank);
    memcpy(line + sizeof fault.reason, (char *)&fault + sizeof fault.reason,
           sizeof fault - sizeof fault.reason);
    atomic_store_explicit(flag_at(ep, rank, MOE_EP_FAULT, ep->rank), fault.reason, memory_order_release);
}

static void give_up(smoe_ep *ep, const moe_ep_fault *fault)
{
    if (ep->fault.reason) return;
    moe_ep_note(ep, fault);
    for (int r = 0; r < ep->ranks; r++)
        if (r != ep->rank) tell(ep, r);
}

void moe_cpu_ep_fail(smoe_ep *ep, moe_ep_reason reason, int other, int64_t a, int64_t b, int64_t c)
{
    const moe_ep_fault fault = {reason, ep->call, ep->rank, other, {a, b, c}};
    give_up(ep, &fault);
}

static void look_for_faults(smoe_ep *ep)
{
    for (int r = 0; r < ep->ranks && !ep->fault.reason; r++) {
        if (!atomic_load_explicit(flag_at(ep, ep->rank, MOE_EP_FAULT, r), memory_order_acquire)) continue;
        moe_ep_fault fault;
        memcpy(&fault, line_at(ep, ep->rank, MOE_EP_FAULT, r), sizeof fault);
        give_up(ep, &fault);
    }
}

/* ---- Waits ---- */

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int moe_cpu_ep_wait(smoe_ep *ep, int source, moe_ep_flag flag, uint64_t mark)
{
    _Atomic uint64_t *const at = flag_at(ep, ep->rank, flag, source);
    const struct timespec nap = {0, SLEEP_NS};
    const int64_t start = now_ms();
    for (int64_t polls = 0; !ep->fault.reason; polls++) {
        if (atomic_load_explicit(at, memory_order_acquire) >= mark) return 1;
        if (atomic_load(&ep->aborted)) moe_cpu_ep_fail(ep, MOE_EP_ABORTED, source, 0, 0, 0);
        look_for_faults(ep);
        if (now_ms() - start >= ep->timeout_ms)
            moe_cpu_ep_fail(ep, MOE_EP_LATE, source, flag, ep->timeout_ms, 0);
        if (polls < POLLS_BEFORE_SLEEP)
            sched_yield();
        else
            nanosleep(&nap, NULL);
    }
    return 0;
}
