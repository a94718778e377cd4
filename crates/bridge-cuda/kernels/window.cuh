// A vector of 16 bytes of a row that is contiguous on both sides, at any address. It is shifted out of two vectors of the
// source; at the ends of the row, where a vector would reach beyond it on either side, units are copied one by one.
#pragma once
#include "common.cuh"

template <typename Unit> struct Window {
    static constexpr int UNITS = 16 / sizeof(Unit);
    Pack<u128, Unit> ends;
    u32 words[8], shift, present;
    char *target;
    bool whole;

    // Makes it one that writes nothing.
    __device__ __forceinline__ void clear() { whole = false, present = 0; }

    // Reads what belongs into one of the vectors that a row of the target touches.
    __device__ __forceinline__ void read(const char *source, char *start, i64 nbytes, u32 vector) {
        target = (char *)((u64)start & ~15ull) + 16 * (i64)vector;
        const i64 done = target - start;
        const char *wanted = source + done, *aligned = (const char *)((u64)wanted & ~15ull);
        shift = (u32)(u64)wanted & 15;
        const bool inside = aligned >= source && aligned + (shift ? 32 : 16) <= source + nbytes;
        whole = inside && done >= 0 && done + 16 <= nbytes;
        if (whole) {
            *(u128 *)&words[0] = load<u128>(aligned);
            if (shift) *(u128 *)&words[4] = load<u128>(aligned + 16);
        } else {
#pragma unroll
            for (int j = 0; j < UNITS; ++j) {
                const i64 at = done + j * (i64)sizeof(Unit);
                if (at >= 0 && at < nbytes) ends.units[j] = load<Unit>(source + at), present |= 1u << j;
            }
        }
    }

    // Writes it with the bits of `mask` flipped.
    __device__ __forceinline__ void write(u128 mask) {
        if (whole) {
            u32(&w)[8] = words;
            const u32 bits = (shift & 3) * 8;
            if (shift & 8) w[0] = w[2], w[1] = w[3], w[2] = w[4], w[3] = w[5], w[4] = w[6], w[5] = w[7];
            if (shift & 4) w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = w[4], w[4] = w[5];
            u128 out;
            out.x = __funnelshift_r(w[0], w[1], bits), out.y = __funnelshift_r(w[1], w[2], bits);
            out.z = __funnelshift_r(w[2], w[3], bits), out.w = __funnelshift_r(w[3], w[4], bits);
            store<u128>(target, out ^ mask);
        } else if (present) {
            ends.item = ends.item ^ mask;
#pragma unroll
            for (int j = 0; j < UNITS; ++j)
                if (present >> j & 1) store<Unit>(target + j * sizeof(Unit), ends.units[j]);
        }
    }
};
