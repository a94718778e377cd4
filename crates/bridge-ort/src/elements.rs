//! The element types of ONNX, and the errors of its functions.

use bridge_core::{DType, Error, ErrorKind, Result};
use ort::sys::OrtStatusPtr;
use ort::value::TensorElementType;

/// The element types of ONNX, and their dtypes. Those of less than a byte and strings have none.
pub(crate) const TYPES: &[(TensorElementType, DType)] = &[
    (TensorElementType::Bool, DType::BOOL),
    (TensorElementType::Int8, DType::INT8),
    (TensorElementType::Int16, DType::INT16),
    (TensorElementType::Int32, DType::INT32),
    (TensorElementType::Int64, DType::INT64),
    (TensorElementType::Uint8, DType::UINT8),
    (TensorElementType::Uint16, DType::UINT16),
    (TensorElementType::Uint32, DType::UINT32),
    (TensorElementType::Uint64, DType::UINT64),
    (TensorElementType::Float16, DType::FLOAT16),
    (TensorElementType::Bfloat16, DType::BFLOAT16),
    (TensorElementType::Float32, DType::FLOAT32),
    (TensorElementType::Float64, DType::FLOAT64),
    (TensorElementType::Complex64, DType::COMPLEX64),
    (TensorElementType::Complex128, DType::COMPLEX128),
    (TensorElementType::Float8E4M3FN, DType::FLOAT8_E4M3FN),
    (TensorElementType::Float8E4M3FNUZ, DType::FLOAT8_E4M3FNUZ),
    (TensorElementType::Float8E5M2, DType::FLOAT8_E5M2),
    (TensorElementType::Float8E5M2FNUZ, DType::FLOAT8_E5M2FNUZ),
];

pub(crate) fn dtype_of(element: TensorElementType) -> Result<DType> {
    TYPES.iter().find(|(known, _)| *known == element).map(|(_, dtype)| *dtype).ok_or_else(|| {
        Error::new(ErrorKind::Dtype, format!("elements of ONNX's type {element} have no counterpart: cast them first"))
    })
}

pub(crate) fn element_of(dtype: DType) -> Result<TensorElementType> {
    TYPES.iter().find(|(_, known)| *known == dtype).map(|(element, _)| *element).ok_or_else(|| {
        Error::new(ErrorKind::Dtype, format!("ONNX has no element type for {dtype}: cast the tensor first"))
    })
}

/// Checks what a function of ONNX Runtime has returned.
///
/// # Safety
///
/// The status is one that a function of its C API has returned, and is used nowhere else.
pub(crate) unsafe fn checked(status: OrtStatusPtr) -> Result<()> {
    // SAFETY: the caller's obligation.
    unsafe { ort::Error::<()>::result_from_status(status) }.map_err(|error| {
        let text = format!("ONNX Runtime: {error}");
        // It has no code for it.
        let is_full =
            ["bad_alloc", "out of memory", "Failed to allocate memory"].iter().any(|sign| text.contains(sign));
        Error::new(if is_full { ErrorKind::OutOfMemory } else { ErrorKind::Framework }, text).caused_by(error)
    })
}
