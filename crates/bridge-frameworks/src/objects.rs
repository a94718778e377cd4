//! Which framework an object belongs to.

use crate::unsupported::no_tensor;
use crate::{AnyAdapter, Framework, Protocol};
use bridge_core::Result;
use bridge_pyo3::{Borrowed, PyTensor, framework_error, is_interrupt, probe};
use pyo3::prelude::*;
use pyo3::types::PyType;
use std::cell::RefCell;

/// Borrows a tensor of any framework, or an object that speaks a protocol, for the length of a call: see [`Borrowed`].
///
/// The borrow of an object that speaks a protocol calls its `__dlpack__`, and costs what that does. Its stream on a CUDA
/// device is the legacy default stream: do not write to its memory, because the producer's own streams do not wait.
///
/// # Errors
///
/// [`NotATensor`](bridge_core::ErrorKind::NotATensor) for any other object, and those of
/// [`PyAdapter::borrow`](bridge_pyo3::PyAdapter::borrow).
pub fn borrow<'a>(object: &'a PyTensor<'_>) -> Result<Borrowed<'a>> {
    match seen(object) {
        Some(framework) => framework.open(object.py())?.borrow(object),
        None => adapter_of(object)?.ok_or_else(|| no_tensor(object))?.borrow(object),
    }
}

/// Returns the adapter of the framework that `object` belongs to, or else [`Protocol`] for an object that speaks a
/// protocol. `None` for any other object, also for a tensor of a framework that the program has not imported.
///
/// # Errors
///
/// Those of an adapter that fails, where the object comes from the modules of its framework; what Python raises.
pub fn adapter_of<'py>(object: &PyTensor<'py>) -> Result<Option<AnyAdapter<'py>>> {
    if let Some(framework) = seen(object) {
        return framework.open(object.py()).map(Some);
    }
    match owner_of(object)? {
        None if Protocol::speaks(object)? => Ok(Some(AnyAdapter::Protocol(Protocol::new(object)))),
        owner => Ok(owner),
    }
}

/// Returns the adapter that exports an object: that of [`adapter_of`], and [`Protocol`] for a scalar of NumPy, whose
/// value a caller wants who passes it by itself.
///
/// # Errors
///
/// [`NotATensor`](bridge_core::ErrorKind::NotATensor) for any other object, with what to pass instead; those of
/// [`adapter_of`].
pub fn source_of<'py>(object: &PyTensor<'py>) -> Result<AnyAdapter<'py>> {
    match adapter_of(object)? {
        Some(adapter) => Ok(adapter),
        None if Protocol::is_value(object)? => Ok(AnyAdapter::Protocol(Protocol::new(object))),
        None => Err(no_tensor(object)),
    }
}

/// Returns the adapter of the framework that `object` belongs to, whose type was not seen before.
fn owner_of<'py>(object: &PyTensor<'py>) -> Result<Option<AnyAdapter<'py>>> {
    let py = object.py();
    let mut broken = None;
    let raised = |error| framework_error(py, "Python", error);
    for &framework in Framework::ALL {
        if !is_loaded(framework, py).map_err(raised)? {
            continue;
        }
        let adapter = match framework.open(py) {
            Ok(adapter) => adapter,
            Err(error) if is_interrupt(py, &error) => return Err(error),
            Err(error) => {
                if names(framework, object).map_err(raised)? {
                    broken.get_or_insert(error);
                }
                continue;
            }
        };
        if adapter.owns(object) {
            let kind = object.get_type().unbind();
            SEEN.with_borrow_mut(|seen| {
                if seen.len() < TYPES_KEPT {
                    seen.push((kind, framework))
                }
            });
            return Ok(Some(adapter));
        }
    }
    // A tensor whose adapter fails must not pass as a object known by a protocol: that adapter's checks would be lost.
    broken.map_or(Ok(None), Err)
}

/// Returns whether the type of the object, or one that it extends, comes from the modules of `framework`.
fn names(framework: Framework, object: &PyTensor<'_>) -> PyResult<bool> {
    let py = object.py();
    let ours = |name: &str| {
        let below = name.strip_prefix(framework.module());
        below.is_some_and(|below| below.is_empty() || below.starts_with('.'))
    };
    for kind in object.get_type().mro() {
        let module = kind.getattr("__module__").and_then(|module| module.extract::<String>());
        if probe(py, module)?.is_some_and(|module| ours(&module)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns whether the program has imported or opened `framework`: before that no object can belong to it.
fn is_loaded(framework: Framework, py: Python<'_>) -> PyResult<bool> {
    match framework {
        #[cfg(feature = "tensorflow")]
        Framework::TensorFlow1 => Ok(bridge_tensorflow::TensorFlow1::is_open()),
        _ => py.import("sys")?.getattr("modules")?.contains(framework.module()),
    }
}

thread_local! {
    /// Types that were seen before. They are kept alive, so that an address means one type for ever.
    static SEEN: RefCell<Vec<(Py<PyType>, Framework)>> = const { RefCell::new(Vec::new()) };
}

/// The most types that are remembered: programs that make types as they run must not fill the memory.
const TYPES_KEPT: usize = 64;

/// Returns the framework of a tensor whose type [`adapter_of`] has met before, at the cost of a few nanoseconds.
pub fn seen(object: &PyTensor<'_>) -> Option<Framework> {
    let kind = object.get_type_ptr().cast();
    SEEN.with_borrow(|seen| seen.iter().find(|(known, _)| known.as_ptr() == kind).map(|(_, framework)| *framework))
}
