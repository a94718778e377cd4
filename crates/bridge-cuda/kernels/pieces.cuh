// Many copies in one launch: rows that are contiguous on both sides, at any address. A table in device memory says what
// each block copies.
#pragma once
#include "common.cuh"
#include "window.cuh"

// The vectors of a piece that a block copies: src/copy/kernels/pieces.rs has the same number.
constexpr u32 SHARE = 4096;

template <typename Unit> __device__ __forceinline__ void pieces(const Pieces &p) {
    constexpr int EACH = 2;
    const Piece piece = ((const Piece *)p.pieces)[p.owners[blockIdx.x]];
    const u32 begin = (blockIdx.x - piece.first) * SHARE, end = min(begin + SHARE, piece.items);
    const i64 last = divide(piece.items - 1, piece.rows) * piece.rows.from;
    const char *low = piece.from + min(last, 0ll), *high = piece.from + max(last, 0ll) + piece.nbytes;
#pragma unroll 1
    for (u32 first = begin + threadIdx.x; first < end; first += THREADS * EACH) {
        Window<Unit> windows[EACH];
        char *to[EACH];
        i64 done[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = first + k * THREADS, row = divide(n, piece.rows);
            to[k] = piece.to + row * piece.rows.to;
            done[k] = n < end ? 16 * (i64)(n - row * piece.rows.length) - ((u64)to[k] & 15) : piece.nbytes;
            if (done[k] < piece.nbytes) windows[k].read(piece.from + row * piece.rows.from + done[k], low, high);
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k)
            if (done[k] < piece.nbytes) store_part<Unit>(to[k] + done[k], -done[k], piece.nbytes - done[k], windows[k].item());
    }
}

// Rows whose addresses and lengths 16 divides: no vector is shifted, so that more of them are in flight.
template <> __device__ __forceinline__ void pieces<u128>(const Pieces &p) {
    constexpr int EACH = 4;
    const Piece piece = ((const Piece *)p.pieces)[p.owners[blockIdx.x]];
    const u32 begin = (blockIdx.x - piece.first) * SHARE, end = min(begin + SHARE, piece.items);
#pragma unroll 1
    for (u32 first = begin + threadIdx.x; first < end; first += THREADS * EACH) {
        u128 vectors[EACH];
        i64 to[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u32 n = first + k * THREADS;
            if (n >= end) continue;
            const u32 row = divide(n, piece.rows);
            const i64 at = 16 * (i64)(n - row * piece.rows.length);
            to[k] = row * piece.rows.to + at;
            vectors[k] = load<u128>(piece.from + (row * piece.rows.from + at));
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k)
            if (first + k * THREADS < end) store<u128>(piece.to + to[k], vectors[k]);
    }
}
