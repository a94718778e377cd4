//! The extension module of the suite.

use pyo3::prelude::*;

/// The native half of `truebridge_conformance`. `_conformance.pyi` describes it for Python.
#[pymodule(gil_used = true)]
#[pyo3(name = "_conformance")]
fn extension(module: &Bound<'_, PyModule>) -> PyResult<()> {
    bridge_conformance::python::fill(module)
}
