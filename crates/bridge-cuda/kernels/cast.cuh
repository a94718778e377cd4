// Casts: elements anywhere on both sides, or eight neighbours in rows. One kernel serves all dtypes: a block reads its
// items as float, by the dtype of the source, and writes them by that of the target.
#pragma once
#include "common.cuh"
#include "floats.cuh"

// The elements that a block casts: src/copy/kernels/casts.rs has the same number.
constexpr u32 CAST_SHARE = 16384;

// What an item is: an element at any address, an element at a multiple of its size, or a vector of eight. The numbers
// are those of Cast::mode.
enum Mode { BYTES, ELEMENTS, VECTORS };

// What `SIZE` bytes are loaded in.
template <int SIZE> struct Chunk {
    typedef u128 Type;
};
template <> struct Chunk<1> {
    typedef u8 Type;
};
template <> struct Chunk<2> {
    typedef u16 Type;
};
template <> struct Chunk<4> {
    typedef u32 Type;
};
template <> struct Chunk<8> {
    typedef u64 Type;
};

// The items of a thread, `EACH` in flight, of `PER` neighbours.
template <int MODE, int EACH, int PER> struct Items {
    i64 from[EACH], to[EACH];
    bool present[EACH];
    float values[EACH][PER];

    // An item in chunks, as it lies in memory.
    template <typename Bits> union Item {
        typedef typename Chunk<MODE == BYTES ? 1 : sizeof(Bits) * PER>::Type Part;
        static constexpr int PARTS = sizeof(Bits) * PER / sizeof(Part);
        Part parts[PARTS];
        Bits bits[PER];
        __device__ __forceinline__ Item() {}
    };

    template <typename Float> __device__ __forceinline__ void read(const Cast &p) {
        typedef typename Float::Bits Bits;
        Item<Bits> items[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k)
#pragma unroll
            for (int i = 0; i < items[k].PARTS; ++i)
                if (present[k]) items[k].parts[i] = ((const typename Item<Bits>::Part *)(p.from + from[k]))[i];
#pragma unroll
        for (int k = 0; k < EACH; ++k)
#pragma unroll
            for (int j = 0; j < PER; ++j) values[k][j] = Float::widen(items[k].bits[j] ^ (Bits)p.flips);
    }

    template <typename Float> __device__ __forceinline__ void write(const Cast &p) const {
        typedef typename Float::Bits Bits;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            Item<Bits> item;
#pragma unroll
            for (int j = 0; j < PER; ++j) item.bits[j] = Float::narrow(values[k][j]);
#pragma unroll
            for (int i = 0; i < item.PARTS; ++i)
                if (present[k]) ((typename Item<Bits>::Part *)(p.to + to[k]))[i] = item.parts[i];
        }
    }
};

template <int MODE, int EACH, int PER> __device__ __forceinline__ void cast_items(const Cast &p, const Dim *dims) {
    const u32 begin = (blockIdx.x - p.first) * (CAST_SHARE / PER), end = min(begin + CAST_SHARE / PER, p.items);
#pragma unroll 1
    for (u32 first = begin + threadIdx.x; first < end; first += THREADS * EACH) {
        Items<MODE, EACH, PER> items;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            items.from[k] = items.to[k] = 0, items.present[k] = first + k * THREADS < end;
            if (items.present[k]) step(first + k * THREADS, dims, p.ndim, items.from[k], items.to[k]);
        }
#define READ(Float) items.template read<Float>(p)
#define WRITE(Float) items.template write<Float>(p)
        WITH_FLOAT(p.from_float, READ)
        WITH_FLOAT(p.to_float, WRITE)
#undef READ
#undef WRITE
    }
}

__device__ __forceinline__ void casts(const Casts &p) {
    const Cast *at = &p.only;
    if (p.table.pieces) at = (const Cast *)((const char *)p.table.pieces + 16 * (u64)p.table.owners[blockIdx.x]);
    const Dim *dims = (const Dim *)(at + 1);
    const Cast piece = *at;
    switch (piece.mode) {
    case BYTES: cast_items<BYTES, 1, 1>(piece, dims); break;
    case ELEMENTS: cast_items<ELEMENTS, 4, 1>(piece, dims); break;
    case VECTORS: cast_items<VECTORS, 1, 8>(piece, dims); break;
    }
}
