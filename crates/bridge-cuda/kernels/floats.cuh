// Floating dtypes as bits, and their values as float, through which all casts go: src/floats.rs has the same arithmetic
// and says why. Plain C++, which a test compiles for the host.
#pragma once

struct Float32 {
    typedef unsigned Bits;
    static __device__ __forceinline__ float widen(Bits bits) {
        union { unsigned bits; float value; } both = {bits};
        return both.value;
    }
    static __device__ __forceinline__ Bits narrow(float value) {
        union { float value; unsigned bits; } both = {value};
        return both.bits;
    }
};

struct Float64 {
    typedef unsigned long long Bits;
    static __device__ __forceinline__ float widen(Bits bits) {
        union { unsigned long long bits; double value; } both = {bits};
        return (float)both.value;
    }
    static __device__ __forceinline__ Bits narrow(float value) {
        union { double value; unsigned long long bits; } both = {(double)value};
        return both.bits;
    }
};

// A sign, `E` bits of exponent and `M` of mantissa. Where it is not `FINITE`, the largest exponent has infinity and
// NaN; else the largest number is the only NaN.
template <typename Unsigned, int E, int M, bool FINITE> struct Small {
    typedef Unsigned Bits;
    // What the exponents of float have more, at their place; bits that this mantissa lacks; the largest number,
    // infinity or NaN; whether small numbers have a smaller exponent here; a float whose last bit is that of subnormal
    // numbers.
    static constexpr unsigned MORE = (128u - (1u << (E - 1))) << 23, LESS = 23 - M;
    static constexpr unsigned TOP = FINITE ? (1u << (E + M)) - 1 : ((1u << E) - 1) << M;
    static constexpr unsigned NOT = FINITE ? TOP : TOP | 1u << (M - 1);
    static constexpr bool RISES = MORE > 0;
    static constexpr unsigned LEVEL = MORE + ((LESS + 1) << 23), ONE = MORE + (1u << 23);

    static __device__ __forceinline__ float widen(Bits bits) {
        const unsigned sign = (unsigned)bits >> (E + M) << 31, number = bits & ((1u << (E + M)) - 1);
        unsigned wide = (number << LESS) + MORE;
        if (RISES && number < 1u << M)
            wide = Float32::narrow(Float32::widen((number << LESS) + ONE) - Float32::widen(ONE));
        if (number >= TOP) wide = FINITE ? 0x7fc00000u : wide + MORE;
        return Float32::widen(sign | wide);
    }
    static __device__ __forceinline__ Bits narrow(float value) {
        const unsigned bits = Float32::narrow(value), sign = bits >> 31 << (E + M), number = bits & 0x7fffffffu;
        // Half of the last bit that stays, or less by one where that is even, so that a tie becomes even.
        unsigned narrow = (number - MORE + ((1u << (LESS - 1)) - 1 + (number >> LESS & 1))) >> LESS;
        if (RISES && number < ONE) narrow = Float32::narrow(Float32::widen(number) + Float32::widen(LEVEL)) - LEVEL;
        if (narrow > TOP) narrow = TOP;
        if (number > 0x7f800000u) narrow = NOT;
        return (Bits)(sign | narrow);
    }
};

typedef Small<unsigned short, 5, 10, false> Float16;
typedef Small<unsigned short, 8, 7, false> BFloat16;
typedef Small<unsigned char, 4, 3, true> Float8E4M3FN;
typedef Small<unsigned char, 5, 2, false> Float8E5M2;

// Does something with the dtype of a number, which is an index of Cast::DTYPES.
#define WITH_FLOAT(number, does) \
    switch (number) { \
    case 0: does(Float16); break; \
    case 1: does(BFloat16); break; \
    case 2: does(Float32); break; \
    case 3: does(Float64); break; \
    case 4: does(Float8E4M3FN); break; \
    case 5: does(Float8E5M2); break; \
    }
