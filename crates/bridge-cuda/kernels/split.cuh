// Kernels for a few channels. One side, the *dense* one, has them close together for each point; the other has a row of
// points for each. Group `i` is the `channels`, group `o` the points, of which a block takes `span_o`. On the dense side,
// points are `pitch` units apart, and the channels of one reach over `extent` units.
#pragma once
#include "tile.cuh"

// The most units of a point that `mix` reorders.
constexpr u32 MIXED = 1024;

// Permutes the vectors of each 128 bytes, so that points whose pitch is a multiple of 16 bytes spread over all banks.
__device__ __forceinline__ u32 spread(u32 at, bool spreads) { return spreads ? at ^ (at >> 7 & 7) << 4 : at; }

// Copies units between global and shared memory, from `begin` to `end`, in bytes.
template <typename Unit, bool IN>
__device__ __forceinline__ void linear(char *global, char *shared, u32 phase, bool spreads, u32 begin, u32 end, Unit mask) {
    constexpr u32 EACH = 4, STEP = THREADS * sizeof(Unit);
    for (u32 first = begin + threadIdx.x * sizeof(Unit); first < end; first += STEP * EACH) {
        Unit units[EACH];
#pragma unroll
        for (u32 k = 0; k < EACH; ++k)
            if (first + k * STEP < end) units[k] = IN ? load<Unit>(global + first + k * STEP) : *(Unit *)(shared + spread(phase + first + k * STEP, spreads));
#pragma unroll
        for (u32 k = 0; k < EACH; ++k)
            if (first + k * STEP < end) {
                if (IN) *(Unit *)(shared + spread(phase + first + k * STEP, spreads)) = units[k];
                else store<Unit>(global + first + k * STEP, units[k] ^ mask);
            }
    }
}

// The same in vectors, as far as there are whole ones. Shared memory has them `phase` bytes further, so that vectors are
// aligned on both sides.
template <typename Unit, bool IN>
__device__ __forceinline__ void chunked(char *global, char *shared, u32 phase, bool spreads, u32 length, const Sides &sides) {
    const u32 begin = min((u32)(-(i64)global & 15), length), end = begin + (length - begin) / 16 * 16;
    linear<Unit, IN>(global, shared, phase, spreads, 0, begin, flips<Unit>(sides));
    linear<u128, IN>(global, shared, phase, spreads, begin, end, flips<u128>(sides));
    linear<Unit, IN>(global, shared, phase, spreads, end, length, flips<Unit>(sides));
}

template <typename Unit> struct Word {
    typedef Unit Type;
};
template <> struct Word<u8> {
    typedef u32 Type;
};
template <> struct Word<u16> {
    typedef u32 Type;
};

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

// Copies between rows and cells. `WHOLE`: every item of every row is adjacent and aligned. `FULL`: a thread's items are of
// one row, and there are as many as a block takes.
template <typename Item, typename Unit, bool JOIN, bool SPREADS, bool WHOLE, bool FULL> __device__ __forceinline__ void between(const Points &p) {
    constexpr int PER = Pack<Item, Unit>::COUNT, EACH = flight<Unit>;
    const i64 along = WHOLE ? sizeof(Unit) : p.along;
    const u32 all = p.lines * p.items.length;
    const auto cell = [&](u32 line, u32 point) -> Unit & {
        return *(Unit *)(p.shared + spread(p.columns[line] + point * p.pitch, SPREADS));
    };
    for (u32 first = threadIdx.x; first < all; first += THREADS * EACH) {
        Pack<Item, Unit> pack[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = first + (FULL ? 0 : k * THREADS), line = divide(n, p.items);
            const u32 point = (n - line * p.items.length) * PER + (FULL ? k * THREADS * PER : 0);
            if (!FULL && (n >= all || point >= p.count)) continue;
            const char *row = p.row + p.rows[line] + point * along;
            if (JOIN && WHOLE) pack[k].item = load<Item>(row);
            else
#pragma unroll
                for (int j = 0; j < PER; ++j)
                    if (WHOLE || FULL || point + j < p.count) pack[k].units[j] = JOIN ? load<Unit>(row + j * along) : cell(line, point + j);
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = first + (FULL ? 0 : k * THREADS), line = divide(n, p.items);
            const u32 point = (n - line * p.items.length) * PER + (FULL ? k * THREADS * PER : 0);
            if (!FULL && (n >= all || point >= p.count)) continue;
            char *row = p.row + p.rows[line] + point * along;
            if (!JOIN) pack[k].item = pack[k].item ^ flips<Item>(p.sides);
            if (!JOIN && WHOLE) store<Item>(row, pack[k].item);
            else
#pragma unroll
                for (int j = 0; j < PER; ++j)
                    if (WHOLE || FULL || point + j < p.count) {
                        if (JOIN) cell(line, point + j) = pack[k].units[j];
                        else store<Unit>(row + j * along, pack[k].units[j]);
                    }
        }
    }
}

// With `JOIN` the target is the dense side. Where rows are short, group `i` goes on with the dimensions that follow on the
// dense side, and a block takes `span_i` rows. `pitches` divides by the items of a row.
template <typename Unit, bool JOIN> __device__ __forceinline__ void split(const Tile &p) {
    typedef typename Word<Unit>::Type Item;
    constexpr int PER = Pack<Item, Unit>::COUNT;
    extern __shared__ u128 chunk[];
    __shared__ i64 rows[ROWS];
    __shared__ u32 columns[ROWS];
    const Block at = block(p);
    char *shared = (char *)chunk, *row = JOIN ? (char *)at.from : at.to;
    const i64 along = JOIN ? p.o.dims[0].from : p.o.dims[0].to;
    const u32 pitch = p.pitch * sizeof(Unit), lines = at.count_i;
    u32 length = (at.count_o - 1) * pitch + p.extent * sizeof(Unit);
    i64 first_from = 0, first_to = 0;
    if (p.span_i > p.channels) {
        i64 last_from = 0, last_to = 0;
        step(at.first_i, p.i.dims, p.i.ndim, first_from, first_to);
        step(at.first_i + lines - p.channels, p.i.dims, p.i.ndim, last_from, last_to);
        length += (u32)(JOIN ? last_to - first_to : last_from - first_from);
    }
    char *dense = (JOIN ? at.to + first_to : (char *)at.from + first_from) + (i64)at.first_o * pitch;
    const u32 phase = (u32)(u64)dense & 15;
    bool whole = along == sizeof(Unit) && at.count_o % PER == 0;
    if (threadIdx.x < lines) {
        i64 from = 0, to = 0;
        step(at.first_i + threadIdx.x, p.i.dims, p.i.ndim, from, to);
        rows[threadIdx.x] = (JOIN ? from : to) + at.first_o * along;
        columns[threadIdx.x] = (u32)(JOIN ? to - first_to : from - first_from) + phase;
        whole = whole && (u64)(row + rows[threadIdx.x]) % sizeof(Item) == 0;
    }
    whole = __syncthreads_and(whole);
    const bool full = at.count_o == p.span_o && p.span_o >= THREADS * PER * flight<Unit>;
    const bool spreads = !whole || !full || pitch % 16 == 0;
    if (!JOIN) {
        chunked<Unit, true>(dense, shared, phase, spreads, length, p.sides);
        __syncthreads();
    }
    const Points all = {row, rows, columns, shared, along, pitch, at.count_o, lines, p.pitches, p.sides};
    if (!spreads) between<Item, Unit, JOIN, false, true, true>(all);
    else if (whole && full) between<Item, Unit, JOIN, true, true, true>(all);
    else if (whole) between<Item, Unit, JOIN, true, true, false>(all);
    else if (full) between<Item, Unit, JOIN, true, false, true>(all);
    else between<Item, Unit, JOIN, true, false, false>(all);
    if (!JOIN) return;
    __syncthreads();
    chunked<Unit, false>(dense, shared, phase, spreads, length, p.sides);
}

// Points that are dense on both sides, their units in another order on each. Group `i` is the units of a point, the
// fastest of the target first; the lowest is `extent` units below the first. A block takes `span_o` points.
template <typename Unit> __device__ __forceinline__ void mix(const Tile &p) {
    typedef typename Word<Unit>::Type Item;
    constexpr int PER = Pack<Item, Unit>::COUNT, EACH = 4;
    extern __shared__ u128 chunk[];
    __shared__ u32 columns[MIXED];
    const Block at = block(p);
    char *shared = (char *)chunk;
    const u32 pitch = p.pitch * sizeof(Unit), length = at.count_o * pitch, below = p.extent * sizeof(Unit);
    char *source = (char *)at.from + (i64)at.first_o * pitch - below, *target = at.to + (i64)at.first_o * pitch;
    const u32 phase = (u32)(u64)source & 15;
    for (u32 t = threadIdx.x; t < p.i.total; t += THREADS) {
        i64 from = 0, unused = 0;
        step(t, p.i.dims, p.i.ndim, from, unused);
        columns[t] = (u32)(from + below) + phase;
    }
    chunked<Unit, true>(source, shared, phase, true, length, p.sides);
    __syncthreads();
    const u32 units = at.count_o * p.pitch, items = (units + PER - 1) / PER;
    const bool aligned = (u64)target % sizeof(Item) == 0;
    for (u32 first = threadIdx.x; first < items; first += THREADS * EACH) {
        Pack<Item, Unit> pack[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = (first + k * THREADS) * PER;
            u32 point = divide(min(n, units), p.pitches), unit = n - point * p.pitch;
#pragma unroll
            for (int j = 0; j < PER; ++j) {
                if (n + j < units) pack[k].units[j] = *(Unit *)(shared + spread(point * pitch + columns[unit], true));
                if (++unit == p.pitch) unit = 0, ++point;
            }
            pack[k].item = pack[k].item ^ flips<Item>(p.sides);
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = (first + k * THREADS) * PER;
            if (aligned && n + PER <= units) store<Item>(target + n * sizeof(Unit), pack[k].item);
            else
#pragma unroll
                for (int j = 0; j < PER; ++j)
                    if (n + j < units) store<Unit>(target + (n + j) * sizeof(Unit), pack[k].units[j]);
        }
    }
}
