//! Units of a copy as types, so that the compiler knows their size.

/// A unit of a fixed number of bytes, at any address.
pub(super) trait Unit: Copy {
    /// Returns the unit with these bits flipped.
    fn flip(self, mask: Self) -> Self;

    /// Returns a unit of the bytes of `pattern`, over and over.
    fn repeat(pattern: &[u8; 16]) -> Self;
}

macro_rules! integers {
    ($($integer:ty)*) => {$(
        impl Unit for $integer {
            #[inline(always)]
            fn flip(self, mask: Self) -> Self {
                self ^ mask
            }

            fn repeat(pattern: &[u8; 16]) -> Self {
                Self::from_ne_bytes(std::array::from_fn(|i| pattern[i]))
            }
        }
    )*};
}

integers!(u8 u16 u32 u64 u128);

/// Adjacent units as one, such as the three halves of an RGB pixel.
impl<U: Unit, const N: usize> Unit for [U; N] {
    #[inline(always)]
    fn flip(self, mask: Self) -> Self {
        std::array::from_fn(|i| self[i].flip(mask[i]))
    }

    fn repeat(pattern: &[u8; 16]) -> Self {
        let size = size_of::<U>();
        std::array::from_fn(|i| U::repeat(&std::array::from_fn(|byte| pattern[(i * size + byte) % 16])))
    }
}
