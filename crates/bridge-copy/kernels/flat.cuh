// Kernels that walk the target in its own order.
#pragma once
#include "common.cuh"
#include "window.cuh"

// Units anywhere on both sides.
template <typename Unit> __device__ __forceinline__ void flat(const Flat &p) {
    constexpr int EACH = 4;
    const u32 first = blockIdx.x * (THREADS * EACH) + threadIdx.x;
    u32 rest[EACH];
    i64 from[EACH], to[EACH];
    Unit units[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) rest[k] = first + k * THREADS, from[k] = 0, to[k] = 0;
#pragma unroll 1
    for (u32 d = 0; d < p.ndim; ++d) {
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 next = d + 1 < p.ndim ? divide(rest[k], p.dims[d]) : 0, at = rest[k] - next * p.dims[d].length;
            from[k] += at * p.dims[d].from;
            to[k] += at * p.dims[d].to;
            rest[k] = next;
        }
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (first + k * THREADS < p.items) units[k] = load<Unit>(p.sides.from + from[k]);
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (first + k * THREADS < p.items) store<Unit>(p.sides.to + to[k], units[k] ^ flips<Unit>(p.sides));
}

// Units anywhere in the source, for a target without gaps that begins at a multiple of an item: a thread gathers an
// item of neighbours. `extra` is the number of units; the last item may be partial.
template <typename Item, typename Unit, int EACH> __device__ __forceinline__ void gather(const Flat &p) {
    constexpr u32 COUNT = Pack<Item, Unit>::COUNT;
    const u32 first = blockIdx.x * (THREADS * EACH) + threadIdx.x, units = (u32)p.extra;
    Pack<Item, Unit> pack[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const u32 begin = (first + k * THREADS) * COUNT;
        if (first + k * THREADS >= p.items) continue;
        const u32 line = p.ndim > 1 ? divide(begin, p.dims[0]) : 0;
        const u32 plane = p.ndim > 2 ? divide(line, p.dims[1]) : 0;
        u32 at = begin - line * p.dims[0].length, at_line = line - plane * p.dims[1].length;
        i64 from = 0, unused = 0;
        step(begin, p.dims, p.ndim, from, unused);
#pragma unroll
        for (u32 j = 0; j < COUNT; ++j) {
            if (begin + j < units) pack[k].units[j] = load<Unit>(p.sides.from + from);
            from += p.dims[0].from;
            // The next unit is on the next line, or anywhere after the last line.
            if (j + 1 < COUNT && ++at == p.dims[0].length && p.ndim > 1) {
                at = 0, from += p.dims[1].from - p.dims[0].length * p.dims[0].from;
                if (++at_line == p.dims[1].length && p.ndim > 2) {
                    at_line = 0, from = 0;
                    step(begin + j + 1, p.dims, p.ndim, from, unused);
                }
            }
        }
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const u32 begin = (first + k * THREADS) * COUNT;
        if (first + k * THREADS >= p.items) continue;
        char *to = p.sides.to + begin * (i64)sizeof(Unit);
        pack[k].item = pack[k].item ^ flips<Item>(p.sides);
        if (begin + COUNT <= units) store<Item>(to, pack[k].item);
        else
#pragma unroll
            for (u32 j = 0; j < COUNT; ++j)
                if (begin + j < units) store<Unit>(to + j * sizeof(Unit), pack[k].units[j]);
    }
}

// Vectors of 16 bytes whose units the target has in reverse.
template <typename Unit> __device__ __forceinline__ void turn(const Flat &p) {
    constexpr int EACH = 2;
    const u32 first = blockIdx.x * (THREADS * EACH) + threadIdx.x;
    Pack<u128, Unit> pack[EACH];
    char *target[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (first + k * THREADS < p.items) {
            i64 from = 0, to = 0;
            step(first + k * THREADS, p.dims, p.ndim, from, to);
            target[k] = p.sides.to + to;
            pack[k].item = load<u128>(p.sides.from + from);
        }
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (first + k * THREADS < p.items) {
            Pack<u128, Unit> turned;
#pragma unroll
            for (int j = 0; j < turned.COUNT; ++j) turned.units[j] = pack[k].units[turned.COUNT - 1 - j];
            store<u128>(target[k], turned.item ^ flips<u128>(p.sides));
        }
}

// Rows of `extra` bytes that are contiguous on both sides, at any address. dims[0] counts the vectors of 16 bytes that
// a row of the target touches.
template <typename Unit> __device__ __forceinline__ void rows(const Flat &p) {
    constexpr int EACH = 2;
    const u32 first = blockIdx.x * (THREADS * EACH) + threadIdx.x;
    Window<Unit> windows[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const u32 n = first + k * THREADS;
        windows[k].clear();
        if (n >= p.items) continue;
        const u32 row = divide(n, p.dims[0]), vector = n - row * p.dims[0].length;
        i64 from = 0, to = 0;
        step(row, p.dims + 1, p.ndim - 1, from, to);
        windows[k].read(p.sides.from + from, p.sides.to + to, p.extra, vector);
    }
    const u128 mask = flips<u128>(p.sides);
#pragma unroll
    for (int k = 0; k < EACH; ++k) windows[k].write(mask);
}
