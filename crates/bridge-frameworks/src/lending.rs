//! The adapter that lends tensors to consumers that are known only by a protocol.

use crate::borrower::{Borrower, Named};
use crate::loan::{Loan, Terms};
use bridge_core::{
    Adapter, Consumer, DType, DeviceKind, Error, ErrorKind, Export, Offer, Options, Ordering, Profile, Result,
};
use bridge_pyo3::{PyTensor, exception};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::sync::{Arc, LazyLock};

/// The adapter whose tensors are [`Loan`]s: objects that any consumer of DLPack or of an array interface takes.
///
/// A loan is ready in the stream that the caller names. Without one it is ready in the stream that is current in the
/// framework of the tensor, each consumer orders its own stream after that, and the memory waits for all work that the
/// device has when the last view is dropped.
pub struct Lending<'py> {
    tensor: PyTensor<'py>,
    consumer: Arc<Borrower>,
    ordering: Arc<dyn Ordering>,
    options: Options,
}

bridge_core::debug_fields!(impl[] Lending<'_>: options);

/// What the protocols can say.
static PROFILE: LazyLock<Profile> = LazyLock::new(|| {
    Profile::export_only("dlpack")
        .with_dtypes(DType::NAMED.iter().map(|(dtype, _)| *dtype).collect())
        .with_devices(vec![DeviceKind::CPU, DeviceKind::CUDA])
});

impl<'py> Lending<'py> {
    /// Returns the adapter for one tensor, whose framework has this consumer. `options` are those of the transfer:
    /// consumers that ask for a copy, or for another device, get it by the same.
    pub fn new(
        tensor: &PyTensor<'py>,
        framework: Arc<dyn Consumer>,
        named: Option<Named>,
        ordering: &Arc<dyn Ordering>,
        options: &Options,
    ) -> Self {
        let consumer = Arc::new(Borrower::new(framework, named));
        Self { tensor: tensor.clone(), consumer, ordering: Arc::clone(ordering), options: *options }
    }
}

// SAFETY: it does what the inner adapter does, and a loan keeps its lease.
unsafe impl<'py> Adapter for Lending<'py> {
    type Tensor = PyTensor<'py>;

    fn profile(&self) -> &Profile {
        &PROFILE
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.consumer.clone()
    }

    fn export(&self, _: &PyTensor<'py>) -> Result<Export> {
        Err(Error::new(ErrorKind::Argument, "a loan is exported by its own protocol: pass it to a conversion"))
    }

    fn import(&self, offer: Offer) -> Result<PyTensor<'py>> {
        let py = self.tensor.py();
        let lease = offer.accept(&PROFILE, &self.consumer)?;
        let ready = self.consumer.current_stream(lease.device())?;
        let terms = Terms {
            borrower: Arc::clone(&self.consumer),
            ordering: Arc::clone(&self.ordering),
            options: self.options,
            lend: lend_again,
        };
        // A capsule is consumed now.
        let source = Some(&self.tensor).filter(|tensor| !tensor.is_instance_of::<PyCapsule>());
        let loan = Bound::new(py, Loan::new(lease, ready, source.cloned().map(Bound::unbind), Some(terms)));
        loan.map(Bound::into_any).map_err(|error| bridge_pyo3::framework_error(py, "Python", error))
    }
}

/// Lends the tensor once more, as a copy or on another device.
///
/// # Errors
///
/// Those of the transfer.
fn lend_again<'py>(tensor: &PyTensor<'py>, terms: &Terms, options: &Options) -> PyResult<Bound<'py, Loan>> {
    let again = || {
        let from = crate::adapter_of(tensor)?.ok_or_else(|| crate::unsupported::no_tensor(tensor))?;
        let Borrower { framework, named, .. } = &*terms.borrower;
        let to = Lending::new(tensor, Arc::clone(framework), named.clone(), &terms.ordering, options);
        bridge_core::transfer(&from, &to, tensor, &terms.ordering, options).map(|(loan, _)| loan)
    };
    let loan = again().map_err(|error| exception(tensor.py(), error))?;
    Ok(loan.cast_into()?)
}

#[cfg(test)]
mod tests;
