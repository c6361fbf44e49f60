// Token rounding. One CTA for each expert decides between the counts lo and hi (smoe_rounding in smoe.h),
// and sets or clears bits of the expert's mask until that many bits are set.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// The CTA adds or drops m tokens. Three integers describe a token. routing_decisions.h computes the first,
// routing/route_math.h the others:
// - The key compares as the token's score for this expert does.
// - The rank tells how soon the token is added or dropped: higher ranks come first. If tokens are added, the
//   rank is key + 1. If tokens are dropped, the rank is the complement of the key. The rank is 0 if the
//   token cannot be added or dropped.
// - The order has 64 bits. The high bits are the rank. The low bits are the token if tokens are dropped, and
//   its complement if tokens are added. So no two orders are equal, and of equal ranks the lower token is
//   added first and the higher token is dropped first.
//
// The m tokens with the highest orders are added or dropped. The lowest of these m orders is called the
// limit. It is found in three steps:
// - Each thread takes the largest rank of its tokens, its maximum. A bisection searches for the highest
//   rank v that at least m maxima reach. It may stop at a lower v: it ends as soon as at least m and at most
//   m + 32 maxima reach v, because a few more tokens in the next step cost less than more bisection. At least
//   m tokens then have a rank >= v, so v is a lower bound of the limit's rank. If fewer than m maxima are
//   above 0, the lower bound is 1.
// - Candidates are all tokens whose rank is at least the bound. Only threads whose maximum reaches the bound
//   have candidates. All threads of the CTA together search the tokens of those threads.
// - For each candidate eight threads count the candidates with a higher order. The limit is the order of the
//   candidate with m - 1 higher ones.
//
// Many equal scores can give more candidates than fit into shared memory. Then the limit is found by
// bisection over all orders.
//
// NR_S decides by scores: it finds the limit for dropping to lo and the limit for adding up to hi, and
// compares two sums of scores: of the tokens that would be dropped and of the tokens that would be added.
// All other rules decide from the counts (SR_F also from a random draw).
//
// Bytes: the mask (E T / 8) is read twice, and its changed words are written. The keys have 2 E T bytes with
// bf16 logits and 4 E T with f32 logits. They are read once if the keys and the mask of one expert fit into
// 160 KiB of shared memory, on GPUs with less of it 64 KiB. Otherwise every step reads them again.
// No FLOPs, except that NR_S converts each score of its two sums to fixed point.
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "host/routing.h"

#include "routing/logits.cuh"

namespace moe
{
namespace rounding
{
namespace
{

enum {
    THREADS = 512,
    WARPS = THREADS / 32,
    MOST_CANDIDATES = 1024,
    FEW_MORE = 32, // so many more candidates cost less than more steps of the search
    SHARE = 8,     // threads that rank a candidate
    COLUMN_BYTES = 163840,
    FEWER_BYTES = 65536 // on GPUs with less shared memory
};

template <typename L> struct column {
    const typename logits_of<L>::key *keys; // (T)
    const uint32_t *words;                  // (W)
    uint32_t tokens;
};

// The ranks of the keys in a word: one of 32 bits, or two of 16 bits.
template <typename K> struct ranks_of;

template <> struct ranks_of<uint32_t> {
    static MOE_DEVICE uint32_t of_keys(uint32_t keys, bool adds)
    {
        return adds ? keys + 1u : ~keys;
    }
    static MOE_DEVICE uint32_t larger(uint32_t a, uint32_t b)
    {
        return max(a, b);
    }
    static MOE_DEVICE uint32_t largest(uint32_t ranks)
    {
        return ranks;
    }
    static MOE_DEVICE uint32_t all(uint32_t rank)
    {
        return rank;
    }
    // Keeps the ranks whose bits are set; the others become 0.
    static MOE_DEVICE uint4 keep(uint4 v, uint32_t bits)
    {
        return {bits & 1 ? v.x : 0, bits & 2 ? v.y : 0, bits & 4 ? v.z : 0, bits & 8 ? v.w : 0};
    }
};

template <> struct ranks_of<uint16_t> {
    static MOE_DEVICE uint32_t of_keys(uint32_t keys, bool adds)
    {
        return adds ? keys + 0x00010001u : ~keys; // a carry comes only from a key past the last token
    }
    static MOE_DEVICE uint32_t larger(uint32_t a, uint32_t b)
    {
        return __vmaxu2(a, b);
    }
    static MOE_DEVICE uint32_t largest(uint32_t ranks)
    {
        return max(ranks >> 16, ranks & 0xffffu);
    }
    static MOE_DEVICE uint32_t all(uint32_t rank)
    {
        return rank * 0x00010001u;
    }
    // Bits 0 to 3 become bytes 0 to 3, each 0xff or 0.
    static MOE_DEVICE uint32_t bytes_of(uint32_t bits)
    {
        return ((bits & 15u) * 0x00204081u & 0x01010101u) * 255u;
    }
    static MOE_DEVICE uint4 keep(uint4 v, uint32_t bits)
    {
        const uint32_t low = bytes_of(bits), high = bytes_of(bits >> 4);
        return {v.x & __byte_perm(low, 0, 0x1100), v.y & __byte_perm(low, 0, 0x3322),
                v.z & __byte_perm(high, 0, 0x1100), v.w & __byte_perm(high, 0, 0x3322)};
    }
};

// The tokens that can move in one direction: those that can be added, or those that can be dropped.
template <typename L> struct candidates {
    using key = typename logits_of<L>::key;
    column<L> c;
    bool adds;
    enum { BYTES = (int)sizeof(key), PER = 16 / BYTES };

    MOE_DEVICE uint32_t vectors() const
    {
        return (c.tokens + PER - 1) / PER;
    }

    // Ranks of vector i, 16 bytes of keys; 0 for those that cannot move.
    MOE_DEVICE uint4 ranks_at(uint32_t i) const
    {
        using ranks = ranks_of<key>;
        const uint4 v = ((const uint4 *)c.keys)[i];
        const uint32_t first = i * PER, left = c.tokens - first;
        uint32_t movable = c.words[first / 32] >> first % 32;
        if (adds) movable = ~movable;
        if (left < PER) movable &= (1u << left) - 1u;
        const uint4 all = {ranks::of_keys(v.x, adds), ranks::of_keys(v.y, adds), ranks::of_keys(v.z, adds),
                           ranks::of_keys(v.w, adds)};
        return ranks::keep(all, movable);
    }

    // f(first token, ranks) for the thread's vectors.
    template <typename F> MOE_DEVICE void each_vector(F f) const
    {
#pragma unroll 2
        for (uint32_t i = threadIdx.x; i < vectors(); i += THREADS) f(i * PER, ranks_at(i));
    }

    // f(token, rank) for every token of a vector.
    template <typename F> static MOE_DEVICE void each_of_vector(uint32_t first, uint4 v, F f)
    {
        const uint32_t quarters[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < PER; j++) {
            const uint32_t quarter = quarters[j * BYTES / 4];
            f(first + j, BYTES == 4 ? quarter : j % 2 ? quarter >> 16 : quarter & 0xffffu);
        }
    }

    // Of the thread's tokens.
    MOE_DEVICE uint32_t largest_rank() const
    {
        using ranks = ranks_of<key>;
        uint32_t largest = 0;
        each_vector([&](uint32_t, uint4 v) {
            largest = ranks::larger(largest, ranks::larger(ranks::larger(v.x, v.y), ranks::larger(v.z, v.w)));
        });
        return ranks::largest(largest);
    }

    // f(token, rank) where the rank is at least `bound`, which is not 0. Such tokens are only in the vectors
    // of `count` threads, the holders; all threads share the work on these vectors.
    template <typename F>
    MOE_DEVICE void each_from(uint32_t bound, const uint16_t *holders, uint32_t count, F f) const
    {
        using ranks = ranks_of<key>;
        const uint32_t below = ranks::all(bound - 1), shift = count > 1 ? 32 - __clz((int)count - 1) : 0;
        const uint32_t items = (vectors() + THREADS - 1) / THREADS << shift;
#pragma unroll 1
        for (uint32_t item = threadIdx.x; item < items; item += THREADS) {
            const uint32_t holder = item & ((1u << shift) - 1u);
            if (holder >= count) continue;
            const uint32_t i = holders[holder] + (item >> shift) * THREADS;
            if (i >= vectors()) continue;
            const uint4 v = ranks_at(i);
            const uint32_t most = ranks::larger(ranks::larger(v.x, v.y), ranks::larger(v.z, v.w));
            if (ranks::larger(most, below) != below)
                each_of_vector(i * PER, v, [&](uint32_t token, uint32_t rank) {
                    if (rank >= bound) f(token, rank);
                });
        }
    }

    // f(token, order) for the thread's share of the tokens, order 0 for those that cannot move.
    template <typename F> MOE_DEVICE void each_order(F f) const
    {
        each_vector([&](uint32_t first, uint4 v) {
            each_of_vector(first, v, [&](uint32_t token, uint32_t rank) {
                f(token, rank ? moe_move_order(adds, rank, token) : 0);
            });
        });
    }

    MOE_DEVICE uint32_t token_of(uint64_t order) const
    {
        return adds ? ~(uint32_t)order : (uint32_t)order;
    }
};

struct shared_memory {
    uint64_t *candidates; // [MOST_CANDIDATES]
    uint32_t *sums;       // [WARPS]
    uint16_t *holders;    // [THREADS]
    int *found, *holding;
    uint64_t *limit;
};

// A rank that the maxima of at least n threads reach, and of few more; 1 if there is none.
MOE_DEVICE uint32_t bound_of_maxima(uint32_t maximum, int n, uint32_t largest)
{
    uint32_t low = 0, high = largest;
    while (low < high) {
        const uint32_t middle = high - (high - low) / 2;
        const int reach = __syncthreads_count(maximum >= middle);
        if (reach >= n) low = middle;
        if (reach >= n && reach <= n + FEW_MORE) break;
        if (reach < n) high = middle - 1;
    }
    return max(low, 1u);
}

MOE_DEVICE void flip(uint32_t *mask, uint32_t token)
{
    atomicXor(mask + token / 32, 1u << token % 32);
}

// Flips the mask bits of the candidates whose order is at least `limit`.
template <typename L> MOE_DEVICE void move(const candidates<L> &all, uint64_t limit, uint32_t *mask)
{
    all.each_order([&](uint32_t token, uint64_t order) {
        if (order >= limit) flip(mask, token);
    });
}

// By bisection over all orders from `low` on: the largest one that at least n candidates reach.
template <typename L>
MOE_DEVICE uint64_t limit_by_bisection(const candidates<L> &all, uint32_t n, uint64_t low,
                                       const shared_memory &m)
{
    uint64_t high = ((uint64_t)logits_of<L>::largest_key << 32) + 0xffffffffu;
    while (low < high) {
        const uint64_t middle = high - (high - low) / 2;
        uint32_t reach = 0;
        all.each_order([&](uint32_t, uint64_t order) { reach += order >= middle; });
        if (sum_of_threads<WARPS>(reach, m.sums) >= n)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// The order that exactly n >= 1 candidates reach; there are at least n candidates. If a mask is given, these
// n are moved in it.
template <typename L>
MOE_DEVICE uint64_t find_limit(const candidates<L> &all, uint32_t n, uint32_t *mask, const shared_memory &m)
{
    const uint32_t maximum = all.largest_rank();
    if (threadIdx.x == 0) *m.found = *m.holding = 0;
    const uint32_t bound = bound_of_maxima(maximum, (int)n, logits_of<L>::largest_key);
    __syncthreads();
    if (maximum >= bound) m.holders[atomicAdd(m.holding, 1)] = (uint16_t)threadIdx.x;
    __syncthreads();
    all.each_from(bound, m.holders, (uint32_t)*m.holding, [&](uint32_t token, uint32_t rank) {
        const int at = atomicAdd(m.found, 1);
        if (at < MOST_CANDIDATES) m.candidates[at] = moe_move_order(all.adds, rank, token);
    });
    __syncthreads();
    const int found = *m.found;
    if (found > MOST_CANDIDATES) {
        const uint64_t limit = limit_by_bisection(all, n, (uint64_t)bound << 32, m);
        if (mask) move(all, limit, mask);
        return limit;
    }
#pragma unroll 1
    for (int first = 0; first < found; first += THREADS / SHARE) {
        const int i = first + (int)threadIdx.x / SHARE;
        const uint64_t order = m.candidates[min(i, found - 1)];
        uint32_t higher = 0;
#pragma unroll 4
        for (int j = threadIdx.x % SHARE; j < found; j += SHARE) higher += m.candidates[j] > order;
#pragma unroll
        for (int other = 1; other < SHARE; other *= 2) higher += __shfl_xor_sync(~0u, higher, other);
        if (i >= found || threadIdx.x % SHARE) continue;
        if (higher == n - 1) *m.limit = order;
        if (mask && higher < n) flip(mask, all.token_of(order));
    }
    __syncthreads();
    const uint64_t limit = *m.limit;
    __syncthreads();
    return limit;
}

// The sum of the scores of the candidates whose order is at least `limit`, in fixed point.
template <typename L>
MOE_DEVICE int64_t score_sum(const candidates<L> &all, uint64_t limit, unsigned long long *memory)
{
    unsigned long long sum = 0;
    all.each_order([&](uint32_t token, uint64_t order) {
        if (order >= limit)
            sum += (unsigned long long)moe_score_fixed(logits_of<L>::widen(all.c.keys[token]));
    });
    if (threadIdx.x == 0) *memory = 0;
    __syncthreads();
    if (sum) atomicAdd(memory, sum);
    __syncthreads();
    const int64_t all_threads = (int64_t)*memory;
    __syncthreads();
    return all_threads;
}

// The number of an expert's tokens under plain top-K.
MOE_DEVICE uint32_t count_tokens(const uint32_t *mask, int64_t words, uint32_t *memory)
{
    uint32_t tokens = 0;
#pragma unroll 2
    for (int64_t i = threadIdx.x; i < words / 4; i += THREADS) {
        const uint4 v = __ldcg((const uint4 *)mask + i);
        tokens += __popc(v.x) + __popc(v.y) + __popc(v.z) + __popc(v.w);
    }
    return sum_of_threads<WARPS>(tokens, memory);
}

// The residual that balance rounding carries to this expert. The closed form does not hold if the hi of an
// expert is above T; then a loop goes over the experts before this one.
MOE_DEVICE int64_t residual_before(const moe_cuda_routing &r, int expert, const shared_memory &m,
                                   int64_t *walked)
{
    const int64_t tile = r.layer.tile, tokens = r.layer.tokens;
    uint32_t sum = 0;
    int forced = 0;
    for (int e = threadIdx.x; e < expert; e += THREADS) {
        const int64_t count = r.all_counts[e], lo = moe_round_lo(count, tile);
        sum += (uint32_t)(count - lo);
        forced |= count != lo && lo + tile > tokens;
    }
    sum = sum_of_threads<WARPS>(sum, m.sums);
    if (!__syncthreads_or(forced)) return moe_balance_residual(sum, tile);
    if (threadIdx.x == 0) {
        int64_t residual = 0;
        for (int e = 0; e < expert; e++) {
            const int64_t count = r.all_counts[e], lo = moe_round_lo(count, tile);
            const int64_t hi = moe_round_hi(count, tile, tokens);
            residual += count - (hi != lo && moe_balance_f_picks_hi(count, lo, tile, residual) ? hi : lo);
        }
        *walked = residual;
    }
    __syncthreads();
    return *walked;
}

// Does the rule take hi rather than lo? For every rule but NR_S.
MOE_DEVICE bool picks_hi(const moe_cuda_routing &r, int expert, int64_t count, int64_t lo,
                         const shared_memory &m, int64_t *walked)
{
    const int64_t tile = r.layer.tile;
    switch (r.layer.rounding) {
    case SMOE_ROUNDING_NR_F: return moe_nr_f_picks_hi(count, lo, tile);
    case SMOE_ROUNDING_SR_F:
        return moe_sr_f_picks_hi(count, lo, tile, moe_round_draw(r.layer.seed, r.step, expert));
    case SMOE_ROUNDING_BALANCE_F:
        return moe_balance_f_picks_hi(count, lo, tile, residual_before(r, expert, m, walked));
    case SMOE_ROUNDING_UP: return true;
    case SMOE_ROUNDING_NONE: // this kernel does not run
    case SMOE_ROUNDING_NR_S: // by scores, in the kernel itself
    case SMOE_ROUNDING_DOWN: break;
    }
    return false;
}

// Starts a copy to shared memory.
MOE_DEVICE void copy16(void *to, const void *from, int64_t bytes)
{
    const uint32_t shared = shared_address(to);
    for (uint32_t at = threadIdx.x * 16; at < bytes; at += THREADS * 16)
        copy16_async(shared + at, (const char *)from + at, 16);
}

// RESIDENT: the expert's keys and mask words are kept in shared memory.
template <typename L, bool RESIDENT>
__global__ void __launch_bounds__(THREADS, 2) round_expert(const __grid_constant__ moe_cuda_routing r)
{
    using key = typename logits_of<L>::key;
    extern __shared__ __align__(16) char memory[];
    __shared__ uint64_t found_candidates[MOST_CANDIDATES], limit;
    __shared__ unsigned long long sum;
    __shared__ uint32_t sums[WARPS];
    __shared__ uint16_t holders[THREADS];
    __shared__ int found, holding;
    __shared__ int64_t walked;
    const shared_memory m = {found_candidates, sums, holders, &found, &holding, &limit};
    const int expert = blockIdx.x;
    uint32_t *mask = r.mask + (int64_t)expert * r.words;
    wait_for_previous();
    column<L> c = {(const key *)r.keys + (int64_t)expert * r.panels * MOE_ROUTE_PANEL, mask,
                   (uint32_t)r.layer.tokens};
    if (RESIDENT) {
        key *keys = (key *)memory;
        uint32_t *words = (uint32_t *)(keys + r.panels * MOE_ROUTE_PANEL);
        copy16(keys, c.keys, r.panels * MOE_ROUTE_PANEL * (int64_t)sizeof(key));
        copy16(words, mask, r.words * 4);
        c.keys = keys;
        c.words = words;
    }
    const int64_t tokens = r.layer.tokens, tile = r.layer.tile, count = count_tokens(mask, r.words, sums);
    if (threadIdx.x == 0) r.all_counts[expert] = (int32_t)count;
    const int64_t lo = moe_round_lo(count, tile), hi = moe_round_hi(count, tile, tokens);
    const bool by_score = r.layer.rounding == SMOE_ROUNDING_NR_S && hi != lo;
    int64_t target = lo;
    if (hi != lo && !by_score) target = picks_hi(r, expert, count, lo, m, &walked) ? hi : lo;
    if (threadIdx.x == 0 && !by_score) r.counts[expert] = (int32_t)target;
    wait_all_copies();
    if (target == count && !by_score) return;
    __syncthreads();

    const candidates<L> adds = {c, true}, drops = {c, false};
    if (by_score) { // the limits of both directions, and the sums of the scores between c and hi, and between
                    // lo and c
        const uint64_t add_limit = find_limit(adds, (uint32_t)(hi - count), nullptr, m);
        const uint64_t drop_limit = find_limit(drops, (uint32_t)(count - lo), nullptr, m);
        const int64_t added = score_sum(adds, add_limit, &sum), dropped = score_sum(drops, drop_limit, &sum);
        const bool up = moe_nr_s_picks_hi(added, dropped);
        if (threadIdx.x == 0) r.counts[expert] = (int32_t)(up ? hi : lo);
        if (up)
            move(adds, add_limit, mask);
        else
            move(drops, drop_limit, mask);
        return;
    }
    const bool up = target > count;
    const candidates<L> all = {c, up};
    find_limit(all, (uint32_t)(up ? target - count : count - target), mask, m);
}

// The most bytes of an expert's keys and mask in shared memory, beside the kernel's 12 KB of static memory.
int column_bytes(const moe_device *device)
{
    return device->shared_bytes >= COLUMN_BYTES + 16384 ? COLUMN_BYTES : FEWER_BYTES;
}

template <typename L> cudaError_t launch(const moe_cuda_routing &r, const moe_launch *on)
{
    const int64_t bytes =
        r.panels * MOE_ROUTE_PANEL * (int64_t)sizeof(typename logits_of<L>::key) + r.words * 4;
    const bool resident = bytes <= column_bytes(on->device);
    return launch_early(resident ? round_expert<L, true> : round_expert<L, false>,
                        dim3((unsigned)r.layer.experts), dim3(THREADS), resident ? (size_t)bytes : 0, on, r);
}

} // namespace
} // namespace rounding
} // namespace moe

extern "C" cudaError_t moe_cuda_rounding(const moe_launch *on, const moe_cuda_routing *r)
{
    return moe::for_type(moe::logits_types(), r->layer.logits_type,
                         [&](auto l) { return moe::rounding::launch<typename decltype(l)::type>(*r, on); });
}

extern "C" cudaError_t moe_cuda_rounding_init(const moe_device *device)
{
    using namespace moe::rounding;
    return moe::for_every_type(moe::logits_types(), [&](auto l) {
        return moe::allow_shared(device, round_expert<typename decltype(l)::type, true>,
                                 column_bytes(device));
    });
}
