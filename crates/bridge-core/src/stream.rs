//! Streams.

use std::fmt;

/// A queue of work on a device, by its driver's handle (for CUDA a `CUstream`).
///
/// The handle 0, CUDA's other name for the legacy default stream, becomes [`Stream::LEGACY`], so that equal streams
/// compare equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream(u64);

impl Stream {
    /// CUDA's legacy default stream (`CU_STREAM_LEGACY`).
    pub const LEGACY: Stream = Stream(1);
    /// CUDA's default stream of the calling thread (`CU_STREAM_PER_THREAD`).
    pub const PER_THREAD: Stream = Stream(2);

    /// Returns the stream with this handle.
    ///
    /// # Safety
    ///
    /// The handle is 0, or that of a stream of the driver's that exists as long as the value or a copy of it is given to
    /// an adapter, or an adapter gives it: drivers take handles unchecked. On a device that is simulated it is any number.
    pub const unsafe fn from_handle(handle: u64) -> Self {
        if handle == 0 { Self::LEGACY } else { Self(handle) }
    }

    /// Returns the handle, never 0.
    pub const fn handle(self) -> u64 {
        self.0
    }

    /// Returns a stream that can replace this one on every thread: the legacy stream for the per-thread stream, whose
    /// handle names a different stream on each thread. Both are blocking streams, so each waits for the other (CUDA
    /// programming guide, "per-thread default stream").
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
