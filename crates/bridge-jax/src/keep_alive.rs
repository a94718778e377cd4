//! Keeps JAX from writing to memory of others.
//!
//! A function of `jit` may overwrite the arrays that are donated to it (`donate_argnums`), and on a GPU that includes
//! views of imported memory. XLA donates no buffer that has an external reference, which an export holds: it refuses
//! the call on a GPU, and copies on the host. So an imported array holds an export of itself, unless its memory is a
//! copy, which belongs only to it.

use crate::driver::on;
use crate::runtime::Runtime;
use crate::turns::{self, in_turn};
use bridge_core::planted::is_planted;
use bridge_core::{DeviceKind, Stream};
use bridge_pyo3::{PyOwner, PyTensor, call, with_gil};
use pyo3::intern;
use pyo3::prelude::*;

/// An export of an array, as an attribute of the array. It refers to another array over the same buffer: an array that
/// referred to itself would not be dropped.
#[pyclass(frozen, module = "truebridge", name = "KeepAlive")]
struct KeepAlive {
    /// `None` only while it is being dropped.
    export: Option<PyOwner>,
    device: DeviceKind,
    runtime: &'static Runtime,
}

impl Drop for KeepAlive {
    fn drop(&mut self) {
        let (export, runtime) = (self.export.take(), self.runtime);
        let release = |py: Python<'_>| {
            export.into_iter().for_each(|export| turns::end(Box::new(export)));
            // jaxlib keeps the array of an export that is dropped, and its memory, until it next collects such arrays.
            if let Err(error) = runtime.collect.bind(py).call0() {
                error.write_unraisable(py, None);
            }
        };
        if is_planted("jax_exception_cleared") {
            // SAFETY: arrays are dropped with the GIL.
            drop(PyErr::take(unsafe { Python::assume_attached() }));
        }
        with_gil(|py| on(self.device, || release(py)));
    }
}

/// Makes an imported array one that is not donated, for as long as it lives. The stream is that which the array waits
/// for, if its device has streams.
pub(crate) fn attach(runtime: &'static Runtime, array: &PyTensor<'_>, stream: Option<Stream>) -> PyResult<()> {
    let py = array.py();
    let clone = call(array, intern!(py, "clone"), &[])?;
    let device = if stream.is_some() { DeviceKind::CUDA } else { DeviceKind::CPU };
    let export = || runtime.export.bind(py).call1((&clone, stream.map(Stream::handle)));
    let export = if stream.is_some() { in_turn(&clone, export) } else { export() };
    let export = PyOwner::new(&export?);
    array.setattr(intern!(py, "_truebridge"), Bound::new(py, KeepAlive { export: Some(export), device, runtime })?)
}
