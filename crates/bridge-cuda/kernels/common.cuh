// What all kernels share. Structures have twins in src/copy/kernels/parameters.rs with the same fields.
//
// A *unit* is what one thread loads at once: an element, or several neighbours that are adjacent on both sides. Offsets
// and strides are in bytes, counts in units. Threads load everything before they store anything, so that many loads are
// in flight.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef uint4 u128;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// A dimension, and the multiplication that divides by its length (Granlund and Montgomery, 1994; exact below 2^31).
struct Dim {
    i64 from, to;
    u32 length, magic, shift;
    // Of boxes: which of the dimensions that a box has a part of, and of runs, the units below and the units at a step.
    u16 cut : 2, part : 14;
    u16 step;
};

// Dimensions walked as one, the fastest first.
struct Group {
    u32 total, ndim;
    Dim dims[4];
};

// The first unit of both sides, and the bits to flip in 16 bytes at an address that 16 divides.
struct Sides {
    const char *from;
    char *to;
    u32 flips[4];
};

// For kernels that walk the target in its own order. `extra` and `mode` are the kernel's own. `unit` is the binary
// logarithm of its bytes. `near`: all offsets fit into 32 bits. The source reaches from `low` to `high` bytes after its first unit.
struct Flat {
    Sides sides;
    i64 extra, low, high;
    u32 items;
    u8 ndim, unit, near, mode;
    Dim dims[64];
};

// For kernels that change the order. Group `i` starts with the dimension that is fastest in the source, group `o` with
// the one that is fastest in the target. A block takes `span_i` by `span_o` of them, at one index of the other
// dimensions; `run` units are adjacent in the target. The next block is the next one along `o`, or with `along_i` along
// `i`. split.cuh, tile.cuh and shifted.cuh say what `pitch`, `extent`, `channels` and `pitches` are.
struct Tile {
    Sides sides;
    u32 run, pitch, extent, span_i, span_o, ndim, along_i, channels;
    Dim tiles_i, tiles_o, pitches;
    Group i, o;
    Dim rest[48];
};

// For boxes.cuh. A block copies a box: in each dimension as many units as `grid` steps by. It reads `lines` intervals of the
// source, of `vectors` each, and writes `runs` intervals of the target, of at most `units`. Shared memory has `cells` bytes
// of lines, `pitch` apart, and then the tables. `lanes` threads write a run, `rows` runs at a time, in so many `passes`.
// `most` and `total` are the units of cut dimensions, in a box and in all. From `below` to `above` are the bytes between the
// first units of lines. `dims` lists the dimensions of lines, those along a line from `nlines`, those of runs from `nalong`,
// and those inside a run from `nruns` to `nplaces`.
struct Box {
    Sides sides;
    i64 low, high, below, above;
    u32 cells, pitch, lines, runs, units, passes, rows;
    u8 ngrid, nlines, nalong, nruns, nplaces, unit, unused[6];
    u32 most[3], total[3];
    Dim vectors, lanes;
    Dim dims[24], grid[8];
};

// Rows of `nbytes` bytes, one of many copies that one launch makes. `rows` counts the vectors of 16 bytes that a row of
// the target touches, and has the bytes from row to row. `items` are all vectors; the piece's first block is `first`.
struct Piece {
    const char *from;
    char *to;
    i64 nbytes;
    u32 items, first;
    Dim rows;
};

// A cast, which walks the target in its own order. `mode` says what an item is, `from_float` and `to_float` are numbers
// for WITH_FLOAT. Its `ndim` dimensions, the fastest first, are next to it in memory.
struct Cast {
    const char *from;
    char *to;
    u64 flips;
    u32 items, first, ndim;
    u8 mode, from_float, to_float, unused;
    u64 unused_too;
};

// For pieces.cuh and cast.cuh: the pieces, and for each block the piece that it works on, of casts in units of 16
// bytes.
struct Pieces {
    const void *pieces;
    const u32 *owners;
};

// For cast.cuh: a table, or without one the only cast.
struct Casts {
    Pieces table;
    Cast only;
    Dim dims[64];
};

__device__ __forceinline__ u32 divide(u32 n, const Dim &dim) { return (__umulhi(n, dim.magic) + n) >> dim.shift; }

// Adds the offsets of each index `n` of the dimensions, without `TO` those in the source alone. The indexes go through a
// dimension together, so that none waits for the arithmetic of another.
template <bool TO, typename Offset, int EACH> __device__ __forceinline__ void walk(u32 (&n)[EACH], const Dim *dims, u32 ndim, Offset (&from)[EACH], Offset (&to)[EACH]) {
#pragma unroll 1
    for (u32 d = 0; d < ndim; ++d) {
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 next = d + 1 < ndim ? divide(n[k], dims[d]) : 0, at = n[k] - next * dims[d].length;
            from[k] += at * (Offset)dims[d].from;
            if (TO) to[k] += at * (Offset)dims[d].to;
            n[k] = next;
        }
    }
}

// The same for one index.
template <typename Offset> __device__ __forceinline__ void step(u32 n, const Dim *dims, u32 ndim, Offset &from, Offset &to) {
    u32 one[1] = {n};
    Offset froms[1] = {from}, tos[1] = {to};
    walk<true>(one, dims, ndim, froms, tos);
    from = froms[0], to = tos[0];
}

__device__ __forceinline__ u128 operator^(u128 a, u128 b) {
    return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w);
}

template <typename Unit> __device__ __forceinline__ Unit flips(const Sides &sides) { return *(const Unit *)sides.flips; }
template <typename Unit> __device__ __forceinline__ Unit load(const char *at) { return *(const Unit *)at; }
template <typename Unit> __device__ __forceinline__ void store(char *at, Unit unit) { *(Unit *)at = unit; }

// What a thread moves at once of small units.
template <typename Unit> struct Word {
    typedef Unit Type;
};
template <> struct Word<u8> {
    typedef u32 Type;
};
template <> struct Word<u16> {
    typedef u32 Type;
};

// Several units that are loaded or stored as one.
template <typename Item, typename Unit> union Pack {
    static constexpr u32 COUNT = sizeof(Item) / sizeof(Unit);
    Item item;
    Unit units[COUNT];
};
