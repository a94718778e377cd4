//! Subjects of host memory: a subject is an adapter and the few functions in which frameworks differ.

use crate::{Capabilities, Observed, Spec, Subject, model};
use bridge_core::{Adapter, DType, Device, HostOnly, Ordering, Result, Stream};
use std::sync::Arc;
use std::time::Duration;

/// What the suite needs of a framework whose tensors are in host memory, through the framework's own interface and
/// never through its adapter. [`HostSubject`] makes a [`Subject`] of it; the methods mean what they mean there.
pub trait HostTensors {
    /// The tensors. A clone is another reference to the same tensor.
    type Tensor: Clone + Send;

    /// Returns what the framework can do.
    fn capabilities(&self) -> Capabilities;

    /// Makes the tensor that `spec` describes, over a base buffer with these bytes.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<Self::Tensor>;

    /// As [`Subject::create_unwritten`].
    fn create_unwritten(&self, spec: &Spec) -> Option<Result<Self::Tensor>> {
        let _ = spec;
        None
    }

    /// Returns what the framework reports of the tensor.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn observe(&self, tensor: &Self::Tensor) -> Result<Observed>;

    /// Returns the elements in row-major order, bit for bit.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn read(&self, tensor: &Self::Tensor) -> Result<Vec<u8>>;

    /// Overwrites the elements, in row-major order. Called only where [`Capabilities::writes`] is set.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn write(&self, tensor: &Self::Tensor, bytes: &[u8]) -> Result<()>;
}

/// A framework of host memory under test: its adapter, and its [tensors](HostTensors).
///
/// ```
/// # use bridge_conformance::{Capabilities, HostSubject, HostTensors, Observed, Spec};
/// # use bridge_core::{Adapter, Result};
/// # fn subject<A: Adapter<Tensor = T>, T: Clone + Send, H: HostTensors<Tensor = T>>(adapter: A, tensors: H) {
/// let subject = HostSubject::new(adapter, tensors);
/// // bridge_conformance::certify(&subject, &reference)
/// # }
/// ```
pub struct HostSubject<A, H> {
    adapter: A,
    tensors: H,
    ordering: Arc<dyn Ordering>,
}

bridge_core::debug_fields!(impl[A, H: std::fmt::Debug] HostSubject<A, H>: tensors);

impl<A: Adapter, H: HostTensors<Tensor = A::Tensor>> HostSubject<A, H> {
    /// Joins an adapter and what the suite needs next to it.
    pub fn new(adapter: A, tensors: H) -> Self {
        Self { adapter, tensors, ordering: Arc::new(HostOnly) }
    }

    /// The same with an ordering that has copies, such as that of `bridge-cuda`.
    #[must_use]
    pub fn with_ordering(self, ordering: Arc<dyn Ordering>) -> Self {
        Self { ordering, ..self }
    }
}

#[deny(clippy::missing_trait_methods)]
// SAFETY: it does what the inner adapter does.
unsafe impl<A: Adapter, H> Adapter for HostSubject<A, H> {
    type Tensor = A::Tensor;

    forward_adapter!(A::Tensor, adapter);
}

/// Garbage, which memory that is used too early is overwritten with.
const GARBAGE: u8 = 0x5a;

impl<T: Clone + Send, A: Adapter<Tensor = T>, H: HostTensors<Tensor = T>> Subject for HostSubject<A, H> {
    fn device(&self) -> Device {
        Device::CPU
    }

    fn ordering(&self) -> Arc<dyn Ordering> {
        Arc::clone(&self.ordering)
    }

    forward! { tensors:
        fn capabilities() -> Capabilities;
        fn create(spec: &Spec, bytes: &[u8]) -> Result<T>;
        fn create_unwritten(spec: &Spec) -> Option<Result<T>>;
        fn observe(tensor: &T) -> Result<Observed>;
        fn read(tensor: &T) -> Result<Vec<u8>>;
        fn write(tensor: &T, bytes: &[u8]) -> Result<()>;
    }

    fn fill(&self, tensor: &mut T, byte: u8) -> Result<()> {
        let Observed { dtype, shape, .. } = self.tensors.observe(tensor)?;
        let bytes = vec![byte; model::numel(&shape) * model::itemsize(dtype)];
        if self.capabilities().writes {
            return self.tensors.write(tensor, &bytes);
        }
        *tensor = self.tensors.create(&Spec::compact(dtype, &shape), &bytes)?;
        Ok(())
    }

    /// Of uint8, or of the first dtype that there is.
    fn allocate(&self, nbytes: usize) -> Result<T> {
        let dtypes = self.capabilities().dtypes;
        let dtype = if dtypes.contains(&DType::UINT8) { DType::UINT8 } else { dtypes[0] };
        let count = nbytes / model::itemsize(dtype);
        let spec = Spec::row(dtype, count, &self.profile().rank);
        self.tensors.create(&spec, &vec![GARBAGE; count * model::itemsize(dtype)])
    }

    fn snapshot(&self, from: &T, into: &mut T) -> Result<()> {
        let bytes = self.tensors.read(from)?;
        if self.capabilities().writes {
            return self.tensors.write(into, &bytes);
        }
        let Observed { dtype, shape, .. } = self.tensors.observe(into)?;
        *into = self.tensors.create(&Spec::compact(dtype, &shape), &bytes)?;
        Ok(())
    }

    fn share(&self, tensor: &T) -> T {
        tensor.clone()
    }

    fn drop_on_thread(&self, tensor: T) {
        std::thread::scope(|scope| drop(scope.spawn(move || drop(tensor))));
    }

    fn streams(&self) -> Vec<Stream> {
        Vec::new()
    }

    unsafe fn on_stream(&self, _: Stream, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        body()
    }

    fn delay(&self) -> Result<()> {
        Ok(())
    }

    fn settle(&self) -> Result<Option<usize>> {
        Ok(None)
    }

    /// No work of a device keeps memory: a lease that is not back in this time is leaked.
    fn patience(&self) -> Duration {
        Duration::from_secs(5)
    }
}
