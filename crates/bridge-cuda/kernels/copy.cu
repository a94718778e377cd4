// The kernels by name: src/copy/kernels/table.rs lists them in the same order.
#include "boxes.cuh"
#include "cast.cuh"
#include "flat.cuh"
#include "pieces.cuh"
#include "shifted.cuh"
#include "split.cuh"
#include "tile.cuh"

#define KERNEL_OF(bounds, name, Parameters, call) \
    extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ Parameters p) { call(p); }
#define KERNEL(name, Parameters, call) KERNEL_OF((THREADS), name, Parameters, call)

// With offsets of 32 bits where these suffice.
#define NEAR(kind, ...) (p.near ? kind<int, __VA_ARGS__>(p) : kind<i64, __VA_ARGS__>(p))
#define FLAT_OF(bounds, name, kind, ...) \
    extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ Flat p) { NEAR(kind, __VA_ARGS__); }
#define FLAT(name, kind, ...) FLAT_OF((THREADS), name, kind, __VA_ARGS__)

// `unit` is the binary logarithm of the unit's bytes. Units of `flat`, `gather` and `pieces` have a kernel each: a switch cost
// them up to 5, 5 and 20 %.
__device__ __forceinline__ void turn_any(const Flat &p) {
    if (p.unit == 0) NEAR(turn, u8);
    else if (p.unit == 1) NEAR(turn, u16);
    else if (p.unit == 2) NEAR(turn, u32);
    else NEAR(turn, u64);
}
__device__ __forceinline__ void rows_any(const Flat &p) {
    if (p.mode == TURNED) turn_any(p);
    else if (p.unit == 0) NEAR(rows, u8);
    else if (p.unit == 1) NEAR(rows, u16);
    else NEAR(rows, u32);
}
__device__ __forceinline__ void boxes_small(const Box &p) {
    if (p.unit == 0) boxes<u8>(p);
    else boxes<u16>(p);
}
__device__ __forceinline__ void words_any(const Tile &p) {
    if (p.pitch == 1) vectors<u32, 1, 128, 128, THREADS>(p);
    else vectors<u32, 2, 128, 128, THREADS>(p);
}

FLAT_OF((128), flat1, flat, u8, 4, 128)
FLAT_OF((128), flat2, flat, u16, 4, 128)
FLAT_OF((128), flat4, flat, u32, 4, 128)
FLAT_OF((128), flat8, flat, u64, 4, 128)
FLAT_OF((128), flat16, flat, u128, 2, 128)
FLAT(gather2, gather, u64, u16, 2)
FLAT(gather4, gather, u128, u32, 2)
KERNEL(rows, Flat, rows_any)
KERNEL(tile2, Tile, (tile<u16, 64>))
KERNEL(tile4, Tile, (tile<u32, 64>))
KERNEL(tile4_small, Tile, (tile<u32, 32>))
KERNEL(tile8, Tile, (tile<u64, 32>))
KERNEL(tile16, Tile, (tile<u128, 32>))
KERNEL(words, Tile, words_any)
KERNEL_OF((THREADS, 5), shifted1, Tile, shifted<1>)
KERNEL_OF((THREADS, 8), shifted2, Tile, shifted<2>)
KERNEL(vectors1, Tile, (vectors<u128, 1, 128, 128, THREADS>))
KERNEL_OF((512), vectors1_wide, Tile, (vectors<u128, 1, 256, 256, 512>))
KERNEL(vectors2, Tile, (vectors<u128, 2, 64, 64, THREADS>))
KERNEL(vectors2_wide, Tile, (vectors<u128, 2, 128, 128, THREADS>))
KERNEL(vectors4, Tile, (vectors<u128, 4, 64, 64, THREADS>))
KERNEL(split1, Tile, split<u8>)
KERNEL(split2, Tile, split<u16>)
KERNEL(split4, Tile, split<u32>)
KERNEL(box, Box, boxes_small)
KERNEL(pieces1, Pieces, pieces<u8>)
KERNEL(pieces2, Pieces, pieces<u16>)
KERNEL(pieces4, Pieces, pieces<u32>)
KERNEL(pieces16, Pieces, pieces<u128>)
KERNEL(cast, Casts, casts)
