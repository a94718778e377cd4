// Kernels that walk the target in its own order, with offsets of 32 bits where these suffice: that saves arithmetic.
#pragma once
#include "common.cuh"
#include "window.cuh"

// Units anywhere on both sides. `extra` is the bytes of a unit for a target without gaps, which takes half of the
// arithmetic, and else 0.
template <typename Offset, typename Unit, int EACH, int THREADS> __device__ __forceinline__ void flat(const Flat &p) {
    const u32 first = blockIdx.x * (THREADS * EACH) + threadIdx.x;
    u32 rest[EACH];
    Offset from[EACH], to[EACH];
    Unit units[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) rest[k] = first + k * THREADS, from[k] = 0, to[k] = rest[k] * (Offset)p.extra;
    if (p.extra) walk<false>(rest, p.dims, p.ndim, from, to);
    else walk<true>(rest, p.dims, p.ndim, from, to);
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (first + k * THREADS < p.items) units[k] = load<Unit>(p.sides.from + from[k]);
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (first + k * THREADS < p.items) store<Unit>(p.sides.to + to[k], units[k] ^ flips<Unit>(p.sides));
}

// Units anywhere in the source, for a target without gaps that begins at a multiple of an item: a thread gathers an
// item of neighbours. `extra` is the number of units; the last item may be partial.
template <typename Offset, typename Item, typename Unit, int EACH> __device__ __forceinline__ void gather(const Flat &p) {
    constexpr u32 COUNT = Pack<Item, Unit>::COUNT;
    const u32 first = blockIdx.x * (THREADS * EACH) + threadIdx.x, units = (u32)p.extra;
    const u32 length = p.dims[0].length, lines = p.dims[1].length;
    const Offset along = p.dims[0].from, across = p.dims[1].from;
    Pack<Item, Unit> pack[EACH];
    // Where each item begins: on its line, which is one of its plane, and in the source.
    u32 at[EACH], line[EACH], plane[EACH];
    Offset from[EACH], unused[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const u32 begin = (first + k * THREADS) * COUNT;
        line[k] = p.ndim > 1 ? divide(begin, p.dims[0]) : 0;
        plane[k] = p.ndim > 2 ? divide(line[k], p.dims[1]) : 0;
        at[k] = begin - line[k] * length, line[k] -= plane[k] * lines;
        from[k] = at[k] * along + line[k] * across, unused[k] = 0;
    }
    if (p.ndim > 2) walk<false>(plane, p.dims + 2, p.ndim - 2, from, unused);
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const u32 begin = (first + k * THREADS) * COUNT;
        if (first + k * THREADS >= p.items) continue;
        if (length % COUNT == 0) {
            // No item goes beyond its line.
#pragma unroll
            for (u32 j = 0; j < COUNT; ++j) pack[k].units[j] = load<Unit>(p.sides.from + from[k] + (Offset)j * along);
        } else if (length >= COUNT) {
            // The rest may be on the next line, or anywhere after the last line.
            const u32 left = length - at[k];
            Offset next = from[k] + across - (Offset)length * along;
            if (left < COUNT && line[k] + 1 == lines && p.ndim > 2) {
                next = -(Offset)left * along;
                step(begin + left, p.dims, p.ndim, next, unused[k]);
            }
#pragma unroll
            for (u32 j = 0; j < COUNT; ++j)
                if (begin + j < units) pack[k].units[j] = load<Unit>(p.sides.from + (j < left ? from[k] : next) + (Offset)j * along);
        } else {
            // Several lines.
#pragma unroll
            for (u32 j = 0; j < COUNT; ++j) {
                if (begin + j < units) pack[k].units[j] = load<Unit>(p.sides.from + from[k]);
                from[k] += along;
                if (j + 1 < COUNT && ++at[k] == length) {
                    at[k] = 0, from[k] += across - (Offset)length * along;
                    if (++line[k] == lines && p.ndim > 2) {
                        line[k] = 0, from[k] = 0;
                        step(begin + j + 1, p.dims, p.ndim, from[k], unused[k]);
                    }
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

// What `rows` copies: rows into a target with gaps or without, or vectors that are turned around. The numbers are those of
// Flat::mode.
enum Rows { APART, JOINED, TURNED };

// Vectors of 16 bytes whose units the target has in reverse.
template <typename Offset, typename Unit> __device__ __forceinline__ void turn(const Flat &p) {
    constexpr int EACH = 2;
    const u32 first = blockIdx.x * (THREADS * EACH) + threadIdx.x;
    Pack<u128, Unit> pack[EACH];
    u32 rest[EACH];
    Offset from[EACH], to[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) rest[k] = first + k * THREADS, from[k] = 0, to[k] = 0;
    walk<true>(rest, p.dims, p.ndim, from, to);
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (first + k * THREADS < p.items) pack[k].item = load<u128>(p.sides.from + from[k]);
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (first + k * THREADS < p.items) {
            Pack<u128, Unit> turned;
#pragma unroll
            for (int j = 0; j < turned.COUNT; ++j) turned.units[j] = pack[k].units[turned.COUNT - 1 - j];
            store<u128>(p.sides.to + to[k], turned.item ^ flips<u128>(p.sides));
        }
}

// Rows of `extra` bytes that are contiguous on both sides, at any address. dims[0] counts the vectors of 16 bytes that
// a row of the target touches.
template <typename Offset, typename Unit> __device__ __forceinline__ void apart(const Flat &p) {
    constexpr int EACH = 2;
    const u32 first = blockIdx.x * (THREADS * EACH) + threadIdx.x;
    Window<Unit> windows[EACH];
    u32 row[EACH], vector[EACH];
    Offset from[EACH], to[EACH];
    // Bytes of the row before the vector, with those of its first vector that are not the row's below zero.
    i64 done[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const u32 n = first + k * THREADS;
        row[k] = divide(n, p.dims[0]), vector[k] = n - row[k] * p.dims[0].length, from[k] = 0, to[k] = 0;
    }
    walk<true>(row, p.dims + 1, p.ndim - 1, from, to);
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        done[k] = 16 * (i64)vector[k] - ((u64)(p.sides.to + to[k]) & 15);
        if (first + k * THREADS >= p.items) done[k] = p.extra;
        if (done[k] < p.extra) windows[k].read(p.sides.from + from[k] + done[k], p.sides.from + p.low, p.sides.from + p.high);
    }
    const u128 mask = flips<u128>(p.sides);
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (done[k] < p.extra) store_part<Unit>(p.sides.to + to[k] + done[k], -done[k], p.extra - done[k], windows[k].item() ^ mask);
}

// Rows of dims[0] units, at least 16 bytes, that are contiguous in the source, for a target of `extra` units without gaps:
// a vector of it has units of one row or of two.
template <typename Offset, typename Unit> __device__ __forceinline__ void joined(const Flat &p) {
    constexpr int EACH = 2, SIZE = sizeof(Unit), UNITS = 16 / SIZE;
    const u32 first = blockIdx.x * (THREADS * EACH) + threadIdx.x, before = (u32)(u64)p.sides.to % 16 / SIZE;
    const u32 length = p.dims[0].length, units = (u32)p.extra;
    const char *low = p.sides.from + p.low, *high = p.sides.from + p.high;
    Window<Unit> windows[EACH], next[EACH];
    // Units before the vector's first one, units of the vector before the target, and those before the next row.
    u32 at[EACH], none[EACH], here[EACH], row[EACH], column[EACH];
    Offset from[EACH], unused[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const u32 begin = (first + k * THREADS) * UNITS;
        at[k] = begin > before ? begin - before : 0, none[k] = begin > before ? 0 : before - begin;
        row[k] = divide(at[k], p.dims[0]), column[k] = at[k] - row[k] * length, from[k] = 0, unused[k] = 0;
        here[k] = length - column[k] + none[k];
    }
    u32 walked[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) walked[k] = row[k];
    walk<false>(walked, p.dims + 1, p.ndim - 1, from, unused);
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        if (first + k * THREADS >= p.items) continue;
        windows[k].read(p.sides.from + from[k] + ((i64)column[k] - none[k]) * SIZE, low, high);
        if (here[k] < UNITS && at[k] + (here[k] - none[k]) < units) {
            Offset below = -(Offset)here[k] * SIZE;
            step(row[k] + 1, p.dims + 1, p.ndim - 1, below, unused[k]);
            next[k].read(p.sides.from + below, low, high);
        }
    }
    const u128 mask = flips<u128>(p.sides);
    char *start = (char *)((u64)p.sides.to & ~15ull);
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        if (first + k * THREADS >= p.items) continue;
        u128 item = windows[k].item();
        if (here[k] < UNITS && at[k] + (here[k] - none[k]) < units) item = blend(item, next[k].item(), here[k] * SIZE);
        const i64 end = ((i64)units - at[k] + none[k]) * SIZE;
        store_part<Unit>(start + 16 * (i64)(first + k * THREADS), none[k] * SIZE, end, item ^ mask);
    }
}

template <typename Offset, typename Unit> __device__ __forceinline__ void rows(const Flat &p) {
    if (p.mode == JOINED) joined<Offset, Unit>(p);
    else apart<Offset, Unit>(p);
}
