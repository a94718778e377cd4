//! Which framework an object belongs to.

use crate::errors::{argument, is_interrupt, text};
use crate::foreign::Foreign;
use bridge_core::Result;
use bridge_frameworks::AnyAdapter;
pub(crate) use bridge_frameworks::Framework;
use bridge_pyo3::{PyAdapter, PyTensor, brief, framework_error, probe};
use bridge_tensorflow::TensorFlow1;
use pyo3::prelude::*;
use pyo3::types::PyType;
use std::cell::RefCell;
use std::ops::Deref;

/// The adapter that exports an object.
pub(crate) enum Source<'py> {
    Framework(AnyAdapter<'py>),
    /// The object belongs to none of the frameworks, and may speak a protocol.
    Foreign(Foreign<'py>),
}

impl<'py> Deref for Source<'py> {
    type Target = dyn PyAdapter<'py> + 'py;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Framework(adapter) => &**adapter,
            Self::Foreign(adapter) => adapter,
        }
    }
}

/// Returns the framework that users call `target`, a `str`.
pub(crate) fn named(target: &Bound<'_, PyAny>) -> Result<Framework> {
    let name = text(target, "a target")?;
    Framework::named(&name).ok_or_else(|| {
        let names: Vec<_> = Framework::ALL.iter().map(|known| known.name()).collect();
        argument(format!("{:?} is no target: choose one of {}", brief(&name), names.join(", ")))
    })
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
        Framework::TensorFlow1 => Ok(TensorFlow1::is_open()),
        _ => py.import("sys")?.getattr("modules")?.contains(framework.module()),
    }
}

thread_local! {
    /// Types that were seen before. They are kept alive, so that an address means one type for ever.
    static SEEN: RefCell<Vec<(Py<PyType>, Framework)>> = const { RefCell::new(Vec::new()) };
}

/// The most types that are remembered: programs that make types as they run must not fill the memory.
const TYPES_KEPT: usize = 64;

pub(crate) fn seen(object: &PyTensor<'_>) -> Option<Framework> {
    let kind = object.get_type_ptr().cast();
    SEEN.with_borrow(|seen| seen.iter().find(|(known, _)| known.as_ptr() == kind).map(|(_, framework)| *framework))
}

/// Returns whether `object` is a tensor of a framework, or an object that speaks a protocol.
pub(crate) fn is_tensor(object: &PyTensor<'_>) -> Result<bool> {
    match source(object)? {
        Source::Framework(_) => Ok(true),
        Source::Foreign(_) => Foreign::speaks(object),
    }
}

/// Returns the adapter of the framework that `object` belongs to, or the one for foreign objects.
pub(crate) fn source<'py>(object: &PyTensor<'py>) -> Result<Source<'py>> {
    let py = object.py();
    if let Some(framework) = seen(object) {
        return framework.open(py).map(Source::Framework);
    }
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
            return Ok(Source::Framework(adapter));
        }
    }
    // A tensor whose adapter fails must not pass as a foreign object: that adapter's checks would be lost.
    broken.map_or_else(|| Ok(Source::Foreign(Foreign(py))), Err)
}
