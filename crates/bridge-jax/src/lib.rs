//! The JAX adapter: arrays on one device, exported and imported through the functions of jaxlib on which `jax.dlpack` is
//! built.
//!
//! Arrays of JAX do not change. Exports cross in place into every framework, as memory that no view may write to
//! ([`Access::Immutable`](bridge_core::Access::Immutable)).
//!
//! JAX computes on the host asynchronously, and has no stream there: an export of an array on the host waits until it is
//! computed. On a CUDA device nothing waits: jaxlib makes the legacy default stream wait for the array, and an imported
//! array waits for the stream that JAX names for external work.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod devices;
mod driver;
mod export;
mod fed;
mod handler;
mod import;
mod keep_alive;
mod runtime;
mod streams;
mod turns;
mod xla;

use bridge_core::{Adapter, Consumer, Export, Offer, Profile, Result};
use bridge_pyo3::{PyAdapter, PyTensor};
pub use fed::{Feed, Feeds, Overwritten};
pub use handler::{Target, targets};
use pyo3::Python;
use runtime::Runtime;
use std::sync::Arc;

/// JAX in this process.
#[derive(Clone, Copy)]
pub struct JAX<'py> {
    py: Python<'py>,
    runtime: &'static Runtime,
    profile: &'static Profile,
}

bridge_core::debug_fields!(impl[] JAX<'_>);

impl<'py> JAX<'py> {
    /// Imports JAX at the first call, and looks up what the installed version supports. The profile is that of JAX's
    /// current mode: without `jax_enable_x64` it has no dtypes of 64 bits.
    ///
    /// # Errors
    ///
    /// [`Missing`](bridge_core::ErrorKind::Missing) if JAX is not installed.
    pub fn new(py: Python<'py>) -> Result<Self> {
        let runtime = Runtime::get(py)?;
        Ok(Self { py, runtime, profile: runtime.profile(py)? })
    }
}

// SAFETY: an array keeps its lease and is never written to. The consumer has the streams of XLA.
unsafe impl<'py> Adapter for JAX<'py> {
    type Tensor = PyTensor<'py>;

    fn profile(&self) -> &Profile {
        self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.runtime.consumer.clone()
    }

    fn export(&self, array: &PyTensor<'py>) -> Result<Export> {
        export::export(self.runtime, array)
    }

    fn import(&self, offer: Offer) -> Result<PyTensor<'py>> {
        import::wrap(self.py, self.runtime, offer.accept(self.profile, &self.runtime.consumer)?)
    }

    fn compact(&self, array: &PyTensor<'py>) -> Result<PyTensor<'py>> {
        export::compact(array)
    }
}

impl<'py> PyAdapter<'py> for JAX<'py> {
    fn owns(&self, object: &PyTensor<'py>) -> bool {
        self.runtime.is_of_jax(object)
    }
}
