// The kernels by name: src/copy/kernels/table.rs lists them in the same order.
#include "cast.cuh"
#include "flat.cuh"
#include "pieces.cuh"
#include "pixels.cuh"
#include "shifted.cuh"
#include "split.cuh"
#include "tile.cuh"

#define KERNEL_OF(bounds, name, Parameters, call) \
    extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ Parameters p) { call(p); }
#define KERNEL(name, Parameters, call) KERNEL_OF((THREADS), name, Parameters, call)
#define FLAT_OF(bounds, name, kind, ...) \
    extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ Flat p) { \
        if (p.near) kind<int, __VA_ARGS__>(p); \
        else kind<i64, __VA_ARGS__>(p); \
    }
#define FLAT(name, kind, ...) FLAT_OF((THREADS), name, kind, __VA_ARGS__)

FLAT_OF((128), flat1, flat, u8, 4, 128)
FLAT_OF((128), flat2, flat, u16, 4, 128)
FLAT_OF((128), flat4, flat, u32, 4, 128)
FLAT_OF((128), flat8, flat, u64, 4, 128)
FLAT_OF((128), flat16, flat, u128, 2, 128)
FLAT(gather1, gather, u32, u8, 4)
FLAT(gather2, gather, u64, u16, 2)
FLAT(gather4, gather, u128, u32, 2)
FLAT(gather8, gather, u128, u64, 2)
FLAT(rows1, rows, u8)
FLAT(rows2, rows, u16)
FLAT(rows4, rows, u32)
FLAT(turn1, turn, u8)
FLAT(turn2, turn, u16)
FLAT(turn4, turn, u32)
FLAT(turn8, turn, u64)
KERNEL(tile1, Tile, (tile<u8, 128>))
KERNEL(tile2, Tile, (tile<u16, 64>))
KERNEL(tile4, Tile, (tile<u32, 64>))
KERNEL(tile8, Tile, (tile<u64, 64>))
KERNEL(tile16, Tile, (tile<u128, 32>))
KERNEL(words1, Tile, (vectors<u32, 1, 128, 128, THREADS>))
KERNEL(words2, Tile, (vectors<u32, 2, 128, 128, THREADS>))
KERNEL_OF((THREADS, 4), shifted1, Tile, shifted<1>)
KERNEL(shifted2, Tile, shifted<2>)
KERNEL_OF((128), pixels1, Tile, (pixels<1, 128>))
KERNEL_OF((128), pixels2, Tile, (pixels<2, 128>))
KERNEL(vectors1, Tile, (vectors<u128, 1, 128, 128, THREADS>))
KERNEL_OF((512), vectors1_wide, Tile, (vectors<u128, 1, 256, 256, 512>))
KERNEL(vectors2, Tile, (vectors<u128, 2, 64, 64, THREADS>))
KERNEL(vectors2_wide, Tile, (vectors<u128, 2, 128, 128, THREADS>))
KERNEL(vectors4, Tile, (vectors<u128, 4, 64, 64, THREADS>))
KERNEL(split1, Tile, (split<u8, false>))
KERNEL(split2, Tile, (split<u16, false>))
KERNEL(split4, Tile, (split<u32, false>))
KERNEL(split8, Tile, (split<u64, false>))
KERNEL(join1, Tile, (split<u8, true>))
KERNEL(join2, Tile, (split<u16, true>))
KERNEL(mix1, Tile, mix<u8>)
KERNEL(mix2, Tile, mix<u16>)
KERNEL(pieces1, Pieces, pieces<u8>)
KERNEL(pieces2, Pieces, pieces<u16>)
KERNEL(pieces4, Pieces, pieces<u32>)
KERNEL(pieces8, Pieces, pieces<u64>)
KERNEL(pieces16, Pieces, pieces<u128>)
KERNEL(cast, Casts, casts)
