//! What has to be done to the bytes of a tensor before they are its values.

use crate::DType;
use serde::{Deserialize, Serialize};

/// What the memory lacks of the tensor's values: an operation that the framework defers until the tensor is read
/// (PyTorch's conj and neg bits), or strides that a layout cannot state. A copy by the framework resolves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Pending {
    /// Complex conjugation.
    Conjugation,
    /// Negation.
    Negation,
    /// Both, of complex elements: the real parts change their sign.
    NegatedConjugation,
    /// Strides that are not a whole number of elements, as those of a field of records. The layout repeats the first
    /// element in their place: see [`Layout::from_any_byte_strides`](crate::Layout::from_any_byte_strides).
    Packing,
}

impl Pending {
    /// Returns the operations that are deferred, of these two.
    pub fn of(conjugation: bool, negation: bool) -> Option<Self> {
        match (conjugation, negation) {
            (true, true) => Some(Self::NegatedConjugation),
            (true, false) => Some(Self::Conjugation),
            (false, true) => Some(Self::Negation),
            (false, false) => None,
        }
    }

    /// Returns the bits to flip in each element of `dtype` in order to do this operation; `None` where flipping bits
    /// does not do it, as for integers, and for [`Packing`](Self::Packing).
    pub fn flips(self, dtype: DType) -> Option<u128> {
        const SIGNED: [DType; 4] = [DType::FLOAT16, DType::BFLOAT16, DType::FLOAT32, DType::FLOAT64];
        const COMPLEX: [DType; 3] = [DType::COMPLEX32, DType::COMPLEX64, DType::COMPLEX128];
        let is_complex = COMPLEX.contains(&dtype);
        let nbytes = dtype.itemsize().filter(|_| is_complex || SIGNED.contains(&dtype))?;
        let (top, real) = (1_u128 << (nbytes * 8 - 1), if is_complex { 1 << (nbytes * 4 - 1) } else { 0 });
        match self {
            Self::Conjugation => is_complex.then_some(top),
            Self::Negation => Some(top | real),
            Self::NegatedConjugation => is_complex.then_some(real),
            Self::Packing => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flipping_bits_conjugates_and_negates() {
        let flip = |pending: Pending, dtype, value: u128| value ^ pending.flips(dtype).expect("bits do it");
        let float = |value: f32| u128::from(value.to_bits());
        assert_eq!(flip(Pending::Negation, DType::FLOAT32, float(1.5)), float(-1.5));
        let complex = |re: f32, im: f32| float(im) << 32 | float(re);
        assert_eq!(flip(Pending::Conjugation, DType::COMPLEX64, complex(1.5, 2.0)), complex(1.5, -2.0));
        assert_eq!(flip(Pending::Negation, DType::COMPLEX64, complex(1.5, 2.0)), complex(-1.5, -2.0));
        assert_eq!(flip(Pending::NegatedConjugation, DType::COMPLEX64, complex(1.5, 2.0)), complex(-1.5, 2.0));
        assert_eq!(Pending::NegatedConjugation.flips(DType::FLOAT32), None);
        assert_eq!(flip(Pending::Negation, DType::FLOAT16, 0x3c00), 0xbc00);
        assert_eq!(Pending::Negation.flips(DType::INT32), None);
        assert_eq!(Pending::Conjugation.flips(DType::FLOAT32), None);
        assert_eq!(Pending::Packing.flips(DType::FLOAT32), None);
    }
}
