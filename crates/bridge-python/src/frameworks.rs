//! Which framework an object belongs to.

use crate::errors::{argument, text};
use bridge_core::Result;
pub(crate) use bridge_frameworks::{AnyAdapter, Framework, adapter_of, seen};
use bridge_frameworks::{Foreign, Source};
use bridge_pyo3::{PyTensor, brief};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Returns the framework that users call `target`, a `str`.
pub(crate) fn named(target: &Bound<'_, PyAny>) -> Result<Framework> {
    let name = text(target, "a target")?;
    Framework::named(&name).ok_or_else(|| {
        let names: Vec<_> = Framework::ALL.iter().map(|known| known.name()).collect();
        argument(format!("{:?} is no target: choose one of {}", brief(&name), names.join(", ")))
    })
}

/// Returns the names of the frameworks that Python imports, in an order in which all can be imported.
pub(crate) fn importable(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
    let packages = Framework::ALL.iter().filter(|known| matches!(known.source(), Source::Distributions(_)));
    PyTuple::new(py, packages.map(|known| known.name()).collect::<Vec<_>>())
}

/// Returns the adapter that exports an object. What is no tensor it refuses then, but for NumPy's scalars: a caller who
/// names one wants its value.
pub(crate) fn source<'py>(object: &PyTensor<'py>) -> Result<AnyAdapter<'py>> {
    Ok(adapter_of(object)?.unwrap_or_else(|| AnyAdapter::Foreign(Foreign::new(object))))
}
