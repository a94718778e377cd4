//! The dtypes of TensorFlow (`TF_DataType` in `tensorflow/c/tf_datatype.h`).

use bridge_core::{DType, Error, ErrorKind, Result};
use std::ffi::c_int;

/// The dtypes that TensorFlow and DLPack share. Those of less than a byte are left out: TensorFlow keeps each element
/// in its own byte, DLPack packs them.
pub(crate) const DTYPES: &[(DType, c_int)] = &[
    (DType::FLOAT32, 1),
    (DType::FLOAT64, 2),
    (DType::INT32, INT32),
    (DType::UINT8, UINT8),
    (DType::INT16, 5),
    (DType::INT8, 6),
    (DType::COMPLEX64, 8),
    (DType::INT64, 9),
    (DType::BOOL, 10),
    (DType::BFLOAT16, 14),
    (DType::UINT16, 17),
    (DType::COMPLEX128, 18),
    (DType::FLOAT16, 19),
    (DType::UINT32, 22),
    (DType::UINT64, 23),
    (DType::FLOAT8_E5M2, 24),
    (DType::FLOAT8_E4M3FN, 25),
    (DType::FLOAT8_E4M3FNUZ, 26),
    (DType::FLOAT8_E4M3B11FNUZ, 27),
    (DType::FLOAT8_E5M2FNUZ, 28),
];

pub(crate) const INT32: c_int = 3;
pub(crate) const UINT8: c_int = 4;

/// TensorFlow's other dtypes, and what to do with a tensor of one.
const REFUSED: &[(c_int, &str)] = &[
    (
        7,
        "strings have no memory of a fixed size: decode them in TensorFlow first (tf.io.decode_raw, tf.strings.to_number)",
    ),
    (20, "a resource is a handle to something else: read its value first"),
    (21, "a variant holds any value: take the tensor out of it first"),
    (29, "int4 takes a byte an element in TensorFlow and half a byte elsewhere: call tf.cast(x, tf.int8) first"),
    (30, "uint4 takes a byte an element in TensorFlow and half a byte elsewhere: call tf.cast(x, tf.uint8) first"),
];

/// Returns TensorFlow's code of a dtype, if it has one.
pub(crate) fn code(dtype: DType) -> Option<c_int> {
    DTYPES.iter().find(|(known, _)| *known == dtype).map(|(_, code)| *code)
}

/// Returns TensorFlow's code of a dtype.
///
/// # Errors
///
/// [`ErrorKind::Dtype`] if it has none.
pub(crate) fn required(dtype: DType) -> Result<c_int> {
    code(dtype).ok_or_else(|| Error::new(ErrorKind::Dtype, format!("tensorflow has no dtype {dtype}")))
}

/// The difference between the code of a reference and that of its value (`kDataTypeRefOffset`).
const REFERENCE: c_int = 100;

/// Returns the dtype of a code, or why there is none, with advice. A reference has the dtype of its value.
pub(crate) fn dtype(code: c_int) -> Result<DType, &'static str> {
    let code = if code > REFERENCE { code - REFERENCE } else { code };
    let known = DTYPES.iter().find(|(_, known)| *known == code).map(|(dtype, _)| *dtype);
    known.ok_or_else(|| {
        let reason = REFUSED.iter().find(|(refused, _)| *refused == code).map(|(_, reason)| *reason);
        reason.unwrap_or("its dtype has no counterpart in other frameworks: call tf.cast first")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_has_the_dtype_of_its_value() {
        for (known, code) in DTYPES {
            assert_eq!((dtype(*code), dtype(REFERENCE + code)), (Ok(*known), Ok(*known)));
        }
        assert!(dtype(0).is_err() && dtype(REFERENCE).is_err());
    }
}
