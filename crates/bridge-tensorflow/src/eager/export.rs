//! Out of TensorFlow.

use crate::eager::devices::Place;
use crate::eager::functions::{EagerRuntime, TFE_TensorHandle};
use crate::eager::handle::{COPY, Handle, Shared, execute};
use crate::eager::import;
use crate::eager::process::{Process, SYMBOLIC, raised};
use crate::runtime::Runtime;
use crate::runtime::dtypes::{self, INT32, UINT8};
use crate::runtime::gpus::{GPUS, gpu_of};
use crate::runtime::status::Status;
use crate::runtime::tensor::{RuntimeTensor, no_tensor};
use bridge_core::{
    Access, Allocation, DType, Device, DeviceKind, Dims, Error, ErrorKind, Layout, Lent, Memory, Result, Reuse, Stream,
};
use bridge_pyo3::{Borrowed, PyTensor, call, not_a_tensor};
use pyo3::{Python, intern};
use std::ffi::CStr;

/// Exports an eager tensor, or the current value of a variable.
pub(crate) fn lend(process: &'static Process, object: &PyTensor<'_>) -> Result<Lent> {
    if process.is_eager(object) {
        return of_eager(process, object);
    }
    if process.is_variable(object) {
        if !process.executes_eagerly(object.py())? {
            return Err(Error::new(ErrorKind::NotATensor, SYMBOLIC));
        }
        // Later assignments allocate other memory for the variable, because this memory is in use.
        let value = call(object, intern!(object.py(), "value"), &[]).map_err(|error| raised(object.py(), error))?;
        if process.is_eager(&value) {
            return of_eager(process, &value);
        }
    }
    let advice = process.refusal(object).map(|advice| Error::new(ErrorKind::NotATensor, advice));
    Err(advice.unwrap_or_else(|| not_a_tensor("tensorflow", object)))
}

/// Borrows an eager tensor. The value of a variable is a tensor of its own, so it is exported.
pub(crate) fn borrow<'a>(process: &'static Process, object: &'a PyTensor<'_>) -> Result<Borrowed<'a>> {
    if !process.is_eager(object) {
        return Borrowed::of(object, lend(process, object)?);
    }
    let Seen { dtype, layout, address, access, device, stream, .. } = Seen::of(process, object)?;
    Ok(Borrowed::new(object, address, dtype, layout, device, access, stream))
}

fn of_eager(process: &'static Process, tensor: &PyTensor<'_>) -> Result<Lent> {
    let Seen { handle, dtype, layout, address, access, device, stream, status } = Seen::of(process, tensor)?;
    let eager = &process.eager;
    // SAFETY: the object keeps the handle, and the status is ours; the returned reference is ours.
    let owner = unsafe {
        let copy = (eager.functions.TFE_TensorHandleCopySharingTensor)(handle, status.raw());
        status.check()?;
        Handle::from_raw(eager, copy).ok_or_else(no_tensor)?
    };
    let bytes = address..address + layout.nbytes();
    let reuse = if stream.is_some() { Reuse::Unknown } else { Reuse::InStreamOrder };
    // SAFETY: the handle keeps the memory, dtype and place are what TensorFlow reports, and TensorFlow works on it in
    // the one stream of the device.
    let memory = unsafe { Memory::new(Allocation { bytes, device, access, stream, reuse }, owner) };
    Lent::new(dtype, layout, memory)
}

/// What TensorFlow says of an eager tensor.
struct Seen {
    /// The object keeps it.
    handle: *mut TFE_TensorHandle,
    dtype: DType,
    layout: Layout,
    address: usize,
    access: Access,
    device: Device,
    /// `None` for host memory.
    stream: Option<Stream>,
    /// For the calls that follow.
    status: Status<'static>,
}

impl Seen {
    fn of(process: &'static Process, tensor: &PyTensor<'_>) -> Result<Self> {
        let py = tensor.py();
        let (eager, runtime, functions) = (&process.eager, process.eager.runtime, &process.eager.functions);
        let status = Status::new(&runtime.core);
        // SAFETY: the object is an eager tensor, and keeps its handle alive; the status is ours. Here and below.
        let handle = unsafe { (eager.handle_of)(tensor.as_ptr()) };
        if handle.is_null() {
            return Err(Error::new(ErrorKind::NotATensor, "this tensor of tensorflow was never filled"));
        }
        // SAFETY: see above.
        let code = unsafe { (functions.TFE_TensorHandleDataType)(handle) };
        let dtype = dtypes::dtype(code).map_err(|reason| Error::new(ErrorKind::Dtype, reason))?;
        // SAFETY: see above; the name lives as long as the device.
        let name = unsafe { (functions.TFE_TensorHandleBackingDeviceName)(handle, status.raw()) };
        status.check()?;
        // SAFETY: as above.
        let gpu = Self::gpu(py, process, unsafe { CStr::from_ptr(name) })?;
        // SAFETY: the object keeps the handle.
        unsafe { wait(py, process, handle, &status) }?;
        // SAFETY: see above; the dimensions are in range. If the tensor could not be made, the status reports it.
        let shape: Dims = unsafe {
            let ndim = (functions.TFE_TensorHandleNumDims)(handle, status.raw());
            (0..ndim).map(|i| (functions.TFE_TensorHandleDim)(handle, i, status.raw())).collect()
        };
        status.check()?;
        let layout = Layout::new(dtype, &shape, None, 0)?;
        let address = memory(process, handle, &status)?;
        let access = runtime.consumer.read_only.access(address);
        // TensorFlow keeps most tensors of int32 in host memory, even if it names a GPU.
        let is_on_gpu = || Ok(code != INT32 || layout.nbytes() == 0 || gpu_of(address)?.is_some());
        let (device, stream) = match gpu {
            Some((device, stream)) if is_on_gpu()? => (device, Some(stream)),
            _ => (Device::CPU, None),
        };
        Ok(Self { handle, dtype, layout, address, access, device, stream, status })
    }

    /// Returns the GPU with this full name and its stream; `None` for the host.
    fn gpu(py: Python<'_>, process: &'static Process, name: &CStr) -> Result<Option<(Device, Stream)>> {
        // In every context.
        if name == LOCAL_HOST {
            return Ok(None);
        }
        let (_, devices) = process.devices(py)?;
        // A cluster that the process has joined since renames the devices.
        let renamed;
        let place = match devices.named(name) {
            None => {
                renamed = process.query_devices(py)?;
                renamed.named(name)
            }
            known => known,
        };
        match place {
            Some(Place::Gpu(gpu)) => Ok(Some((Device::cuda(gpu.ordinal), gpu.stream))),
            Some(Place::Host) => Ok(None),
            None => Err(elsewhere(process.eager.runtime, &name.to_string_lossy())),
        }
    }
}

/// The host's full name, unless the process has joined a cluster.
const LOCAL_HOST: &CStr = c"/job:localhost/replica:0/task:0/device:CPU:0";

#[cold]
fn elsewhere(runtime: &Runtime, name: &str) -> Error {
    if name.contains(GPUS) && !runtime.profile.private_functions {
        let version = runtime.version();
        let text = format!(
            "the tensor is on {name}, and on a GPU TensorFlow {version} is not supported yet: use 2.12 to 2.21, or copy it to the host"
        );
        return Error::new(ErrorKind::Version, text);
    }
    let text = format!(
        "the tensor is on {name}, which is no device of this process: copy it to one with tf.identity under tf.device first"
    );
    Error::new(ErrorKind::Device, text)
}

/// Waits until an asynchronous executor has made the tensor; without one it has been made. If it could not be made, the
/// status of the next call reports it.
///
/// # Safety
///
/// The handle is alive, and on a device of this process.
unsafe fn wait(py: Python<'_>, process: &Process, handle: *mut TFE_TensorHandle, status: &Status<'_>) -> Result<()> {
    // SAFETY: a handle on a device of this process is a local `TensorHandle`.
    if process.eager.handles.is_ready.is_some_and(|is_ready| unsafe { is_ready(handle) }) {
        return Ok(());
    }
    let (shared, raw) = (Shared(handle), Shared(status.raw()));
    // The executor may need the GIL.
    // SAFETY: the handle is alive.
    py.detach(|| unsafe { (process.eager.functions.TFE_TensorHandleDeviceMemorySize)(shared.get(), raw.get()) });
    status.check()
}

/// Returns the address of the memory of a handle that is ready.
fn memory(process: &Process, handle: *mut TFE_TensorHandle, status: &Status<'_>) -> Result<usize> {
    let EagerRuntime { functions, handles, .. } = &process.eager;
    // SAFETY: a handle on a device of this process is a local `TensorHandle`, as TensorFlow's own functions take it,
    // and the tensor has been made.
    if let Some(address) = handles.tensor.and_then(|functions| unsafe { functions.address(handle) }) {
        return Ok(address);
    }
    // SAFETY: the handle is alive. This waits for the device.
    let address = unsafe { (functions.TFE_TensorHandleDevicePointer)(handle, status.raw()) };
    status.check()?;
    Ok(address.addr())
}

/// Returns a copy of a tensor in memory of TensorFlow's.
pub(crate) fn compact<'py>(process: &'static Process, object: &PyTensor<'py>) -> Result<PyTensor<'py>> {
    let (py, lent) = (object.py(), lend(process, object)?);
    match lent.device().kind {
        DeviceKind::CUDA => copy_on_device(py, process, lent),
        _ => copy_on_host(py, process, &lent),
    }
}

fn copy_on_host<'py>(py: Python<'py>, process: &'static Process, lent: &Lent) -> Result<PyTensor<'py>> {
    let code = dtypes::code(lent.dtype()).expect("an exported tensor has a code");
    let (layout, bytes) = (lent.layout(), lent.data() as *const u8);
    // SAFETY: the exported tensor is compact host memory of that many bytes, and ready.
    let copy =
        unsafe { RuntimeTensor::copied(&process.eager.runtime.core, code, layout.shape(), bytes, layout.nbytes()) }?;
    import::eager_tensor(py, process, Handle::of(&process.eager, &copy)?)
}

/// Copies bytes, because few operations support every dtype.
fn copy_on_device<'py>(py: Python<'py>, process: &'static Process, lent: Lent) -> Result<PyTensor<'py>> {
    let code = dtypes::code(lent.dtype()).expect("an exported tensor has a code");
    let (device, shape, start) = (lent.device(), Dims::from(lent.layout().shape()), lent.data());
    let nbytes = lent.layout().nbytes();
    if nbytes == 0 {
        return import::wrap_memory(py, process, device, code, &shape, 0..0, ());
    }
    if !start.is_multiple_of(process.profile.alignment) {
        let text = "tensorflow aborts the process when it copies a tensor at an unaligned address: copy it with the framework that made it";
        return Err(Error::new(ErrorKind::Layout, text));
    }
    let (context, devices) = process.devices(py)?;
    let name = devices.name_of(device)?;
    let bytes = import::handle(process, context, name, UINT8, &[nbytes as i64], start..start + nbytes, lent)?;
    let status = Status::new(&process.eager.runtime.core);
    // SAFETY: Python's context object keeps the context alive; the copy is ours, and on the device.
    let copy = unsafe {
        let copy = execute(&process.eager, context, COPY, name, &bytes, &[(c"T", UINT8)])?;
        wait(py, process, copy.raw(), &status)?;
        copy
    };
    let start = memory(process, copy.raw(), &status)?;
    import::wrap_memory(py, process, device, code, &shape, start..start + nbytes, copy)
}
