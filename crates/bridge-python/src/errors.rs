//! Core's errors as Python's exceptions.

use bridge_core::{Error, ErrorKind};
use pyo3::exceptions::{PyException, PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;
use std::error::Error as _;

/// The class in `tensor_bridge.errors` for a kind.
fn class(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotATensor | ErrorKind::Dtype => "BridgeTypeError",
        ErrorKind::Argument | ErrorKind::Layout | ErrorKind::Device => "BridgeValueError",
        ErrorKind::ReadOnly
        | ErrorKind::CopyNeeded
        | ErrorKind::RequiresGrad
        | ErrorKind::Refused
        | ErrorKind::Consumed
        | ErrorKind::Protocol
        | ErrorKind::Version => "BridgeBufferError",
        ErrorKind::OutOfMemory => "BridgeMemoryError",
        ErrorKind::Missing => "BridgeImportError",
        _ => "BridgeRuntimeError",
    }
}

/// The exception for an error, with the framework's own exception as its cause.
#[cold]
pub(crate) fn into_python(py: Python<'_>, error: Error) -> PyErr {
    let cause = error.source().and_then(|source| source.downcast_ref::<PyErr>());
    if let Some(cause) = cause.filter(|cause| !is_ours_to_wrap(py, cause)) {
        return cause.clone_ref(py);
    }
    let make = || -> PyResult<PyErr> {
        let class = py.import("tensor_bridge.errors")?.getattr(class(error.kind()))?;
        let exception = class.call1((error.to_string(),))?;
        let kind = serde_json::to_value(error.kind()).expect("a kind is a word");
        exception.setattr("kind", kind.as_str())?;
        let exception = PyErr::from_value(exception);
        exception.set_cause(py, cause.map(|cause| cause.clone_ref(py)));
        Ok(exception)
    };
    make().unwrap_or_else(|failure| {
        PyRuntimeError::new_err(format!("{error} (and the error class is missing: {failure})"))
    })
}

/// Ctrl-C, the end of the program and a full memory are what they are, wherever they come up.
fn is_ours_to_wrap(py: Python<'_>, cause: &PyErr) -> bool {
    cause.is_instance_of::<PyException>(py) && !cause.is_instance_of::<PyMemoryError>(py)
}

/// An argument that means nothing here.
pub(crate) fn argument(error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Argument, error.to_string())
}
