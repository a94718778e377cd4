//! Floating dtypes as bits, and their values as float32, through which all casts go: kernels/floats.cuh has the same
//! arithmetic.
//!
//! Every dtype but float64 is a part of float32, so only the step to the target rounds, once. A float64 is rounded to
//! float32 first, as PyTorch does it.

use bridge_core::{Cast, DType};

/// Returns the number of a dtype of a cast: its index in [`Cast::DTYPES`], by which tables list them.
pub(crate) fn number(dtype: DType) -> usize {
    Cast::DTYPES.iter().position(|known| *known == dtype).expect("a cast is between these dtypes")
}

/// A floating dtype.
pub(crate) trait Float {
    /// An unsigned integer of the same size.
    type Bits: Copy;

    /// Returns the bits with those of the mask flipped, the lowest ones of 64.
    fn flip(bits: Self::Bits, mask: u64) -> Self::Bits;

    /// Returns the value.
    fn widen(bits: Self::Bits) -> f32;

    /// Returns the nearest value, ties to even.
    fn narrow(value: f32) -> Self::Bits;
}

/// float32.
pub(crate) struct Float32;

/// float64.
pub(crate) struct Float64;

macro_rules! large {
    ($($float:ident $bits:ty, $native:ty;)*) => {$(
        impl Float for $float {
            type Bits = $bits;

            #[inline(always)]
            fn flip(bits: $bits, mask: u64) -> $bits {
                bits ^ mask as $bits
            }

            #[inline(always)]
            fn widen(bits: $bits) -> f32 {
                <$native>::from_bits(bits) as f32
            }

            #[inline(always)]
            fn narrow(value: f32) -> $bits {
                <$native>::from(value).to_bits()
            }
        }
    )*};
}

large! {
    Float32 u32, f32;
    Float64 u64, f64;
}

/// A dtype with fewer bits than float32: a sign, `E` bits of exponent and `M` of mantissa. Where it is not `FINITE`,
/// the largest exponent has infinity and NaN; else the largest number is the only NaN.
struct Small<const E: u32, const M: u32, const FINITE: bool>;

impl<const E: u32, const M: u32, const FINITE: bool> Small<E, M, FINITE> {
    /// What the exponents of float32 have more, at their place.
    const MORE: u32 = (128 - (1 << (E - 1))) << 23;

    /// Bits of the mantissa of float32 that this one lacks.
    const LESS: u32 = 23 - M;

    /// The largest number without the sign: infinity, or the NaN.
    const TOP: u32 = if FINITE { (1 << (E + M)) - 1 } else { ((1 << E) - 1) << M };

    const NAN: u32 = if FINITE { Self::TOP } else { Self::TOP | 1 << (M - 1) };

    /// Whether small numbers of this dtype have a smaller exponent in float32.
    const RISES: bool = Self::MORE > 0;

    /// A float32 whose last bit counts as that of the subnormal numbers: what is added to it is rounded to them.
    const LEVEL: u32 = Self::MORE + ((Self::LESS + 1) << 23);

    #[inline(always)]
    fn widen(bits: u32) -> f32 {
        let (sign, number) = (bits >> (E + M) << 31, bits & ((1 << (E + M)) - 1));
        let mut wide = (number << Self::LESS) + Self::MORE;
        if Self::RISES {
            // Without the leading one that a subnormal number has not: exact.
            let one = Self::MORE + (1 << 23);
            let subnormal = f32::from_bits((number << Self::LESS) + one) - f32::from_bits(one);
            wide = if number < 1 << M { subnormal.to_bits() } else { wide };
        }
        let beyond = if FINITE { f32::NAN.to_bits() } else { wide + Self::MORE };
        let is_beyond = number >= Self::TOP;
        f32::from_bits(sign | if is_beyond { beyond } else { wide })
    }

    #[inline(always)]
    fn narrow(value: f32) -> u32 {
        let (sign, number) = (value.to_bits() >> 31 << (E + M), value.to_bits() & (u32::MAX >> 1));
        // Half of the last bit that stays, or less by one where that is even, so that a tie becomes even.
        let half = (1 << (Self::LESS - 1)) - 1 + (number >> Self::LESS & 1);
        let mut narrow = number.wrapping_sub(Self::MORE).wrapping_add(half) >> Self::LESS;
        if Self::RISES {
            let level = f32::from_bits(Self::LEVEL);
            let subnormal = (f32::from_bits(number) + level).to_bits().wrapping_sub(Self::LEVEL);
            narrow = if number < Self::MORE + (1 << 23) { subnormal } else { narrow };
        }
        let narrow = if narrow > Self::TOP { Self::TOP } else { narrow };
        let is_nan = number > f32::INFINITY.to_bits();
        sign | if is_nan { Self::NAN } else { narrow }
    }
}

macro_rules! small {
    ($($(#[$doc:meta])* $float:ident $bits:ty, $exponent:literal, $mantissa:literal, $finite:literal;)*) => {$(
        $(#[$doc])*
        pub(crate) struct $float;

        impl Float for $float {
            type Bits = $bits;

            #[inline(always)]
            fn flip(bits: $bits, mask: u64) -> $bits {
                bits ^ mask as $bits
            }

            #[inline(always)]
            fn widen(bits: $bits) -> f32 {
                Small::<$exponent, $mantissa, $finite>::widen(u32::from(bits))
            }

            #[inline(always)]
            fn narrow(value: f32) -> $bits {
                Small::<$exponent, $mantissa, $finite>::narrow(value) as $bits
            }
        }
    )*};
}

small! {
    /// float16.
    Float16 u16, 5, 10, false;
    /// bfloat16.
    BFloat16 u16, 8, 7, false;
    /// float8_e4m3fn.
    Float8E4M3FN u8, 4, 3, true;
    /// float8_e5m2.
    Float8E5M2 u8, 5, 2, false;
}

#[cfg(test)]
pub(crate) mod tests;
