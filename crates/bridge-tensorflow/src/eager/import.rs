//! Into TensorFlow.

use crate::eager::functions::TFE_Context;
use crate::eager::handle::Handle;
use crate::eager::process::{Process, raised};
use crate::runtime::dtypes;
use crate::runtime::read_only;
use crate::runtime::release::handed_over;
use crate::runtime::status::Status;
use crate::runtime::tensor::no_tensor;
use bridge_core::{Device, Dims, Lease, Result};
use bridge_pyo3::PyTensor;
use pyo3::prelude::*;
use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;

/// Returns an eager tensor over the memory of a lease.
pub(crate) fn wrap<'py>(py: Python<'py>, process: &'static Process, lease: Lease) -> Result<PyTensor<'py>> {
    let (code, device) = (dtypes::required(lease.dtype())?, lease.device());
    let (shape, bytes) = (Dims::from(lease.layout().shape()), read_only::bytes(&lease));
    let owner = process.eager.runtime.consumer.read_only.owner(lease);
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
    let handle = handle(process, context, devices.name_of(device)?, code, shape, bytes, owner)?;
    eager_tensor(py, process, handle)
}

/// Returns the eager tensor for a handle.
pub(crate) fn eager_tensor<'py>(py: Python<'py>, process: &'static Process, handle: Handle) -> Result<PyTensor<'py>> {
    let raw = handle.into_raw();
    // SAFETY: the handle is ours, and handed over; the GIL is held, and the result is a new reference or null.
    unsafe {
        let object = (process.eager.from_handle)(raw, false);
        if object.is_null() {
            drop(Handle::from_raw(&process.eager, raw));
            return Err(raised(py, PyErr::fetch(py)));
        }
        Ok(Bound::from_owned_ptr(py, object))
    }
}

/// Returns a handle over compact memory. TensorFlow drops the owner when the last use of the memory is in its stream,
/// and also on errors.
pub(crate) fn handle(
    process: &'static Process,
    context: *mut TFE_Context,
    place: &CStr,
    code: c_int,
    shape: &[i64],
    bytes: Range<usize>,
    owner: impl Send + Sync + 'static,
) -> Result<Handle> {
    let status = Status::new(&process.eager.runtime.core);
    // TensorFlow checks the alignment of empty memory, too.
    let (release, argument) = handed_over(owner);
    let address = if bytes.is_empty() { process.profile.alignment } else { bytes.start };
    // SAFETY: the context is alive, the name and the shape too; the memory is compact, of the length that shape and
    // dtype need, and kept by the owner. TensorFlow calls the deleter once, also where it makes no handle.
    unsafe {
        let raw = (process.eager.functions.TFE_NewTensorHandleFromDeviceMemory)(
            context,
            place.as_ptr(),
            code,
            shape.as_ptr(),
            shape.len() as c_int,
            address as *mut c_void,
            bytes.len(),
            release,
            argument,
            status.raw(),
        );
        status.check()?;
        Handle::from_raw(&process.eager, raw).ok_or_else(no_tensor)
    }
}
