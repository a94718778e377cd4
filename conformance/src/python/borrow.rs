//! Borrows as Python sees them, for tests and the bench: authors of kernels call [`borrow`] from Rust.

use bridge_core::Error;
use bridge_frameworks::borrow;
use bridge_pyo3::PyTensor;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::hint::black_box;
use std::time::Instant;

/// Returns what a borrow of a tensor says.
#[pyfunction]
pub(crate) fn borrowed<'py>(tensor: &PyTensor<'py>) -> PyResult<Bound<'py, PyDict>> {
    let borrowed = borrow(tensor).map_err(refused)?;
    let said = PyDict::new(tensor.py());
    said.set_item("data", borrowed.as_ptr::<u8>().addr())?;
    said.set_item("dtype", borrowed.dtype().to_string())?;
    said.set_item("shape", borrowed.shape())?;
    said.set_item("strides", borrowed.strides())?;
    said.set_item("device", borrowed.device().to_string())?;
    said.set_item("read_only", borrowed.is_read_only())?;
    said.set_item("stream", borrowed.stream().map(|stream| stream.handle()))?;
    Ok(said)
}

/// Returns the nanoseconds that a borrow of a tensor takes, as the mean of `count` borrows.
#[pyfunction]
pub(crate) fn borrow_ns(tensor: &PyTensor<'_>, count: u32) -> PyResult<f64> {
    let start = Instant::now();
    for _ in 0..count {
        drop(black_box(borrow(black_box(tensor)).map_err(refused)?));
    }
    Ok(start.elapsed().as_nanos() as f64 / f64::from(count.max(1)))
}

fn refused(error: Error) -> PyErr {
    PyRuntimeError::new_err(format!("{:?}: {error}", error.kind()))
}
