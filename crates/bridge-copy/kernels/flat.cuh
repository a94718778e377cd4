// Kernels that walk the target in its own order.
#pragma once
#include "common.cuh"

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
// a row of the target touches. Each is shifted out of two vectors of the source; at the ends of a row, where a vector
// would reach beyond it on either side, units are copied one by one.
template <typename Unit> __device__ __forceinline__ void rows(const Flat &p) {
    constexpr int EACH = 2, UNITS = 16 / sizeof(Unit);
    const u32 first = blockIdx.x * (THREADS * EACH) + threadIdx.x;
    Pack<u128, Unit> ends[EACH];
    u32 words[EACH][8], shift[EACH], present[EACH];
    char *target[EACH];
    bool whole[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const u32 n = first + k * THREADS;
        whole[k] = false, present[k] = 0;
        if (n >= p.items) continue;
        const u32 row = divide(n, p.dims[0]), vector = n - row * p.dims[0].length;
        i64 from = 0, to = 0;
        step(row, p.dims + 1, p.ndim - 1, from, to);
        const char *source = p.sides.from + from;
        char *start = p.sides.to + to;
        target[k] = (char *)((u64)start & ~15ull) + 16 * (i64)vector;
        const i64 done = target[k] - start;
        const char *wanted = source + done, *aligned = (const char *)((u64)wanted & ~15ull);
        shift[k] = (u32)(u64)wanted & 15;
        const bool inside = aligned >= source && aligned + (shift[k] ? 32 : 16) <= source + p.extra;
        whole[k] = inside && done >= 0 && done + 16 <= p.extra;
        if (whole[k]) {
            *(u128 *)&words[k][0] = load<u128>(aligned);
            if (shift[k]) *(u128 *)&words[k][4] = load<u128>(aligned + 16);
        } else {
#pragma unroll
            for (int j = 0; j < UNITS; ++j) {
                const i64 at = done + j * (i64)sizeof(Unit);
                if (at >= 0 && at < p.extra) ends[k].units[j] = load<Unit>(source + at), present[k] |= 1u << j;
            }
        }
    }
    const u128 mask = flips<u128>(p.sides);
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (whole[k]) {
            u32(&w)[8] = words[k];
            const u32 bits = (shift[k] & 3) * 8;
            if (shift[k] & 8) w[0] = w[2], w[1] = w[3], w[2] = w[4], w[3] = w[5], w[4] = w[6], w[5] = w[7];
            if (shift[k] & 4) w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = w[4], w[4] = w[5];
            u128 out;
            out.x = __funnelshift_r(w[0], w[1], bits), out.y = __funnelshift_r(w[1], w[2], bits);
            out.z = __funnelshift_r(w[2], w[3], bits), out.w = __funnelshift_r(w[3], w[4], bits);
            store<u128>(target[k], out ^ mask);
        } else if (present[k]) {
            ends[k].item = ends[k].item ^ mask;
#pragma unroll
            for (int j = 0; j < UNITS; ++j)
                if (present[k] >> j & 1) store<Unit>(target[k] + j * sizeof(Unit), ends[k].units[j]);
        }
}
