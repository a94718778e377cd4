//! Out of TensorFlow.

use crate::eager::devices::{COPY, Place, gpu_of};
use crate::eager::handle::{Handle, execute, nothing};
use crate::eager::import;
use crate::eager::process::{Process, SYMBOLIC, Shared, raised};
use crate::runtime::api::{Status, TFE_TensorHandle};
use crate::runtime::dtypes::{self, INT32, UINT8};
use crate::runtime::kernel::Tensor;
use bridge_core::{
    Access, Allocation, Device, DeviceKind, Dims, Error, ErrorKind, Layout, Lent, Memory, Result, Reuse,
};
use bridge_pyo3::{PyTensor, call, not_a_tensor};
use pyo3::{Python, intern};
use std::ffi::CStr;

pub(crate) fn lend(process: &'static Process, object: &PyTensor<'_>) -> Result<Lent> {
    if process.is_eager(object) {
        return of_eager(process, object);
    }
    if process.is_variable(object) {
        if !process.executes_eagerly(object.py())? {
            return Err(Error::new(ErrorKind::NotATensor, SYMBOLIC));
        }
        // Its current value: later assignments give the variable other memory, because this one is in use.
        let value = call(object, intern!(object.py(), "value"), &[]).map_err(|error| raised(object.py(), error))?;
        if process.is_eager(&value) {
            return of_eager(process, &value);
        }
    }
    let advice = process.refusal(object).map(|advice| Error::new(ErrorKind::NotATensor, advice));
    Err(advice.unwrap_or_else(|| not_a_tensor("tensorflow", object)))
}

fn of_eager(process: &'static Process, tensor: &PyTensor<'_>) -> Result<Lent> {
    let py = tensor.py();
    let (runtime, eager) = (process.runtime, process.runtime.eager());
    let status = Status::new(&runtime.core);
    // SAFETY: the object is an eager tensor, and keeps its handle alive; the status is ours. Here and below.
    let handle = unsafe { (process.handle_of)(tensor.as_ptr()) };
    if handle.is_null() {
        return Err(Error::new(ErrorKind::NotATensor, "this tensor of tensorflow was never filled"));
    }
    // SAFETY: see above.
    let code = unsafe { (eager.TFE_TensorHandleDataType)(handle) };
    let dtype = dtypes::dtype(code).map_err(|reason| Error::new(ErrorKind::Dtype, reason))?;
    let (_, devices) = process.devices(py)?;
    // SAFETY: see above; the name lives as long as the device.
    let name = unsafe { (eager.TFE_TensorHandleBackingDeviceName)(handle, status.raw()) };
    status.check()?;
    // SAFETY: as above.
    let name = unsafe { CStr::from_ptr(name) };
    // A cluster that was joined meanwhile has given the devices other names.
    let renamed = if devices.named(name).is_none() { Some(process.learn(py)?) } else { None };
    let place = renamed.as_ref().unwrap_or(&devices).named(name).ok_or_else(|| {
        let name = name.to_string_lossy();
        if name.contains("/device:GPU:") && !runtime.profile.private_functions {
            let version = runtime.version();
            let text = format!("the tensor is on {name}, and on a GPU TensorFlow {version} is not supported yet: use 2.12 to 2.21, or copy it to the host");
            return Error::new(ErrorKind::Version, text);
        }
        let text = format!("the tensor is on {name}, which is no device of this process: copy it to one with tf.identity under tf.device first");
        Error::new(ErrorKind::Device, text)
    })?;
    // SAFETY: the object keeps the handle.
    unsafe { wait(py, process, handle, &status) }?;
    // SAFETY: see above; the dimensions asked for are there. Where the tensor could not be made, the status says it.
    let shape: Dims = unsafe {
        let ndim = (eager.TFE_TensorHandleNumDims)(handle, status.raw());
        (0..ndim).map(|i| (eager.TFE_TensorHandleDim)(handle, i, status.raw())).collect()
    };
    status.check()?;
    let layout = Layout::new(dtype, &shape, None, 0)?;
    let address = memory(process, handle, &status)?;
    // SAFETY: see above; the reference that comes back is ours.
    let owner = unsafe {
        let copy = (eager.TFE_TensorHandleCopySharingTensor)(handle, status.raw());
        status.check()?;
        Handle::from_raw(runtime, copy).ok_or_else(nothing)?
    };
    let bytes = address..address + layout.nbytes();
    let read_only = process.runtime.consumer.read_only.contains(address);
    let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
    // TensorFlow keeps most tensors of int32 in host memory, also where it names a GPU.
    let is_on_gpu = || Ok(code != INT32 || bytes.is_empty() || gpu_of(address)?.is_some());
    let (device, stream, reuse) = match place {
        Place::Gpu(gpu) if is_on_gpu()? => (Device::cuda(gpu.ordinal), Some(gpu.stream), Reuse::Unknown),
        _ => (Device::CPU, None, Reuse::InStreamOrder),
    };
    // SAFETY: the handle keeps the memory; TensorFlow says what it is and where, and works on it in the one stream of the
    // device.
    let memory = unsafe { Memory::new(Allocation { bytes, device, access, stream, reuse }, owner) };
    Lent::new(dtype, layout, Box::new(memory))
}

/// Waits until an asynchronous executor has made the tensor; elsewhere it has been made. What went wrong then is in the
/// status of the next call.
///
/// # Safety
///
/// The handle is alive, and on a device of this process.
unsafe fn wait(py: Python<'_>, process: &Process, handle: *mut TFE_TensorHandle, status: &Status<'_>) -> Result<()> {
    // SAFETY: a handle on a device of this process is a local `TensorHandle`.
    if process.runtime.cxx.is_ready.is_some_and(|is_ready| unsafe { is_ready(handle) }) {
        return Ok(());
    }
    let (shared, raw) = (Shared(handle), Shared(status.raw()));
    // The executor may need the GIL.
    // SAFETY: the handle is alive.
    py.detach(|| unsafe { (process.runtime.eager().TFE_TensorHandleDeviceMemorySize)(shared.get(), raw.get()) });
    status.check()
}

/// The address of a handle that is ready.
fn memory(process: &Process, handle: *mut TFE_TensorHandle, status: &Status<'_>) -> Result<usize> {
    let (eager, tensor) = (process.runtime.eager(), process.runtime.cxx.tensor);
    // SAFETY: a handle on a device of this process is a local `TensorHandle`, as TensorFlow's own functions take it, and
    // the tensor has been made.
    if let Some(address) = tensor.and_then(|functions| unsafe { functions.address(handle) }) {
        return Ok(address);
    }
    // SAFETY: the handle is alive. This waits for the device.
    let address = unsafe { (eager.TFE_TensorHandleDevicePointer)(handle, status.raw()) };
    status.check()?;
    Ok(address.addr())
}

pub(crate) fn compact<'py>(process: &'static Process, object: &PyTensor<'py>) -> Result<PyTensor<'py>> {
    let (py, lent) = (object.py(), lend(process, object)?);
    match lent.device().kind {
        DeviceKind::CUDA => copy_on_device(py, process, lent),
        _ => copy_on_host(py, process, &lent),
    }
}

fn copy_on_host<'py>(py: Python<'py>, process: &'static Process, lent: &Lent) -> Result<PyTensor<'py>> {
    let code = dtypes::code(lent.dtype()).expect("what was lent has a code");
    let copy = Tensor::allocate(&process.runtime.core, code, lent.layout().shape(), lent.layout().nbytes())?;
    // SAFETY: what is lent is compact host memory of that many bytes, and ready; nobody else has the copy.
    unsafe { copy.write(lent.data() as *const u8, lent.layout().nbytes()) };
    import::eager_tensor(py, process, copy.into_handle(process.runtime)?)
}

/// As bytes, because few operations take every dtype.
fn copy_on_device<'py>(py: Python<'py>, process: &'static Process, lent: Lent) -> Result<PyTensor<'py>> {
    let code = dtypes::code(lent.dtype()).expect("what was lent has a code");
    let (device, shape, start) = (lent.device(), Dims::from(lent.layout().shape()), lent.data());
    let nbytes = lent.layout().nbytes();
    if nbytes == 0 {
        return import::wrap_memory(py, process, device, code, &shape, 0..0, Box::new(()));
    }
    if !start.is_multiple_of(process.profile.alignment) {
        let text = "tensorflow ends the process when it copies a tensor at an unaligned address: copy it with the framework that made it";
        return Err(Error::new(ErrorKind::Layout, text));
    }
    let (context, devices) = process.devices(py)?;
    let name = import::place(&devices, device)?;
    let bytes = import::handle(process, context, name, UINT8, &[nbytes as i64], start..start + nbytes, Box::new(lent))?;
    let status = Status::new(&process.runtime.core);
    // SAFETY: Python's context object keeps the context alive; the copy is ours, and on the device.
    let copy = unsafe {
        let copy = execute(process.runtime, context, COPY, name, &bytes, &[(c"T", UINT8)])?;
        wait(py, process, copy.raw(), &status)?;
        copy
    };
    let start = memory(process, copy.raw(), &status)?;
    import::wrap_memory(py, process, device, code, &shape, start..start + nbytes, Box::new(copy))
}
