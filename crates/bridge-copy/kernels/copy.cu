// The kernels by name: src/kernels/table.rs lists them in the same order.
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

KERNEL(flat1, Flat, (flat<u8, 4, THREADS>))
KERNEL(flat2, Flat, (flat<u16, 4, THREADS>))
KERNEL(flat4, Flat, (flat<u32, 4, THREADS>))
KERNEL(flat8, Flat, (flat<u64, 4, THREADS>))
KERNEL_OF((128), flat16, Flat, (flat<u128, 2, 128>))
KERNEL(gather1, Flat, (gather<u32, u8, 4>))
KERNEL(gather2, Flat, (gather<u64, u16, 4>))
KERNEL(gather4, Flat, (gather<u128, u32, 2>))
KERNEL(gather8, Flat, (gather<u128, u64, 2>))
KERNEL(rows1, Flat, rows<u8>)
KERNEL(rows2, Flat, rows<u16>)
KERNEL(rows4, Flat, rows<u32>)
KERNEL(rows8, Flat, rows<u64>)
KERNEL(turn1, Flat, turn<u8>)
KERNEL(turn2, Flat, turn<u16>)
KERNEL(turn4, Flat, turn<u32>)
KERNEL(turn8, Flat, turn<u64>)
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
KERNEL(join4, Tile, (split<u32, true>))
KERNEL(join8, Tile, (split<u64, true>))
KERNEL(mix1, Tile, mix<u8>)
KERNEL(mix2, Tile, mix<u16>)
KERNEL(mix4, Tile, mix<u32>)
KERNEL(mix8, Tile, mix<u64>)
KERNEL(pieces1, Pieces, pieces<u8>)
KERNEL(pieces2, Pieces, pieces<u16>)
KERNEL(pieces4, Pieces, pieces<u32>)
KERNEL(pieces8, Pieces, pieces<u64>)
KERNEL(pieces16, Pieces, pieces<u128>)
KERNEL(cast, Casts, casts)
