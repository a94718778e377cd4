//! PyTorch through the crate `tch`, without Python.

mod export;
mod import;
mod libtorch;
mod memory;
mod numbers;
mod runtime;
mod tensors;
#[cfg(test)]
mod tests;

use ::tch::Tensor;
use bridge_core::{Adapter, Consumer, DType, Device, Export, Offer, Order, Profile, Result, Stream};
use runtime::Runtime;
use std::sync::Arc;

/// The libtorch of this process, whose tensors are [`tch::Tensor`](::tch::Tensor).
///
/// A tensor is converted in any layout. Memory of another owner becomes a `tch` tensor over `torch_from_blob`, a C
/// function of libtorch 2.11 and later, and returns to its owner when libtorch drops the last tensor over its storage.
///
/// ```no_run
/// use bridge_core::{HostOnly, Options, Ordering, transfer};
/// use bridge_torch::Tch;
/// use std::sync::Arc;
///
/// // SAFETY: the program uses the memory of a tensor on one thread at a time.
/// let tch = unsafe { Tch::new()? };
/// let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
/// let tensor = tch::Tensor::arange(6, (tch::Kind::Float, tch::Device::Cpu)).view([2, 3]);
/// let (same, _) = transfer(&tch, &tch, &tensor.tr(), &ordering, &Options::default())?;
/// assert_eq!(same.data_ptr(), tensor.data_ptr());
/// # Ok::<(), bridge_core::Error>(())
/// ```
///
/// # Versions
///
/// Each version of `tch` compiles with one version of libtorch:
///
/// | `tch` | libtorch | this adapter |
/// |---|---|---|
/// | 0.23 and older | 2.10 and older | [`Version`](bridge_core::ErrorKind::Version): there is no `torch_from_blob` |
/// | 0.24 | 2.11 | tested |
/// | 0.26 | 2.13 | compiles |
///
/// `LIBTORCH_BYPASS_VERSION_CHECK` makes the build script of `tch` accept another libtorch, with which it mostly does
/// not compile. What the adapter calls itself are C functions, which it looks up at run time.
///
/// # Errors
///
/// A tensor that requires grad is refused, as in Python: call `detach` first. So are sparse, quantised and meta
/// tensors. A conjugated or negated view is converted as a copy.
#[derive(Clone, Copy)]
pub struct Tch {
    runtime: &'static Runtime,
}

bridge_core::debug_fields!(impl[] Tch);

impl Tch {
    /// Looks up the functions of libtorch at the first call.
    ///
    /// # Errors
    ///
    /// [`Missing`](bridge_core::ErrorKind::Missing) where the process has not loaded libtorch,
    /// [`Version`](bridge_core::ErrorKind::Version) where libtorch is older than 2.11.
    ///
    /// # Safety
    ///
    /// Memory that frameworks share can be read and written through each of them by safe code, and no framework waits
    /// for another on the host. While a tensor of another framework, or of another process, shares the memory of a tensor
    /// of `tch`, no code writes to it through the one (also by [`copy_into`](bridge_core::copy_into)) while another thread
    /// reads or writes it through the other. The clones of a tensor share its memory too.
    /// No code writes to a tensor of memory that never changes ([`Access::Immutable`](bridge_core::Access::Immutable)).
    ///
    /// The only constructor is unsafe, because `tch` writes through shared tensors in safe methods.
    pub unsafe fn new() -> Result<Self> {
        Ok(Self { runtime: Runtime::of_process()? })
    }

    /// Returns the current stream of a CUDA device on this thread, which `tch` does not show.
    ///
    /// # Errors
    ///
    /// [`Framework`](bridge_core::ErrorKind::Framework) where libtorch has no such device.
    pub fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        self.runtime.consumer.current_stream(device)
    }

    /// Makes `stream` the current stream of a CUDA device on this thread, until the next call.
    ///
    /// # Errors
    ///
    /// [`Framework`](bridge_core::ErrorKind::Framework) where libtorch has no such device.
    ///
    /// # Safety
    ///
    /// The stream belongs to this device, and is not destroyed while it is current or while libtorch has memory that
    /// was used in it.
    pub unsafe fn set_current_stream(&self, device: Device, stream: Stream) -> Result<()> {
        // SAFETY: the caller's obligation.
        unsafe { self.runtime.set_current_stream(device, stream) }
    }
}

// SAFETY: a storage keeps its lease, and the consumer has the streams of libtorch. Writes are what the contract of
// `new` allows.
unsafe impl Adapter for Tch {
    type Tensor = Tensor;

    fn profile(&self) -> &Profile {
        &self.runtime.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.runtime.consumer.clone()
    }

    fn export(&self, tensor: &Tensor) -> Result<Export> {
        export::export(self.runtime, tensor)
    }

    fn import(&self, offer: Offer) -> Result<Tensor> {
        import::wrap(self.runtime, offer.accept(&self.runtime.profile, &self.runtime.consumer)?)
    }

    fn compact(&self, tensor: &Tensor) -> Result<Tensor> {
        export::compact(self.runtime, tensor)
    }

    fn overwritten(&self, tensor: &Tensor) -> Result<()> {
        export::overwritten(tensor)
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Tensor> {
        tensors::empty(&self.runtime.libtorch, &self.runtime.numbers, device, dtype, shape, order)
    }
}
