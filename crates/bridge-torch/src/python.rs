//! PyTorch as a module of Python.

use crate::runtime::Runtime;
use crate::{borrow, counter, export, import, raised, watched};
use bridge_core::planted::is_planted;
use bridge_core::{Adapter, Consumer, DType, Device, Export, Failed, Offer, Order, Profile, Result};
use bridge_pyo3::{Borrowed, Fingerprint, PyAdapter, PyTensor};
use pyo3::prelude::*;
use pyo3::types::PyList;
use std::sync::Arc;

/// PyTorch in this process.
#[derive(Clone, Copy)]
pub struct Torch<'py> {
    py: Python<'py>,
    runtime: &'static Runtime,
}

bridge_core::debug_fields!(impl[] Torch<'_>);

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

// SAFETY: a storage keeps its lease, and the consumer has the streams of PyTorch. The profile says that it may write.
unsafe impl<'py> Adapter for Torch<'py> {
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
        if is_planted("torch_object_leaked") {
            std::mem::forget(PyList::empty(self.py));
        }
        import::wrap(self.py, self.runtime, offer.accept(&self.runtime.profile, &self.runtime.consumer)?)
    }

    fn compact(&self, tensor: &PyTensor<'py>) -> Result<PyTensor<'py>> {
        export::compact(tensor)
    }

    fn overwritten(&self, tensor: &PyTensor<'py>) -> Result<()> {
        self.overwritten_all(&[tensor]).map_err(|failed| failed.error)
    }

    fn overwritten_all(&self, tensors: &[&PyTensor<'py>]) -> Result<(), Failed> {
        for (index, tensor) in tensors.iter().enumerate() {
            watched::excuse(self.runtime, tensor).map_err(|error| Failed::new(index, error))?;
        }
        let all = if is_planted("torch_write_counted_once") { 1 } else { tensors.len() };
        let tensors = &tensors[..all.min(tensors.len())];
        let is_counted = |tensor: &PyTensor<'py>| {
            let native = self.runtime.native.as_ref().filter(|_| self.runtime.is_tensor(tensor));
            native.is_some_and(|native| native.count(tensor))
        };
        let rest: Vec<usize> = (0..tensors.len()).filter(|index| !is_counted(tensors[*index])).collect();
        if rest.is_empty() {
            return Ok(());
        }
        let each = |index: &usize| export::overwritten(tensors[*index]).map_err(|error| Failed::new(*index, error));
        let together = PyList::new(self.py, rest.iter().map(|index| tensors[*index]));
        match together.map_err(|error| raised(self.py, error)).and_then(|list| export::overwritten(&list)) {
            Ok(()) => Ok(()),
            // Once more, to find the one that it is about.
            Err(_) => rest.iter().try_for_each(each),
        }
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<PyTensor<'py>> {
        import::empty(self.py, self.runtime, device, dtype, shape, order)
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

    fn fingerprint(&self, tensor: &PyTensor<'py>, exported: &Export) -> Fingerprint {
        borrow::fingerprint(self.runtime, tensor, exported)
    }

    fn is_still(&self, tensor: &PyTensor<'py>, exported: &Export, fingerprint: &Fingerprint) -> bool {
        borrow::is_still(self.runtime, tensor, exported, fingerprint)
    }

    fn storage(&self, tensor: &PyTensor<'py>) -> Result<Option<usize>> {
        export::storage(tensor).map(Some)
    }

    fn has_storage(&self, tensor: &PyTensor<'py>, number: usize) -> bool {
        let native = self.runtime.native.as_ref().filter(|_| self.runtime.is_tensor(tensor));
        native.is_some_and(|native| native.memory(tensor) == number)
    }

    fn counted_by(&self, tensor: &PyTensor<'py>) -> Result<Option<PyTensor<'py>>> {
        counter::counted_by(tensor).map(Some)
    }
}
