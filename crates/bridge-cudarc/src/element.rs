//! The types of elements.

use bridge_core::DType;
use cudarc::driver::DeviceRepr;

mod sealed {
    pub trait Sealed {}
}

/// A type of elements in a view of `cudarc`. It has the bits of its dtype, and every pattern of bits is a value of it.
///
/// | Rust | dtype |
/// |---|---|
/// | `i8` … `i64`, `u8` … `u64` | `int8` … `int64`, `uint8` … `uint64` |
/// | `f32`, `f64` | `float32`, `float64` |
/// | `half::f16`, `half::bf16` (feature `half`) | `float16`, `bfloat16` |
///
/// Tensors of other dtypes are converted as well, as addresses: see [`DeviceArray::data`](crate::DeviceArray::data).
pub trait Element: sealed::Sealed + DeviceRepr + Copy + Send + Sync + 'static {
    /// The dtype.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($(#[$condition:meta])? $type:ty = $dtype:ident;)*) => {$(
        $(#[$condition])?
        impl sealed::Sealed for $type {}

        $(#[$condition])?
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
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
    #[cfg(feature = "half")] half::f16 = FLOAT16;
    #[cfg(feature = "half")] half::bf16 = BFLOAT16;
}
