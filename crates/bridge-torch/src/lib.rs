//! The PyTorch adapter.
//!
//! With the feature `python`, [`Torch`] exports and imports `torch.Tensor` objects: through the C exchange API of
//! DLPack 1.3 where the installed version has it (2.10 and later, or the package `torch-c-dlpack-ext`), and through
//! `__dlpack__` and capsules elsewhere. It supports PyTorch 2.9, the first version with the `__dlpack__` of DLPack 1.0,
//! and later, and is tested with 2.11.
//!
//! The adapter does what PyTorch leaves to its callers: the exchange API checks neither `requires_grad` nor the conj
//! and neg bits, and no export records the stream that uses the memory with the caching allocator.

#![cfg(feature = "python")]

#[cfg(all(doctest, feature = "python"))]
#[doc = include_str!("../README.md")]
struct Readme;

mod allocator;
mod borrow;
mod capsule;
mod exchange;
mod export;
mod import;
mod native;
mod runtime;

use bridge_core::{Adapter, Consumer, DType, Device, Lease, Lent, Order, Profile, Result};
use bridge_pyo3::{Borrowed, PyAdapter, PyTensor};
use pyo3::Python;
use runtime::Runtime;
use std::sync::Arc;

/// PyTorch in this process.
#[derive(Clone, Copy)]
pub struct Torch<'py> {
    py: Python<'py>,
    runtime: &'static Runtime,
}

impl<'py> Torch<'py> {
    /// Imports PyTorch at the first call, and looks up what the installed version supports.
    ///
    /// # Errors
    ///
    /// [`Missing`](bridge_core::ErrorKind::Missing) if PyTorch is not installed.
    pub fn new(py: Python<'py>) -> Result<Self> {
        Ok(Self { py, runtime: Runtime::fast(py)? })
    }

    /// As [`new`](Self::new), but through `__dlpack__` and capsules only, as older versions of PyTorch need.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn with_capsules(py: Python<'py>) -> Result<Self> {
        Ok(Self { py, runtime: Runtime::with_capsules(py)? })
    }
}

impl<'py> Adapter for Torch<'py> {
    type Tensor = PyTensor<'py>;

    fn profile(&self) -> &Profile {
        &self.runtime.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.runtime.consumer.clone()
    }

    fn export(&self, tensor: &PyTensor<'py>) -> Result<Lent> {
        export::lend(self.runtime, tensor)
    }

    fn import(&self, lease: Lease) -> Result<PyTensor<'py>> {
        import::wrap(self.py, self.runtime, lease)
    }

    fn compact(&self, tensor: &PyTensor<'py>) -> Result<PyTensor<'py>> {
        export::compact(tensor)
    }

    fn overwritten(&self, tensor: &PyTensor<'py>) -> Result<()> {
        export::overwritten(tensor)
    }

    fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<PyTensor<'py>> {
        import::empty(self.py, device, dtype, shape, order)
    }
}

impl<'py> PyAdapter<'py> for Torch<'py> {
    fn owns(&self, object: &PyTensor<'py>) -> bool {
        self.runtime.is_tensor(object)
    }

    fn borrow<'a>(&self, tensor: &'a PyTensor<'py>) -> Result<Borrowed<'a>> {
        borrow::borrow(self.runtime, tensor)
    }

    fn locate(&self, tensor: &PyTensor<'py>) -> Result<Option<(Device, usize)>> {
        export::locate(self.runtime, tensor)
    }
}
