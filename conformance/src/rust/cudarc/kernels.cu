// The kernels of the suite's subject for cudarc: elements of any strides, byte by byte, and a delay.
// `cargo xtask generate kernels` compiles it.

struct Walk {
    unsigned char* strided;
    unsigned char* compact;
    long long count;
    // In elements, and in bytes.
    long long lengths[64];
    long long strides[64];
    int ndim;
    int itemsize;
    int byte;
};

__device__ unsigned char* element(const Walk& walk, long long index) {
    long long offset = 0;
#pragma unroll 1
    for (int d = walk.ndim - 1; d >= 0; d--) {
        offset += index % walk.lengths[d] * walk.strides[d];
        index /= walk.lengths[d];
    }
    return walk.strided + offset;
}

// Calls `body` with the address of each byte of an element, and the index of the byte among those of a compact tensor.
template <typename Body>
__device__ void each(const Walk& walk, Body body) {
    long long step = (long long)gridDim.x * blockDim.x;
#pragma unroll 1
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < walk.count; i += step) {
        unsigned char* start = element(walk, i);
#pragma unroll 1
        for (int byte = 0; byte < walk.itemsize; byte++) body(start[byte], i * walk.itemsize + byte);
    }
}

extern "C" __global__ void gather(Walk walk) {
    each(walk, [&](unsigned char& byte, long long at) { walk.compact[at] = byte; });
}

extern "C" __global__ void scatter(Walk walk) {
    each(walk, [&](unsigned char& byte, long long at) { byte = walk.compact[at]; });
}

extern "C" __global__ void fill(Walk walk) {
    each(walk, [&](unsigned char& byte, long long) { byte = walk.byte; });
}

extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles);
}
