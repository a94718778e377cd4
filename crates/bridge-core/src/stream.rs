//! Streams, and the trait over which work in them is put in order.

use crate::{Device, DeviceBuffer, Error, ErrorKind, Result};
use std::fmt;

/// A queue of work on a device, by the handle that its driver knows it by (for CUDA a `CUstream`).
///
/// The handle 0, which CUDA takes for the legacy default stream unless told otherwise, becomes [`Stream::LEGACY`], so
/// that equal streams compare equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream(u64);

impl Stream {
    /// CUDA's legacy default stream (`CU_STREAM_LEGACY`).
    pub const LEGACY: Stream = Stream(1);
    /// CUDA's default stream of the calling thread (`CU_STREAM_PER_THREAD`).
    pub const PER_THREAD: Stream = Stream(2);

    /// The stream with this handle.
    pub const fn from_handle(handle: u64) -> Self {
        if handle == 0 { Self::LEGACY } else { Self(handle) }
    }

    /// The handle, never 0.
    pub const fn handle(self) -> u64 {
        self.0
    }

    /// A stream that stands for this one on any thread.
    ///
    /// The handle of the per-thread stream names another stream on every thread. It is a blocking stream, though, and
    /// so the legacy stream waits for it and it for the legacy stream (CUDA programming guide, "per-thread default
    /// stream").
    #[must_use]
    pub const fn on_any_thread(self) -> Self {
        if self.0 == Self::PER_THREAD.0 { Self::LEGACY } else { self }
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::LEGACY => f.pad("legacy default stream"),
            Self::PER_THREAD => f.pad("per-thread default stream"),
            Self(handle) => write!(f, "stream {handle:#x}"),
        }
    }
}

/// Puts work of different streams in order. CUDA events implement it, and so does the simulated device of the suite.
///
/// # For implementers
///
/// Neither method may block the calling thread on the device, and both leave the calling thread's current device or
/// context as they found it. Both are called from any thread.
pub trait Ordering: Send + Sync {
    /// Lets everything that is put into `later` from now on wait for everything that is in `earlier` now.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Driver`] with the driver's own words.
    fn order(&self, device: Device, earlier: Stream, later: Stream) -> Result<()>;

    /// Drops `buffer` as soon as everything that is in `stream` now has run.
    fn retire(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>);

    /// Blocks the host until everything that is in `stream` now has run. Only a framework that reads device memory on the
    /// host needs it, such as NumPy with managed memory.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Driver`] with the driver's own words, [`ErrorKind::Missing`] where this is not implemented.
    fn synchronize(&self, device: Device, stream: Stream) -> Result<()> {
        let text = format!("the host cannot wait for {stream} of {device}: copy the tensor to the host first");
        Err(Error::new(ErrorKind::Missing, text))
    }

    /// Calls `attempt`, on any thread, after the capture of `stream` into a graph has ended, and again until it returns
    /// `true`. Where `stream` is not being captured, calls it once. Where this is not implemented, drops it: the memory
    /// that it holds is then leaked, and counted.
    fn defer(&self, device: Device, stream: Stream, attempt: Deferred) {
        let _ = (device, stream, attempt);
    }
}

/// Gives memory back as soon as that is possible, and returns whether it was. See [`Ordering::defer`].
pub type Deferred = Box<dyn FnMut() -> bool + Send>;

/// The ordering of a process without a device: host memory needs none.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostOnly;

impl Ordering for HostOnly {
    fn order(&self, device: Device, _: Stream, _: Stream) -> Result<()> {
        let text = format!("streams of {device} cannot be ordered: no driver for it was found in this process");
        Err(Error::new(ErrorKind::Missing, text))
    }

    /// Nothing can be known of the stream, and so the memory is not given back: reuse would be unsafe.
    fn retire(&self, _: Device, _: Stream, buffer: Box<dyn DeviceBuffer>) {
        std::mem::forget(buffer);
    }
}
