//! The MadeUp adapter.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod export;
mod import;
mod runtime;
//% if cuda
mod streams;
//% end

//% if writes
use bridge_core::{DType, Device, Order};
//% end
use bridge_core::{Adapter, Consumer, Error, ErrorKind, Lent, Offer, Profile, Result};
use bridge_pyo3::{PyAdapter, PyTensor, framework_error};
use pyo3::{PyErr, Python};
use runtime::Runtime;
use std::sync::Arc;

/// MadeUp in this process.
#[derive(Clone, Copy)]
pub struct MadeUp<'py> {
    py: Python<'py>,
    runtime: &'static Runtime,
}

bridge_core::debug_fields!(impl[] MadeUp<'_>);

impl<'py> MadeUp<'py> {
    /// Imports MadeUp at the first call, and looks up what the installed version supports.
    ///
    /// # Errors
    ///
    /// [`Missing`](bridge_core::ErrorKind::Missing) if MadeUp is not installed.
    pub fn new(py: Python<'py>) -> Result<Self> {
        Ok(Self { py, runtime: Runtime::get(py)? })
    }
}

// SAFETY: the profile is what MadeUp does, the consumer has its streams, and a tensor keeps its lease: see to it that
// this stays true of what you write below.
unsafe impl<'py> Adapter for MadeUp<'py> {
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

    fn import(&self, offer: Offer) -> Result<PyTensor<'py>> {
        import::wrap(self.py, self.runtime, offer.accept(self)?)
    }
//% if compact

    fn compact(&self, tensor: &PyTensor<'py>) -> Result<PyTensor<'py>> {
        export::compact(self.runtime, tensor)
    }
//% end
//% if writes

    fn overwritten(&self, _: &PyTensor<'py>) -> Result<()> {
        Ok(()) // It keeps no record of writes.
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<PyTensor<'py>> {
        import::empty(self.py, self.runtime, (device, dtype), shape, order)
    }
//% end
}

impl<'py> PyAdapter<'py> for MadeUp<'py> {
    fn owns(&self, object: &PyTensor<'py>) -> bool {
        self.runtime.is_tensor(object)
    }
}

/// Wraps an exception.
pub(crate) fn raised(py: Python<'_>, error: PyErr) -> Error {
    framework_error(py, "madeup", error)
}

/// Returns the error of a function that is to be written. Delete this with the last of them.
pub(crate) fn unwritten(function: &str, returns: &str) -> Error {
    let text = format!("write {function} in crates/bridge-madeup/src: it returns {returns}");
    Error::new(ErrorKind::Framework, text)
}
