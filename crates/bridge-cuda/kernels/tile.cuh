// Kernels for sides that each have a fastest dimension of their own: tiles through shared memory.
#pragma once
#include "common.cuh"

// What a block works on.
struct Block {
    const char *from;
    char *to;
    u32 first_i, first_o, count_i, count_o;
};

// Blocks that run at a time are next to each other, so that the sectors at the edges of their rows are used as a whole:
// the cache still has the other part.
__device__ __forceinline__ Block block(const Tile &p) {
    const Dim &fast = p.along_i ? p.tiles_i : p.tiles_o, &slow = p.along_i ? p.tiles_o : p.tiles_i;
    const u32 row = divide(blockIdx.x, fast), in_row = blockIdx.x - row * fast.length;
    const u32 rest = divide(row, slow), in_rest = row - rest * slow.length;
    const u32 i = p.along_i ? in_row : in_rest, o = p.along_i ? in_rest : in_row;
    i64 from = 0, to = 0;
    step(rest, p.rest, p.ndim, from, to);
    Block at = {p.sides.from + from, p.sides.to + to, i * p.span_i, o * p.span_o};
    at.count_i = min(p.span_i, p.i.total - at.first_i), at.count_o = min(p.span_o, p.o.total - at.first_o);
    return at;
}

// Looks up where the rows of the tile begin, in the source by group `o` and in the target by group `i`.
template <int TI, int TO, int THREADS> __device__ __forceinline__ void offsets(const Tile &p, const Block &at, i64 (&from_o)[TO], i64 (&to_i)[TI]) {
    for (u32 t = threadIdx.x; t < max(TI, TO); t += THREADS) {
        i64 from = 0, to = 0, unused = 0;
        if (t < at.count_o) step(at.first_o + t, p.o.dims, p.o.ndim, from, unused);
        if (t < at.count_i) step(at.first_i + t, p.i.dims, p.i.ndim, unused, to);
        if (t < TO) from_o[t] = from;
        if (t < TI) to_i[t] = to;
    }
}

// Units of any alignment: `SIDE` units across in both groups, `run` of them at each index: adjacent in the target, every
// `extent`th in the source.
template <typename Unit, int SIDE> __device__ __forceinline__ void tile(const Tile &p) {
    constexpr int LANES = SIDE / 32, ROWS = SIDE / WARPS, PITCH = SIDE + 1;
    __shared__ Unit cells[SIDE * PITCH];
    __shared__ i64 from_o[SIDE], to_i[SIDE];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Block at = block(p);
    offsets<SIDE, SIDE, THREADS>(p, at, from_o, to_i);
    bool reads[LANES], writes[LANES];
    i64 from_i[LANES], to_o[LANES];
    u32 cell[LANES];
#pragma unroll
    for (int k = 0; k < LANES; ++k) {
        const u32 across = k * 32 + lane, index = p.run == 1 ? across : across / p.run, unit = across - index * p.run;
        i64 unused = 0;
        from_i[k] = unit * p.extent * sizeof(Unit), to_o[k] = unit * sizeof(Unit);
        reads[k] = index < at.count_i, writes[k] = index < at.count_o;
        if (reads[k]) step(at.first_i + index, p.i.dims, p.i.ndim, from_i[k], unused);
        if (writes[k]) step(at.first_o + index, p.o.dims, p.o.ndim, unused, to_o[k]);
        cell[k] = index * PITCH + unit;
    }
    __syncthreads();
    Unit units[ROWS][LANES];
#pragma unroll
    for (int s = 0; s < ROWS; ++s) {
        const u32 row = s * WARPS + warp;
        if (row < at.count_o)
#pragma unroll
            for (int k = 0; k < LANES; ++k)
                if (reads[k]) units[s][k] = load<Unit>(at.from + from_o[row] + from_i[k]);
    }
#pragma unroll
    for (int s = 0; s < ROWS; ++s)
#pragma unroll
        for (int k = 0; k < LANES; ++k) cells[(s * WARPS + warp) * PITCH + k * 32 + lane] = units[s][k];
    __syncthreads();
#pragma unroll
    for (int s = 0; s < ROWS; ++s) {
        const u32 row = s * WARPS + warp;
        if (row < at.count_i)
#pragma unroll
            for (int k = 0; k < LANES; ++k)
                if (writes[k]) store<Unit>(at.to + to_i[row] + to_o[k], cells[cell[k] + row * p.run] ^ flips<Unit>(p.sides));
    }
}

// The unit of `SIZE` bytes.
template <int SIZE> struct Bytes;
template <> struct Bytes<1> {
    typedef u8 Unit;
};
template <> struct Bytes<2> {
    typedef u16 Unit;
};

// Transposes a square of elements of `SIZE` bytes in words.
template <int SIZE> struct Square;
template <> struct Square<1> {
    static __device__ __forceinline__ void transpose(u32 (&w)[4]) {
        const u32 ab = __byte_perm(w[0], w[1], 0x5140), ba = __byte_perm(w[0], w[1], 0x7362);
        const u32 cd = __byte_perm(w[2], w[3], 0x5140), dc = __byte_perm(w[2], w[3], 0x7362);
        w[0] = __byte_perm(ab, cd, 0x5410), w[1] = __byte_perm(ab, cd, 0x7632);
        w[2] = __byte_perm(ba, dc, 0x5410), w[3] = __byte_perm(ba, dc, 0x7632);
    }
};
template <> struct Square<2> {
    static __device__ __forceinline__ void transpose(u32 (&w)[2]) {
        const u32 low = __byte_perm(w[0], w[1], 0x5410), high = __byte_perm(w[0], w[1], 0x7632);
        w[0] = low, w[1] = high;
    }
};
template <> struct Square<4> {
    static __device__ __forceinline__ void transpose(u32 (&)[1]) {}
};

// Elements of `SIZE` bytes, which `pitch` says too, in vectors of 1 or 4 words that are aligned on both sides. A thread takes squares of
// elements and transposes them in registers. `cells` holds rows of the target, their groups of four words permuted so
// that no access meets a bank conflict.
template <typename Vector, int SIZE, int TI, int TO, int THREADS> __device__ __forceinline__ void vectors(const Tile &p) {
    constexpr int WARPS = THREADS / 32;
    constexpr int PER = 4 / SIZE, WORDS = sizeof(Vector) / 4, ACROSS = PER * WORDS;
    constexpr int LANES_O = WORDS == 4 ? 4 : PER, LANES_I = 32 / LANES_O;
    constexpr int PASSES_I = TI / (LANES_I * ACROSS), PASSES_O = TO / (WARPS * LANES_O * PER);
    constexpr int ROW = TO / PER, PITCH = WORDS == 4 ? ROW : ROW + 1, EACH = TI * (ROW / WORDS) / THREADS;
    static_assert(PASSES_I * LANES_I * ACROSS == TI && PASSES_O * WARPS * LANES_O * PER == TO, "whole passes");
    extern __shared__ u32 cells[];
    __shared__ i64 from_o[TO], to_i[TI];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, l = lane % LANES_I, g = lane / LANES_I;
    const Block at = block(p);
    const bool straight_o = p.o.ndim == 1, straight_i = p.i.ndim == 1;
    if (!straight_o || !straight_i) offsets<TI, TO, THREADS>(p, at, from_o, to_i);
    Pack<Vector, u32> v[PASSES_O][PASSES_I][PER];
    i64 source[PASSES_I];
    bool reads[PASSES_I];
#pragma unroll
    for (int b = 0; b < PASSES_I; ++b) {
        const u32 i = (b * LANES_I + l) * ACROSS;
        i64 unused = 0;
        source[b] = 0, reads[b] = i < at.count_i;
        if (reads[b]) step(at.first_i + i, p.i.dims, p.i.ndim, source[b], unused);
    }
    if (!straight_o || !straight_i) __syncthreads();
#pragma unroll
    for (int a = 0; a < PASSES_O; ++a)
#pragma unroll
        for (int k = 0; k < PER; ++k) {
            const u32 o = ((a * WARPS + warp) * LANES_O + g) * PER + k;
            const i64 from = straight_o ? (i64)(at.first_o + o) * p.o.dims[0].from : from_o[o];
            if (o < at.count_o)
#pragma unroll
                for (int b = 0; b < PASSES_I; ++b)
                    if (reads[b]) v[a][b][k].item = load<Vector>(at.from + from + source[b]);
        }
#pragma unroll
    for (int a = 0; a < PASSES_O; ++a)
#pragma unroll
        for (int b = 0; b < PASSES_I; ++b) {
            const u32 q = (a * WARPS + warp) * LANES_O + g, column = WORDS == 4 ? q ^ (l * 4) : q;
#pragma unroll
            for (int m = 0; m < WORDS; ++m) {
                u32 w[PER];
#pragma unroll
                for (int k = 0; k < PER; ++k) w[k] = v[a][b][k].units[m];
                Square<SIZE>::transpose(w);
#pragma unroll
                for (int k = 0; k < PER; ++k) cells[((b * LANES_I + l) * ACROSS + m * PER + k) * PITCH + column] = w[k];
            }
        }
    __syncthreads();
    // A thread stays in one column: the threads of a block are whole rows.
    static_assert(THREADS % (ROW / WORDS) == 0, "whole rows");
    const u32 first = threadIdx.x / (ROW / WORDS), q = threadIdx.x % (ROW / WORDS) * WORDS;
    if (q * PER >= at.count_o) return;
    i64 to_o = 0, unused = 0;
    step(at.first_o + q * PER, p.o.dims, p.o.ndim, unused, to_o);
#pragma unroll
    for (int s = 0; s < EACH; ++s) {
        const u32 i = s * (THREADS / (ROW / WORDS)) + first, column = WORDS == 4 ? q ^ (i / ACROSS % 8 * 4) : q;
        const i64 to = straight_i ? (i64)(at.first_i + i) * p.i.dims[0].to : to_i[i];
        if (i < at.count_i) store<Vector>(at.to + to + to_o, *(Vector *)&cells[i * PITCH + column] ^ flips<Vector>(p.sides));
    }
}
