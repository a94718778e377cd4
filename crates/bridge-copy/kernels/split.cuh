// Kernels for a few channels. One side, the *dense* one, has them close together for each point; the other has a row of
// points for each. Group `i` is the channels, group `o` the points, of which a block takes `span_o`, a power of two. On
// the dense side, points are `pitch` units apart, and the channels of one reach over `extent` units.
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

// With `JOIN` the target is the dense side. Whole words of points are taken at once where a row allows it.
// `SPREADS`: the pitch is a multiple of 16 bytes.
template <typename Unit, bool JOIN, bool SPREADS> __device__ __forceinline__ void split(const Tile &p) {
    typedef typename Word<Unit>::Type Item;
    constexpr int PER = Pack<Item, Unit>::COUNT, EACH = sizeof(Unit) == 4 ? 8 : 4;
    extern __shared__ u128 chunk[];
    __shared__ i64 rows[64];
    __shared__ u32 columns[64];
    const Block at = block(p);
    char *shared = (char *)chunk;
    const i64 along = JOIN ? p.o.dims[0].from : p.o.dims[0].to;
    const u32 pitch = p.pitch * sizeof(Unit);
    char *dense = (JOIN ? at.to : (char *)at.from) + (i64)at.first_o * pitch;
    const u32 phase = (u32)(u64)dense & 15, length = (at.count_o - 1) * pitch + p.extent * sizeof(Unit);
    if (threadIdx.x < p.i.total) {
        i64 from = 0, to = 0;
        step(threadIdx.x, p.i.dims, p.i.ndim, from, to);
        rows[threadIdx.x] = (JOIN ? from : to) + at.first_o * along;
        columns[threadIdx.x] = (u32)(JOIN ? to : from) + phase;
    }
    if (!JOIN) chunked<Unit, true>(dense, shared, phase, SPREADS, length, p.sides);
    __syncthreads();
    const auto cell = [&](u32 at) -> Unit & { return *(Unit *)(shared + spread(at, SPREADS)); };
    const u32 log = 31 - __clz(p.span_o / PER), mask = (1u << log) - 1, all = p.i.total << log;
    for (u32 first = threadIdx.x; first < all; first += THREADS * EACH) {
        Pack<Item, Unit> pack[EACH];
        u32 point[EACH], first_cell[EACH];
        char *row[EACH];
        bool whole[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = first + k * THREADS;
            point[k] = n < all ? (n & mask) * PER : p.span_o;
            if (point[k] >= at.count_o) continue;
            first_cell[k] = point[k] * pitch + columns[n >> log];
            row[k] = (JOIN ? (char *)at.from : at.to) + rows[n >> log] + point[k] * along;
            whole[k] = PER == 1 || (along == sizeof(Unit) && (u64)row[k] % sizeof(Item) == 0 && point[k] + PER <= at.count_o);
            if (whole[k]) {
                if (JOIN) pack[k].item = load<Item>(row[k]);
                else
#pragma unroll
                    for (int j = 0; j < PER; ++j) pack[k].units[j] = cell(first_cell[k] + j * pitch);
            } else {
#pragma unroll
                for (int j = 0; j < PER; ++j)
                    if (point[k] + j < at.count_o) pack[k].units[j] = JOIN ? load<Unit>(row[k] + j * along) : cell(first_cell[k] + j * pitch);
            }
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            if (point[k] >= at.count_o) continue;
            if (!JOIN) pack[k].item = pack[k].item ^ flips<Item>(p.sides);
            if (whole[k]) {
                if (!JOIN) store<Item>(row[k], pack[k].item);
                else
#pragma unroll
                    for (int j = 0; j < PER; ++j) cell(first_cell[k] + j * pitch) = pack[k].units[j];
            } else {
#pragma unroll
                for (int j = 0; j < PER; ++j)
                    if (point[k] + j < at.count_o) {
                        if (JOIN) cell(first_cell[k] + j * pitch) = pack[k].units[j];
                        else store<Unit>(row[k] + j * along, pack[k].units[j]);
                    }
            }
        }
    }
    if (!JOIN) return;
    __syncthreads();
    chunked<Unit, false>(dense, shared, phase, SPREADS, length, p.sides);
}

template <typename Unit, bool JOIN> __device__ __forceinline__ void split(const Tile &p) {
    if (p.pitch * sizeof(Unit) % 16 == 0) split<Unit, JOIN, true>(p);
    else split<Unit, JOIN, false>(p);
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
