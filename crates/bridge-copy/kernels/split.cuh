// Kernels for a few channels. One side, the *dense* one, has them close together for each point; the other has a row of
// points for each. Group `i` is the channels, group `o` the points, of which a block takes `span_o`, a power of two. On
// the dense side, points are `pitch` units apart, and the channels of one reach over `extent` units.
#pragma once
#include "tile.cuh"

// Copies units between global and shared memory, from `begin` to `end`, in bytes.
template <typename Unit, bool IN> __device__ __forceinline__ void linear(char *global, char *shared, u32 begin, u32 end, Unit mask) {
    constexpr u32 EACH = 4, STEP = THREADS * sizeof(Unit);
    for (u32 first = begin + threadIdx.x * sizeof(Unit); first < end; first += STEP * EACH) {
        Unit units[EACH];
#pragma unroll
        for (u32 k = 0; k < EACH; ++k)
            if (first + k * STEP < end) units[k] = IN ? load<Unit>(global + first + k * STEP) : *(Unit *)(shared + first + k * STEP);
#pragma unroll
        for (u32 k = 0; k < EACH; ++k)
            if (first + k * STEP < end) {
                if (IN) *(Unit *)(shared + first + k * STEP) = units[k];
                else store<Unit>(global + first + k * STEP, units[k] ^ mask);
            }
    }
}

// The same in vectors, as far as there are whole ones. Both addresses are as far from a multiple of 16.
template <typename Unit, bool IN> __device__ __forceinline__ void chunked(char *global, char *shared, u32 length, const Sides &sides) {
    const u32 begin = min((u32)(-(i64)global & 15), length), end = begin + (length - begin) / 16 * 16;
    linear<Unit, IN>(global, shared, 0, begin, flips<Unit>(sides));
    linear<u128, IN>(global, shared, begin, end, flips<u128>(sides));
    linear<Unit, IN>(global, shared, end, length, flips<Unit>(sides));
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
template <typename Unit, bool JOIN> __device__ __forceinline__ void split(const Tile &p) {
    typedef typename Word<Unit>::Type Item;
    constexpr int PER = Pack<Item, Unit>::COUNT, EACH = sizeof(Unit) < 4 ? 4 : sizeof(Unit) == 4 ? 8 : 2;
    extern __shared__ u128 chunk[];
    __shared__ i64 rows[64];
    __shared__ u32 columns[64];
    const Block at = block(p);
    const i64 along = JOIN ? p.o.dims[0].from : p.o.dims[0].to;
    if (threadIdx.x < p.i.total) {
        i64 from = 0, to = 0;
        step(threadIdx.x, p.i.dims, p.i.ndim, from, to);
        rows[threadIdx.x] = (JOIN ? from : to) + at.first_o * along;
        columns[threadIdx.x] = (u32)(JOIN ? to : from) / sizeof(Unit);
    }
    char *dense = (JOIN ? at.to : (char *)at.from) + (i64)at.first_o * p.pitch * sizeof(Unit);
    const u32 length = ((at.count_o - 1) * p.pitch + p.extent) * sizeof(Unit);
    char *shared = (char *)chunk + ((u64)dense & 15);
    Unit *cells = (Unit *)shared;
    if (!JOIN) chunked<Unit, true>(dense, shared, length, p.sides);
    __syncthreads();
    const u32 log = 31 - __clz(p.span_o / PER), mask = (1u << log) - 1, all = p.i.total << log;
    for (u32 first = threadIdx.x; first < all; first += THREADS * EACH) {
        Pack<Item, Unit> pack[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = first + k * THREADS, channel = n >> log, point = (n & mask) * PER;
            if (n >= all || point >= at.count_o) continue;
            const char *row = at.from + rows[channel] + point * along;
            const bool whole = PER > 1 && along == sizeof(Unit) && (u64)row % sizeof(Item) == 0 && point + PER <= at.count_o;
            if (JOIN && whole) pack[k].item = load<Item>(row);
#pragma unroll
            for (int j = 0; j < PER; ++j)
                if (point + j < at.count_o && !(JOIN && whole))
                    pack[k].units[j] = JOIN ? load<Unit>(row + j * along) : cells[(point + j) * p.pitch + columns[channel]];
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = first + k * THREADS, channel = n >> log, point = (n & mask) * PER;
            if (n >= all || point >= at.count_o) continue;
            char *row = at.to + rows[channel] + point * along;
            const bool whole = PER > 1 && along == sizeof(Unit) && (u64)row % sizeof(Item) == 0 && point + PER <= at.count_o;
            if (!JOIN) pack[k].item = pack[k].item ^ flips<Item>(p.sides);
            if (!JOIN && whole) store<Item>(row, pack[k].item);
#pragma unroll
            for (int j = 0; j < PER; ++j)
                if (point + j < at.count_o && !(!JOIN && whole)) {
                    if (JOIN) cells[(point + j) * p.pitch + columns[channel]] = pack[k].units[j];
                    else store<Unit>(row + j * along, pack[k].units[j]);
                }
        }
    }
    if (!JOIN) return;
    __syncthreads();
    chunked<Unit, false>(dense, shared, length, p.sides);
}
