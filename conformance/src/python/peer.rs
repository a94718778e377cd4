//! A library that is known only by a protocol, as a source.

use bridge_core::{
    Adapter, Consumer, DType, Device, Error, ErrorKind, Export, Failed, Offer, Order, Profile, Result, Strides,
};
use bridge_frameworks::Protocol;
use bridge_pyo3::{Borrowed, Fingerprint, PyAdapter, PyTensor};
use pyo3::prelude::*;
use std::ops::Deref;
use std::sync::Arc;

/// The adapter of objects that are known by a protocol, with the profile of one library: what its protocol carries.
pub(super) struct Peer<'py> {
    protocol: Protocol<'py>,
    profile: Profile,
}

impl<'py> Peer<'py> {
    /// Reads the profile from the library's subject: its dtypes, `rank` and `compact`.
    ///
    /// # Errors
    ///
    /// What the subject raises.
    pub(super) fn new(name: &str, harness: &PyTensor<'py>, dtypes: Vec<DType>) -> PyResult<Self> {
        let (least, most) = harness.getattr("rank")?.extract()?;
        let strides = if harness.getattr("compact")?.extract()? { Strides::Compact } else { Strides::Any };
        let profile = Profile::export_only(name).with_dtypes(dtypes).with_rank(least..=most);
        let profile = profile.with_strides(strides).with_alignment(1);
        Ok(Self { protocol: Protocol::new(harness), profile })
    }
}

impl<'py> Deref for Peer<'py> {
    type Target = dyn PyAdapter<'py> + 'py;

    fn deref(&self) -> &Self::Target {
        self
    }
}

#[deny(clippy::missing_trait_methods)]
// SAFETY: it does what the inner adapter does.
unsafe impl<'py> Adapter for Peer<'py> {
    type Tensor = PyTensor<'py>;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.protocol.consumer()
    }

    fn export(&self, tensor: &PyTensor<'py>) -> Result<Export> {
        self.protocol.export(tensor)
    }

    fn import(&self, _: Offer) -> Result<PyTensor<'py>> {
        Err(Error::new(ErrorKind::Argument, "the suite knows this library only by its protocol, as a source"))
    }

    fn compact(&self, tensor: &PyTensor<'py>) -> Result<PyTensor<'py>> {
        self.protocol.compact(tensor)
    }

    fn overwritten(&self, tensor: &PyTensor<'py>) -> Result<()> {
        self.protocol.overwritten(tensor)
    }

    fn overwritten_all(&self, tensors: &[&PyTensor<'py>]) -> Result<(), Failed> {
        self.protocol.overwritten_all(tensors)
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<PyTensor<'py>> {
        // SAFETY: the caller's obligation.
        unsafe { self.protocol.empty(device, dtype, shape, order) }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<'py> PyAdapter<'py> for Peer<'py> {
    fn owns(&self, object: &PyTensor<'py>) -> bool {
        self.protocol.owns(object)
    }

    fn borrow<'a>(&self, tensor: &'a PyTensor<'py>) -> Result<Borrowed<'a>> {
        self.protocol.borrow(tensor)
    }

    fn locate(&self, tensor: &PyTensor<'py>) -> Result<Option<(Device, usize)>> {
        self.protocol.locate(tensor)
    }

    fn fingerprint(&self, tensor: &PyTensor<'py>, exported: &Export) -> Fingerprint {
        self.protocol.fingerprint(tensor, exported)
    }

    fn is_still(&self, tensor: &PyTensor<'py>, exported: &Export, fingerprint: &Fingerprint) -> bool {
        self.protocol.is_still(tensor, exported, fingerprint)
    }

    fn storage(&self, tensor: &PyTensor<'py>) -> Result<Option<usize>> {
        self.protocol.storage(tensor)
    }

    fn has_storage(&self, tensor: &PyTensor<'py>, number: usize) -> bool {
        self.protocol.has_storage(tensor, number)
    }

    fn counted_by(&self, tensor: &PyTensor<'py>) -> Result<Option<PyTensor<'py>>> {
        self.protocol.counted_by(tensor)
    }
}
