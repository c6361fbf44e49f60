/* What ranks tell each other besides rows: descriptions of their groups and of each call, which are compared.
 */
#include "ep_cpu.h"

static int64_t *values_at(const smoe_ep *ep, int rank, uint64_t region, int source)
{
    return (int64_t *)(void *)(ep->windows[rank] + region) + source * MOE_EP_VALUES;
}

int moe_cpu_ep_wait_all(smoe_ep *ep, moe_ep_flag flag, uint64_t mark)
{
    for (int r = 0; r < ep->ranks; r++)
        if (r != ep->rank && !moe_cpu_ep_wait(ep, r, flag, mark)) return 0;
    return !ep->fault.reason;
}

void moe_cpu_ep_signal_all(smoe_ep *ep, moe_ep_flag flag, uint64_t mark)
{
    for (int r = 0; r < ep->ranks; r++)
        if (r != ep->rank) moe_cpu_ep_signal(ep, r, flag, mark);
}

smoe_status moe_cpu_ep_open(smoe_ep *ep)
{
    for (int r = 0; r < ep->ranks; r++) moe_ep_group_values(ep, values_at(ep, r, ep->window.hello, ep->rank));
    moe_cpu_ep_signal_all(ep, MOE_EP_HELLO, 1);
    return SMOE_OK;
}

static int same_values(smoe_ep *ep, moe_ep_reason reason, int source, const int64_t *theirs,
                       const int64_t *ours, int count)
{
    for (int i = 0; i < count; i++) {
        if (theirs[i] == ours[i]) continue;
        moe_cpu_ep_fail(ep, reason, source, i, ours[i], theirs[i]);
        return 0;
    }
    return 1;
}

int moe_cpu_ep_meet(smoe_ep *ep)
{
    int64_t ours[MOE_EP_GROUP_VALUES];
    moe_ep_group_values(ep, ours);
    for (int r = 0; r < ep->ranks && !ep->met; r++) {
        if (r == ep->rank) continue;
        if (!moe_cpu_ep_wait(ep, r, MOE_EP_HELLO, 1)) return 0;
        if (!same_values(ep, MOE_EP_STRANGER, r, values_at(ep, ep->rank, ep->window.hello, r), ours,
                         MOE_EP_GROUP_VALUES))
            return 0;
    }
    ep->met = 1;
    return ep->backwards ? moe_cpu_ep_wait_all(ep, MOE_EP_FREE, moe_ep_mark(ep->backwards, 0))
                         : !ep->fault.reason;
}

void moe_cpu_ep_describe(const smoe_ep *ep, const moe_problem *problem, int backward, int wanted, int rank)
{
    int64_t *values = values_at(ep, rank, ep->window.header, ep->rank);
    values[0] = problem->layer.tokens;
    moe_ep_call_values(problem, backward, wanted, values + 1);
}

int moe_cpu_ep_take_headers(smoe_ep *ep, const moe_problem *problem, int backward, int wanted,
                            int64_t *tokens)
{
    int64_t ours[MOE_EP_CALL_VALUES];
    moe_ep_call_values(problem, backward, wanted, ours);
    if (!moe_cpu_ep_wait_all(ep, MOE_EP_HEADER, moe_ep_mark(ep->call, 0))) return 0;
    for (int r = 0; r < ep->ranks; r++) {
        const int64_t *values = values_at(ep, ep->rank, ep->window.header, r);
        if (!same_values(ep, MOE_EP_MISMATCH, r, values + 1, ours, MOE_EP_CALL_VALUES)) return 0;
        tokens[r] = values[0];
    }
    return 1;
}
