//! The CuPy adapter. Exports read an array's attributes; imports make an array over `UnownedMemory`. The owner's stream
//! is CuPy's current stream.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod export;
mod import;
mod native;
mod runtime;

use bridge_core::{Adapter, Consumer, DType, Device, Error, Export, Offer, Order, Profile, Result};
use bridge_pyo3::{Borrowed, Fingerprint, PyAdapter, PyTensor, framework_error};
use pyo3::{PyErr, Python};
use runtime::Runtime;
use std::sync::Arc;

/// CuPy in this process.
#[derive(Clone, Copy)]
pub struct CuPy<'py> {
    py: Python<'py>,
    runtime: &'static Runtime,
}

bridge_core::debug_fields!(impl[] CuPy<'_>);

impl<'py> CuPy<'py> {
    /// Imports CuPy at the first call, and looks up what the installed version supports.
    ///
    /// # Errors
    ///
    /// [`Missing`](bridge_core::ErrorKind::Missing) if CuPy is not installed, or finds no CUDA device.
    pub fn new(py: Python<'py>) -> Result<Self> {
        Ok(Self { py, runtime: Runtime::get(py)? })
    }
}

// SAFETY: an array keeps its lease, and the consumer has the streams of CuPy. The profile says that it may write.
unsafe impl<'py> Adapter for CuPy<'py> {
    type Tensor = PyTensor<'py>;

    fn profile(&self) -> &Profile {
        &self.runtime.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.runtime.consumer.clone()
    }

    fn export(&self, array: &PyTensor<'py>) -> Result<Export> {
        export::export(self.runtime, array)
    }

    fn import(&self, offer: Offer) -> Result<PyTensor<'py>> {
        import::wrap(self.py, self.runtime, offer.accept(&self.runtime.profile, &self.runtime.consumer)?)
    }

    fn compact(&self, array: &PyTensor<'py>) -> Result<PyTensor<'py>> {
        export::compact(self.runtime, array)
    }

    fn overwritten(&self, _: &PyTensor<'py>) -> Result<()> {
        Ok(())
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<PyTensor<'py>> {
        import::empty(self.py, self.runtime, device, dtype, shape, order)
    }
}

impl<'py> PyAdapter<'py> for CuPy<'py> {
    fn owns(&self, object: &PyTensor<'py>) -> bool {
        self.runtime.is_array(object)
    }

    fn borrow<'a>(&self, array: &'a PyTensor<'py>) -> Result<Borrowed<'a>> {
        export::borrow(self.runtime, array)
    }

    fn is_still(&self, array: &PyTensor<'py>, exported: &Export, _: &Fingerprint) -> bool {
        self.borrow(array).is_ok_and(|borrowed| borrowed.is(exported))
    }

    fn storage(&self, _: &PyTensor<'py>) -> Result<Option<usize>> {
        Ok(None)
    }

    fn counted_by(&self, _: &PyTensor<'py>) -> Result<Option<PyTensor<'py>>> {
        Ok(None)
    }
}

/// Wraps an exception.
pub(crate) fn raised(py: Python<'_>, error: PyErr) -> Error {
    framework_error(py, "cupy", error)
}
