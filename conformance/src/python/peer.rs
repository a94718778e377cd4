//! A library that is known only by a protocol, as a source.

use bridge_core::{Adapter, DType, Device, Error, ErrorKind, Export, Offer, Profile, Result, Strides};
use bridge_frameworks::Protocol;
use bridge_pyo3::{Borrowed, Fingerprint, PyAdapter, PyTensor};
use pyo3::prelude::*;
use std::ops::Deref;

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

    forward_adapter!(PyTensor<'py>, protocol: consumer export compact overwritten empty);

    fn import(&self, _: Offer) -> Result<PyTensor<'py>> {
        Err(Error::new(ErrorKind::Argument, "the suite knows this library only by its protocol, as a source"))
    }
}

#[deny(clippy::missing_trait_methods)]
impl<'py> PyAdapter<'py> for Peer<'py> {
    forward! { protocol:
        fn owns(object: &PyTensor<'py>) -> bool;
        fn locate(tensor: &PyTensor<'py>) -> Result<Option<(Device, usize)>>;
        fn fingerprint(tensor: &PyTensor<'py>, exported: &Export) -> Fingerprint;
        fn is_still(tensor: &PyTensor<'py>, exported: &Export, fingerprint: &Fingerprint) -> bool;
        fn storage(tensor: &PyTensor<'py>) -> Result<Option<usize>>;
        fn has_storage(tensor: &PyTensor<'py>, number: usize) -> bool;
        fn counted_by(tensor: &PyTensor<'py>) -> Result<Option<PyTensor<'py>>>;
    }

    fn borrow<'a>(&self, tensor: &'a PyTensor<'py>) -> Result<Borrowed<'a>> {
        self.protocol.borrow(tensor)
    }
}
