//! The adapter for MadeUp.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod tensor;

//% if cuda
use bridge_core::{DeviceKind as Kind, Reuse, Stream};
//% end
use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Lent, Memory, Offer, Profile,
    Result, Strides, Views,
};
//% if writes
use bridge_core::Order;
//% end
use std::sync::Arc;
pub use tensor::Tensor;

/// MadeUp.
#[derive(Debug)]
pub struct MadeUp {
    profile: Profile,
//% if cuda
    consumer: Arc<MadeUpConsumer>,
//% end
//% if host
    /// Host memory has no streams.
    consumer: Arc<Views>,
//% end
}

impl MadeUp {
//% if writes
    /// Makes the adapter.
    ///
    /// # Safety
    ///
    /// While this adapter fills a tensor (as the target of `copy_into`), no other thread reads or writes its elements,
    /// also through clones and views.
    pub unsafe fn new() -> Self {
//% end
//% if immutable
    /// Makes the adapter.
    #[allow(clippy::new_without_default, reason = "as the adapters that can write, which have no default")]
    pub fn new() -> Self {
//% end
        // What it can hold, no more and no less: the suite tries all of it.
        let profile = Profile::export_only("madeup")
            .with_dtypes(vec![DType::FLOAT32])
            .with_strides(Strides::Compact)
            .with_alignment(1)
//% if cuda
            .with_devices(vec![DeviceKind::CPU, DeviceKind::CUDA])
//% end
//% if host
            .with_devices(vec![DeviceKind::CPU])
//% end
            .with_keeps_read_only(false);
        Self { profile, consumer: Arc::default() }
    }
}

// SAFETY: the profile is what MadeUp does, the consumer has its streams, and a tensor keeps its lease: see to it that
// this stays true of what you write below.
unsafe impl Adapter for MadeUp {
    type Tensor = Tensor;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.consumer.clone()
    }

    fn export(&self, tensor: &Tensor) -> Result<Lent> {
        let (data, device, dtype, layout) = tensor::view(tensor)?;
//% if writes
        let access = Access::ReadWrite;
//% end
//% if immutable
        let access = Access::Immutable;
//% end
        let bytes = layout.hull(data, None)?;
//% if cuda
        let stream = self.consumer.current_stream(device)?;
        // `InStreamOrder` only with evidence, for this block, that the allocator reuses it after that stream.
        let allocation = Allocation::new(bytes, device, access, stream, Reuse::Unknown);
//% end
//% if host
        debug_assert_eq!(device, Device::CPU);
        let allocation = Allocation::host(bytes, access);
//% end
        // SAFETY: the clone keeps the memory, and MadeUp vouches for what `view` reads.
        let memory = unsafe { Memory::new(allocation, tensor.clone()) };
        Lent::at(data, dtype, layout, memory)
    }

    fn import(&self, offer: Offer) -> Result<Tensor> {
        tensor::wrap(offer.accept(self)?)
    }
//% if compact

    fn compact(&self, tensor: &Tensor) -> Result<Tensor> {
        tensor::compact(tensor)
    }
//% end
//% if writes

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Tensor> {
        tensor::empty(device, dtype, shape, order)
    }
//% end
}
//% if cuda

/// MadeUp's current stream.
#[derive(Debug, Default)]
struct MadeUpConsumer {
    views: Views,
}

// SAFETY: MadeUp uses a tensor in its current stream and in recorded streams: see to it that this stays true.
unsafe impl Consumer for MadeUpConsumer {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        match device.kind {
            Kind::CUDA => Err(unwritten("lib.rs, current_stream", "the stream that work is submitted to now")),
            _ => Ok(None),
        }
    }

    fn views(&self) -> &Views {
        &self.views
    }
}
//% end

/// Returns the error of a function that is to be written. Delete this with the last of them.
fn unwritten(function: &str, returns: &str) -> Error {
    let text = format!("write {function} in crates/bridge-madeup/src: it returns {returns}");
    Error::new(ErrorKind::Framework, text)
}
