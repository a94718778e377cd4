//! The trait that orders work between streams, its calls for streams that are alive, and memory that is leaked because a
//! reader could not be ordered.
//!
//! A [`Stream`] is a handle, which safe code can keep longer than its framework keeps the stream. So the methods of
//! [`Ordering`] that take one are unsafe, as are [`Copies::plan`], [`Copies::allocate`] and [`Views::used`]. In this crate they are
//! safe, because only this crate can call them: no public function passes on a stream that its caller names. Each
//! stream that the crate passes here comes from one of these, which keeps it alive during the call, and for what the
//! call leaves pending:
//!
//! - A [`DeviceBuffer`] that the crate holds: its implementer promises that the stream is not destroyed before it is
//!   dropped.
//! - A [`Consumer`](crate::Consumer), asked in the same function: its implementer promises that the stream which it names
//!   is alive then, and those that it was asked to keep longer.
//! - A [`Used`](crate::views::Used), which has the value that keeps the stream. The attempts of [`Ordering::defer`] hold
//!   it, or a value of that kind.
//! - [`Stream::LEGACY`], which every device has.

use crate::{
    Copies, Device, DeviceBuffer, Error, ErrorKind, Export, Failed, Keep, Piece, Planned, Result, Stream, Views,
};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

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

/// The methods of an ordering that take streams.
#[derive(Clone, Copy)]
pub(crate) struct Alive<'a>(&'a dyn Ordering);

/// Returns the methods of an ordering, for streams that are alive.
pub(crate) fn alive(ordering: &dyn Ordering) -> Alive<'_> {
    Alive(ordering)
}

impl Alive<'_> {
    /// As [`Ordering::order`].
    pub(crate) fn order(self, device: Device, earlier: Stream, later: Stream) -> Result<()> {
        // SAFETY: the streams of this crate are alive, as the module says.
        unsafe { self.0.order(device, earlier, later) }
    }

    /// As [`Ordering::order_across`].
    pub(crate) fn order_across(self, earlier: (Device, Stream), later: (Device, Stream)) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.0.order_across(earlier, later) }
    }

    /// As [`Ordering::synchronize`].
    pub(crate) fn synchronize(self, device: Device, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.0.synchronize(device, stream) }
    }

    /// As [`Ordering::is_captured`].
    pub(crate) fn is_captured(self, device: Device, stream: Stream) -> Option<bool> {
        // SAFETY: as above.
        unsafe { self.0.is_captured(device, stream) }
    }

    /// As [`Ordering::defer`], for an attempt that holds the buffers of the stream, or what keeps it.
    pub(crate) fn defer(self, device: Device, stream: Stream, attempt: Deferred) {
        // SAFETY: the streams of this crate are alive as long as what the attempt holds, as the module says.
        unsafe { self.0.defer(device, stream, attempt) }
    }

    /// As [`Ordering::release_later`].
    pub(crate) fn release_later(self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        // SAFETY: as above.
        unsafe { self.0.release_later(device, stream, buffer) }
    }

    /// As [`Ordering::release_all_later`].
    pub(crate) fn release_all_later(self, device: Device, stream: Stream, buffers: Vec<Box<dyn DeviceBuffer>>) {
        // SAFETY: as above.
        unsafe { self.0.release_all_later(device, stream, buffers) }
    }

    /// As [`Ordering::release_after_all_work`], for the stream of the buffer itself.
    pub(crate) fn release_after_all_work(self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        // SAFETY: the stream is that of the buffer, and by the contract of `DeviceBuffer` alive until it is dropped.
        unsafe { self.0.release_after_all_work(device, stream, buffer) }
    }
}

/// As [`Copies::plan`].
pub(crate) fn plan_copies(
    copies: &dyn Copies,
    device: Device,
    pieces: &[Piece<'_>],
    stream: Option<Stream>,
) -> Result<Option<Box<dyn Planned>>, Failed> {
    // SAFETY: the stream is that of the targets, whose exports the caller holds.
    unsafe { copies.plan(device, pieces, stream) }
}

/// As [`Copies::allocate`], for the stream of a consumer that was asked to `keep` it.
pub(crate) fn allocate(
    copies: &dyn Copies,
    device: Device,
    nbytes: usize,
    stream: Stream,
    keep: Option<Keep>,
) -> Result<Box<dyn DeviceBuffer>> {
    // SAFETY: by the contract of `Consumer` the stream is alive as long as `keep`, or as the process.
    unsafe { copies.allocate(device, nbytes, stream, keep) }
}

/// As [`Views::used`], for a stream of a consumer that `keep` asks to keep it.
pub(crate) fn used(
    views: &Views,
    device: Device,
    address: usize,
    stream: Stream,
    keep: impl FnOnce() -> Option<Keep>,
) -> usize {
    // SAFETY: by the contract of `Consumer` the stream is alive as long as what `keep` returns, or as the process.
    unsafe { views.used(device, address, stream, keep) }
}

static LEASED: AtomicU64 = AtomicU64::new(0);
static RELEASED: AtomicU64 = AtomicU64::new(0);
static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Counts of leases in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Leases made.
    pub leased: u64,
    /// Leases dropped.
    pub released: u64,
    /// Dropped leases whose memory is leaked, because a reader could not be ordered before its reuse: for example a
    /// view was used on a stream that is being captured into a graph.
    pub leaked: u64,
}

/// Returns the counts of this process: `leased - released` leases are alive.
pub fn stats() -> Stats {
    // Released first: a lease dropped between the two reads must not make the difference negative.
    let released = RELEASED.load(Relaxed);
    Stats { leased: LEASED.load(Relaxed), released, leaked: LEAKED.load(Relaxed) }
}

/// Counts a lease that is made.
pub(crate) fn leased() {
    LEASED.fetch_add(1, Relaxed);
}

/// Counts leases whose memory has been returned, or leaked.
pub(crate) fn released(leases: usize) {
    RELEASED.fetch_add(leases as u64, Relaxed);
}

/// Memory that a reader may still use. Dropping it, as error paths do, leaks the memory and counts the leak.
pub(crate) struct Unordered(ManuallyDrop<Box<dyn DeviceBuffer>>);

impl Unordered {
    pub(crate) fn new(buffer: Box<dyn DeviceBuffer>) -> Self {
        Self(ManuallyDrop::new(buffer))
    }

    /// Returns the buffer. The owner's stream waits for its readers now.
    pub(crate) fn into_ordered(mut self) -> Box<dyn DeviceBuffer> {
        // SAFETY: the box is taken once, because `self` is forgotten right away.
        let buffer = unsafe { ManuallyDrop::take(&mut self.0) };
        std::mem::forget(self);
        buffer
    }
}

/// Leaks the memory of an exported tensor, which work without an order may still use, and counts the leak.
pub(crate) fn leak(exported: Export) {
    drop(Unordered::new(exported.into_buffer()));
}

impl Drop for Unordered {
    fn drop(&mut self) {
        LEAKED.fetch_add(1, Relaxed);
    }
}
