//! Core's errors as Python's exceptions.

use bridge_core::{Error, ErrorKind, Result};
use bridge_frameworks::is_bridge_error;
use bridge_pyo3::{brief, framework_error, is_ordinary, is_out_of_memory, type_name};
use pyo3::exceptions::{PyRuntimeError, PyUnicodeError};
use pyo3::prelude::*;
use pyo3::types::PyString;
use std::error::Error as _;

/// Returns the exception for an error, with the framework's own exception as its cause.
///
/// Two kinds of causes are returned themselves: those that programs catch by class (interrupts, exits, a full memory,
/// where the framework has a class for it), and errors of this package, which a producer has met in a conversion of its
/// own and which say what to do already.
#[cold]
pub(crate) fn into_python(py: Python<'_>, error: Error) -> PyErr {
    let cause = error.source().and_then(|source| source.downcast_ref::<PyErr>());
    let has_class = |cause: &PyErr| !cause.value(py).is_exact_instance_of::<PyRuntimeError>();
    let as_it_is = |cause: &&PyErr| {
        !is_ordinary(py, cause) || is_out_of_memory(py, cause) && has_class(cause) || is_bridge_error(cause.value(py))
    };
    if let Some(cause) = cause.filter(as_it_is) {
        return cause.clone_ref(py);
    }
    let make = || -> PyResult<PyErr> {
        let kind = serde_json::to_value(error.kind()).expect("a kind is a word");
        let errors = py.import("truebridge.errors")?;
        let exception = PyErr::from_value(errors.call_method1("of_kind", (kind.as_str(), worded(&error)))?);
        exception.set_cause(py, cause.map(|cause| cause.clone_ref(py)));
        Ok(exception)
    };
    make().unwrap_or_else(|failure| match is_ordinary(py, &failure) {
        true => PyRuntimeError::new_err(format!("{} (and the error class is missing: {failure})", worded(&error))),
        // Ctrl-C, which Python notices in the call above.
        false => failure,
    })
}

/// Returns the message, with the advice in the words of Python.
fn worded(error: &Error) -> String {
    error.worded(bridge_core::python::words)
}

/// Returns the error for an argument that cannot be used.
pub(crate) fn argument(error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Argument, error.to_string())
}

/// Returns the text of an argument, which `what` names in the error.
///
/// # Errors
///
/// [`ErrorKind::Argument`] for anything but a `str`, and for one with half of a surrogate pair.
pub(crate) fn text(object: &Bound<'_, PyAny>, what: &str) -> Result<String> {
    let text =
        object.cast::<PyString>().map_err(|_| argument(format!("{what} must be a str, not {}", type_name(object))))?;
    match text.to_str() {
        Ok(text) => Ok(text.into()),
        Err(error) if error.is_instance_of::<PyUnicodeError>(object.py()) => {
            Err(argument(format!("{what} {:?} holds half of a surrogate pair", brief(&text.to_string_lossy()))))
        }
        Err(error) => Err(framework_error(object.py(), what, error)),
    }
}
