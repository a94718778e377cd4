//! The dtypes of NumPy, which CuPy shares, and those that the package `ml_dtypes` adds.

use super::errors::{brief_str, framework_error, probe};
use bridge_core::{DType, Error, ErrorKind, Result};
use pyo3::intern;
use pyo3::prelude::*;

/// The dtypes of NumPy itself that have a counterpart in DLPack, in native byte order.
pub const NUMPY_DTYPES: &[DType] = &[
    DType::BOOL,
    DType::INT8,
    DType::INT16,
    DType::INT32,
    DType::INT64,
    DType::UINT8,
    DType::UINT16,
    DType::UINT32,
    DType::UINT64,
    DType::FLOAT16,
    DType::FLOAT32,
    DType::FLOAT64,
    DType::COMPLEX64,
    DType::COMPLEX128,
];

/// The dtypes that `ml_dtypes` adds, without those whose elements are not whole bytes in both worlds.
pub const EXTENSION_DTYPES: &[DType] = &[
    DType::BFLOAT16,
    DType::COMPLEX32,
    DType::FLOAT8_E3M4,
    DType::FLOAT8_E4M3,
    DType::FLOAT8_E4M3B11FNUZ,
    DType::FLOAT8_E4M3FN,
    DType::FLOAT8_E4M3FNUZ,
    DType::FLOAT8_E5M2,
    DType::FLOAT8_E5M2FNUZ,
    DType::FLOAT8_E8M0FNU,
];

/// The `numpy.dtype` objects of an array framework and their counterparts in core.
///
/// NumPy keeps one object per built-in dtype, so the usual look-up compares pointers.
pub struct ArrayDTypes {
    framework: &'static str,
    known: Vec<(DType, Py<PyAny>)>,
}

bridge_core::debug_fields!(impl[] ArrayDTypes: framework);

impl ArrayDTypes {
    /// Looks up those of `wanted` that this process has: NumPy's own always, the others where `ml_dtypes` is installed.
    ///
    /// # Errors
    ///
    /// What Python raises.
    pub fn new(py: Python<'_>, framework: &'static str, wanted: &[DType]) -> PyResult<Self> {
        let make = py.import("numpy")?.getattr("dtype")?;
        let extensions = probe(py, py.import("ml_dtypes"))?;
        let mut known = Vec::new();
        for &dtype in wanted {
            let name = dtype.to_string();
            let object = match (NUMPY_DTYPES.contains(&dtype), &extensions) {
                (true, _) => make.call1((name,))?,
                (false, Some(extensions)) => match extensions.getattr_opt(name.as_str())? {
                    Some(scalar) => make.call1((scalar,))?,
                    None => continue,
                },
                (false, None) => continue,
            };
            known.push((dtype, object.unbind()));
        }
        Ok(Self { framework, known })
    }

    /// Returns the dtypes of this process.
    pub fn all(&self) -> Vec<DType> {
        self.known.iter().map(|(dtype, _)| *dtype).collect()
    }

    /// Returns the dtype that a `numpy.dtype` object stands for.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Dtype`] for a dtype without a counterpart in DLPack, and for non-native byte order.
    pub fn read(&self, object: &Bound<'_, PyAny>) -> Result<DType> {
        if let Some((dtype, _)) = self.known.iter().find(|(_, known)| known.as_ptr() == object.as_ptr()) {
            return Ok(*dtype);
        }
        // Equal, but another object: a dtype with metadata, say.
        let py = object.py();
        let holds = |answer: PyResult<bool>| match probe(py, answer) {
            Ok(answer) => Ok(answer == Some(true)),
            Err(error) => Err(framework_error(py, self.framework, error)),
        };
        for (dtype, known) in &self.known {
            if holds(object.eq(known.bind(py)))? {
                return Ok(*dtype);
            }
        }
        let swapped = object.getattr(intern!(py, "isnative")).and_then(|native| Ok(!native.is_truthy()?));
        let fields = object.getattr(intern!(py, "fields")).map(|fields| !fields.is_none());
        let (has_fields, name) = (holds(fields)?, brief_str(object));
        let advice = match holds(swapped)? {
            true => "is not in native byte order: call .astype(x.dtype.newbyteorder(\"=\")) first",
            // JAX's gradients with respect to integers.
            false if name.contains("float0") => "has no elements, only a shape: leave the array out, or pass zeros",
            false if has_fields => "has fields: convert each by itself, x[name]",
            false => "has no counterpart in other frameworks: cast the array first",
        };
        Err(Error::new(ErrorKind::Dtype, format!("{} dtype {name} {advice}", self.framework)))
    }

    /// Returns the `numpy.dtype` object for a dtype.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Dtype`] if this process has none.
    pub fn write<'py>(&self, py: Python<'py>, dtype: DType) -> Result<&Bound<'py, PyAny>> {
        let known = self.known.iter().find(|(known, _)| *known == dtype);
        known.map(|(_, object)| object.bind(py)).ok_or_else(|| {
            Error::new(ErrorKind::Dtype, format!("{} has no dtype {dtype} in this process", self.framework))
        })
    }
}
