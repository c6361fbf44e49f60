// Quantises to e4m3 (f8.h): rows of X or dO with a scale for each token, and weights with a scale for each
// matrix of an expert, in both layouts that the GEMMs read.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Rows, bytes: 2 T d read, T d + 4 T written. A warp has a row, up to 4096 columns of it in registers. The
// rest is read twice, first for the largest magnitude.
//
// Weights, bytes of 16-bit weights: 6 E d n read, 6 E d n written (gated). The largest magnitude of a matrix
// must be known before its first byte is written, and the matrix should be read only once. So what has been
// read stays in shared memory until all of the matrix has been read: 30 MB on 132 SMs, more than W1 of most
// layers has, so that the next matrices are read meanwhile.
//
// Tile: 128 rows of 256 bytes, in one of seven slots. CTAs claim the tiles of W1[0], W2[0], W1[1], ... in
// this order from a counter. A CTA goes in steps. In a step it begins to load a tile, reads another one for
// its largest magnitude, and quantises a third one, whose matrix has been read by all CTAs. One warp plans
// the next step meanwhile. Another one adds to the largest magnitudes of the matrix and of its groups of 256
// features (group1, group2 of f8.h), and to its count of read tiles.
// A thread quantises four rows of 16 bytes: it stores each row's bytes, and the four bytes of each column to
// shared memory, over the tile, from where they go to the transposed matrix.
//
// If all slots have tiles of the matrix that the CTA claimed from last, it drops one, so that one slot stays
// free, and loads it once more when the matrix has been read. So a CTA waits only for tiles that are claimed,
// the CTA that claimed the first one of these never waits, and there is no deadlock, however few CTAs are
// resident. A CTA that has many tiles of a matrix asks L2 to keep what it loads more of it, and of these it
// drops one as soon as fewer than SPARE slots are free: in those it goes on with the next matrix, while other
// CTAs read their last tiles.
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/storage.cuh"
#include "sm90/f8.cuh"
#include "sm90/f8_kernels.h"

namespace moe
{
namespace
{

enum { ROW_BYTES = 256 }; // of a tile of weights

// 16 bytes of the source, and a tile of weights.
template <typename T> struct chunk_of {
    enum { COLUMNS = 16 / sizeof(T), WORDS = COLUMNS / 4, TILE_COLUMNS = ROW_BYTES / sizeof(T) };
    static MOE_DEVICE uint32_t largest(uint32_t amax, uint4 v) // amax: of the elements' bits
    {
        const uint32_t mask = 0x7fff7fffu;
        amax = __vmaxu2(__vmaxu2(amax, v.x & mask), v.y & mask);
        return __vmaxu2(__vmaxu2(amax, v.z & mask), v.w & mask);
    }
    static MOE_DEVICE uint32_t as_float(uint32_t amax)
    {
        return moe_f8_amax(moe_f8_amax(0, storage<T>::low(amax)), storage<T>::high(amax));
    }
    static MOE_DEVICE uint32_t quantize(uint4 v, int word, float factor)
    {
        const uint32_t a = word ? v.z : v.x, b = word ? v.w : v.y;
        return pack_e4m3(storage<T>::low(a) * factor, storage<T>::high(a) * factor,
                         storage<T>::low(b) * factor, storage<T>::high(b) * factor);
    }
};

template <> struct chunk_of<float> {
    enum { COLUMNS = 4, WORDS = 1, TILE_COLUMNS = ROW_BYTES / 4 };
    static MOE_DEVICE uint32_t largest(uint32_t amax, uint4 v)
    {
        const uint32_t mask = 0x7fffffffu;
        return max(max(amax, max(v.x & mask, v.y & mask)), max(v.z & mask, v.w & mask));
    }
    static MOE_DEVICE uint32_t as_float(uint32_t amax)
    {
        return amax;
    }
    static MOE_DEVICE uint32_t quantize(uint4 v, int, float factor)
    {
        return pack_e4m3(__uint_as_float(v.x) * factor, __uint_as_float(v.y) * factor,
                         __uint_as_float(v.z) * factor, __uint_as_float(v.w) * factor);
    }
};

// ---- Rows

enum { ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / 32, WARP_COLUMNS = 32 * 8 };

struct rows_params {
    const void *x;
    uint8_t *bytes;
    float *scale;
    int rows, columns;
};

template <typename T> MOE_DEVICE uint2 quantize_eight(uint4 v, float factor)
{
    return {chunk_of<T>::quantize(v, 0, factor), chunk_of<T>::quantize(v, 1, factor)};
}

// KEPT: a lane has so many vectors of eight elements in registers, so that the row is read once.
template <typename T, int KEPT>
__global__ void __launch_bounds__(ROW_THREADS) quantize_rows(const rows_params p)
{
    const int row = blockIdx.x * ROW_WARPS + warp_number(), first = (threadIdx.x & 31) * 8;
    if (row >= p.rows) return;
    const T *from = (const T *)p.x + (int64_t)row * p.columns;
    uint8_t *to = p.bytes + (int64_t)row * p.columns;
    uint4 kept[KEPT];
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        const int column = first + i * WARP_COLUMNS;
        kept[i] = column < p.columns ? __ldg((const uint4 *)(from + column)) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < KEPT; i++) most = chunk_of<T>::largest(most, kept[i]);
    for (int column = first + KEPT * WARP_COLUMNS; column < p.columns; column += WARP_COLUMNS)
        most = chunk_of<T>::largest(most, __ldg((const uint4 *)(from + column)));
    const uint32_t amax = __reduce_max_sync(~0u, chunk_of<T>::as_float(most));
    const float factor = moe_f8_factor(amax);
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        const int column = first + i * WARP_COLUMNS;
        if (column < p.columns) *(uint2 *)(to + column) = quantize_eight<T>(kept[i], factor);
    }
    for (int column = first + KEPT * WARP_COLUMNS; column < p.columns; column += WARP_COLUMNS)
        *(uint2 *)(to + column) = quantize_eight<T>(__ldg((const uint4 *)(from + column)), factor);
    if (first == 0) p.scale[row] = moe_f8_scale(amax);
}

template <typename T> auto kernel_of_rows(int64_t columns)
{
    return columns <= 4 * WARP_COLUMNS   ? quantize_rows<T, 4>
           : columns <= 8 * WARP_COLUMNS ? quantize_rows<T, 8>
                                         : quantize_rows<T, 16>;
}

// ---- Weights

enum {
    WORKERS = 512,
    PLANNER = WORKERS / 32, // warps
    REPORTER,
    THREADS = WORKERS + 64,
    ROWS = 128, // of a tile
    CHUNKS = ROW_BYTES / 16,
    GROUPS = ROWS / 4, // of four rows
    SLOT_BYTES = ROWS * ROW_BYTES,
    SLOTS = 7,
    SPARE = 3,     // slots for the next matrix, if L2 keeps what they would hold
    IN_FLIGHT = 1, // a tile is read so many steps after its load began
    WEIGHTS_SHARED = SLOTS * SLOT_BYTES
};
static_assert(2 * SPARE <= SLOTS, "tiles of one matrix at most are put aside");
static_assert(WORKERS == GROUPS * CHUNKS, "a worker has four rows of a chunk");

struct matrix {
    const void *from; // of the first expert
    uint8_t *to, *to_transposed;
    float *scale, *group_scale;
    int rows, columns;
    int half; // rows 2 j and 2 j + 1 of `from` are rows j and half + j; 0: the same order
    int column_tiles, tiles;
};

struct weights_params {
    matrix of[2];         // W1, W2
    char *work;           // moe_f8_work and 2 x `groups` uint32_t for each expert
    int numbers;          // matrices of all experts
    int features, groups; // n, and its groups of 256
};

// The tile from (row, column) on of matrix `number`, which is of expert number / 2. slot: where it is in
// shared memory; none below 0.
struct tile {
    int slot, number, row, column;
};

// What the CTA does next.
struct step {
    tile load, read, write;
    uint64_t policy; // of L2 for the load; 0: none
    uint32_t amax;   // of the matrix that is written
    int last;        // nothing: all is done
};

struct steps {
    step of[2];          // even and odd ones
    uint32_t amax[2][2]; // of the tile that is read: of the first row's group, and of the other one
};

MOE_DEVICE int64_t expert_offset(const matrix &m, tile t)
{
    return (int64_t)(t.number / 2) * m.rows * m.columns;
}

MOE_DEVICE moe_f8_work *work_of(const weights_params &p, int number)
{
    return (moe_f8_work *)(p.work + (int64_t)(number / 2) * moe_f8_work_bytes(p.groups));
}

// The largest magnitudes of the matrix's groups.
MOE_DEVICE uint32_t *groups_of(const weights_params &p, int number)
{
    return (uint32_t *)(work_of(p, number) + 1) + (number & 1) * p.groups;
}

// Of row `row` of the tile: its group of features. A tile has rows of two groups at most, since groups begin
// at row 256 i of the gate, which begins a tile, and at row 256 i of the up half. 16 rows have one group.
MOE_DEVICE int group_of(const weights_params &p, tile t, int row)
{
    if (t.number & 1) return t.column / MOE_F8_DH_FEATURES;
    const int feature = t.row + row < p.features ? t.row + row : t.row + row - p.features;
    return feature / MOE_F8_DH_FEATURES;
}

// ---- The planner

enum tile_state { FREE, LOADING, LOADING_AGAIN, KEPT, READY };

// Tile `index` of a matrix.
template <typename T> MOE_DEVICE tile tile_of(const weights_params &p, int slot, int number, int index)
{
    const int tiles = p.of[number & 1].column_tiles;
    return {slot, number, index / tiles * ROWS, index % tiles * chunk_of<T>::TILE_COLUMNS};
}

template <typename T> MOE_DEVICE int index_of(const weights_params &p, tile t)
{
    return t.row / ROWS * p.of[t.number & 1].column_tiles + t.column / chunk_of<T>::TILE_COLUMNS;
}

// Where the tile's first four bytes will be written.
MOE_DEVICE volatile int *first_bytes(const weights_params &p, tile t)
{
    const matrix &m = p.of[t.number & 1];
    return (volatile int *)(m.to + expert_offset(m, t) + (int64_t)t.row * m.columns + t.column);
}

// Whether all tiles of the matrix have been read; if so, its largest magnitude.
MOE_DEVICE bool all_read(const weights_params &p, int number, uint32_t &amax)
{
    const moe_f8_work *work = work_of(p, number);
    if (load_acquire_gpu(&work->read[number & 1]) != (uint32_t)p.of[number & 1].tiles) return false;
    amax = *(const volatile uint32_t *)&work->amax[number & 1];
    return true;
}

// The tiles of one matrix that were put aside. The first bytes of each name the one before.
struct put_aside {
    int number, newest; // newest: -1 without any
    bool ready;
    uint32_t amax;
};

// Lane s has slot s. Step i is planned while step i - 1 runs.
template <typename T> MOE_DEVICE void plan_steps(const weights_params &p, steps &s)
{
    const int lane = threadIdx.x & 31;
    const bool has_slot = lane < SLOTS;
    tile mine = {lane, 0, 0, 0};
    tile_state state = FREE;
    uint32_t amax = 0;
    int due = 0;
    bool in_l2 = false;
    put_aside aside = {0, -1, false, 0};
    const int first = p.of[0].tiles, pair = first + p.of[1].tiles;
    int claimed = lane == 0 ? (int)add_one(&work_of(p, 0)->turn) : 0;
    for (int i = 1;; i++) {
        step &to = s.of[i & 1];
        const int unit = __shfl_sync(~0u, claimed, 0), in_pair = unit % pair, second = in_pair >= first;
        const int number = unit / pair * 2 + second; // of the tile that was claimed one step ahead
        const bool claims = number < p.numbers, again = aside.newest >= 0 && aside.ready;
        const uint32_t free = __ballot_sync(~0u, has_slot && state == FREE);
        const int slot = free && (again || claims) ? __ffs((int)free) - 1 : -1;
        const tile load = again ? tile_of<T>(p, slot, aside.number, aside.newest)
                                : tile_of<T>(p, slot, number, in_pair - (second ? first : 0));
        const uint32_t before = __ballot_sync(~0u, state != FREE && mine.number == number);
        const bool full = claims && __popc(before) >= SLOTS - SPARE;
        if (lane == slot) {
            in_l2 = full;
            mine = load, state = again ? LOADING_AGAIN : LOADING, due = i + IN_FLIGHT + again;
            amax = aside.amax;
        }
        if (slot >= 0 && again) aside.newest = *first_bytes(p, load);
        if (slot >= 0 && !again && lane == 0) claimed = (int)add_one(&work_of(p, 0)->turn); // not awaited yet
        const bool reads = state == LOADING && due == i;
        const uint32_t reading = __ballot_sync(~0u, reads);
        if (reads) to.read = mine;
        if (state == LOADING_AGAIN && due == i) state = READY;
        if (state == KEPT && all_read(p, mine.number, amax)) state = READY;
        if (reads) state = KEPT;
        const uint32_t of_aside = __ballot_sync(~0u, state == READY && mine.number == aside.number);
        if (of_aside) aside.ready = true, aside.amax = __shfl_sync(~0u, amax, __ffs((int)of_aside) - 1);
        const uint32_t ready = __ballot_sync(~0u, state == READY);
        if (ready && lane == __ffs((int)ready) - 1) {
            to.write = mine, to.amax = amax;
            state = FREE;
        }
        const int last = free == (1u << SLOTS) - 1 && slot < 0;
        if (lane == 0) {
            to.load = load, to.policy = again ? EVICT_FIRST : full ? EVICT_LAST : 0, to.last = last;
            if (!reading) to.read.slot = -1;
            if (!ready) to.write.slot = -1;
        }
        // All slots, or all but SPARE, have tiles of a matrix of which more are claimed: the CTA must not
        // wait for it, so it puts one aside.
        const bool same = state != FREE && mine.number == number;
        const uint32_t kept = __ballot_sync(~0u, state == KEPT && same);
        const uint32_t best = __ballot_sync(~0u, state == KEPT && same && in_l2);
        const int tiles = __popc(__ballot_sync(~0u, same));
        if (claims && ((best && tiles > SLOTS - SPARE) || (kept && tiles == SLOTS))) {
            const int which = 31 - __clz((int)(best ? best : kept));
            if (lane == which) {
                *first_bytes(p, mine) = aside.newest;
                state = FREE;
            }
            aside = {number, __shfl_sync(~0u, index_of<T>(p, mine), which), false, 0};
        }
        __syncthreads();
        if (last) return;
    }
}

// ---- The reporter

MOE_DEVICE void report(const weights_params &p, steps &s)
{
    for (int i = 0;; i++) {
        const step now = s.of[i & 1]; // a copy: after the barrier step i + 2 is planned there
        if (now.last) return;
        __syncthreads();
        if (now.read.slot < 0 || (threadIdx.x & 31)) continue;
        const int number = now.read.number;
        moe_f8_work *work = work_of(p, number);
        const uint32_t first = s.amax[i & 1][0], other = s.amax[i & 1][1];
        atomicMax(&work->amax[number & 1], max(first, other));
        atomicMax(groups_of(p, number) + group_of(p, now.read, 0), first);
        if (other) atomicMax(groups_of(p, number) + group_of(p, now.read, ROWS - 1), other);
        s.amax[i & 1][0] = s.amax[i & 1][1] = 0;
        add_one_release(&work->read[number & 1]);
    }
}

// ---- The workers. Thread t has chunk t % 16 of four rows, and no other thread reads it.

MOE_DEVICE uint32_t own_place(int slot)
{
    return slot * SLOT_BYTES + threadIdx.x / CHUNKS * 4 * ROW_BYTES + threadIdx.x % CHUNKS * 16;
}

template <typename T>
MOE_DEVICE void load_tile(const weights_params &p, uint32_t memory, tile t, uint64_t policy)
{
    const matrix &m = p.of[t.number & 1];
    const int row = t.row + (int)threadIdx.x / CHUNKS * 4;
    const int column = t.column + (int)threadIdx.x % CHUNKS * chunk_of<T>::COLUMNS;
    const bool inside = row < m.rows && column < m.columns;
    const int source = !m.half ? row : row < m.half ? 2 * row : 2 * (row - m.half) + 1;
    const T *from = (const T *)m.from;
    if (inside) from += expert_offset(m, t) + (int64_t)source * m.columns + column;
    const int64_t next = !inside ? 0 : m.half ? 2 * m.columns : m.columns;
    const uint32_t to = memory + own_place(t.slot), bytes = inside ? 16 : 0;
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (policy)
            copy16_async_by(policy, to + j * ROW_BYTES, from + j * next, bytes);
        else
            copy16_async_unhinted(to + j * ROW_BYTES, from + j * next, bytes);
}

template <typename T>
MOE_DEVICE void read_tile(const weights_params &p, uint32_t memory, tile t, uint32_t (&amax)[2])
{
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < 4; j++)
        largest = chunk_of<T>::largest(largest, load_shared16(memory + own_place(t.slot) + j * ROW_BYTES));
    largest = __reduce_max_sync(~0u, chunk_of<T>::as_float(largest));
    const bool other = group_of(p, t, threadIdx.x / CHUNKS * 4) != group_of(p, t, 0);
    if ((threadIdx.x & 31) == 0) atomicMax(amax + other, largest);
}

// Turns four rows of four bytes.
MOE_DEVICE void turn(uint32_t (&v)[4])
{
    const uint32_t a = __byte_perm(v[0], v[1], 0x5140), b = __byte_perm(v[2], v[3], 0x5140);
    const uint32_t c = __byte_perm(v[0], v[1], 0x7362), d = __byte_perm(v[2], v[3], 0x7362);
    v[0] = __byte_perm(a, b, 0x5410);
    v[1] = __byte_perm(a, b, 0x7632);
    v[2] = __byte_perm(c, d, 0x5410);
    v[3] = __byte_perm(c, d, 0x7632);
}

// The bytes of a tile in the order of the source, and turned: words of four rows, one for each column.
template <typename T>
MOE_DEVICE void quantize_tile(const weights_params &p, uint32_t memory, tile t, float factor,
                              uint32_t (&turned)[chunk_of<T>::WORDS][4])
{
    enum { WORDS = chunk_of<T>::WORDS };
    const matrix &m = p.of[t.number & 1];
    const int row = t.row + (int)threadIdx.x / CHUNKS * 4;
    const int column = t.column + (int)threadIdx.x % CHUNKS * chunk_of<T>::COLUMNS;
    const bool inside = row < m.rows && column < m.columns;
    uint8_t *to = m.to + expert_offset(m, t) + (int64_t)row * m.columns + column;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint4 v = load_shared16(memory + own_place(t.slot) + j * ROW_BYTES);
#pragma unroll
        for (int w = 0; w < WORDS; w++) turned[w][j] = chunk_of<T>::quantize(v, w, factor);
        if (!inside) continue;
        if constexpr (WORDS == 2)
            *(uint2 *)(to + (int64_t)j * m.columns) = {turned[0][j], turned[1][j]};
        else
            *(uint32_t *)(to + (int64_t)j * m.columns) = turned[0][j];
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) turn(turned[w]);
}

// Word `group` (four rows) of a column of the turned tile is at group ^ 2 chunk, so that the 32 lanes that
// store words of two groups and 16 chunks each have a bank of their own.
template <typename T>
MOE_DEVICE void store_turned(uint32_t memory, tile t, const uint32_t (&turned)[chunk_of<T>::WORDS][4])
{
    const int group = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const uint32_t to = memory + t.slot * SLOT_BYTES + (group ^ chunk * 2) * 4;
#pragma unroll
    for (int w = 0; w < chunk_of<T>::WORDS; w++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            store_shared_word(to + (chunk * chunk_of<T>::COLUMNS + w * 4 + j) * GROUPS * 4, turned[w][j]);
}

template <typename T> MOE_DEVICE void write_turned(const weights_params &p, uint32_t memory, tile t)
{
    enum { COLUMNS = chunk_of<T>::TILE_COLUMNS, PIECES = ROWS / 16 };
    const matrix &m = p.of[t.number & 1];
    uint8_t *to = m.to_transposed + expert_offset(m, t);
#pragma unroll
    for (int i = 0; i < COLUMNS * PIECES / WORKERS; i++) {
        const int task = i * WORKERS + threadIdx.x, column = task / PIECES, piece = task % PIECES;
        const int chunk = column / chunk_of<T>::COLUMNS, at = piece * 4 ^ (chunk * 2 & ~3);
        const uint4 v = load_shared16(memory + t.slot * SLOT_BYTES + (column * GROUPS + at) * 4);
        const int row = t.row + piece * 16;
        if (row < m.rows && t.column + column < m.columns)
            *(uint4 *)(to + (int64_t)(t.column + column) * m.rows + row) =
                chunk & 1 ? uint4{v.z, v.w, v.x, v.y} : v;
    }
}

// With the first tile of a matrix that has been read.
MOE_DEVICE void write_scales(const weights_params &p, int number, uint32_t amax)
{
    const matrix &m = p.of[number & 1];
    if (threadIdx.x == 0) m.scale[number / 2] = moe_f8_scale(amax);
    const volatile uint32_t *of_groups = groups_of(p, number);
    for (int g = threadIdx.x; g < p.groups; g += WORKERS)
        m.group_scale[(int64_t)(number / 2) * p.groups + g] = moe_f8_scale(of_groups[g]);
}

template <typename T> MOE_DEVICE void work(const weights_params &p, uint32_t memory, steps &s)
{
    for (int i = 0;; i++) {
        const step now = s.of[i & 1];
        const bool writes = now.write.slot >= 0;
        if (now.last) return;
        uint32_t turned[chunk_of<T>::WORDS][4];
        if (writes) quantize_tile<T>(p, memory, now.write, moe_f8_factor(now.amax), turned);
        named_barrier_sync(1, WORKERS); // the slot is read, and so is what was turned in the step before
        if (now.load.slot >= 0) load_tile<T>(p, memory, now.load, now.policy);
        commit_copies();
        if (writes) store_turned<T>(memory, now.write, turned);
        wait_copies<IN_FLIGHT>();
        if (now.read.slot >= 0) read_tile<T>(p, memory, now.read, s.amax[i & 1]);
        __syncthreads();
        if (!writes) continue;
        write_turned<T>(p, memory, now.write);
        if (now.write.row + now.write.column == 0) write_scales(p, now.write.number, now.amax);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) quantize_weights(const __grid_constant__ weights_params p)
{
    extern __shared__ __align__(128) char memory[];
    __shared__ steps s;
    if (threadIdx.x < 2) {
        s.of[threadIdx.x] = {{-1}, {-1}, {-1}, 0, 0, 0};
        s.amax[threadIdx.x][0] = s.amax[threadIdx.x][1] = 0;
    }
    __syncthreads();
    if (warp_number() == PLANNER)
        plan_steps<T>(p, s);
    else if (warp_number() == REPORTER)
        report(p, s);
    else
        work<T>(p, shared_address(memory), s);
}

template <typename T>
matrix matrix_of(const void *from, uint8_t *to, uint8_t *to_transposed, float *scale, float *group_scale,
                 int64_t rows, int64_t columns, int64_t half)
{
    const int64_t tiles = moe_divide_up(columns, chunk_of<T>::TILE_COLUMNS);
    return {from,      to,           to_transposed, scale,      group_scale,
            (int)rows, (int)columns, (int)half,     (int)tiles, (int)(tiles * moe_divide_up(rows, ROWS))};
}

template <typename T> weights_params prepare(const moe_f8_quantized &q)
{
    const int64_t d = q.hidden, n = q.intermediate, w1 = q.first * q.h_width * d, w2 = q.first * d * n;
    const int64_t groups = moe_f8_groups(n, MOE_F8_DH_FEATURES), group = q.first * groups;
    return {{matrix_of<T>(q.w1, q.to.w1 + w1, q.to.w1_t + w1, q.to.scale1 + q.first, q.to.group1 + group,
                          q.h_width, d, q.interleaved ? n : 0),
             matrix_of<T>(q.w2, q.to.w2 + w2, q.to.w2_t + w2, q.to.scale2 + q.first, q.to.group2 + group, d,
                          n, 0)},
            (char *)q.to.work + q.first * moe_f8_work_bytes(groups),
            2 * (int)q.count,
            (int)n,
            (int)groups};
}

using weight_types = type_list<float, __nv_bfloat16, __half>;

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_f8_weights_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(weight_types(), [&](auto t) {
        return allow_shared(device, quantize_weights<typename decltype(t)::type>, WEIGHTS_SHARED);
    });
}

extern "C" cudaError_t moe_sm90_f8_rows(const moe_launch *on, const moe_f8_rows *r)
{
    using namespace moe;
    const rows_params p = {r->x, r->bytes, r->scale, (int)r->rows, (int)r->columns};
    if (!r->rows) return cudaSuccess;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return enqueue(kernel_of_rows<T>(r->columns), (unsigned)moe_divide_up(r->rows, ROW_WARPS),
                       ROW_THREADS, 0, on->stream, p);
    });
}

extern "C" cudaError_t moe_sm90_f8_weights(const moe_launch *on, const moe_f8_quantized *q)
{
    using namespace moe;
    if (!q->count) return cudaSuccess;
    const int64_t bytes = moe_f8_work_bytes(moe_f8_groups(q->intermediate, MOE_F8_DH_FEATURES));
    const cudaError_t status =
        cudaMemsetAsync((char *)q->to.work + q->first * bytes, 0, (size_t)(q->count * bytes), on->stream);
    if (status != cudaSuccess) return status;
    return for_type(weight_types(), q->type, [&](auto t) {
        using T = typename decltype(t)::type;
        return enqueue(quantize_weights<T>, on->sms, THREADS, WEIGHTS_SHARED, on->stream, prepare<T>(*q));
    });
}
