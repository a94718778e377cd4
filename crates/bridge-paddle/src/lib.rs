//! The PaddlePaddle adapter: dense tensors in memory of the host.
//!
//! A tensor is exported by a capsule of Paddle's own, which keeps the memory. The object does not: `contiguous` gives it
//! other memory.
//!
//! A tensor is imported as a NumPy array without a copy, of which Paddle keeps the object. Paddle's own import of DLPack
//! finds deleters by address. Where two tensors at one address live, the end of the first releases the memory of the
//! second, and that of the first never. The deleter runs under a lock, so that one that enters Paddle hangs.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod export;
mod import;
mod naive;
mod runtime;

use bridge_core::{Adapter, Consumer, DType, Device, Error, Export, Offer, Order, Profile, Result};
use bridge_pyo3::{Borrowed, PyAdapter, PyTensor, framework_error};
use pyo3::{PyErr, Python};
use runtime::Runtime;
use std::sync::Arc;

/// PaddlePaddle in this process.
#[derive(Clone, Copy)]
pub struct Paddle<'py> {
    py: Python<'py>,
    runtime: &'static Runtime,
}

bridge_core::debug_fields!(impl[] Paddle<'_>);

impl<'py> Paddle<'py> {
    /// Imports Paddle at the first call, and looks up what the installed version supports.
    ///
    /// # Errors
    ///
    /// [`Missing`](bridge_core::ErrorKind::Missing) if Paddle is not installed, and if TensorFlow was imported before it,
    /// [`Version`](bridge_core::ErrorKind::Version) for a version that lacks what this adapter uses.
    pub fn new(py: Python<'py>) -> Result<Self> {
        Ok(Self { py, runtime: Runtime::get(py)? })
    }
}

// SAFETY: the profile is what Paddle does on the host, which has no streams. A tensor keeps the array that it views,
// and the array its lease.
unsafe impl<'py> Adapter for Paddle<'py> {
    type Tensor = PyTensor<'py>;

    fn profile(&self) -> &Profile {
        &self.runtime.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.runtime.consumer.clone()
    }

    fn export(&self, tensor: &PyTensor<'py>) -> Result<Export> {
        export::export(self.runtime, tensor)
    }

    fn import(&self, offer: Offer) -> Result<PyTensor<'py>> {
        import::wrap(self.py, self.runtime, offer.accept(&self.runtime.profile, &self.runtime.consumer)?)
    }

    fn overwritten(&self, tensor: &PyTensor<'py>) -> Result<()> {
        export::count_write(tensor)
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<PyTensor<'py>> {
        import::empty(self.py, self.runtime, (device, dtype), shape, order)
    }
}

impl<'py> PyAdapter<'py> for Paddle<'py> {
    fn owns(&self, object: &PyTensor<'py>) -> bool {
        self.runtime.is_of_paddle(object)
    }

    fn borrow<'a>(&self, tensor: &'a PyTensor<'py>) -> Result<Borrowed<'a>> {
        Borrowed::of(tensor, export::export_any(self.runtime, tensor)?)
    }

    fn locate(&self, tensor: &PyTensor<'py>) -> Result<Option<(Device, usize)>> {
        let exported = export::export_any(self.runtime, tensor)?;
        Ok((exported.layout().numel() > 0).then(|| (exported.device(), exported.data())))
    }

    fn storage(&self, _: &PyTensor<'py>) -> Result<Option<usize>> {
        Ok(None)
    }
}

/// Wraps an exception.
pub(crate) fn raised(py: Python<'_>, error: PyErr) -> Error {
    framework_error(py, "paddle", error)
}
