//! Into TensorFlow.

use crate::eager::handle::Handle;
use crate::eager::process::{Process, raised};
use crate::runtime::dtypes;
use bridge_core::planted::is_planted;
use bridge_core::{Device, Dims, Lease, Result};
use bridge_pyo3::PyTensor;
use pyo3::prelude::*;
use std::ffi::c_int;
use std::ops::Range;

/// Returns an eager tensor over the memory of a lease.
pub(crate) fn wrap<'py>(py: Python<'py>, process: &'static Process, lease: Lease) -> Result<PyTensor<'py>> {
    let (code, device) = (dtypes::required(lease.dtype())?, lease.device());
    let (mut shape, bytes) = (Dims::from(lease.layout().shape()), lease.compact_bytes());
    if is_planted("tensorflow_shape_reversed") {
        shape.reverse();
    }
    let owner = process.eager.runtime.consumer.protected.owner(lease);
    wrap_memory(py, process, device, code, &shape, bytes, owner)
}

/// Returns an eager tensor over compact memory, which `owner` keeps.
pub(crate) fn wrap_memory<'py>(
    py: Python<'py>,
    process: &'static Process,
    device: Device,
    code: c_int,
    shape: &[i64],
    bytes: Range<usize>,
    owner: impl Send + Sync + 'static,
) -> Result<PyTensor<'py>> {
    let (context, devices) = process.devices(py)?;
    let place = devices.name_of(device)?;
    // SAFETY: Python's context object keeps the context alive. The owner keeps the memory, which core has checked against
    // the profile.
    let handle = unsafe { Handle::over(&process.eager, context, place, (code, shape), bytes, owner) }?;
    eager_tensor(py, process, handle)
}

/// Returns the eager tensor for a handle.
pub(crate) fn eager_tensor<'py>(py: Python<'py>, process: &'static Process, handle: Handle) -> Result<PyTensor<'py>> {
    let raw = handle.into_raw();
    // SAFETY: the handle is ours, and handed over; the GIL is held, and the result is a new reference or null.
    unsafe {
        let object = (process.objects.from_handle)(raw, false);
        if object.is_null() {
            drop(Handle::from_raw(&process.eager, raw));
            return Err(raised(py, PyErr::fetch(py)));
        }
        Ok(Bound::from_owned_ptr(py, object))
    }
}
