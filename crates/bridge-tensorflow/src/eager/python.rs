//! The adapter for eager tensors as Python objects.

use crate::eager::process::{Process, exhausted};
use crate::eager::{export, import};
use crate::runtime::Runtime;
use bridge_core::{Adapter, Consumer, Export, Offer, Profile, Result};
use bridge_pyo3::{Borrowed, PyAdapter, PyTensor};
use pyo3::Python;
use std::sync::Arc;

/// TensorFlow 2 in this process, executing eagerly.
#[derive(Clone, Copy)]
pub struct TensorFlow2<'py> {
    py: Python<'py>,
    process: &'static Process,
}

bridge_core::debug_fields!(impl[] TensorFlow2<'_>);

impl<'py> TensorFlow2<'py> {
    /// Imports TensorFlow, the first time, and queries what it can do. TensorFlow sets up its devices later, when its
    /// first tensor is made or seen.
    ///
    /// # Errors
    ///
    /// [`Missing`](bridge_core::ErrorKind::Missing) if TensorFlow is not installed, and
    /// [`Version`](bridge_core::ErrorKind::Version) if it is older than 2.12.
    pub fn new(py: Python<'py>) -> Result<Self> {
        Ok(Self { py, process: Process::get(py)? })
    }

    /// The runtime.
    pub fn runtime(&self) -> &'static Runtime {
        self.process.eager.runtime
    }
}

// SAFETY: TensorFlow keeps the lease with the tensor, and never writes to it. Its consumer has its streams.
unsafe impl<'py> Adapter for TensorFlow2<'py> {
    type Tensor = PyTensor<'py>;

    fn profile(&self) -> &Profile {
        &self.process.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.runtime().consumer.clone()
    }

    fn export(&self, tensor: &PyTensor<'py>) -> Result<Export> {
        export::export(self.process, tensor).map_err(|error| exhausted(self.py, error))
    }

    fn import(&self, offer: Offer) -> Result<PyTensor<'py>> {
        import::wrap(self.py, self.process, offer.accept(&self.process.profile, &self.runtime().consumer)?)
            .map_err(|error| exhausted(self.py, error))
    }

    fn compact(&self, tensor: &PyTensor<'py>) -> Result<PyTensor<'py>> {
        export::compact(self.process, tensor).map_err(|error| exhausted(self.py, error))
    }
}

impl<'py> PyAdapter<'py> for TensorFlow2<'py> {
    fn owns(&self, object: &PyTensor<'py>) -> bool {
        let process = self.process;
        process.is_eager(object) || process.is_variable(object) || process.refusal(object).is_some()
    }

    fn borrow<'a>(&self, tensor: &'a PyTensor<'py>) -> Result<Borrowed<'a>> {
        export::borrow(self.process, tensor).map_err(|error| exhausted(self.py, error))
    }
}
