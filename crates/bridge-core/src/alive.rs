//! Calls that take streams, for streams that are alive.
//!
//! A [`Stream`] is a handle, which safe code can keep longer than its framework keeps the stream. So the methods of
//! [`Ordering`] that take one are unsafe, as are [`Copies::plan`], [`Copies::allocate`] and [`Views::used`]. Here they are
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

use crate::{Copies, Deferred, Device, DeviceBuffer, Failed, Keep, Ordering, Piece, Planned, Result, Stream, Views};

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
pub(crate) fn plan(
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
