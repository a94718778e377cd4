//! Element types: an open set over DLPack's codes, with the names that frameworks use.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// An element type, by DLPack's `DLDataType` (`dlpack.h`): a type code, bits per lane, lanes.
///
/// The set is open: a code without a name here is passed on unchanged, and is refused only where a
/// [`Profile`](crate::Profile) does not list it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DType {
    /// `DLDataTypeCode` of `dlpack.h`.
    pub code: u8,
    /// Bits of one lane.
    pub bits: u8,
    /// Lanes of one element: 1, but for [two numbers in a byte](Self::FLOAT4_E2M1FN_X2).
    pub lanes: u16,
}

macro_rules! dtypes {
    ($($constant:ident = $name:literal, $code:literal, $bits:literal $(x $lanes:literal)?;)*) => {
        impl DType {
            $(#[doc = concat!("`", $name, "`")]
            pub const $constant: DType = DType { code: $code, bits: $bits, lanes: 1 $(* $lanes)? };)*

            /// Every dtype with a name, and its name.
            pub const NAMED: &'static [(DType, &'static str)] = &[$((DType::$constant, $name)),*];
        }
    };
}

dtypes! {
    BOOL = "bool", 6, 8;
    INT8 = "int8", 0, 8;
    INT16 = "int16", 0, 16;
    INT32 = "int32", 0, 32;
    INT64 = "int64", 0, 64;
    UINT8 = "uint8", 1, 8;
    UINT16 = "uint16", 1, 16;
    UINT32 = "uint32", 1, 32;
    UINT64 = "uint64", 1, 64;
    FLOAT16 = "float16", 2, 16;
    FLOAT32 = "float32", 2, 32;
    FLOAT64 = "float64", 2, 64;
    BFLOAT16 = "bfloat16", 4, 16;
    COMPLEX32 = "complex32", 5, 32;
    COMPLEX64 = "complex64", 5, 64;
    COMPLEX128 = "complex128", 5, 128;
    FLOAT8_E3M4 = "float8_e3m4", 7, 8;
    FLOAT8_E4M3 = "float8_e4m3", 8, 8;
    FLOAT8_E4M3B11FNUZ = "float8_e4m3b11fnuz", 9, 8;
    FLOAT8_E4M3FN = "float8_e4m3fn", 10, 8;
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz", 11, 8;
    FLOAT8_E5M2 = "float8_e5m2", 12, 8;
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz", 13, 8;
    FLOAT8_E8M0FNU = "float8_e8m0fnu", 14, 8;
    FLOAT6_E2M3FN = "float6_e2m3fn", 15, 6;
    FLOAT6_E3M2FN = "float6_e3m2fn", 16, 6;
    FLOAT4_E2M1FN = "float4_e2m1fn", 17, 4;
    FLOAT4_E2M1FN_X2 = "float4_e2m1fn_x2", 17, 4 x 2;
}

impl DType {
    /// Returns the bytes of one element, or `None` where an element is not a whole number of bytes.
    pub fn itemsize(self) -> Option<usize> {
        let bits = usize::from(self.bits) * usize::from(self.lanes);
        (bits > 0 && bits % 8 == 0).then_some(bits / 8)
    }

    /// Returns whether frameworks have such elements: of one lane, or two float4 in a byte.
    pub fn is_element(self) -> bool {
        self.lanes == 1 || self == Self::FLOAT4_E2M1FN_X2
    }

    /// Returns whether an element is a pair of a real and an imaginary part.
    pub fn is_complex(self) -> bool {
        self.code == Self::COMPLEX64.code
    }

    fn name(self) -> Option<&'static str> {
        Self::NAMED.iter().find(|(dtype, _)| *dtype == self).map(|(_, name)| *name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.pad(name),
            None => write!(f, "dlpack({}, {}, {})", self.code, self.bits, self.lanes),
        }
    }
}

/// The name, as [`Display`](fmt::Display) writes it.
impl fmt::Debug for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Error for text that is neither a dtype name nor `dlpack(code, bits, lanes)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseDTypeError(String);

impl ParseDTypeError {
    /// The most characters of the text that the message quotes.
    const KEPT: usize = 64;
}

impl fmt::Display for ParseDTypeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not a dtype name such as \"float32\"", self.0)
    }
}

impl std::error::Error for ParseDTypeError {}

impl FromStr for DType {
    type Err = ParseDTypeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some((dtype, _)) = Self::NAMED.iter().find(|(_, name)| *name == text) {
            return Ok(*dtype);
        }
        let numbers = text.strip_prefix("dlpack(").and_then(|rest| rest.strip_suffix(')'));
        let numbers: Vec<_> = numbers.unwrap_or_default().split(", ").collect();
        let read = |[code, bits, lanes]: [&str; 3]| {
            Some(DType { code: code.parse().ok()?, bits: bits.parse().ok()?, lanes: lanes.parse().ok()? })
        };
        let dtype = <[&str; 3]>::try_from(numbers).ok().and_then(read);
        // One text for each dtype: no sign, no zeros before a number, and no number for what has a name.
        let kept = || ParseDTypeError(text.chars().take(ParseDTypeError::KEPT).collect());
        dtype.filter(|dtype| dtype.to_string() == text).ok_or_else(kept)
    }
}

impl Serialize for DType {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DType {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_read_back() {
        let unnamed = DType { code: 99, bits: 24, lanes: 3 };
        for dtype in DType::NAMED.iter().map(|(dtype, _)| *dtype).chain([unnamed]) {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        let refused = "float31".parse::<DType>().unwrap_err();
        assert_eq!(refused.to_string(), r#""float31" is not a dtype name such as "float32""#);
        let odd = ["dlpack(1, 2)", "dlpack(1, 2, x)", "dlpack(1, 2, 3, 4)", "dlpack(+99, 24, 3)", "dlpack(99, 024, 3)"];
        for text in odd.into_iter().chain(["dlpack(2, 32, 1)", "dlpack(99,24,3)", "dlpack()", "dlpack(99, 24, 3"]) {
            assert!(text.parse::<DType>().is_err(), "{text}");
        }
        assert!("é".repeat(1000).parse::<DType>().unwrap_err().to_string().len() < 200);
        assert_eq!((DType::BFLOAT16.to_string(), unnamed.to_string()), ("bfloat16".into(), "dlpack(99, 24, 3)".into()));
        assert_eq!(format!("{:?}", [DType::BFLOAT16, unnamed]), "[bfloat16, dlpack(99, 24, 3)]");
    }

    #[test]
    fn pairs_of_real_and_imaginary_parts_are_complex() {
        let complex: Vec<_> =
            DType::NAMED.iter().filter(|(dtype, _)| dtype.is_complex()).map(|(_, name)| *name).collect();
        assert_eq!(complex, ["complex32", "complex64", "complex128"]);
    }

    #[test]
    fn only_whole_bytes_have_an_itemsize() {
        assert_eq!(DType::COMPLEX128.itemsize(), Some(16));
        assert_eq!(DType { lanes: 3, ..DType::UINT16 }.itemsize(), Some(6), "all lanes");
        assert_eq!(DType::FLOAT4_E2M1FN_X2, DType { lanes: 2, ..DType::FLOAT4_E2M1FN });
        assert_eq!(DType::FLOAT4_E2M1FN_X2.itemsize(), Some(1), "two halves of a byte");
        assert!(DType::FLOAT4_E2M1FN_X2.is_element() && DType::INT8.is_element());
        assert!(!DType { lanes: 2, ..DType::UINT8 }.is_element());
        assert_eq!(DType::FLOAT4_E2M1FN.itemsize(), None);
        assert_eq!(DType { code: 0, bits: 0, lanes: 1 }.itemsize(), None);
    }
}
