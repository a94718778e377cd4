// Tiles of small units at any address: rows of the source and of the target each begin anywhere in a word.
#pragma once
#include "tile.cuh"

// The bytes of a row that a tile may touch, from `begin` to `end` after the tile's first unit. Units of `SIZE` bytes
// beyond them are neither read nor written. With `INSIDE` every word is read or written as a whole.
template <int SIZE, bool INSIDE> struct Words {
    typedef typename Bytes<SIZE>::Unit Unit;
    int begin, end;

    // The row has `nbytes` bytes, and `first` of them are before the tile.
    __device__ __forceinline__ Words(i64 first, i64 nbytes) : begin((int)max(-first, -64ll)), end((int)min(nbytes - first, 1024ll)) {}

    __device__ __forceinline__ u32 read(const char *word, int at) const {
        if (INSIDE || (at >= begin && at + 4 <= end)) return load<u32>(word);
        Pack<u32, Unit> units;
        units.item = 0;
#pragma unroll
        for (int j = 0; j < 4; j += SIZE)
            if (at + j >= begin && at + j < end) units.units[j / SIZE] = load<Unit>(word + j);
        return units.item;
    }

    __device__ __forceinline__ void write(char *word, int at, u32 item) const {
        if (INSIDE || (at >= begin && at + 4 <= end)) return store<u32>(word, item);
        Pack<u32, Unit> units;
        units.item = item;
#pragma unroll
        for (int j = 0; j < 4; j += SIZE)
            if (at + j >= begin && at + j < end) store<Unit>(word + j, units.units[j / SIZE]);
    }
};

// A tile of `shifted` in words: rows of the target, each permuted so that no access meets a bank conflict. The first
// `extent` words, a power of two, are before the tile: a row of the target is written by whole parts of so many words,
// and the first of them may begin there.
template <int SIZE> struct Cells {
    static constexpr u32 PER = 4 / SIZE, ACROSS = 31 * PER, ROW = 64;
    u32 words[ACROSS * ROW];
};

// Reads rows of the source into cells. A warp takes `PER` rows at a time, shifts them so that the tile's first unit is
// the first of its word, and transposes squares of units.
template <int SIZE, bool INSIDE> __device__ __forceinline__ void gather_rows(const Tile &p, const Block &at, Cells<SIZE> &cells) {
    typedef Cells<SIZE> Of;
    constexpr u32 PER = Of::PER, PASSES = 4;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, before = p.extent * PER, groups = p.span_o / PER + p.extent;
    const Words<SIZE, INSIDE> source((i64)at.first_i * SIZE, (i64)p.i.total * SIZE);
    const i64 stride = p.o.dims[0].from;
    // The rows from `before` on that there are.
    const u32 none = at.first_o < before ? before - at.first_o : 0, some = min(before + p.span_o, before + p.o.total - at.first_o) - none;
#pragma unroll 1
    for (u32 half = 0; half < groups; half += PASSES * WARPS) {
        const u32 row = (half + warp) * PER;
        const char *begin = at.from + ((i64)at.first_o + row - before) * stride + (i64)at.first_i * SIZE + 4 * lane, *unit = begin;
        u32 words[PASSES][PER];
#pragma unroll
        for (u32 a = 0; a < PASSES; ++a, unit += (WARPS - 1) * PER * stride)
#pragma unroll
            for (u32 k = 0; k < PER; ++k, unit += stride) {
                words[a][k] = 0;
                if (INSIDE || row + a * WARPS * PER + k - none < some)
                    words[a][k] = source.read((const char *)((u64)unit & ~3ull), (int)(4 * lane) - (int)((u32)(u64)unit & 3));
            }
        u32 beyond = (u32)(u64)begin;
#pragma unroll
        for (u32 a = 0; a < PASSES; ++a, beyond += (WARPS - 1) * PER * (u32)stride) {
            if (!INSIDE && half + a * WARPS >= groups) break;
            u32 w[PER];
#pragma unroll
            for (u32 k = 0; k < PER; ++k, beyond += (u32)stride)
                w[k] = __funnelshift_r(words[a][k], __shfl_down_sync(~0u, words[a][k], 1), 8 * beyond);
            Square<SIZE>::transpose(w);
            // The last lane only has the word that its neighbour shifts in.
            if (lane < 31)
#pragma unroll
                for (u32 k = 0; k < PER; ++k) cells.words[(lane * PER + k) * Of::ROW + ((half + a * WARPS + warp) ^ lane)] = w[k];
        }
    }
}

// Writes the cells: of each row of the target the parts that begin in the tile, or in the first part before it.
template <int SIZE, bool INSIDE> __device__ __forceinline__ void write_rows(const Tile &p, const Block &at, const Cells<SIZE> &cells) {
    typedef Cells<SIZE> Of;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, mask = flips<u32>(p.sides), written = p.span_o / Of::PER;
    const Words<SIZE, INSIDE> target((i64)at.first_o * SIZE, (i64)p.o.total * SIZE);
    const i64 stride = p.i.dims[0].to;
    char *row = at.to + (i64)(at.first_i + warp) * stride + (i64)at.first_o * SIZE;
#pragma unroll 2
    for (u32 i = warp; i < at.count_i; i += WARPS, row += WARPS * stride) {
        const u32 beyond = (u32)(u64)row & (4 * p.extent - 1), column = p.extent - beyond / 4 + lane;
        const u32 *high = cells.words + i * Of::ROW + (column ^ i / Of::PER);
        const u32 *low = cells.words + i * Of::ROW + (column - 1 ^ i / Of::PER);
        char *word = row - beyond + 4 * lane;
        // 32 columns further there are the same banks.
#pragma unroll
        for (u32 k = 0; k < Of::ROW; k += 32)
            if (k + lane < written)
                target.write(word + 4 * k, (int)(4 * (k + lane) - beyond), __funnelshift_rc(low[k], high[k], 32 - 8 * (beyond & 3)) ^ mask);
    }
}

// Units of `SIZE` bytes that are adjacent in the source along group `i` and in the target along group `o`, of one
// dimension each.
template <int SIZE> __device__ __forceinline__ void shifted(const Tile &p) {
    typedef Cells<SIZE> Of;
    __shared__ Of cells;
    const Block at = block(p);
    // A row is read to 3 bytes before a tile, and to 128 bytes after its first. Rows are 64 bytes apart or more, so that the
    // source has these bytes where it has two rows more on either side.
    const u32 before = p.extent * Of::PER, rows = Of::ROW * Of::PER;
    if (at.first_o >= before + 2 && at.first_o + rows + 2 <= p.o.total + before) gather_rows<SIZE, true>(p, at, cells);
    else gather_rows<SIZE, false>(p, at, cells);
    __syncthreads();
    if (at.first_o > 0 && at.first_o + p.span_o <= p.o.total) write_rows<SIZE, true>(p, at, cells);
    else write_rows<SIZE, false>(p, at, cells);
}
