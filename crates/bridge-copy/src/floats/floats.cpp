// Casts the numbers that are read, 64 bits each, by the header of the kernels.
#define __device__
#define __forceinline__ inline
#include "floats.cuh"

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int, char **arguments) {
    const unsigned from = atoi(arguments[1]), to = atoi(arguments[2]);
    unsigned long long bits;
    std::vector<unsigned long long> all;
    while (fread(&bits, sizeof bits, 1, stdin) == 1) {
        float value = 0;
#define WIDEN(Float) value = Float::widen((Float::Bits)bits)
#define NARROW(Float) all.push_back(Float::narrow(value))
        WITH_FLOAT(from, WIDEN)
        WITH_FLOAT(to, NARROW)
    }
    fwrite(all.data(), sizeof bits, all.size(), stdout);
}
