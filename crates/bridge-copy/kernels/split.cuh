// Kernels for a few channels: one side has them adjacent for each point, the other has a row of points for each.
#pragma once
#include "tile.cuh"

// Copies `length` bytes between global and shared memory, in vectors where the address allows it.
template <typename Unit, bool IN, int EACH> __device__ __forceinline__ u32 linear(char *global, char *shared, u32 start, u32 length, Unit flips) {
    const u32 count = length / sizeof(Unit);
    for (u32 first = start / sizeof(Unit) + threadIdx.x; first < count; first += THREADS * EACH) {
        Unit units[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k)
            if (first + k * THREADS < count) units[k] = IN ? load<Unit>(global + (first + k * THREADS) * sizeof(Unit)) : ((Unit *)shared)[first + k * THREADS];
#pragma unroll
        for (int k = 0; k < EACH; ++k)
            if (first + k * THREADS < count) {
                if (IN) ((Unit *)shared)[first + k * THREADS] = units[k];
                else store<Unit>(global + (first + k * THREADS) * sizeof(Unit), units[k] ^ flips);
            }
    }
    return count * sizeof(Unit);
}

template <typename Unit, bool IN> __device__ __forceinline__ void linear(char *global, char *shared, u32 length, const Sides &sides) {
    const u32 done = ((u64)global & 15) == 0 ? linear<u128, IN, 4>(global, shared, 0, length, flips<u128>(sides)) : 0;
    linear<Unit, IN, 4>(global, shared, done, length, flips<Unit>(sides));
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

// Group `i` is the channels, group `o` the points, of which a block takes `span_o`, a power of two. Rows start at
// multiples of a word, and whole words of points are taken at once.
template <typename Unit, bool JOIN> __device__ __forceinline__ void split(const Tile &p) {
    typedef typename Word<Unit>::Type Item;
    constexpr int PER = Pack<Item, Unit>::COUNT, EACH = sizeof(Unit) < 4 ? 4 : sizeof(Unit) == 4 ? 8 : 2;
    extern __shared__ u128 chunk[];
    __shared__ i64 rows[64];
    Unit *cells = (Unit *)chunk;
    const u32 channels = p.i.total;
    const Block at = block(p);
    if (threadIdx.x < channels) {
        i64 from = 0, to = 0;
        step(threadIdx.x, p.i.dims, p.i.ndim, from, to);
        rows[threadIdx.x] = (JOIN ? from : to) + (i64)at.first_o * sizeof(Unit);
    }
    char *dense = (JOIN ? at.to : (char *)at.from) + (i64)at.first_o * channels * sizeof(Unit);
    if (!JOIN) linear<Unit, true>(dense, (char *)chunk, at.count_o * channels * sizeof(Unit), p.sides);
    __syncthreads();
    const u32 items = at.count_o / PER, log = 31 - __clz(p.span_o / PER), mask = (1u << log) - 1, all = channels << log;
    for (u32 first = threadIdx.x; first < all; first += THREADS * EACH) {
        Pack<Item, Unit> pack[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = first + k * THREADS, channel = n >> log, item = n & mask;
            if (n < all && item < items) {
                if (JOIN) pack[k].item = load<Item>(at.from + rows[channel] + item * sizeof(Item));
                else
#pragma unroll
                    for (int j = 0; j < PER; ++j) pack[k].units[j] = cells[(item * PER + j) * channels + channel];
            }
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = first + k * THREADS, channel = n >> log, item = n & mask;
            if (n < all && item < items) {
                if (!JOIN) store<Item>(at.to + rows[channel] + item * sizeof(Item), pack[k].item ^ flips<Item>(p.sides));
                else
#pragma unroll
                    for (int j = 0; j < PER; ++j) cells[(item * PER + j) * channels + channel] = pack[k].units[j];
            }
        }
    }
    if (!JOIN) return;
    __syncthreads();
    linear<Unit, false>(dense, (char *)chunk, at.count_o * channels * sizeof(Unit), p.sides);
}
