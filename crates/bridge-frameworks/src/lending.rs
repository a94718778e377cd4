//! The adapter that lends tensors to consumers that are known by a protocol alone.

use crate::driver;
use crate::loan::{Loan, Terms};
use crate::origin::READER;
use bridge_core::{
    Adapter, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Keep, Lent, Offer, Options, Ordering, Profile,
    Result, Stream, Views,
};
use bridge_pyo3::{PyTensor, exception};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, OnceLock};

/// A stream that the caller names for a loan, and what keeps it alive.
#[derive(Clone)]
pub struct Named {
    /// The stream.
    pub stream: Stream,
    /// As [`Consumer::keep`].
    pub keep: Option<Keep>,
}

bridge_core::debug_fields!(impl[] Named: stream);

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

/// Consumers that are known by a protocol alone, and borrow a tensor of a framework.
pub(crate) struct Borrower {
    framework: Arc<dyn Consumer>,
    named: Option<Named>,
    /// Set once the stream is known to be one that the device can be ordered with.
    checked: OnceLock<()>,
    /// Whether a consumer has named another stream. Nothing keeps that one alive, so no later call may name it.
    elsewhere: AtomicBool,
}

impl Borrower {
    fn new(framework: Arc<dyn Consumer>, named: Option<Named>) -> Self {
        Self { framework, named, checked: OnceLock::new(), elsewhere: AtomicBool::new(false) }
    }

    /// Takes note of a stream that a consumer has named.
    pub(crate) fn used_in(&self, stream: Stream) {
        if self.named() != Some(stream) {
            self.elsewhere.store(true, Relaxed);
        }
    }

    /// Refuses a stream of another device, and to name none where the driver needs one.
    fn check(&self, device: Device) -> Result<()> {
        if self.checked.get().is_none() {
            driver::check(device, self.named())?;
            let _ = self.checked.set(());
        }
        Ok(())
    }

    /// Returns the stream that the caller has named.
    pub(crate) fn named(&self) -> Option<Stream> {
        self.named.as_ref().map(|named| named.stream)
    }

    /// Returns the stream that is current in the framework of the tensor.
    ///
    /// # Errors
    ///
    /// Those of the framework.
    pub(crate) fn framework_stream(&self, device: Device) -> Result<Stream> {
        // A framework without streams has moved a tensor of the host to a device.
        Ok(self.framework.current_stream(device)?.map_or(Stream::LEGACY, Stream::on_any_thread))
    }
}

impl Consumer for Borrower {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        if device.kind == DeviceKind::CPU {
            return Ok(None);
        }
        self.check(device)?;
        match self.named() {
            Some(stream) => Ok(Some(stream)),
            None => self.framework_stream(device).map(Some),
        }
    }

    fn keep(&self, device: Device, stream: Stream) -> Option<Keep> {
        match &self.named {
            Some(named) => named.keep.clone(),
            None => self.framework.keep(device, stream),
        }
    }

    fn uses_other_streams(&self) -> bool {
        self.named.is_none() || self.elsewhere.load(Relaxed)
    }

    fn views(&self) -> &Views {
        READER.views()
    }
}

impl<'py> Adapter for Lending<'py> {
    type Tensor = PyTensor<'py>;

    fn profile(&self) -> &Profile {
        &PROFILE
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.consumer.clone()
    }

    fn export(&self, _: &PyTensor<'py>) -> Result<Lent> {
        Err(Error::new(ErrorKind::Argument, "a loan is exported by its own protocol: pass it to a conversion"))
    }

    fn import(&self, offer: Offer) -> Result<PyTensor<'py>> {
        let py = self.tensor.py();
        let lease = offer.accept(self)?;
        let ready = self.consumer.current_stream(lease.device())?;
        let terms =
            Terms { borrower: Arc::clone(&self.consumer), ordering: Arc::clone(&self.ordering), options: self.options };
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
pub(crate) fn lend_again<'py>(tensor: &PyTensor<'py>, terms: &Terms, options: &Options) -> PyResult<Bound<'py, Loan>> {
    let again = || {
        let from = crate::adapter_of(tensor)?.ok_or_else(|| crate::strangers::no_tensor(tensor))?;
        let Borrower { framework, named, .. } = &*terms.borrower;
        let to = Lending::new(tensor, Arc::clone(framework), named.clone(), &terms.ordering, options);
        bridge_core::transfer(&from, &to, tensor, &terms.ordering, options).map(|(loan, _)| loan)
    };
    let loan = again().map_err(|error| exception(tensor.py(), error))?;
    Ok(loan.cast_into()?)
}

#[cfg(test)]
mod tests;
