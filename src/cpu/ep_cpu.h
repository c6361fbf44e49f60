/* Layers with ranks on the CPU. The threads of a context write rows into the windows of all ranks, then its
 * calling thread sets flags. A flag is set with release and read with acquire, so whoever sees it sees the
 * rows.
 *
 * A region is written again only when its reader is known to be done. A layer may be smaller than the one
 * before it, so its rows may have the place of another source's rows, and "done" means with the rows of all
 * sources:
 * - routing, X: the source's collect has had all sums of all ranks, which they send after reading these.
 * - dO, X again: MOE_EP_FREE of the last backward.
 * - sums, dS: the owner describes its next call after its collect, and nobody sends sums of that call before
 *   all ranks have described it. */
#ifndef MOE_CPU_EP_H
#define MOE_CPU_EP_H

#include "ep.h"
#include "experts.h"

enum { MOE_NAN_BYTE = 0xFF }; /* NaN in f32 and in bf16, if all bytes are this */

extern const moe_ep_table moe_cpu_ep;

/* Of the received rows and of collect; the plan before them not included. */
uint64_t moe_cpu_ep_forward_scratch(const smoe_context *context, const moe_problem *problem);
uint64_t moe_cpu_ep_backward_scratch(const smoe_context *context, const moe_problem *problem);

/* ---- ep_flags.c ---- */

/* Row `row` of `source` in a region of the window of `rank`. The region begins with a tensor (ranks,
 * max_tokens, d) of this layer, which may be smaller than the group's largest. */
char *moe_cpu_ep_row(const smoe_ep *ep, const moe_problem *problem, int rank, uint64_t region, int source,
                     int64_t row);

/* Sets this rank's flag in the window of `rank`. */
void moe_cpu_ep_signal(smoe_ep *ep, int rank, moe_ep_flag flag, uint64_t mark);

/* Waits until the flag of `source` in this rank's window is at least `mark`. Returns 0 when the group has
 * failed. */
int moe_cpu_ep_wait(smoe_ep *ep, int source, moe_ep_flag flag, uint64_t mark);

/* The group fails on this rank, and all others are told. */
void moe_cpu_ep_fail(smoe_ep *ep, moe_ep_reason reason, int other, int64_t a, int64_t b, int64_t c);

/* ---- ep_wire.c ---- */

/* The same for the flags of all other ranks. */
int moe_cpu_ep_wait_all(smoe_ep *ep, moe_ep_flag flag, uint64_t mark);
void moe_cpu_ep_signal_all(smoe_ep *ep, moe_ep_flag flag, uint64_t mark);

smoe_status moe_cpu_ep_open(smoe_ep *ep);

/* Before anything is sent: once for a group, all ranks have made theirs, of the same kind; nobody reads rows
 * of the last backward. */
int moe_cpu_ep_meet(smoe_ep *ep);

/* Describes the call to `rank`. */
void moe_cpu_ep_describe(const smoe_ep *ep, const moe_problem *problem, int backward, int wanted, int rank);

/* Waits for the descriptions of all ranks and compares them; tokens (ranks) receives T of each. */
int moe_cpu_ep_take_headers(smoe_ep *ep, const moe_problem *problem, int backward, int wanted,
                            int64_t *tokens);

/* ---- ep_plan.c ---- */

/* Sends this rank's rows of the experts of `rank`. */
void moe_cpu_ep_send_routing(const smoe_ep *ep, const moe_problem *problem, const moe_plan_arrays *plan,
                             int rank);

/* The plan of the received rows from the routing of all ranks. An expert's rows are sorted by source, then by
 * token. */
void moe_cpu_ep_plan(const smoe_ep *ep, const moe_ep_problem *received, const moe_ep_arrays *arrays);

/* The lowest rank from `after` + 1 on that has an expert of the token; ranks if there is none. */
int moe_cpu_ep_next_rank(const moe_problem *problem, const moe_plan_arrays *plan, int64_t token, int after);

/* ---- ep.c, ep_backward.c ---- */

/* Sends a (T, d) tensor's rows to the ranks that need them, part by part, each with MOE_EP_INPUT; or all with
 * MOE_EP_AGAIN. */
void moe_cpu_ep_send_rows(smoe_ep *ep, const moe_problem *problem, const moe_plan_arrays *plan,
                          const void *rows, uint64_t region, moe_ep_flag flag, int parts);

/* Waits for all parts of all ranks. */
int moe_cpu_ep_wait_parts(smoe_ep *ep, moe_ep_flag flag, int parts);

/* Sums over the rows of a received token, for the columns of a chunk. */
typedef void moe_cpu_ep_sum(const moe_cpu_pass *pass, int64_t token, int64_t columns, float *sum);

/* Sends the sums of each received token to its rank. Parts are signalled with the last chunk. */
void moe_cpu_ep_send_sums(smoe_ep *ep, const moe_cpu_pass *pass, const int64_t *tokens, int parts,
                          moe_cpu_ep_sum *sum_rows, int64_t first_column);

/* sum (columns) += what the ranks have returned for the token, ascending. `row` is work space (columns). */
void moe_cpu_ep_add_sums(const smoe_ep *ep, const moe_cpu_pass *pass, int64_t token, int64_t first_column,
                         int64_t columns, float *sum, float *row);

smoe_status moe_cpu_ep_backward(smoe_context *context, const moe_call *call, const smoe_backward_args *args,
                                int with_router, int stages);

#endif
