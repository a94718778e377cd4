//! The consumer's side of a transfer: a reader in one stream, which holds a lease, bare or as a managed tensor of
//! DLPack.

use crate::on_device::in_streams;
use crate::status::refused;
use bridge_core::dlpack::{wrap, wrap_as};
use bridge_core::{Adapter, Consumer, Device, Error, ErrorKind, Export, Lease, Offer, Profile, Result, Stream, Views};
use bridge_pyo3::interpreter::AnyManaged;
use std::sync::{Arc, LazyLock};

/// The views of all readers, which are looked up by address.
pub(crate) static VIEWS: LazyLock<Views> = LazyLock::new(Views::default);

/// The part of a reader, or of an owner, that outlives the view: the stream that it works in. `None` for the owner of
/// host memory.
pub(crate) struct InStream(pub(crate) Option<Stream>);

// SAFETY: the caller of the C function has named the stream.
unsafe impl Consumer for InStream {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        Ok(self.0.filter(|_| in_streams(device)))
    }

    fn views(&self) -> &Views {
        &VIEWS
    }
}

/// An adapter for the caller, who reads and writes in one stream and takes every lease that fits the profile.
pub(crate) struct Reader {
    profile: Profile,
    consumer: Arc<InStream>,
}

impl Reader {
    pub(crate) fn new(profile: Profile, stream: Option<Stream>) -> Self {
        Self { profile, consumer: Arc::new(InStream(stream)) }
    }

    /// Returns a reader on the host that takes such a tensor in place.
    pub(crate) fn of_any(tensor: &Export) -> Self {
        let (dtypes, devices) = (vec![tensor.dtype()], vec![tensor.device().kind]);
        Self::new(Profile::export_only("the consumer").with_dtypes(dtypes).with_devices(devices), None)
    }
}

// SAFETY: a view keeps its lease. Streams and writes are what the caller of the C function has promised.
unsafe impl Adapter for Reader {
    type Tensor = Lease;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.consumer.clone()
    }

    fn export(&self, _: &Lease) -> Result<Export> {
        Err(refused("a view cannot be exported again: export the tensor that it was made of"))
    }

    fn import(&self, offer: Offer) -> Result<Lease> {
        offer.accept(&self.profile, &self.consumer)
    }

    fn compact(&self, lease: &Lease) -> Result<Lease> {
        Err(uncopied(lease.device()))
    }
}

/// Returns the error for memory of a device that is neither the host nor a GPU.
#[cold]
pub(crate) fn uncopied(device: Device) -> Error {
    let text = format!("cannot copy memory of {device} here: copy it with its own framework first");
    Error::new(ErrorKind::CopyNeeded, text)
}

/// Returns a managed tensor, whose deleter drops the lease.
pub(crate) fn managed(lease: Lease, versioned: bool) -> AnyManaged {
    match versioned {
        true => AnyManaged::Versioned(wrap(lease).0.into_raw()),
        // SAFETY: the profile of such a target says that it may write, so the caller of C has promised it.
        false => AnyManaged::Legacy(unsafe { wrap_as(lease, drop) }.0.into_raw()),
    }
}
