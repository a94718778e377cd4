//! A result as the frameworks of other producers take it in: an object with `__dlpack__`.

use crate::driver;
use crate::origin::READER;
use bridge_core::dlpack::Tensor;
use bridge_core::{Consumer, DeviceKind, Lease, Result, Stream};
use bridge_pyo3::{PyTensor, exception};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

/// A tensor of DLPack as a Python object, for `from_dlpack` of the array API.
#[pyclass(frozen, module = "truebridge")]
pub(crate) struct Produced(Tensor);

/// `stream` of `__dlpack__`: the consumer orders its work itself (array API).
const NO_SYNC: i64 = -1;

impl Produced {
    pub(crate) fn new(lease: Lease) -> Self {
        Self(lease.into())
    }

    /// Makes the stream of a reader wait for the result, and the return of the memory wait for the reader.
    fn read_in(&self, stream: Stream) -> Result<()> {
        let device = self.0.device();
        driver::ordering().order(device, Stream::LEGACY, stream)?;
        READER.views().used(device, self.0.data(), stream.on_any_thread(), || None);
        Ok(())
    }
}

#[pymethods]
impl Produced {
    fn __dlpack_device__(&self) -> (i32, i32) {
        let device = self.0.device();
        (device.kind.0, device.index)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<PyTensor<'py>> {
        if copy == Some(true) || dl_device.is_some_and(|device| device != self.__dlpack_device__()) {
            return Err(PyBufferError::new_err(
                "this result is neither copied nor moved: pass copy=None and no device",
            ));
        }
        // Without a stream it is the legacy default stream, which the result is in already.
        if let Some(stream) = stream.filter(|stream| *stream != NO_SYNC && self.0.device().kind != DeviceKind::CPU) {
            let handle = u64::try_from(stream)
                .map_err(|_| PyBufferError::new_err(format!("{stream} is not a stream: pass its handle, or -1")))?;
            // SAFETY: the caller of the protocol names a stream that exists.
            self.read_in(unsafe { Stream::from_handle(handle) }).map_err(|error| exception(py, error))?;
        }
        let tensor = self.0.clone();
        match max_version {
            Some((major, _)) if major > 0 => bridge_pyo3::capsule(py, tensor.into_managed()),
            _ => bridge_pyo3::legacy_capsule(py, tensor.into_managed()),
        }
    }
}
