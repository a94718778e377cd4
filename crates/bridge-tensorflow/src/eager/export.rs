//! Out of TensorFlow.

use crate::eager::copy::{copied_on_device, copied_on_host};
use crate::eager::devices::{Place, elsewhere};
use crate::eager::functions::TFE_TensorHandle;
use crate::eager::handle::Shared;
use crate::eager::import;
use crate::eager::process::{Process, SYMBOLIC, raised};
use crate::eager::seen::{Seen, is_ready};
use crate::runtime::dtypes;
use crate::runtime::status::Status;
use bridge_core::{DeviceKind, Dims, Error, ErrorKind, Export, Result};
use bridge_pyo3::{Borrowed, PyTensor, call, not_a_tensor};
use pyo3::intern;
use pyo3::prelude::*;
use std::ffi::CStr;

/// Exports an eager tensor, or the current value of a variable.
pub(crate) fn export(process: &'static Process, object: &PyTensor<'_>) -> Result<Export> {
    if process.is_eager(object) {
        return seen(process, object)?.export();
    }
    if process.is_variable(object) {
        if !process.executes_eagerly(object.py())? {
            return Err(Error::new(ErrorKind::NotATensor, SYMBOLIC));
        }
        // Later assignments allocate other memory for the variable, because this memory is in use.
        let value = call(object, intern!(object.py(), "value"), &[]);
        let value = value.map_err(|error| without_value(object, Some(error)))?;
        if process.is_eager(&value) {
            let exported = seen(process, &value)?.export()?;
            // What TensorFlow reads of a variable without a value is an empty tensor.
            return match exported.layout().numel() == 0 && !is_initialized(object) {
                true => Err(without_value(object, None)),
                false => Ok(exported),
            };
        }
    }
    let advice = process.refusal(object).map(|advice| Error::new(ErrorKind::NotATensor, advice));
    Err(advice.unwrap_or_else(|| not_a_tensor("tensorflow", object)))
}

/// Returns whether a variable has a value; `true` where TensorFlow does not say.
fn is_initialized(variable: &PyTensor<'_>) -> bool {
    let answer = call(variable, intern!(variable.py(), "is_initialized"), &[]).and_then(|answer| answer.is_truthy());
    answer.unwrap_or(true)
}

/// Makes the error for a variable whose value cannot be read.
#[cold]
fn without_value(variable: &PyTensor<'_>, error: Option<PyErr>) -> Error {
    match error {
        Some(error) if is_initialized(variable) => raised(variable.py(), error),
        error => {
            let text = "the variable has no value yet: assign one first";
            let refused = Error::new(ErrorKind::NotATensor, text);
            error.into_iter().fold(refused, Error::caused_by)
        }
    }
}

/// Borrows an eager tensor. The value of a variable is its own tensor, so it is exported.
pub(crate) fn borrow<'a>(process: &'static Process, object: &'a PyTensor<'_>) -> Result<Borrowed<'a>> {
    if !process.is_eager(object) {
        return Borrowed::of(object, export(process, object)?);
    }
    let Seen { dtype, layout, address, access, device, stream, .. } = seen(process, object)?;
    Ok(Borrowed::new(object, address, dtype, layout, device, access, stream))
}

/// Looks at an eager tensor.
fn seen(process: &'static Process, tensor: &PyTensor<'_>) -> Result<Seen> {
    let py = tensor.py();
    // SAFETY: the object is an eager tensor.
    let handle = unsafe { (process.objects.handle_of)(tensor.as_ptr()) };
    if handle.is_null() {
        return Err(Error::new(ErrorKind::NotATensor, "this tensor of tensorflow was never filled"));
    }
    // SAFETY: the object keeps the handle alive; those on devices of other processes are refused before the wait.
    unsafe {
        Seen::of(&process.eager, handle, |name| place(py, process, name), |status| wait(py, process, handle, status))
    }
}

/// Returns the device with this full name.
fn place(py: Python<'_>, process: &'static Process, name: &CStr) -> Result<Place> {
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
    place.ok_or_else(|| elsewhere(process.eager.runtime, &name.to_string_lossy()))
}

/// The host's full name, unless the process has joined a cluster.
const LOCAL_HOST: &CStr = c"/job:localhost/replica:0/task:0/device:CPU:0";

/// Waits until the tensor has been made, without the GIL, which the executor may need.
///
/// # Safety
///
/// The handle is alive, and on a device of this process.
unsafe fn wait(py: Python<'_>, process: &Process, handle: *mut TFE_TensorHandle, status: &Status<'_>) -> Result<()> {
    // SAFETY: the caller's obligation.
    if unsafe { is_ready(&process.eager, handle) } {
        return Ok(());
    }
    let (shared, raw) = (Shared(handle), Shared(status.raw()));
    // SAFETY: the handle is alive.
    py.detach(|| unsafe { (process.eager.functions.TFE_TensorHandleDeviceMemorySize)(shared.get(), raw.get()) });
    status.check()
}

/// Returns a copy of a tensor in memory of TensorFlow's.
pub(crate) fn compact<'py>(process: &'static Process, object: &PyTensor<'py>) -> Result<PyTensor<'py>> {
    let (py, exported) = (object.py(), export(process, object)?);
    if exported.device().kind != DeviceKind::CUDA {
        return import::eager_tensor(py, process, copied_on_host(&process.eager, &exported)?);
    }
    let (code, device, shape) =
        (dtypes::required(exported.dtype())?, exported.device(), Dims::from(exported.layout().shape()));
    let (context, devices) = process.devices(py)?;
    let place = devices.name_of(device)?;
    // SAFETY: Python's context object keeps the context alive. What is waited for is the copy, which is alive.
    let (copy, bytes) = unsafe {
        copied_on_device(&process.eager, context, place, exported, |handle, status| wait(py, process, handle, status))
    }?;
    import::wrap_memory(py, process, device, code, &shape, bytes, copy)
}
