//! Memory that is leaked because a reader may still use it, and the counts of leases.

use crate::{DeviceBuffer, Export};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

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
