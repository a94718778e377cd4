//! How tensors are exchanged with PyTorch, and the faster of two paths: the C exchange API of DLPack 1.3, in PyTorch
//! 2.10 and later. The other one is in `capsule.rs`.

use crate::refusal::refusal;
use bridge_core::dlpack::ffi::{DLDevice, DLDeviceType, DLManagedTensorVersioned, DLPackExchangeAPI, DLTensor};
use bridge_core::dlpack::{Origin, adopt, export, versioned::Dlpack};
use bridge_core::{Device, Error, ErrorKind, Export, Result, Stream};
use bridge_pyo3::{PyTensor, exchange_table, take_raised};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use std::ffi::{c_int, c_void};
use std::ptr;

/// Exports and imports tensors. No method synchronises.
pub(crate) trait Exchange: Send + Sync {
    /// Exports a tensor that has been screened. `origin` adds what PyTorch does not say, once the device is known.
    fn export(&self, tensor: &PyTensor<'_>, origin: &dyn Fn(Device) -> Result<Origin>) -> Result<Export>;
    /// Makes a tensor over a managed tensor.
    fn import<'py>(&self, py: Python<'py>, managed: Dlpack) -> PyResult<PyTensor<'py>>;
    /// Exports a tensor and imports it again.
    fn round_trip<'py>(&self, tensor: &PyTensor<'py>) -> PyResult<PyTensor<'py>>;
    /// Returns the current stream of a CUDA device on this thread, with or without the GIL; `None` if it is unknown.
    fn current_stream(&self, device: Device) -> Result<Option<Stream>>;
}

/// Functions of a framework's exchange table, valid for the life of the process (`dlpack.h`).
pub(crate) struct ExchangeApi {
    export: unsafe extern "C" fn(*mut c_void, *mut *mut DLManagedTensorVersioned) -> c_int,
    import: unsafe extern "C" fn(*mut DLManagedTensorVersioned, *mut *mut c_void) -> c_int,
    current_stream: unsafe extern "C" fn(DLDeviceType, i32, *mut *mut c_void) -> c_int,
    /// Describes a tensor without a new owner; tables may leave it out.
    pub(crate) borrow: Option<Borrow>,
}

/// `dltensor_from_py_object_no_sync`: fills the description of an object in.
pub(crate) type Borrow = unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> c_int;

impl ExchangeApi {
    /// Returns the functions of a tensor type, if it has a table of this major version.
    pub(crate) fn of_type(tensor: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        Ok(exchange_table(tensor)?.and_then(Self::of_table))
    }

    fn of_table(api: &DLPackExchangeAPI) -> Option<Self> {
        Some(Self {
            export: api.managed_tensor_from_py_object_no_sync?,
            import: api.managed_tensor_to_py_object_no_sync?,
            current_stream: api.current_work_stream?,
            borrow: api.dltensor_from_py_object_no_sync,
        })
    }

    fn managed(&self, tensor: &PyTensor<'_>) -> PyResult<*mut DLManagedTensorVersioned> {
        let mut managed = ptr::null_mut();
        // SAFETY: the object is a tensor of the type that the table came from, and the GIL is held.
        match unsafe { (self.export)(tensor.as_ptr().cast(), &mut managed) } {
            0 => Ok(managed),
            _ => Err(PyErr::fetch(tensor.py())),
        }
    }
}

impl Exchange for ExchangeApi {
    fn export(&self, tensor: &PyTensor<'_>, origin: &dyn Fn(Device) -> Result<Origin>) -> Result<Export> {
        let managed = self.managed(tensor).map_err(|error| refusal(tensor, error))?;
        // SAFETY: the managed tensor is initialised and ours, and its deleter may run on any thread. PyTorch keeps
        // DLPack's promises, and the origin is that of this tensor.
        unsafe { export(adopt(managed)?, |device, _| origin(device)) }
    }

    fn import<'py>(&self, py: Python<'py>, managed: Dlpack) -> PyResult<PyTensor<'py>> {
        let mut object = ptr::null_mut();
        // SAFETY: the function takes ownership of the tensor, the GIL is held, and on success the object is a new
        // reference.
        match unsafe { (self.import)(managed.into_raw(), &mut object) } {
            // SAFETY: as above.
            0 => unsafe { Bound::from_owned_ptr_or_err(py, object.cast()) },
            _ => Err(PyErr::fetch(py)),
        }
    }

    fn round_trip<'py>(&self, tensor: &PyTensor<'py>) -> PyResult<PyTensor<'py>> {
        // SAFETY: as in `export`.
        let managed = unsafe { adopt(self.managed(tensor)?) };
        self.import(tensor.py(), managed.map_err(|error| PyBufferError::new_err(error.to_string()))?)
    }

    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        let DLDevice { device_type, device_id } = device.into();
        let mut stream = ptr::null_mut();
        // SAFETY: the function reads a thread-local of PyTorch, and takes the GIL itself to raise.
        match unsafe { (self.current_stream)(device_type, device_id, &mut stream) } {
            // SAFETY: PyTorch keeps its streams as long as the process, and an external one is its maker's to keep.
            0 => Ok(Some(unsafe { Stream::from_handle(stream as u64) })),
            _ => {
                let text = format!("torch has no current stream for {device}: check torch.cuda.is_available()");
                let error = Error::new(ErrorKind::Framework, text);
                Err(match take_raised() {
                    Some(cause) => error.caused_by(cause),
                    None => error,
                })
            }
        }
    }
}
