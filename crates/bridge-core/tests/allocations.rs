//! A transfer between two adapters in Rust takes one allocation: the exported tensor.

use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, DeviceBuffer, DeviceKind, Export, Layout, Memory, Offer,
    Options, Ordering, Owner, Profile, Result, Reuse, Stream, Strides, Views, transfer,
};
use std::alloc::{GlobalAlloc, System};
use std::cell::Cell;
use std::sync::Arc;

/// Counts the allocations of each thread: the harness of the tests allocates on its own.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: both functions are those of the system's allocator. The counter allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: std::alloc::Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's obligation.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: std::alloc::Layout) {
        // SAFETY: the caller's obligation.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A framework whose tensors are owners of memory that no test touches.
struct Relay {
    profile: Profile,
    consumer: Arc<Current>,
}

struct Current {
    stream: Option<Stream>,
    views: Views,
}

// SAFETY: nothing reads the memory of the tests.
unsafe impl Consumer for Current {
    fn current_stream(&self, _: Device) -> Result<Option<Stream>> {
        Ok(self.stream)
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

impl Relay {
    fn new(stream: Option<u64>) -> Self {
        let profile = Profile::export_only("relay")
            .with_dtypes(vec![DType::FLOAT32])
            .with_strides(Strides::Any)
            .with_devices(vec![DeviceKind::CPU, DeviceKind::CUDA]);
        // SAFETY: no driver sees this stream.
        let stream = stream.map(|handle| unsafe { Stream::from_handle(handle) });
        Self { profile, consumer: Arc::new(Current { stream, views: Views::default() }) }
    }
}

// SAFETY: nothing reads the memory of the tests.
unsafe impl Adapter for Relay {
    type Tensor = Option<Owner>;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.consumer.clone()
    }

    fn export(&self, _: &Option<Owner>) -> Result<Export> {
        let layout = Layout::new(DType::FLOAT32, &[2, 3, 4, 5], Some(&[60, 1, 12, 3]), 0)?;
        let (stream, reuse) = (self.consumer.stream, Reuse::InStreamOrder);
        let device = if stream.is_some() { Device::cuda(0) } else { Device::CPU };
        let bytes = layout.extent_at(0x1000, None)?;
        let allocation = Allocation::new(bytes, device, Access::ReadWrite, stream, reuse);
        // SAFETY: no test touches the memory.
        Export::at(0x1000, DType::FLOAT32, layout, unsafe { Memory::new(allocation, ()) })
    }

    fn import(&self, offer: Offer) -> Result<Option<Owner>> {
        Ok(Some(offer.accept(&self.profile, &self.consumer)?.into()))
    }
}

/// An ordering that allocates nothing.
struct Free;

// SAFETY: the memory of these tests is of the host, and no work is put into a stream.
unsafe impl Ordering for Free {
    unsafe fn order(&self, _: Device, _: Stream, _: Stream) -> Result<()> {
        Ok(())
    }

    unsafe fn release_later(&self, _: Device, _: Stream, buffer: Box<dyn DeviceBuffer>) {
        drop(buffer);
    }
}

#[test]
fn a_transfer_takes_one_allocation() {
    for (owner, reader) in [(None, None), (Some(5), Some(5)), (Some(5), Some(6))] {
        let (from, to) = (Relay::new(owner), Relay::new(reader));
        let (ordering, options): (Arc<dyn Ordering>, _) = (Arc::new(Free), Options::default());
        let before = COUNT.get();
        let (view, _) = transfer(&from, &to, &None, &ordering, &options).unwrap();
        assert_eq!(to.consumer.views.len(), usize::from(owner.is_some()));
        assert_eq!(COUNT.get() - before, 1, "owner {owner:?}, reader {reader:?}");
        let clone = view.clone();
        drop(view);
        assert_eq!(to.consumer.views.len(), usize::from(owner.is_some()));
        drop(clone);
        assert_eq!(to.consumer.views.len(), 0);
    }
}
