//! What an object states about its dtype besides its protocol, which may name the wrong one: DLPack had no bool before
//! version 1.0, and PyTorch and JAX export elements of less than a byte as bytes.

use crate::unsupported::is_of;
use bridge_core::{DType, Error, ErrorKind, Export, Result};
use bridge_pyo3::{PyTensor, framework_error, probe};
use pyo3::intern;
use pyo3::prelude::*;

/// Dtypes that a protocol names where it lacks the right one.
const MISTAKEN: [DType; 3] = [DType::BOOL, DType::INT8, DType::UINT8];

/// Returns the export with the dtype that the object itself states.
///
/// # Errors
///
/// [`ErrorKind::Dtype`] for elements of less than a byte.
pub(crate) fn corrected(object: &PyTensor<'_>, exported: Export) -> Result<Export> {
    if !MISTAKEN.contains(&exported.dtype()) {
        return Ok(exported);
    }
    let stated = stated(object).map_err(|error| framework_error(object.py(), "the producer", error))?;
    match stated.as_deref() {
        Some("bool" | "bool_") => exported.relabelled(DType::BOOL),
        Some(name) if is_narrow(name) => {
            let text =
                format!("dtype {name} has no counterpart in other frameworks: unpack it, or view its bytes as uint8");
            Err(Error::new(ErrorKind::Dtype, text))
        }
        _ => Ok(exported),
    }
}

/// Returns whether a name is that of an integer of less than a byte, such as `int4`.
fn is_narrow(name: &str) -> bool {
    let bits = name.strip_prefix('u').unwrap_or(name).strip_prefix("int");
    bits.is_some_and(|bits| matches!(bits.parse(), Ok(1..8)))
}

/// Returns the name of the dtype that the object states: that of its `dtype`, or for a value of ONNX Runtime the text in
/// `tensor(…)`. `None` where it states none, and where it raises.
fn stated(object: &PyTensor<'_>) -> PyResult<Option<String>> {
    let py = object.py();
    let look = || -> PyResult<Option<String>> {
        if is_of(object, "onnxruntime") {
            let text: String = object.call_method0(intern!(py, "data_type"))?.extract()?;
            return Ok(text.strip_prefix("tensor(").and_then(|text| text.strip_suffix(')')).map(String::from));
        }
        let Some(dtype) = object.getattr_opt(intern!(py, "dtype"))? else { return Ok(None) };
        match dtype.getattr_opt(intern!(py, "name"))? {
            Some(name) => Ok(Some(name.extract()?)),
            // PyTorch's have no name.
            None => Ok(dtype.str()?.to_string_lossy().rsplit('.').next().map(String::from)),
        }
    };
    Ok(probe(py, look())?.flatten())
}
