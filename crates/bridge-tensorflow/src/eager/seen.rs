//! What TensorFlow says of a handle.

use crate::eager::devices::Place;
use crate::eager::functions::{EagerRuntime, TFE_TensorHandle};
use crate::eager::handle::Handle;
use crate::runtime::dtypes::{self, INT32};
use crate::runtime::gpus::gpu_of;
use crate::runtime::status::Status;
use crate::runtime::tensor::no_tensor;
use bridge_core::{
    Access, Allocation, DType, Device, Dims, Error, ErrorKind, Export, Layout, Memory, Result, Reuse, Stream,
};
use std::ffi::CStr;

/// A handle, and what TensorFlow says of its tensor.
pub(crate) struct Seen {
    eager: &'static EagerRuntime,
    /// The caller keeps it.
    handle: *mut TFE_TensorHandle,
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
    pub(crate) address: usize,
    pub(crate) access: Access,
    pub(crate) device: Device,
    /// `None` for host memory.
    pub(crate) stream: Option<Stream>,
    /// For the calls that follow.
    status: Status<'static>,
}

impl Seen {
    /// Looks at a handle. `place` returns the device with a full name, and `wait` waits until the tensor has been made.
    ///
    /// # Safety
    ///
    /// The handle is alive as long as the result. `place` accepts only the names of devices of this process.
    pub(crate) unsafe fn of(
        eager: &'static EagerRuntime,
        handle: *mut TFE_TensorHandle,
        place: impl FnOnce(&CStr) -> Result<Place>,
        wait: impl FnOnce(&Status<'_>) -> Result<()>,
    ) -> Result<Self> {
        let (runtime, functions) = (eager.runtime, &eager.functions);
        let status = Status::new(&runtime.core);
        // SAFETY: the handle is alive (the caller's obligation), here and below; the status is ours.
        let code = unsafe { (functions.TFE_TensorHandleDataType)(handle) };
        let dtype = dtypes::dtype(code).map_err(|reason| Error::new(ErrorKind::Dtype, reason))?;
        // SAFETY: see above; the name lives as long as the device.
        let name = unsafe { (functions.TFE_TensorHandleBackingDeviceName)(handle, status.raw()) };
        status.check()?;
        // SAFETY: as above.
        let gpu = place(unsafe { CStr::from_ptr(name) })?;
        wait(&status)?;
        // SAFETY: the handle is alive, local to the process, and its tensor has been made.
        let (shape, address) = unsafe { read(eager, handle, &status) }?;
        let layout = Layout::new(dtype, &shape, None, 0)?;
        let access = runtime.consumer.protected.access(address, Access::Immutable);
        // TensorFlow keeps most tensors of int32 in host memory, even if it names a GPU.
        let is_on_gpu = || Ok::<_, Error>(code != INT32 || layout.nbytes() == 0 || gpu_of(address)?.is_some());
        let (device, stream) = match gpu {
            Some((device, stream)) if is_on_gpu()? => (device, Some(stream)),
            _ => (Device::CPU, None),
        };
        Ok(Self { eager, handle, dtype, layout, address, access, device, stream, status })
    }

    /// Exports the tensor.
    pub(crate) fn export(self) -> Result<Export> {
        let Self { eager, handle, dtype, layout, address, access, device, stream, status } = self;
        // SAFETY: the handle is alive, and the status is ours; the returned reference is ours.
        let owner = unsafe {
            let copy = (eager.functions.TFE_TensorHandleCopySharingTensor)(handle, status.raw());
            status.check()?;
            Handle::from_raw(eager, copy).ok_or_else(no_tensor)?
        };
        let bytes = address..address + layout.nbytes();
        let reuse = if stream.is_some() { Reuse::Unknown } else { Reuse::InStreamOrder };
        // SAFETY: the handle keeps the memory, dtype and device are what TensorFlow reports, and TensorFlow works on it
        // in the one stream of the device.
        let memory = unsafe { Memory::new(Allocation::new(bytes, device, access, stream, reuse), owner) };
        Export::new(dtype, layout, memory)
    }
}

/// Returns the shape of a handle, and the address of its memory. If the tensor could not be made, that is the error.
///
/// # Safety
///
/// The handle is alive, on a device of this process, and its tensor has been made.
pub(crate) unsafe fn read(
    eager: &EagerRuntime,
    handle: *mut TFE_TensorHandle,
    status: &Status<'_>,
) -> Result<(Dims, usize)> {
    // SAFETY: a handle on a device of this process is a local `TensorHandle`, as TensorFlow's own functions take it; the
    // rest is the caller's obligation.
    if let Some(read) = eager.handles.tensor.and_then(|functions| unsafe { functions.read(handle) }) {
        return Ok(read);
    }
    // SAFETY: the handle is alive, here and below.
    let shape = unsafe { shape(eager, handle, status) }?;
    // SAFETY: see above. This waits for the device.
    let address = unsafe { (eager.functions.TFE_TensorHandleDevicePointer)(handle, status.raw()) };
    status.check()?;
    Ok((shape, address.expose_provenance()))
}

/// Returns the shape of a handle.
///
/// # Safety
///
/// The handle is alive.
pub(crate) unsafe fn shape(eager: &EagerRuntime, handle: *mut TFE_TensorHandle, status: &Status<'_>) -> Result<Dims> {
    let functions = &eager.functions;
    // SAFETY: the caller's obligation; the dimensions are in range.
    let shape = unsafe {
        let ndim = (functions.TFE_TensorHandleNumDims)(handle, status.raw());
        (0..ndim).map(|i| (functions.TFE_TensorHandleDim)(handle, i, status.raw())).collect()
    };
    status.check().map(|()| shape)
}

/// Returns whether an asynchronous executor has made the tensor; without one it has been made.
///
/// # Safety
///
/// The handle is alive, and on a device of this process.
pub(crate) unsafe fn is_ready(eager: &EagerRuntime, handle: *mut TFE_TensorHandle) -> bool {
    // SAFETY: a handle on a device of this process is a local `TensorHandle`.
    eager.handles.is_ready.is_some_and(|is_ready| unsafe { is_ready(handle) })
}

/// Waits until the tensor has been made. If it could not be made, the status reports it.
///
/// # Safety
///
/// As for [`is_ready`].
pub(crate) unsafe fn wait(eager: &EagerRuntime, handle: *mut TFE_TensorHandle, status: &Status<'_>) -> Result<()> {
    // SAFETY: the caller's obligation.
    unsafe {
        if !is_ready(eager, handle) {
            (eager.functions.TFE_TensorHandleDeviceMemorySize)(handle, status.raw());
        }
    }
    status.check()
}
