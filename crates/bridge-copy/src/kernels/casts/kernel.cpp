// Runs the kernel for casts on the host, a thread after another, over a table and memory that are read: four lengths of
// 64 bits, the source, the target, the casts with offsets in the place of addresses, and the owners. Writes the target.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <vector>

#define __device__
#define __forceinline__ inline

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
struct {
    unsigned x;
} blockIdx, threadIdx;

#include "cast.cuh"

static char *memory(u64 length) {
    char *all = (char *)aligned_alloc(64, (length + 64) / 64 * 64);
    if (fread(all, 1, length, stdin) != length) exit(1);
    return all;
}

int main() {
    u64 lengths[4];
    if (fread(lengths, sizeof lengths, 1, stdin) != 1) return 1;
    char *source = memory(lengths[0]), *target = memory(lengths[1]), *casts_ = memory(lengths[2]);
    const u32 *owners = (const u32 *)memory(4 * lengths[3]);
    for (u32 owner : std::set<u32>(owners, owners + lengths[3])) {
        Cast &cast = *(Cast *)(casts_ + 16 * (u64)owner);
        cast.from = source + (u64)cast.from;
        cast.to = target + (u64)cast.to;
    }
    Casts parameters = {};
    parameters.table = {casts_, owners};
    for (blockIdx.x = 0; blockIdx.x < lengths[3]; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) casts(parameters);
    fwrite(target, 1, lengths[1], stdout);
}
