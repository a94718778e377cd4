//! The NumPy adapter: arrays in host memory, exported and imported through NumPy's C API, or else through the C struct
//! of the array interface. It keeps any strides, any alignment and the read-only flag.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod export;
mod import;
mod interface;
mod native;
mod runtime;

use bridge_core::planted::is_planted;
use bridge_core::{Adapter, Consumer, DType, Device, Error, Export, Offer, Order, Profile, Result};
use bridge_pyo3::{Borrowed, Fingerprint, PyAdapter, PyTensor, framework_error};
use pyo3::{PyErr, Python};
use runtime::Runtime;
use std::sync::Arc;

/// NumPy in this process.
#[derive(Clone, Copy)]
pub struct NumPy<'py> {
    py: Python<'py>,
    runtime: &'static Runtime,
}

bridge_core::debug_fields!(impl[] NumPy<'_>);

impl<'py> NumPy<'py> {
    /// Imports NumPy at the first call, and looks up what the installed version supports.
    ///
    /// # Errors
    ///
    /// [`Missing`](bridge_core::ErrorKind::Missing) if NumPy is not installed.
    pub fn new(py: Python<'py>) -> Result<Self> {
        Ok(Self { py, runtime: Runtime::fast(py)? })
    }

    /// As [`new`](Self::new), but only through the array interface, as with a NumPy whose C API is not as expected.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new).
    pub fn with_interface(py: Python<'py>) -> Result<Self> {
        Ok(Self { py, runtime: Runtime::with_interface(py)? })
    }
}

// SAFETY: an array keeps its lease, has its memory on the host, and is not writeable where that is read-only.
unsafe impl<'py> Adapter for NumPy<'py> {
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
        if is_planted("numpy_memory_leaked") {
            std::mem::forget(vec![1_u8; 4096]);
        }
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

impl<'py> PyAdapter<'py> for NumPy<'py> {
    fn owns(&self, object: &PyTensor<'py>) -> bool {
        self.runtime.is_array(object) && !self.runtime.exports_itself(object)
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
    framework_error(py, "numpy", error)
}
