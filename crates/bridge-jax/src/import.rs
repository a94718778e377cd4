//! Imports leases as arrays of JAX.

use crate::devices::raised;
use crate::driver::on;
use crate::keep_alive;
use crate::runtime::Runtime;
use bridge_core::dlpack::describe_as;
use bridge_core::planted::is_planted;
use bridge_core::{Consumer, Dims, Layout, Lease, Result, Stream};
use bridge_pyo3::{PyTensor, legacy_capsule};
use pyo3::Python;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyTuple};
use std::sync::Arc;

/// Returns an array over the memory of a lease. JAX drops the lease when the last computation that reads it is done, on
/// any thread.
pub(crate) fn wrap<'py>(py: Python<'py>, runtime: &'static Runtime, lease: Lease) -> Result<PyTensor<'py>> {
    let (dtype, device, data) = (lease.dtype(), lease.device(), lease.data());
    // Strides of dimensions of length 1 mean nothing, but `numpy.asarray` copies an array with odd ones, once for all.
    let layout = Layout::new(dtype, lease.layout().shape(), None, 0)?;
    let of_jax = runtime.device(py, device)?;
    if layout.numel() == 0 {
        return empty(py, &lease, &of_jax).map_err(|error| raised(py, error));
    }
    let stream = runtime.consumer.current_stream(device)?;
    let is_copy = lease.is_copy();
    let owner = Arc::new(runtime.protected.owner(lease));
    if is_planted("jax_lease_leaked") {
        std::mem::forget(Arc::clone(&owner));
    }
    // SAFETY: this is what the lease says, which the owner keeps.
    let managed = unsafe { describe_as(dtype, &layout, device, data, false, owner) };
    // Without a copy: jaxlib would make one, of memory that is not aligned, on the host.
    let import = || {
        let capsule = legacy_capsule(py, managed)?;
        let array = runtime.import.bind(py).call1((capsule, of_jax, stream.map(Stream::handle), false))?;
        if !is_copy {
            keep_alive::attach(runtime, &array, stream).inspect_err(|_| {
                if is_planted("jax_failed_import_kept") {
                    std::mem::forget(array.clone());
                }
            })?;
        }
        Ok(array)
    };
    on(device.kind, import).map_err(|error| raised(py, error))
}

/// Returns an array without elements. Those of a lease may have any address, which jaxlib would refuse.
fn empty<'py>(py: Python<'py>, lease: &Lease, device: &PyTensor<'py>) -> PyResult<PyTensor<'py>> {
    let shape: Dims = lease.layout().shape().into();
    let keywords = [("dtype", lease.dtype().to_string())].into_py_dict(py)?;
    keywords.set_item("device", device)?;
    py.import("jax")?.getattr("numpy")?.call_method("zeros", (PyTuple::new(py, shape.iter())?,), Some(&keywords))
}
