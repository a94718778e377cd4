//! Into TensorFlow.

use crate::eager::devices::{Devices, HOST};
use crate::eager::handle::{Handle, nothing};
use crate::eager::process::{Process, raised};
use crate::graph::external::{bytes, imported};
use crate::runtime::api::{Status, TFE_Context};
use crate::runtime::dtypes;
use crate::runtime::release::{Owner, into_raw, release};
use bridge_core::{Device, DeviceKind, Dims, Error, ErrorKind, Lease, Result};
use bridge_pyo3::PyTensor;
use pyo3::prelude::*;
use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;

pub(crate) fn wrap<'py>(py: Python<'py>, process: &'static Process, lease: Lease) -> Result<PyTensor<'py>> {
    let code = dtypes::code(lease.dtype())
        .ok_or_else(|| Error::new(ErrorKind::Dtype, format!("tensorflow has no dtype {}", lease.dtype())))?;
    let (device, shape, bytes) = (lease.device(), Dims::from(lease.layout().shape()), bytes(&lease));
    wrap_memory(py, process, device, code, &shape, bytes, imported(process.runtime, lease))
}

/// An eager tensor over compact memory, which `owner` keeps.
pub(crate) fn wrap_memory<'py>(
    py: Python<'py>,
    process: &'static Process,
    device: Device,
    code: c_int,
    shape: &[i64],
    bytes: Range<usize>,
    owner: Owner,
) -> Result<PyTensor<'py>> {
    let (context, devices) = process.devices(py)?;
    let handle = handle(process, context, place(&devices, device)?, code, shape, bytes, owner)?;
    eager_tensor(py, process, handle)
}

/// The handle as an eager tensor.
pub(crate) fn eager_tensor<'py>(py: Python<'py>, process: &'static Process, handle: Handle) -> Result<PyTensor<'py>> {
    let raw = handle.into_raw();
    // SAFETY: the handle is ours and given away; the GIL is held, and the result is a new reference or null.
    unsafe {
        let object = (process.from_handle)(raw, false);
        if object.is_null() {
            drop(Handle::from_raw(process.runtime, raw));
            return Err(raised(py, PyErr::fetch(py)));
        }
        Ok(Bound::from_owned_ptr(py, object))
    }
}

/// TensorFlow's name of a device.
pub(crate) fn place(devices: &Devices, device: Device) -> Result<&CStr> {
    match device.kind {
        DeviceKind::CUDA => Ok(&devices.gpu(device)?.name),
        _ => Ok(HOST),
    }
}

/// A handle of the eager runtime over compact memory. The owner is dropped when TensorFlow needs the memory no more,
/// which is when its last use is in the stream, and also on errors.
pub(crate) fn handle(
    process: &'static Process,
    context: *mut TFE_Context,
    place: &CStr,
    code: c_int,
    shape: &[i64],
    bytes: Range<usize>,
    owner: Owner,
) -> Result<Handle> {
    let status = Status::new(&process.runtime.core);
    // Memory of no bytes may be anywhere, but TensorFlow looks at its alignment all the same.
    let address = if bytes.is_empty() { process.profile.alignment } else { bytes.start };
    // SAFETY: the context is alive, the name and the shape too; the memory is compact, of the length that shape and
    // dtype need, and kept by the owner. TensorFlow calls `release` once with it, also where it makes no handle.
    unsafe {
        let raw = (process.runtime.eager().TFE_NewTensorHandleFromDeviceMemory)(
            context,
            place.as_ptr(),
            code,
            shape.as_ptr(),
            shape.len() as c_int,
            address as *mut c_void,
            bytes.len(),
            release,
            into_raw(owner),
            status.raw(),
        );
        status.check()?;
        Handle::from_raw(process.runtime, raw).ok_or_else(nothing)
    }
}
