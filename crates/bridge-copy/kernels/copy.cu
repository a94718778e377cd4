// The kernels by name: src/kernels/table.rs lists them in the same order.
#include "flat.cuh"
#include "split.cuh"
#include "tile.cuh"

#define KERNEL(name, Parameters, call) \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Parameters p) { call(p); }

KERNEL(flat1, Flat, (flat<u8, u8, 4>))
KERNEL(flat2, Flat, (flat<u16, u16, 4>))
KERNEL(flat4, Flat, (flat<u32, u32, 4>))
KERNEL(flat8, Flat, (flat<u64, u64, 4>))
KERNEL(flat16, Flat, (flat<u128, u128, 4>))
KERNEL(pack1, Flat, (flat<u32, u8, 4>))
KERNEL(pack2, Flat, (flat<u32, u16, 4>))
KERNEL(pack4, Flat, (flat<u128, u32, 2>))
KERNEL(pack8, Flat, (flat<u128, u64, 2>))
KERNEL(rows, Flat, shifted)
KERNEL(turn1, Flat, turn<u8>)
KERNEL(turn2, Flat, turn<u16>)
KERNEL(turn4, Flat, turn<u32>)
KERNEL(turn8, Flat, turn<u64>)
KERNEL(tile1, Tile, (tile<u8, 128>))
KERNEL(tile2, Tile, (tile<u16, 64>))
KERNEL(tile4, Tile, (tile<u32, 64>))
KERNEL(tile8, Tile, (tile<u64, 64>))
KERNEL(tile16, Tile, (tile<u128, 32>))
KERNEL(words1, Tile, (vectors<u32, 1, 128, 128>))
KERNEL(words2, Tile, (vectors<u32, 2, 128, 128>))
KERNEL(vectors1, Tile, (vectors<u128, 1, 128, 128>))
KERNEL(vectors1_wide, Tile, (vectors<u128, 1, 256, 256>))
KERNEL(vectors2, Tile, (vectors<u128, 2, 64, 64>))
KERNEL(vectors2_wide, Tile, (vectors<u128, 2, 128, 128>))
KERNEL(vectors4, Tile, (vectors<u128, 4, 64, 64>))
KERNEL(split1, Tile, (split<u8, false>))
KERNEL(split2, Tile, (split<u16, false>))
KERNEL(split4, Tile, (split<u32, false>))
KERNEL(split8, Tile, (split<u64, false>))
KERNEL(split16, Tile, (split<u128, false>))
KERNEL(join1, Tile, (split<u8, true>))
KERNEL(join2, Tile, (split<u16, true>))
KERNEL(join4, Tile, (split<u32, true>))
KERNEL(join8, Tile, (split<u64, true>))
KERNEL(join16, Tile, (split<u128, true>))
