//! The adapter for the edges of graphs.

use crate::graph::argument;
use crate::graph::external::External;
use crate::graph::operations::{INPUT, OUTPUT};
use crate::graph::results::copied;
use crate::runtime::Runtime;
use crate::runtime::kernel::register;
use crate::runtime::stream;
use bridge_core::{Adapter, Consumer, Export, Offer, Profile, Result};
use std::sync::Arc;

/// The adapter for the edges of a runtime's graphs: it imports tensors to be fed, and exports those that a run has
/// fetched.
#[derive(Clone, Copy, Debug)]
pub struct GraphEdges(&'static Runtime);

impl GraphEdges {
    /// Registers the operations, the first time: those of the edges, and the one that reports the stream of a GPU.
    ///
    /// # Errors
    ///
    /// [`Argument`](bridge_core::ErrorKind::Argument) if another copy of this crate in the process has registered them,
    /// and what TensorFlow reports.
    pub fn new(runtime: &'static Runtime) -> Result<Self> {
        register(runtime, &[&INPUT, &OUTPUT])?;
        stream::register(runtime)?;
        Ok(Self(runtime))
    }

    /// The runtime.
    pub fn runtime(&self) -> &'static Runtime {
        self.0
    }

    /// Refuses a tensor of the other TensorFlow, which computes in another stream.
    fn check(&self, tensor: &External) -> Result<()> {
        let version = tensor.value().runtime.version();
        std::ptr::eq(tensor.value().runtime, self.0)
            .then_some(())
            .ok_or_else(|| argument(format!("the tensor is one of TensorFlow {version}")))
    }
}

// SAFETY: TensorFlow keeps the lease of a fed tensor with its buffer, and its consumer has its streams. It writes to no
// tensor that it is fed, but by operations in place, which docs/rust.md names.
unsafe impl Adapter for GraphEdges {
    type Tensor = External;

    fn profile(&self) -> &Profile {
        &self.0.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.0.consumer.clone()
    }

    fn export(&self, tensor: &External) -> Result<Export> {
        self.check(tensor)?;
        tensor.export()
    }

    fn import(&self, offer: Offer) -> Result<External> {
        External::feed(self.0, offer.accept(&self.0.profile, &self.0.consumer)?)
    }

    fn compact(&self, tensor: &External) -> Result<External> {
        self.check(tensor)?;
        copied(tensor.value()).map(External::new)
    }
}
