// Kernels for a few channels, which the source has close together for each point, and the target in a row of points for
// each. Group `i` is the `channels`, group `o` the points, of which a block takes `span_o`. In the source, points are
// `pitch` units apart, and the channels of one reach over `extent` units.
#pragma once
#include "tile.cuh"

// Permutes the vectors of each 128 bytes, so that points whose pitch is a multiple of 16 bytes spread over all banks.
__device__ __forceinline__ u32 spread(u32 at, bool spreads) { return spreads ? at ^ (at >> 7 & 7) << 4 : at; }

// Copies units into shared memory, from `begin` to `end`, in bytes.
template <typename Unit> __device__ __forceinline__ void linear(const char *global, char *shared, u32 phase, bool spreads, u32 begin, u32 end) {
    constexpr u32 EACH = 4, STEP = THREADS * sizeof(Unit);
    for (u32 first = begin + threadIdx.x * sizeof(Unit); first < end; first += STEP * EACH) {
        Unit units[EACH];
#pragma unroll
        for (u32 k = 0; k < EACH; ++k)
            if (first + k * STEP < end) units[k] = load<Unit>(global + first + k * STEP);
#pragma unroll
        for (u32 k = 0; k < EACH; ++k)
            if (first + k * STEP < end) *(Unit *)(shared + spread(phase + first + k * STEP, spreads)) = units[k];
    }
}

// The same in vectors, as far as there are whole ones. Shared memory has them `phase` bytes further, so that vectors are
// aligned on both sides.
template <typename Unit> __device__ __forceinline__ void chunked(const char *global, char *shared, u32 phase, bool spreads, u32 length) {
    const u32 begin = min((u32)(-(i64)global & 15), length), end = begin + (length - begin) / 16 * 16;
    linear<Unit>(global, shared, phase, spreads, 0, begin);
    linear<u128>(global, shared, phase, spreads, begin, end);
    linear<Unit>(global, shared, phase, spreads, end, length);
}

// The most rows of a block.
constexpr u32 ROWS = THREADS;

// One block's points of `split`.
struct Points {
    // By row its offset from `row` and, in shared memory, that of its first cell.
    char *row;
    const i64 *rows;
    const u32 *columns;
    char *shared;
    // Bytes from one point to the next in a row and in shared memory.
    i64 along;
    // Points, and rows of a block.
    u32 pitch, count, lines;
    // Divides by the items of a row.
    const Dim &items;
    const Sides &sides;
};

// Units that a thread has in flight, by their size.
template <typename Unit> constexpr int flight = sizeof(Unit) == 4 ? 8 : 4;

// Copies cells to rows. `WHOLE`: every item of every row is adjacent and aligned. `FULL`: a thread's items are of one row,
// and there are as many as a block takes.
template <typename Item, typename Unit, bool SPREADS, bool WHOLE, bool FULL> __device__ __forceinline__ void to_rows(const Points &p) {
    constexpr int PER = Pack<Item, Unit>::COUNT, EACH = flight<Unit>;
    const i64 along = WHOLE ? sizeof(Unit) : p.along;
    const u32 all = p.lines * p.items.length;
    const auto cell = [&](u32 line, u32 point) -> Unit {
        return *(const Unit *)(p.shared + spread(p.columns[line] + point * p.pitch, SPREADS));
    };
    for (u32 first = threadIdx.x; first < all; first += THREADS * EACH) {
        Pack<Item, Unit> pack[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = first + (FULL ? 0 : k * THREADS), line = divide(n, p.items);
            const u32 point = (n - line * p.items.length) * PER + (FULL ? k * THREADS * PER : 0);
            if (!FULL && (n >= all || point >= p.count)) continue;
#pragma unroll
            for (int j = 0; j < PER; ++j)
                if (WHOLE || FULL || point + j < p.count) pack[k].units[j] = cell(line, point + j);
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = first + (FULL ? 0 : k * THREADS), line = divide(n, p.items);
            const u32 point = (n - line * p.items.length) * PER + (FULL ? k * THREADS * PER : 0);
            if (!FULL && (n >= all || point >= p.count)) continue;
            char *row = p.row + p.rows[line] + point * along;
            pack[k].item = pack[k].item ^ flips<Item>(p.sides);
            if (WHOLE) store<Item>(row, pack[k].item);
            else
#pragma unroll
                for (int j = 0; j < PER; ++j)
                    if (WHOLE || FULL || point + j < p.count) store<Unit>(row + j * along, pack[k].units[j]);
        }
    }
}

// Where rows are short, group `i` goes on with the dimensions that follow in the source, and a block takes `span_i` rows.
// `pitches` divides by the items of a row.
template <typename Unit> __device__ __forceinline__ void split(const Tile &p) {
    typedef typename Word<Unit>::Type Item;
    constexpr int PER = Pack<Item, Unit>::COUNT;
    extern __shared__ u128 chunk[];
    __shared__ i64 rows[ROWS];
    __shared__ u32 columns[ROWS];
    const Block at = block(p);
    char *shared = (char *)chunk;
    const i64 along = p.o.dims[0].to;
    const u32 pitch = p.pitch * sizeof(Unit), lines = at.count_i;
    u32 length = (at.count_o - 1) * pitch + p.extent * sizeof(Unit);
    i64 first_from = 0, first_to = 0;
    if (p.span_i > p.channels) {
        i64 last_from = 0, last_to = 0;
        step(at.first_i, p.i.dims, p.i.ndim, first_from, first_to);
        step(at.first_i + lines - p.channels, p.i.dims, p.i.ndim, last_from, last_to);
        length += (u32)(last_from - first_from);
    }
    const char *dense = at.from + first_from + (i64)at.first_o * pitch;
    const u32 phase = (u32)(u64)dense & 15;
    bool whole = along == sizeof(Unit) && at.count_o % PER == 0;
    if (threadIdx.x < lines) {
        i64 from = 0, to = 0;
        step(at.first_i + threadIdx.x, p.i.dims, p.i.ndim, from, to);
        rows[threadIdx.x] = to + at.first_o * along;
        columns[threadIdx.x] = (u32)(from - first_from) + phase;
        whole = whole && (u64)(at.to + rows[threadIdx.x]) % sizeof(Item) == 0;
    }
    whole = __syncthreads_and(whole);
    const bool full = at.count_o == p.span_o && p.span_o >= THREADS * PER * flight<Unit>;
    const bool spreads = !whole || !full || pitch % 16 == 0;
    chunked<Unit>(dense, shared, phase, spreads, length);
    __syncthreads();
    const Points all = {at.to, rows, columns, shared, along, pitch, at.count_o, lines, p.pitches, p.sides};
    if (!spreads) to_rows<Item, Unit, false, true, true>(all);
    else if (whole && full) to_rows<Item, Unit, true, true, true>(all);
    else if (whole) to_rows<Item, Unit, true, true, false>(all);
    else if (full) to_rows<Item, Unit, true, false, true>(all);
    else to_rows<Item, Unit, true, false, false>(all);
}
