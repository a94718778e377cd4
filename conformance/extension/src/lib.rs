//! The extension module of the suite. It is a package of its own because cargo gives a library for Python no name that
//! says how it was built: beside it in one package, the library for Rust has none either, and builds with other features
//! would overwrite it.

use pyo3::prelude::*;

/// The native half of `truebridge_conformance`. `_conformance.pyi` describes it for Python.
#[pymodule(gil_used = true)]
#[pyo3(name = "_conformance")]
fn extension(module: &Bound<'_, PyModule>) -> PyResult<()> {
    conformance::python::fill(module)
}
