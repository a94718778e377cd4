//! The table of frameworks, and which of them an object belongs to.

use crate::errors::{argument, is_interrupt, text};
use crate::foreign::Foreign;
use bridge_core::Result;
use bridge_cupy::CuPy;
use bridge_numpy::NumPy;
use bridge_pyo3::{PyAdapter, PyTensor, brief, framework_error, probe};
use bridge_tensorflow::{TensorFlow1, TensorFlow2};
use bridge_torch::Torch;
use pyo3::prelude::*;
use pyo3::types::PyType;
use std::cell::RefCell;
use std::ops::Deref;

/// The adapter of one of the frameworks.
pub(crate) enum AnyAdapter<'py> {
    Torch(Torch<'py>),
    CuPy(CuPy<'py>),
    NumPy(NumPy<'py>),
    TensorFlow2(TensorFlow2<'py>),
    TensorFlow1(TensorFlow1<'py>),
    Foreign(Foreign<'py>),
}

impl<'py> Deref for AnyAdapter<'py> {
    type Target = dyn PyAdapter<'py> + 'py;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Torch(adapter) => adapter,
            Self::CuPy(adapter) => adapter,
            Self::NumPy(adapter) => adapter,
            Self::TensorFlow2(adapter) => adapter,
            Self::TensorFlow1(adapter) => adapter,
            Self::Foreign(adapter) => adapter,
        }
    }
}

type Open = for<'py> fn(Python<'py>) -> Result<AnyAdapter<'py>>;

/// A framework.
struct Entry {
    /// What users call it.
    name: &'static str,
    /// The module that the types of its tensors are in, or below.
    module: &'static str,
    open: Open,
}

const FRAMEWORKS: &[Entry] = &[
    Entry { name: "torch", module: "torch", open: |py| Torch::new(py).map(AnyAdapter::Torch) },
    Entry { name: "cupy", module: "cupy", open: |py| CuPy::new(py).map(AnyAdapter::CuPy) },
    Entry { name: "numpy", module: "numpy", open: |py| NumPy::new(py).map(AnyAdapter::NumPy) },
    Entry { name: "tensorflow", module: "tensorflow", open: |py| TensorFlow2::new(py).map(AnyAdapter::TensorFlow2) },
    Entry {
        name: "tensorflow1",
        module: "tensor_bridge.tensorflow1",
        open: |py| TensorFlow1::new(py).map(AnyAdapter::TensorFlow1),
    },
];

/// An entry of the table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Framework(usize);

impl Framework {
    pub(crate) const TORCH: Framework = Framework(0);
    pub(crate) const CUPY: Framework = Framework(1);
    pub(crate) const NUMPY: Framework = Framework(2);
    pub(crate) const TENSORFLOW: Framework = Framework(3);
    const TENSORFLOW1: Framework = Framework(4);

    /// The framework that users call `target`, a `str`.
    pub(crate) fn named(target: &Bound<'_, PyAny>) -> Result<Self> {
        let name = text(target, "a target")?;
        let known = FRAMEWORKS.iter().position(|known| known.name == name);
        known.map(Self).ok_or_else(|| {
            let names: Vec<_> = FRAMEWORKS.iter().map(|known| known.name).collect();
            argument(format!("{:?} is no target: choose one of {}", brief(&name), names.join(", ")))
        })
    }

    /// Its adapter; imports the framework.
    pub(crate) fn open(self, py: Python<'_>) -> Result<AnyAdapter<'_>> {
        (FRAMEWORKS[self.0].open)(py)
    }

    /// Whether the type of the object, or one that it extends, comes from this framework's modules.
    fn names(self, object: &PyTensor<'_>) -> PyResult<bool> {
        let py = object.py();
        let ours = |name: &str| {
            let below = name.strip_prefix(FRAMEWORKS[self.0].module);
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

    /// Whether the program has imported it, or opened it: before that no object can belong to it.
    fn is_loaded(self, py: Python<'_>) -> PyResult<bool> {
        match self == Self::TENSORFLOW1 {
            true => Ok(TensorFlow1::is_open()),
            false => py.import("sys")?.getattr("modules")?.contains(FRAMEWORKS[self.0].module),
        }
    }
}

thread_local! {
    /// Types that were seen before. They are kept alive, so that an address means one type for ever.
    static SEEN: RefCell<Vec<(Py<PyType>, Framework)>> = const { RefCell::new(Vec::new()) };
}

/// More types than this are not remembered: programs that make types as they go must not fill the memory.
const TYPES_KEPT: usize = 64;

fn seen(object: &PyTensor<'_>) -> Option<Framework> {
    let kind = object.get_type_ptr().cast();
    SEEN.with_borrow(|seen| seen.iter().find(|(known, _)| known.as_ptr() == kind).map(|(_, framework)| *framework))
}

/// The adapter for the framework that `object` belongs to; the one for DLPack producers if none knows it.
pub(crate) fn source<'py>(object: &PyTensor<'py>) -> Result<AnyAdapter<'py>> {
    let py = object.py();
    if let Some(framework) = seen(object) {
        return framework.open(py);
    }
    let mut broken = None;
    let raised = |error| framework_error(py, "Python", error);
    for framework in (0..FRAMEWORKS.len()).map(Framework) {
        if !framework.is_loaded(py).map_err(raised)? {
            continue;
        }
        let adapter = match framework.open(py) {
            Ok(adapter) => adapter,
            Err(error) if is_interrupt(py, &error) => return Err(error),
            Err(error) => {
                if framework.names(object).map_err(raised)? {
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
            return Ok(adapter);
        }
    }
    // A tensor of a framework whose adapter fails must not slip past that adapter's checks as a mere producer.
    broken.map_or_else(|| Ok(AnyAdapter::Foreign(Foreign(py))), Err)
}
