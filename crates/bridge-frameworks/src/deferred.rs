//! The end of a borrow from a producer whose allocator is unknown.

use bridge_core::{Allocation, Device, DeviceBuffer, Export, Memory, Ordering, Result, Stream};
use std::sync::Arc;

/// Memory that is returned to its producer only when the device has done the work that its stream holds at the drop.
struct DeferredRelease {
    device: Device,
    stream: Stream,
    /// `None` only while it is being dropped.
    memory: Option<Box<dyn DeviceBuffer>>,
    ordering: Arc<dyn Ordering>,
}

impl Drop for DeferredRelease {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            // SAFETY: by the contract of `DeviceBuffer` the stream of the memory is alive until that is dropped.
            unsafe { self.ordering.release_later(self.device, self.stream, memory) };
        }
    }
}

/// Returns the same tensor, whose memory is returned to its producer after the work in its stream. Memory without a
/// stream is returned at once.
///
/// A kernel may still run when its borrow ends, and a producer that is known only by a protocol may reuse the memory
/// in any stream.
///
/// # Errors
///
/// None: the view has been inside its memory before.
pub(crate) fn released_later(exported: Export, ordering: &Arc<dyn Ordering>) -> Result<Export> {
    let (data, dtype, layout, buffer) =
        (exported.data(), exported.dtype(), exported.layout().clone(), exported.buffer());
    let Some(stream) = buffer.stream() else { return Ok(exported) };
    let (device, start) = (buffer.device(), buffer.address());
    let bytes = start..start + buffer.len();
    let allocation = Allocation::new(bytes, device, buffer.access(), Some(stream), buffer.reuse());
    // SAFETY: these are the properties of the buffer inside, whose producer has made the promises.
    let memory: Box<dyn DeviceBuffer> = Box::new(unsafe { Memory::new(allocation.clone(), exported) });
    let stream = stream.on_any_thread();
    let release = DeferredRelease { device, stream, memory: Some(memory), ordering: Arc::clone(ordering) };
    // SAFETY: the same; the memory lives longer than it must, and `release_later` may be called on any thread.
    Export::at(data, dtype, layout, unsafe { Memory::new(allocation, release) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bridge_core::{Access, DType, Layout, Reuse};
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    type Released = (Device, Stream, Box<dyn DeviceBuffer>);

    #[derive(Default)]
    struct Recorded(Mutex<Vec<Released>>);

    // SAFETY: it is called only for the drops that the tests look at.
    unsafe impl Ordering for Recorded {
        unsafe fn order(&self, _: Device, _: Stream, _: Stream) -> Result<()> {
            unreachable!("nothing is ordered")
        }

        unsafe fn release_later(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
            self.0.lock().unwrap().push((device, stream, buffer));
        }
    }

    struct Owner(Arc<AtomicU32>);

    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    /// Returns six elements in a buffer of more, and the number of its drops.
    fn exported(device: Device, stream: Option<Stream>) -> (Export, Arc<AtomicU32>) {
        let dropped = Arc::new(AtomicU32::new(0));
        let allocation = Allocation::new(0x1000..0x1100, device, Access::ReadOnly, stream, Reuse::Unknown);
        // SAFETY: nothing reads the memory.
        let memory = unsafe { Memory::new(allocation, Owner(Arc::clone(&dropped))) };
        let layout = Layout::new(DType::FLOAT32, &[2, 3], None, 0).unwrap();
        (Export::at(0x1040, DType::FLOAT32, layout, memory).unwrap(), dropped)
    }

    #[test]
    fn memory_of_a_device_is_returned_after_its_stream() {
        let recorded = Arc::new(Recorded::default());
        let ordering: Arc<dyn Ordering> = Arc::<Recorded>::clone(&recorded);
        let (device, stream) = (Device::cuda(1), Stream::LEGACY);
        let (exported, dropped) = exported(device, Some(stream));
        let release = released_later(exported, &ordering).unwrap();
        assert_eq!((release.data(), release.layout().shape(), release.device()), (0x1040, &[2, 3][..], device));
        assert_eq!((release.buffer().address(), release.buffer().len()), (0x1000, 0x100));
        assert_eq!((release.buffer().access(), release.buffer().stream()), (Access::ReadOnly, Some(stream)));
        drop(release);
        assert_eq!(dropped.load(Relaxed), 0, "the kernel may still run");
        let (on, after, memory) = recorded.0.lock().unwrap().pop().unwrap();
        assert_eq!((on, after), (device, stream));
        drop(memory);
        assert_eq!(dropped.load(Relaxed), 1);
        assert!(recorded.0.lock().unwrap().is_empty());
    }

    #[test]
    fn host_memory_is_returned_at_once() {
        let recorded: Arc<dyn Ordering> = Arc::new(Recorded::default());
        let (exported, dropped) = exported(Device::CPU, None);
        drop(released_later(exported, &recorded).unwrap());
        assert_eq!(dropped.load(Relaxed), 1);
    }
}
