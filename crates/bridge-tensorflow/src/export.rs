//! Out of TensorFlow.

use crate::api::Status;
use crate::devices::{Gpu, Handle, execute};
use crate::dtypes::{INT32, UINT8, dtype};
use crate::import;
use crate::process::{Process, Shared, raised};
use bridge_core::{
    Access, Consumer, Device, DeviceKind, Dims, Error, ErrorKind, Layout, Lent, Memory, Result, Reuse, Views,
};
use bridge_pyo3::{PyTensor, call, not_a_tensor};
use pyo3::intern;
use std::ffi::CStr;

pub(crate) fn lend(process: &'static Process, object: &PyTensor<'_>) -> Result<Lent> {
    if process.is_eager(object) {
        return of_eager(process, object);
    }
    if process.is_variable(object) {
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
    let (runtime, eager) = (process.runtime, &process.runtime.eager);
    let status = Status::new(&runtime.core);
    // SAFETY: the object is an eager tensor, and keeps its handle alive; the status is ours. Here and below.
    let handle = unsafe { (process.handle_of)(tensor.as_ptr()) };
    if handle.is_null() {
        return Err(Error::new(ErrorKind::NotATensor, "this tensor of tensorflow was never filled"));
    }
    // SAFETY: see above.
    let code = unsafe { (eager.TFE_TensorHandleDataType)(handle) };
    let dtype = dtype(code).map_err(|reason| Error::new(ErrorKind::Dtype, reason))?;
    let (_, devices) = process.devices(py)?;
    // SAFETY: see above; the name lives as long as the device.
    let name = unsafe { (eager.TFE_TensorHandleBackingDeviceName)(handle, status.raw()) };
    status.check()?;
    // SAFETY: as above.
    let name = unsafe { CStr::from_ptr(name) };
    let gpu = devices.gpus.iter().find(|gpu| gpu.name.as_c_str() == name);
    if gpu.is_none() && name != devices.cpu.as_c_str() {
        let text = format!("the tensor is on {}, which is no device of this process", name.to_string_lossy());
        return Err(Error::new(ErrorKind::Device, text));
    }
    let shared = Shared(handle);
    let raw_status = Shared(status.raw());
    // Waits where the tensor is still to be made by an asynchronous executor, which may need the GIL for that.
    // SAFETY: see above; the object keeps the handle.
    py.detach(|| unsafe { (eager.TFE_TensorHandleDeviceMemorySize)(shared.get(), raw_status.get()) });
    status.check()?;
    // SAFETY: see above; the dimensions asked for are there.
    let shape: Dims = unsafe {
        let ndim = (eager.TFE_TensorHandleNumDims)(handle, status.raw());
        (0..ndim).map(|i| (eager.TFE_TensorHandleDim)(handle, i, status.raw())).collect()
    };
    status.check()?;
    let layout = Layout::new(dtype, &shape, None, 0)?;
    let (address, is_own) = memory(process, handle, &status)?;
    let gpu = if code == INT32 { gpu.filter(|_| is_on_device(address)) } else { gpu };
    // SAFETY: see above; the reference that comes back is ours.
    let owner = unsafe {
        let copy = (eager.TFE_TensorHandleCopySharingTensor)(handle, status.raw());
        status.check()?;
        Handle::from_raw(runtime, copy)
    };
    let bytes = address..address + layout.nbytes();
    let read_only = process.consumer.read_only.contains(address);
    let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
    let (device, stream, reuse) = match gpu {
        None => (Device::CPU, None, Reuse::InStreamOrder),
        Some(gpu) => {
            (Device::cuda(gpu.ordinal), Some(gpu.stream), reuse(process.consumer.views(), gpu, address, is_own))
        }
    };
    // SAFETY: the handle keeps the memory; TensorFlow says what it is and where, works on it in the one stream of the
    // device, and hands out memory of its own allocator behind that stream alone.
    let memory = unsafe { Memory::new(bytes, device, access, stream, reuse, owner) };
    Lent::new(dtype, layout, Box::new(memory))
}

/// Memory of TensorFlow's own allocator is reused at once, in the one stream of the device. A view that this adapter has
/// made is given back by its lease, in order. Memory that is shared between tensors, or that TensorFlow has from
/// elsewhere, is unknown.
fn reuse(views: &Views, gpu: &Gpu, address: usize, is_own: bool) -> Reuse {
    let known = is_own || views.contains(Device::cuda(gpu.ordinal), address);
    if known { Reuse::InStreamOrder } else { Reuse::Unknown }
}

/// The address of a handle that is ready, and whether the memory is TensorFlow's own and nobody shares it.
fn memory(process: &Process, handle: *mut crate::api::TFE_TensorHandle, status: &Status<'_>) -> Result<(usize, bool)> {
    let (eager, cxx) = (&process.runtime.eager, &process.runtime.cxx);
    if let Some((tensor_of, data_of)) = cxx.tensor {
        let (mut result, mut tensor) = (0, std::ptr::null());
        // SAFETY: a handle of a local tensor is a `TensorHandle`, as TensorFlow's own functions take it; that it is
        // local, and made, the question for its size has told. The result is 1 for success.
        unsafe {
            tensor_of(&mut result, handle, &mut tensor);
            if result == 1 && !tensor.is_null() {
                let is_own = cxx.is_own.is_some_and(|is_own| is_own(tensor));
                return Ok((data_of(tensor).addr(), is_own));
            }
        }
    }
    // SAFETY: the handle is alive. This waits for the device.
    let address = unsafe { (eager.TFE_TensorHandleDevicePointer)(handle, status.raw()) };
    status.check()?;
    Ok((address.addr(), false))
}

/// TensorFlow keeps most tensors of int32 in host memory, also where it names a GPU; the driver knows.
fn is_on_device(address: usize) -> bool {
    matches!(bridge_cuda::locate(address), Ok(Some(located)) if located.device.kind == DeviceKind::CUDA)
}

/// The operation that copies bytes on any device.
const COPY: &CStr = c"DeepCopy";

pub(crate) fn compact<'py>(process: &'static Process, object: &PyTensor<'py>) -> Result<PyTensor<'py>> {
    let py = object.py();
    let lent = lend(process, object)?;
    let (code, shape) = (crate::dtypes::code(lent.dtype()), Dims::from(lent.layout().shape()));
    let code = code.expect("what was lent has a code");
    let (address, nbytes, device) = (lent.data(), lent.layout().nbytes(), lent.device());
    if nbytes == 0 {
        return import::wrap_memory(py, process, device, code, &shape, 0..0, Box::new(()));
    }
    if !address.is_multiple_of(process.profile.alignment) {
        let text = "tensorflow ends the process when it copies a tensor at an unaligned address: copy it with the framework that made it";
        return Err(Error::new(ErrorKind::Layout, text));
    }
    let (context, devices) = process.devices(py)?;
    let place = import::place(&devices, device)?;
    // As bytes, because few operations take every dtype.
    let bytes =
        import::handle(process, context, place, UINT8, &[nbytes as i64], address..address + nbytes, Box::new(lent))?;
    // SAFETY: Python's context object keeps the context alive.
    let copy = unsafe { execute(process.runtime, context, COPY, place, &bytes, &[(c"T", UINT8)]) }?;
    let status = Status::new(&process.runtime.core);
    let (address, _) = memory(process, copy.raw(), &status)?;
    import::wrap_memory(py, process, device, code, &shape, address..address + nbytes, Box::new(copy))
}
