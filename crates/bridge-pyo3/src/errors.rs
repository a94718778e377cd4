//! From Python's errors to core's.

use bridge_core::{Error, ErrorKind, Result};
use pyo3::exceptions::{PyException, PyImportError, PyMemoryError};
use pyo3::prelude::*;
use pyo3::types::PyModule;

/// An error that a framework raised, as core's error, with Python's exception as its cause.
pub fn framework_error(py: Python<'_>, framework: &str, error: PyErr) -> Error {
    let text = error.value(py).repr().map_or_else(|_| "an error".into(), |text| text.to_string());
    // PyTorch writes the backtrace of C++ behind the first line.
    let text = text.split("\\n").next().unwrap_or_default();
    Error::new(ErrorKind::Framework, format!("{framework} raised {text}")).caused_by(error)
}

/// The error for an object that the adapter of `framework` does not know as a tensor.
pub fn not_a_tensor(framework: &str, object: &Bound<'_, PyAny>) -> Error {
    let type_name =
        object.get_type().fully_qualified_name().map_or_else(|_| "this object".into(), |name| name.to_string());
    Error::new(ErrorKind::NotATensor, format!("{type_name} is no tensor of {framework}"))
}

/// Imports the module of a framework.
///
/// # Errors
///
/// [`ErrorKind::Missing`], which names the package to install, if there is no such module or it cannot be loaded.
pub fn installed<'py>(py: Python<'py>, module: &str, package: &str) -> Result<Bound<'py, PyModule>> {
    PyModule::import(py, module).map_err(|error| {
        let (kind, text) = if error.is_instance_of::<PyImportError>(py) {
            (ErrorKind::Missing, format!("{module} cannot be imported ({}): pip install {package}", error.value(py)))
        } else {
            (ErrorKind::Framework, format!("importing {module} failed: {error}"))
        };
        Error::new(kind, text).caused_by(error)
    })
}

/// Returns the value of a probe, or `None` where it raised an ordinary exception: that is an answer, too.
///
/// # Errors
///
/// What no probe may swallow: `KeyboardInterrupt`, `SystemExit` and the like, and `MemoryError`.
pub fn probe<T>(py: Python<'_>, result: PyResult<T>) -> PyResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_instance_of::<PyException>(py) && !error.is_instance_of::<PyMemoryError>(py) => Ok(None),
        Err(error) => Err(error),
    }
}
