//! Conversion of Python's errors to core's.

use super::handlers;
use bridge_core::{Error, ErrorKind, Result};
use pyo3::exceptions::{
    PyBufferError, PyException, PyImportError, PyMemoryError, PyOSError, PyRecursionError, PyRuntimeError, PyTypeError,
    PyValueError,
};
use pyo3::prelude::*;
use pyo3::types::PyModule;
use std::error::Error as _;

/// Characters of an external text that a message quotes. Messages quote messages where conversions nest, so each must
/// be bounded.
const QUOTED: usize = 200;

/// Exceptions of frameworks that mean a full memory and extend no `MemoryError`, by module and name. Programs catch
/// them by their class.
const OUT_OF_MEMORY: &[(&str, &str)] = &[
    // adapters: begin
    ("torch", "OutOfMemoryError"),
    ("cupy.cuda.memory", "OutOfMemoryError"),
    ("tensorflow.python.framework.errors_impl", "ResourceExhaustedError"),
    // adapters: end
];

/// What plain `RuntimeError`s say instead of such a class.
const NO_MEMORY: &[&str] = &["DefaultCPUAllocator: can't allocate memory"];

/// Returns the first line of `text`, cut to a length that a message can hold.
pub fn brief(text: &str) -> String {
    // PyTorch writes the backtrace of C++ after the first line.
    let line = text.lines().next().unwrap_or_default();
    match line.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.into(),
    }
}

/// Returns the text that Python's `str` makes of an object, as [`brief`] cuts it, or the name of its type where `str`
/// fails.
pub fn brief_str(object: &Bound<'_, PyAny>) -> String {
    object.str().map_or_else(|_| type_name(object), |text| brief(&text.to_string_lossy()))
}

/// Returns the text that Python's `repr` makes of an object, as [`brief_str`] that of `str`.
pub fn brief_repr(object: &Bound<'_, PyAny>) -> String {
    object.repr().map_or_else(|_| type_name(object), |text| brief(&text.to_string_lossy()))
}

/// Returns the name of an object's type, with its module, as [`brief`] cuts it.
pub fn type_name(object: &Bound<'_, PyAny>) -> String {
    let name = object.get_type().fully_qualified_name();
    name.map_or_else(|_| "this object".into(), |name| brief(&name.to_string_lossy()))
}

/// Converts an exception that a framework raised to core's error, with the exception as its cause.
///
/// The kind is [`ErrorKind::Refused`] for a `BufferError`, which the array API demands of a producer that cannot
/// export, [`ErrorKind::OutOfMemory`] for a full memory and for too many open files, and [`ErrorKind::Framework`] for all others.
pub fn framework_error(py: Python<'_>, framework: &str, error: PyErr) -> Error {
    let (full, advice) = match is_out_of_files(py, &error) {
        true => (true, ": raise the limit of open files (ulimit -n)"),
        false => (is_out_of_memory(py, &error), ""),
    };
    let kind = if full {
        ErrorKind::OutOfMemory
    } else if error.is_instance_of::<PyBufferError>(py) {
        ErrorKind::Refused
    } else {
        ErrorKind::Framework
    };
    let name = type_name(error.value(py));
    match probe(py, error.value(py).str()) {
        Ok(text) => {
            let text = text.map_or_else(String::new, |text| brief(&text.to_string_lossy()));
            let colon = if text.is_empty() { "" } else { ": " };
            Error::new(kind, format!("{framework} raised {name}{colon}{text}{advice}")).caused_by(error)
        }
        // Ctrl-C during `str(exception)`.
        Err(interrupt) => Error::new(kind, format!("{framework} raised {name}")).caused_by(interrupt),
    }
}

/// Converts core's error to the built-in exception that fits, with the framework's own exception as its cause. An
/// interrupt that is the cause is returned itself.
///
/// For extension modules that are written with pyo3. The Python package raises its own classes.
#[cold]
pub fn exception(py: Python<'_>, error: Error) -> PyErr {
    let cause = error.source().and_then(|source| source.downcast_ref::<PyErr>()).map(|cause| cause.clone_ref(py));
    if let Some(cause) = cause.as_ref().filter(|cause| !is_ordinary(py, cause)) {
        return cause.clone_ref(py);
    }
    let text = error.worded(bridge_core::python::words);
    let exception = match error.kind() {
        ErrorKind::NotATensor | ErrorKind::Dtype => PyTypeError::new_err(text),
        ErrorKind::Argument | ErrorKind::Device | ErrorKind::Layout => PyValueError::new_err(text),
        ErrorKind::ReadOnly
        | ErrorKind::CopyNeeded
        | ErrorKind::RequiresGrad
        | ErrorKind::Refused
        | ErrorKind::Consumed
        | ErrorKind::Protocol
        | ErrorKind::Version => PyBufferError::new_err(text),
        ErrorKind::Missing => PyImportError::new_err(text),
        ErrorKind::OutOfMemory => PyMemoryError::new_err(text),
        _ => PyRuntimeError::new_err(text),
    };
    exception.set_cause(py, cause);
    exception
}

/// Returns whether an exception means that the process, or the system, may open no more files.
fn is_out_of_files(py: Python<'_>, error: &PyErr) -> bool {
    let number = || error.value(py).getattr("errno")?.extract::<i32>();
    // `ENFILE` and `EMFILE` of Linux.
    error.is_instance_of::<PyOSError>(py) && number().is_ok_and(|number| matches!(number, 23 | 24))
}

/// Returns whether an exception means that a framework or the process has no memory left.
pub fn is_out_of_memory(py: Python<'_>, error: &PyErr) -> bool {
    let named = |kind: Bound<'_, PyAny>, attribute: &str, expected: &str| {
        kind.getattr(attribute).is_ok_and(|name| name.extract::<&str>().is_ok_and(|name| name == expected))
    };
    error.is_instance_of::<PyMemoryError>(py)
        || error.get_type(py).mro().iter().any(|kind| {
            OUT_OF_MEMORY.iter().any(|(module, name)| {
                named(kind.clone(), "__name__", name) && named(kind.clone(), "__module__", module)
            })
        })
        || error.value(py).is_exact_instance_of::<PyRuntimeError>()
            && error.value(py).str().is_ok_and(|text| {
                let text = text.to_string_lossy();
                NO_MEMORY.iter().any(|sign| text.contains(sign))
            })
}

/// Returns whether a probe may take the exception as an answer, and an error of ours may stand in its place. It may not
/// for what ends the program (`KeyboardInterrupt`, `SystemExit` and the like), for what depends on the moment
/// (`MemoryError`, `RecursionError`), and for what a signal handler of the program has raised, such as the
/// `TimeoutError` of one for `SIGALRM`.
pub fn is_ordinary(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyException>(py)
        && !error.is_instance_of::<PyMemoryError>(py)
        && !error.is_instance_of::<PyRecursionError>(py)
        && !handlers::has_raised(py, error)
}

/// Returns whether the cause of the error must reach the program, whatever else could be tried: see [`is_ordinary`].
pub fn is_interrupt(py: Python<'_>, error: &Error) -> bool {
    let cause = error.source().and_then(|source| source.downcast_ref::<PyErr>());
    cause.is_some_and(|cause| !is_ordinary(py, cause))
}

/// Returns the error for an object that the adapter of `framework` does not know as a tensor.
pub fn not_a_tensor(framework: &str, object: &Bound<'_, PyAny>) -> Error {
    Error::new(ErrorKind::NotATensor, format!("{} is not a tensor of {framework}", type_name(object)))
}

/// Imports the module of a framework.
///
/// # Errors
///
/// [`ErrorKind::Missing`], which names the package to install, if there is no such module or it cannot be loaded.
pub fn installed<'py>(py: Python<'py>, module: &str, package: &str) -> Result<Bound<'py, PyModule>> {
    PyModule::import(py, module).map_err(|error| {
        let text = brief_str(error.value(py));
        let (kind, text) = if error.is_instance_of::<PyImportError>(py) {
            (ErrorKind::Missing, format!("{module} cannot be imported ({text}): pip install {package}"))
        } else {
            (ErrorKind::Framework, format!("importing {module} failed: {}: {text}", type_name(error.value(py))))
        };
        Error::new(kind, text).caused_by(error)
    })
}

/// Returns the value of a probe, or `None` where it raised an ordinary exception.
///
/// # Errors
///
/// What no probe may swallow: see [`is_ordinary`].
pub fn probe<T>(py: Python<'_>, result: PyResult<T>) -> PyResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_ordinary(py, &error) => Ok(None),
        Err(error) => Err(error),
    }
}
