//! The trait that orders work between streams.

use crate::leak::Unordered;
use crate::{Copies, Device, DeviceBuffer, Error, ErrorKind, Result, Stream};

/// Orders work between streams. Implemented with CUDA events, and by the simulated device of the conformance suite.
///
/// # For implementers
///
/// Only [`synchronize`](Self::synchronize) may block the calling thread on the device. Every method may be called on
/// any thread, and leaves that thread's current device or context unchanged.
///
/// # For callers
///
/// A [`Stream`] is a handle, which safe code can keep after its framework has destroyed the stream, and drivers take
/// handles unchecked. So each method that takes one is unsafe: its caller promises that the stream is *alive*. A default
/// stream always is, the stream of a buffer is as long as the buffer ([`DeviceBuffer`]), and that of a consumer as
/// [`Consumer`](crate::Consumer) says.
///
/// # Safety
///
/// Core and the adapters rely on the following. If [`order`](Self::order) or [`order_across`](Self::order_across)
/// returns no error, the later work waits. If [`synchronize`](Self::synchronize) returns no error, the earlier work has
/// run. Buffers are dropped after the work of their stream, or never.
pub unsafe trait Ordering: Send + Sync {
    /// Makes all work submitted to `later` from now on wait for all work now in `earlier`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Driver`] with the driver's message, [`ErrorKind::Captured`] where one stream is being captured and
    /// the other is not.
    ///
    /// # Safety
    ///
    /// Both streams are alive.
    unsafe fn order(&self, device: Device, earlier: Stream, later: Stream) -> Result<()>;

    /// As [`order`](Self::order), for streams of two devices. The default streams have one handle on all devices: each
    /// belongs to the device next to it.
    ///
    /// # Errors
    ///
    /// Those of [`order`](Self::order), and [`ErrorKind::Missing`] where this is not implemented.
    ///
    /// # Safety
    ///
    /// Both streams are alive.
    unsafe fn order_across(&self, earlier: (Device, Stream), later: (Device, Stream)) -> Result<()> {
        if earlier.0 == later.0 {
            // SAFETY: the caller's promise.
            return unsafe { self.order(earlier.0, earlier.1, later.1) };
        }
        let text = format!("streams of {} and {} cannot be ordered: move through the host", earlier.0, later.0);
        Err(Error::new(ErrorKind::Missing, text))
    }

    /// Drops `buffer` once all work now in `stream` has run.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn release_later(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>);

    /// Blocks the host until all work now in `stream` has run. Used only for a framework that reads device memory on
    /// the host, such as NumPy with managed memory.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Driver`] with the driver's message, [`ErrorKind::Missing`] where this is not implemented.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn synchronize(&self, device: Device, stream: Stream) -> Result<()> {
        let text = format!("the host cannot wait for {stream} of {device}: copy the tensor to the host first");
        Err(Error::new(ErrorKind::Missing, text))
    }

    /// Calls `attempt`, on any thread, after the capture of `stream` into a graph has ended, and repeats the call until
    /// it returns `true`. If `stream` is not being captured, calls it once. The default drops `attempt`, which leaks
    /// and counts the memory that it holds.
    ///
    /// # Safety
    ///
    /// `stream` is alive until `attempt` has been dropped.
    unsafe fn defer(&self, device: Device, stream: Stream, attempt: Deferred) {
        let _ = (device, stream, attempt);
    }

    /// Returns whether `stream` is being captured into a graph; `None` where that is unknown, which is the default.
    /// Only with `Some(false)` is memory returned together ([`transfer_all`](crate::transfer_all)).
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn is_captured(&self, device: Device, stream: Stream) -> Option<bool> {
        let _ = (device, stream);
        None
    }

    /// Calls `flush` once, on any thread, in about a millisecond. It orders streams and drops buffers. The default
    /// calls it now.
    fn flush_later(&self, flush: Flush) {
        flush();
    }

    /// As [`release_later`](Self::release_later), for several buffers at the cost of one. The default calls
    /// `release_later` for each.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn release_all_later(&self, device: Device, stream: Stream, buffers: Vec<Box<dyn DeviceBuffer>>) {
        // SAFETY: the caller's promise.
        buffers.into_iter().for_each(|buffer| unsafe { self.release_later(device, stream, buffer) });
    }

    /// As [`release_later`](Self::release_later), once all work has run that any stream of the device has now. The
    /// default never drops
    /// `buffer`, and counts the leak.
    ///
    /// # Safety
    ///
    /// `stream` is alive until `buffer` has been dropped.
    unsafe fn release_after_all_work(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        let _ = (device, stream);
        drop(Unordered::new(buffer));
    }

    /// Returns the copies to prefer to the frameworks' own, if there are any.
    fn copies(&self) -> Option<&dyn Copies> {
        None
    }
}

/// An attempt to return memory to its owner. Returns whether it is done. See [`Ordering::defer`].
pub type Deferred = Box<dyn FnMut() -> bool + Send>;

/// A release that waits about a millisecond. See [`Ordering::flush_later`].
pub type Flush = Box<dyn FnOnce() + Send>;

/// Ordering for a process without a device: host memory needs none.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostOnly;

// SAFETY: it refuses every stream, and nothing on the host waits.
unsafe impl Ordering for HostOnly {
    unsafe fn order(&self, device: Device, _: Stream, _: Stream) -> Result<()> {
        let text = format!("streams of {device} cannot be ordered: no driver for it was found in this process");
        Err(Error::new(ErrorKind::Missing, text))
    }

    /// Leaks the buffer, and counts it: without a driver the state of the stream is unknown, and reuse would be unsafe.
    unsafe fn release_later(&self, _: Device, _: Stream, buffer: Box<dyn DeviceBuffer>) {
        drop(Unordered::new(buffer));
    }
}
