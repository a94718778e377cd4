// 16 bytes at any address, as rows have them.
#pragma once
#include "common.cuh"

// 16 bytes of the source. They are shifted out of two vectors, or read unit by unit where a vector would reach beyond the
// bytes that may be read.
template <typename Unit> struct Window {
    alignas(16) u32 words[8];
    u32 shift;

    // Reads the bytes from `at` on, of which those from `low` to `high` may be read.
    __device__ __forceinline__ void read(const char *at, const char *low, const char *high) {
        const char *aligned = (const char *)((u64)at & ~15ull);
        shift = (u32)(u64)at & 15;
        if (aligned >= low && aligned + (shift ? 32 : 16) <= high) {
            *(u128 *)&words[0] = load<u128>(aligned);
            if (shift) *(u128 *)&words[4] = load<u128>(aligned + 16);
        } else {
            Pack<u128, Unit> pack;
#pragma unroll
            for (u32 j = 0; j < pack.COUNT; ++j) {
                const char *unit = at + j * sizeof(Unit);
                pack.units[j] = unit >= low && unit < high ? load<Unit>(unit) : (Unit)0;
            }
            *(u128 *)&words[0] = pack.item, shift = 0;
        }
    }

    __device__ __forceinline__ u128 item() {
        u32(&w)[8] = words;
        const u32 bits = (shift & 3) * 8;
        if (shift & 8) w[0] = w[2], w[1] = w[3], w[2] = w[4], w[3] = w[5], w[4] = w[6], w[5] = w[7];
        if (shift & 4) w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = w[4], w[4] = w[5];
        u128 out;
        out.x = __funnelshift_r(w[0], w[1], bits), out.y = __funnelshift_r(w[1], w[2], bits);
        out.z = __funnelshift_r(w[2], w[3], bits), out.w = __funnelshift_r(w[3], w[4], bits);
        return out;
    }
};

// Returns the first `nbytes` bytes of one vector, and the rest of the other one.
__device__ __forceinline__ u128 blend(u128 first, u128 rest, int nbytes) {
    u32 *a = (u32 *)&first, *b = (u32 *)&rest;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int own = min(max(nbytes - 4 * j, 0), 4);
        const u32 mask = own == 4 ? ~0u : (1u << 8 * own) - 1;
        a[j] = a[j] & mask | b[j] & ~mask;
    }
    return first;
}

// Stores the units of a vector from byte `begin` to byte `end`.
template <typename Unit> __device__ __forceinline__ void store_part(char *to, i64 begin, i64 end, u128 item) {
    if (begin <= 0 && end >= 16) return store<u128>(to, item);
    Pack<u128, Unit> pack;
    pack.item = item;
#pragma unroll
    for (int j = 0; j < pack.COUNT; ++j)
        if (j * (int)sizeof(Unit) >= begin && j * (int)sizeof(Unit) < end) store<Unit>(to + j * sizeof(Unit), pack.units[j]);
}
