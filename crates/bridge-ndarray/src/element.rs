//! The types of elements.

use bridge_core::DType;
use num_complex::Complex;

mod sealed {
    pub trait Sealed {}
}

/// A type that an element of a [`HostArray`](crate::HostArray) can have. It has the bits of its dtype.
///
/// | Rust | dtype |
/// |---|---|
/// | `bool` | `bool`, one byte that is 0 or 1 |
/// | `i8` … `i64`, `u8` … `u64` | `int8` … `int64`, `uint8` … `uint64` |
/// | `f32`, `f64` | `float32`, `float64` |
/// | `Complex<f32>`, `Complex<f64>` of `num-complex` | `complex64`, `complex128` |
///
/// Tensors of other dtypes, such as `bfloat16`, do not become arrays: view them as integers of their size first.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The dtype.
    const DTYPE: DType;

    #[doc(hidden)]
    type Bits: Copy;

    /// Makes an element of any bits.
    #[doc(hidden)]
    fn of_bits(bits: Self::Bits) -> Self;
}

macro_rules! elements {
    ($($type:ty = $dtype:ident;)*) => {
        $(
            impl sealed::Sealed for $type {}

            impl Element for $type {
                const DTYPE: DType = DType::$dtype;
                type Bits = Self;

                fn of_bits(bits: Self) -> Self {
                    bits
                }
            }
        )*

        /// The dtypes of elements.
        pub(crate) const DTYPES: &[DType] = &[DType::BOOL, $(DType::$dtype),*];
    };
}

elements! {
    i8 = INT8;
    i16 = INT16;
    i32 = INT32;
    i64 = INT64;
    u8 = UINT8;
    u16 = UINT16;
    u32 = UINT32;
    u64 = UINT64;
    f32 = FLOAT32;
    f64 = FLOAT64;
    Complex<f32> = COMPLEX64;
    Complex<f64> = COMPLEX128;
}

impl sealed::Sealed for bool {}

/// Frameworks write other bytes than 0 and 1 as well, which are `true` in C.
impl Element for bool {
    const DTYPE: DType = DType::BOOL;
    type Bits = u8;

    fn of_bits(bits: u8) -> Self {
        bits != 0
    }
}
