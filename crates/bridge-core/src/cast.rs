//! Casts: copies that change the dtype of each element while it is copied.

use crate::{Advice, DType, Error, ErrorKind, Result};

/// A conversion of each element from one dtype to another, between the floating dtypes of [`DTYPES`](Self::DTYPES).
///
/// Values are rounded to nearest, ties to even, as PyTorch's `.to()` rounds: a float64 that becomes smaller than a
/// float32 is rounded to float32 first. What is too large becomes infinite, and NaN in float8_e4m3fn, which has no
/// infinity. A NaN stays one, with any payload, and a zero keeps its sign.
///
/// ```
/// use bridge_core::{Cast, DType};
///
/// let cast = Cast::new(DType::FLOAT32, DType::BFLOAT16).unwrap();
/// assert_eq!((cast.from(), cast.to()), (DType::FLOAT32, DType::BFLOAT16));
/// assert!(Cast::new(DType::INT32, DType::FLOAT32).is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cast {
    from: DType,
    to: DType,
}

impl Cast {
    /// The dtypes that casts are between.
    pub const DTYPES: [DType; 6] =
        [DType::FLOAT16, DType::BFLOAT16, DType::FLOAT32, DType::FLOAT64, DType::FLOAT8_E4M3FN, DType::FLOAT8_E5M2];

    /// Returns the cast between two dtypes that differ.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Dtype`] where there is none.
    pub fn new(from: DType, to: DType) -> Result<Self> {
        match from != to && [from, to].iter().all(|dtype| Self::DTYPES.contains(dtype)) {
            true => Ok(Self { from, to }),
            false => {
                let text = format!(
                    "cannot cast {from} to {to}: cast the source first, with its own framework (supported: {})",
                    Self::DTYPES.map(|dtype| dtype.to_string()).join(", ")
                );
                Err(Error::new(ErrorKind::Dtype, text))
            }
        }
    }

    /// Returns the dtype of the source.
    pub fn from(self) -> DType {
        self.from
    }

    /// Returns the dtype of the target.
    pub fn to(self) -> DType {
        self.to
    }

    /// Returns how the elements of a source get into a target, whose caller asks for casts to `dtype` or for none: by
    /// this cast, or as they are.
    pub(crate) fn between(source: DType, target: DType, dtype: Option<DType>) -> Result<Option<Self>> {
        match dtype {
            _ if source == target => Ok(None),
            Some(dtype) if dtype == target => Self::new(source, target).map(Some),
            Some(dtype) => {
                let text = format!(
                    "the target has dtype {target}, but the source {source}, and the cast is to {dtype}: pass a target of dtype {dtype}, or of {source}"
                );
                Err(Error::new(ErrorKind::Dtype, text))
            }
            None => {
                let text = format!("elements of dtype {source} cannot be copied into a tensor of dtype {target}");
                let error = Error::new(ErrorKind::Dtype, text);
                Err(match Self::new(source, target) {
                    Ok(_) => error.advise(Advice::Cast),
                    Err(_) => error.advise(Advice::CastFirst),
                })
            }
        }
    }
}

/// What happens to each element: the bits that are flipped, and the cast after that.
pub(crate) type Change = (u128, Option<Cast>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn casts_are_between_different_floats() {
        for from in DType::NAMED.iter().map(|(dtype, _)| *dtype) {
            for to in Cast::DTYPES {
                let known = Cast::DTYPES.contains(&from) && from != to;
                assert_eq!(Cast::new(from, to).is_ok(), known, "{from} to {to}");
                assert_eq!(Cast::new(to, from).is_ok(), known, "{to} to {from}");
            }
        }
        let error = Cast::new(DType::INT64, DType::BFLOAT16).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Dtype);
        assert!(error.to_string().contains("cannot cast int64 to bfloat16: cast the source first"), "{error}");
    }

    #[test]
    fn a_pair_is_copied_cast_or_refused() {
        use DType as D;
        let (half, float, int) = (D::BFLOAT16, D::FLOAT32, D::INT64);
        assert_eq!(Cast::between(int, int, Some(half)).unwrap(), None, "as it is");
        assert_eq!(Cast::between(float, half, Some(half)).unwrap(), Some(Cast { from: float, to: half }));
        let refused = |source, target, dtype| Cast::between(source, target, dtype).unwrap_err().to_string();
        assert!(refused(float, D::FLOAT16, Some(half)).contains("pass a target of dtype bfloat16, or of float32"));
        assert!(refused(int, half, Some(half)).contains("cannot cast"));
        assert!(refused(float, half, None).contains("Pair::dtype"));
        assert!(refused(int, half, None).ends_with("bfloat16: cast the source first"));
    }
}
