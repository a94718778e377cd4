// Changes of order through a box in shared memory, of any dimensions and at any address.
#pragma once
#include "common.cuh"

// A run of the target in a box: its first unit, the bytes of shared memory before those of its units, and how many it has.
struct alignas(8) Run {
    int to;
    u16 cell, units;
};

// A line that is beyond the last unit of a dimension.
constexpr int NONE = 1 << 31;

// How many units a box has of the dimensions that it may have a part of.
struct Counts {
    u32 one, two, three;

    __device__ __forceinline__ u32 of(const Dim &dim) const { return dim.cut == 0 ? dim.length * dim.step : dim.cut == 1 ? one : dim.cut == 2 ? two : three; }
};

// Reads a word whose bytes beyond `low` and `high` are not read.
template <typename Unit> __device__ __forceinline__ u32 read_word(const char *at, const char *low, const char *high) {
    Pack<u32, Unit> word;
    word.item = 0;
#pragma unroll
    for (int j = 0; j < word.COUNT; ++j)
        if (at + j * sizeof(Unit) >= low && at + j * sizeof(Unit) < high) word.units[j] = load<Unit>(at + j * sizeof(Unit));
    return word.item;
}

// Lines are read in vectors, and shifted so that each begins with a word. With `INSIDE` the
// source has all bytes of these vectors.
template <typename Unit, bool INSIDE> __device__ __forceinline__ void read_lines(const Box &p, const char *start, const int *lines, u32 nbytes, char *cells) {
    constexpr int EACH = 4, SIZE = sizeof(Unit);
    const char *low = p.sides.from + p.low, *high = p.sides.from + p.high;
    const u32 all = p.lines * p.vectors.length, length = (nbytes + 3) / 4;
    for (u32 first = threadIdx.x; first < all; first += THREADS * EACH) {
        u32 words[EACH][5], *cell[EACH], shift[EACH];
        int place[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = first + k * THREADS, line = divide(n, p.vectors), vector = n - line * p.vectors.length;
            place[k] = length;
            const int offset = n < all ? lines[line] : NONE;
            if (offset == NONE) continue;
            const char *begin = start + (i64)offset * SIZE, *at = (const char *)((u64)begin & ~15ull) + 16 * vector;
            const u32 beyond = (u32)(u64)begin & 15;
            place[k] = (int)(4 * vector - beyond / 4), shift[k] = 8 * (beyond & 3);
            cell[k] = (u32 *)(cells + line * p.pitch) + place[k];
            if (place[k] >= (int)length) continue;
            const bool more = shift[k] && place[k] + 4 < (int)((nbytes + (beyond & 3) + 3) / 4);
            if (INSIDE || (at >= low && at + (more ? 20 : 16) <= high)) {
                const u128 four = load<u128>(at);
                words[k][0] = four.x, words[k][1] = four.y, words[k][2] = four.z, words[k][3] = four.w;
                if (more) words[k][4] = load<u32>(at + 16);
            } else {
#pragma unroll 1
                for (int m = 0; m < 5; ++m) {
                    const u32 word = m < 4 || more ? read_word<Unit>(at + 4 * m, low, high) : 0;
#pragma unroll
                    for (int l = 0; l < 5; ++l) words[k][l] = l == m ? word : words[k][l];
                }
            }
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k)
#pragma unroll
            for (int m = 0; m < 4; ++m)
                if ((u32)(place[k] + m) < length) cell[k][m] = __funnelshift_r(words[k][m], words[k][m + 1], shift[k]);
    }
}

// Puts an item together whose units begin with another one, so that the lanes of a warp meet no bank conflict.
template <int COUNT> __device__ __forceinline__ u64 turned(u64 item, u32 turn) {
    u32 low = (u32)item, high = (u32)(item >> 32);
    if (turn & COUNT / 2) {
        const u32 other = low;
        low = high, high = other;
    }
    const u32 by = 64 / COUNT * (turn & (COUNT / 2 - 1));
    return (u64)__funnelshift_l(low, high, by) << 32 | __funnelshift_l(high, low, by);
}

// Writes the runs by items of eight bytes, each aligned.
template <typename Unit> __device__ __forceinline__ void write_runs(const Box &p, char *to, const Run *runs, const u16 *places, const char *cells) {
    constexpr int SIZE = sizeof(Unit), COUNT = 8 / SIZE;
    const u64 mask = flips<u64>(p.sides);
    const u32 row = divide(threadIdx.x, p.lanes), lane = threadIdx.x - row * p.lanes.length, rows = p.rows;
    const u32 turn = (threadIdx.x & 31) / (32 / COUNT);
    if (row >= rows) return;
    for (u32 pass = 0; pass < p.passes; ++pass) {
        const int item = (int)(pass * p.lanes.length + lane) * COUNT;
        u32 known = 16;
        int first = 0, whole = 0;
        char *mine = to;
        const char *cell[COUNT];
#pragma unroll 2
        for (u32 n = row; n < p.runs; n += rows) {
            const u64 both = *(const u64 *)&runs[n];
            const Run run = *(const Run *)&both;
            const u32 beyond = ((u32)(u64)to + (u32)run.to * SIZE) & 7;
            if (beyond != known) {
                known = beyond, first = item - (int)(beyond / SIZE);
                // The units that a run has for the item to be whole.
                whole = first < 0 ? 1 << 30 : first + COUNT, mine = to + (i64)first * SIZE;
#pragma unroll
                for (int j = 0; j < COUNT; ++j) cell[j] = cells + places[min(max(first + (int)((j + turn) % COUNT), 0), (int)p.units - 1)];
            }
            char *at = mine + (i64)run.to * SIZE;
            Pack<u64, Unit> pack;
            if (run.units >= whole) {
#pragma unroll
                for (int j = 0; j < COUNT; ++j) pack.units[j] = *(const Unit *)(cell[j] + run.cell);
                store<u64>(at, turned<COUNT>(pack.item, turn) ^ mask);
            } else if (first < (int)run.units) {
#pragma unroll
                for (int j = 0; j < COUNT; ++j) {
                    const u32 unit = (j + turn) % COUNT;
                    if (first + (int)unit >= 0 && first + (int)unit < (int)run.units) store<Unit>(at + unit * SIZE, *(const Unit *)(cell[j] + run.cell) ^ flips<Unit>(p.sides));
                }
            }
        }
    }
}

template <typename Unit> __device__ __forceinline__ void boxes(const Box &p) {
    constexpr int SIZE = sizeof(Unit);
    extern __shared__ u128 chunk[];
    char *cells = (char *)chunk;
    Run *runs = (Run *)(cells + p.cells);
    int *lines = (int *)(runs + p.runs);
    u16 *places = (u16 *)(lines + p.lines);
    i64 from = 0, to = 0;
    Counts counts = {p.most[0], p.most[1], p.most[2]};
    u32 index = blockIdx.x;
#pragma unroll 1
    for (u32 d = 0; d < p.ngrid; ++d) {
        const Dim &dim = p.grid[d];
        const u32 next = d + 1 < p.ngrid ? divide(index, dim) : 0, at = index - next * dim.length;
        from += at * dim.from, to += at * dim.to;
        if (dim.cut == 1) counts.one = min(p.most[0], p.total[0] - at * p.most[0]);
        if (dim.cut == 2) counts.two = min(p.most[1], p.total[1] - at * p.most[1]);
        if (dim.cut == 3) counts.three = min(p.most[2], p.total[2] - at * p.most[2]);
        index = next;
    }
#pragma unroll 1
    for (u32 t = threadIdx.x; t < p.lines; t += THREADS) {
        u32 n = t;
        int at_from = 0;
        bool there = true;
#pragma unroll 1
        for (u32 d = 0; d < p.nlines; ++d) {
            const Dim &dim = p.dims[d];
            const u32 next = d + 1 < p.nlines ? divide(n, dim) : 0, at = n - next * dim.length;
            at_from += (int)at * (int)dim.from, there = there && at < counts.of(dim), n = next;
        }
        lines[t] = there ? at_from : NONE;
    }
    u32 nbytes = SIZE;
#pragma unroll 1
    for (u32 d = p.nlines; d < p.nalong; ++d) nbytes += (counts.of(p.dims[d]) - 1) * (u32)p.dims[d].from;
#pragma unroll 1
    for (u32 t = threadIdx.x; t < p.runs; t += THREADS) {
        u32 n = t, units = p.units;
        Run run = {0, 0, 0};
#pragma unroll 1
        for (u32 d = p.nalong; d < p.nruns; ++d) {
            const Dim &dim = p.dims[d];
            const u32 next = d + 1 < p.nruns ? divide(n, dim) : 0, at = n - next * dim.length, first = at * dim.step, has = counts.of(dim);
            run.to += (int)at * (int)dim.to, run.cell += (u16)(at * (u32)dim.from);
            if (first >= has) units = 0;
            else if (dim.part) units = min(units, min(dim.step, has - first) * dim.part);
            n = next;
        }
        run.units = (u16)units, runs[t] = run;
    }
#pragma unroll 1
    for (u32 t = threadIdx.x; t < p.units; t += THREADS) {
        u32 n = t, place = 0;
#pragma unroll 1
        for (u32 d = p.nruns; d < p.nplaces; ++d) {
            const Dim &dim = p.dims[d];
            const u32 next = d + 1 < p.nplaces ? divide(n, dim) : 0, at = n - next * dim.length;
            place += at * (u32)dim.from, n = next;
        }
        places[t] = (u16)place;
    }
    __syncthreads();
    const char *start = p.sides.from + from;
    const bool inside = from + p.below >= p.low + 15 && from + p.above + nbytes + 35 <= p.high;
    if (inside) read_lines<Unit, true>(p, start, lines, nbytes, cells);
    else read_lines<Unit, false>(p, start, lines, nbytes, cells);
    __syncthreads();
    write_runs<Unit>(p, p.sides.to + to, runs, places, cells);
}
