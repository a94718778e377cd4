// Tiles of pixels: `run` units that are adjacent on both sides, at any address.
#pragma once
#include "shifted.cuh"

// Pixels are adjacent in the source along group `i` and in the target along group `o`, of one dimension each. A block
// takes at most 31 words of pixels along either group. Rows of the source are shifted so that the tile begins at a word,
// and a thread puts the units of one word of the target together. `pitches` divides by `run`.
template <int SIZE, int THREADS> __device__ __forceinline__ void pixels(const Tile &p) {
    typedef typename Bytes<SIZE>::Unit Unit;
    constexpr u32 WARPS = THREADS / 32, PASSES = 4, PER = 4 / SIZE, ROWS = 124 / (2 * SIZE), PITCH = 33;
    __shared__ u32 cells[ROWS * PITCH];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pixel = p.run * SIZE;
    const Block at = block(p);
    const Words<SIZE, false> source((i64)at.first_i * pixel, (i64)p.i.total * pixel);
    const i64 down = p.o.dims[0].from;
    for (u32 first = warp; first < at.count_o; first += PASSES * WARPS) {
        const char *row = at.from + (i64)(at.first_o + first) * down + (i64)at.first_i * pixel;
        u32 words[PASSES];
#pragma unroll
        for (u32 a = 0; a < PASSES; ++a) {
            const char *begin = row + a * WARPS * down;
            words[a] = 0;
            if (first + a * WARPS < at.count_o) words[a] = source.read((const char *)((u64)begin & ~3ull) + 4 * lane, (int)(4 * lane) - (int)((u32)(u64)begin & 3));
        }
#pragma unroll
        for (u32 a = 0; a < PASSES; ++a) {
            const u32 word = __funnelshift_r(words[a], __shfl_down_sync(~0u, words[a], 1), 8 * ((u32)(u64)(row + a * WARPS * down) & 3));
            // The last lane only has the word that its neighbour shifts in.
            if (lane < 31 && first + a * WARPS < at.count_o) cells[(first + a * WARPS) * PITCH + lane] = word;
        }
    }
    __syncthreads();
    const int units = at.count_o * p.run;
    const Words<SIZE, false> target(0, (i64)units * SIZE);
    const u32 mask = flips<u32>(p.sides);
    // Where the units of this thread's word are in the first row of the target, if that begins so far beyond a word.
    u32 known = 4, places[PER];
    for (u32 i = warp; i < at.count_i; i += WARPS) {
        char *row = at.to + (i64)(at.first_i + i) * p.i.dims[0].to + (i64)at.first_o * pixel;
        const u32 beyond = (u32)(u64)row & 3;
        const int first = (int)(4 * lane - beyond);
        if (beyond != known) {
            known = beyond;
#pragma unroll
            for (u32 j = 0; j < PER; ++j) {
                const u32 unit = min(max(first / SIZE + (int)j, 0), units - 1), index = divide(unit, p.pitches);
                places[j] = index * PITCH * PER + unit - index * p.run;
            }
        }
        if (first >= units * SIZE) continue;
        Pack<u32, Unit> pack;
#pragma unroll
        for (u32 j = 0; j < PER; ++j) pack.units[j] = ((const Unit *)cells)[places[j] + i * p.run];
        target.write(row - beyond + 4 * lane, first, pack.item ^ mask);
    }
}
