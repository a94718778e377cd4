//! Leases that return their memory together.

use crate::ordering::{Alive, alive};
use crate::ordering::{Unordered, released};
use crate::planted::is_planted;
use crate::sync::{AtomicUsize, Mutex, MutexGuard};
use crate::views::Used;
use crate::{Device, DeviceBuffer, ErrorKind, Ordering, Reuse, Stream};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process;
use std::sync::atomic::{Ordering::AcqRel, Ordering::Relaxed};
use std::sync::{Arc, PoisonError};

/// The leases of one batch on memory of one owner's stream, read in one stream.
///
/// Returning memory costs a wait of the owner's stream for the reader, and with [`Reuse::Unknown`] an event besides. A
/// group pays that once for the leases that are dropped together. The drop of a lease puts its buffer on the list of
/// its group. The *flush* makes the owner's stream wait for the reader once, and then drops all buffers on the list. It
/// runs when the last lease of the group is dropped, and otherwise about a millisecond after the first buffer was put
/// on the list ([`Ordering::flush_later`]).
///
/// # Why that is safe
///
/// - *No reader is missed.* A buffer is put on the list only if the reader is the one stream that its view is known to
///   have been used in: no other stream was recorded, and none is current at the drop. The flush comes later than the
///   drop, so its wait covers every use of the view.
/// - *No memory is lost to a capture.* A buffer is put on the list only while the reader is not being captured. So no
///   graph uses the view. Where a capture of either stream has begun before the flush, the wait follows the capture:
///   inside, it would become a part of the graph, or break two captures that do not belong together.
/// - *The streams are alive.* The buffer keeps the owner's stream. The reader outlives the last lease of the group,
///   whose drop needs it too, and that drop returns only after every wait has been recorded, on any thread. A wait that
///   follows a capture keeps the reader itself, where that is possible.
/// - *No buffer is dropped before it is ordered*, and none twice. Each is [`Unordered`] on the list, which leaks it
///   wherever the ordering fails or panics.
///
/// Every other lease returns its memory at its drop, as if it had no group.
pub(crate) struct Group {
    /// The device of the memory.
    device: Device,
    owner: Stream,
    reader: Used,
    ordering: Arc<dyn Ordering>,
    /// Leases that have not been dropped.
    live: AtomicUsize,
    list: Mutex<List>,
    /// The process that made the group. A forked child has no driver to order with, and may find the lock taken by a
    /// thread that it does not have.
    process: u32,
}

/// The buffers that wait for the flush.
#[derive(Default)]
struct List {
    waiting: Vec<Waiting>,
    /// Whether [`Ordering::flush_later`] has a flush to call.
    expected: bool,
}

/// A buffer that waits for the flush.
struct Waiting {
    buffer: Unordered,
    reuse: Reuse,
}

impl Group {
    /// Makes a group without leases. Both streams mean the same on any thread.
    pub(crate) fn new(device: Device, owner: Stream, reader: Used, ordering: Arc<dyn Ordering>) -> Self {
        let (live, list) = (AtomicUsize::new(0), Mutex::default());
        Self { device, owner, reader, ordering, live, list, process: process::id() }
    }

    fn alive(&self) -> Alive<'_> {
        alive(&*self.ordering)
    }

    /// Adds a lease.
    pub(crate) fn enter(&self) {
        self.live.fetch_add(1, Relaxed);
    }

    /// Returns whether memory can wait for the flush that was used in `readers`, the stream current at the drop among
    /// them.
    pub(crate) fn admits(&self, readers: &[Stream], reuse: Reuse) -> bool {
        let reader = self.reader.stream;
        // In one stream, memory that is reused in its order needs no call of the driver.
        (readers == [reader] || is_planted("core_group_admits_all"))
            && (reader != self.owner || reuse == Reuse::Unknown)
            && self.alive().is_captured(self.device, reader) == Some(false)
    }

    /// Puts a buffer on the list. Returns whether the caller has to see to its flush, by passing `true` to
    /// [`leave`](Self::leave).
    pub(crate) fn put(&self, buffer: Unordered, reuse: Reuse) -> bool {
        let mut list = self.lock();
        list.waiting.push(Waiting { buffer, reuse });
        if is_planted("core_group_ordered_early") && !list.expected {
            let _ = self.order();
        }
        !mem::replace(&mut list.expected, true)
    }

    /// Removes a lease. Flushes if it is the last one, and soon if it is the first on the list.
    pub(crate) fn leave(self: Arc<Self>, first: bool) {
        if self.live.fetch_sub(1, AcqRel) == 1 {
            self.flush();
        } else if first {
            let group = Arc::downgrade(&self);
            self.ordering.flush_later(Box::new(move || group.upgrade().into_iter().for_each(|group| group.flush())));
        }
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the owner's stream wait for the reader, and drops the buffers on the list.
    fn flush(self: &Arc<Self>) {
        if process::id() != self.process {
            return;
        }
        let mut list = self.lock();
        let List { waiting, .. } = mem::take(&mut *list);
        if waiting.is_empty() {
            return;
        }
        let count = waiting.len();
        // Under the lock, so that the drop of the last lease returns after it.
        let order = || if is_planted("core_group_ordered_early") { Ok(()) } else { self.order() };
        let ordered = catch_unwind(AssertUnwindSafe(order));
        drop(list);
        let give_back = || match ordered {
            Ok(Ok(())) => self.give_back(waiting),
            Ok(Err(Unready::Captured(stream))) => self.give_back_after_the_capture(stream, waiting),
            Ok(Err(Unready::Failed)) | Err(_) => (),
        };
        let _ = catch_unwind(AssertUnwindSafe(give_back));
        released(count);
    }

    /// Makes the owner's stream wait for the reader, outside of any graph.
    fn order(&self) -> Result<(), Unready> {
        let (device, reader) = (self.device, self.reader.stream);
        let is_captured = |stream: &Stream| self.alive().is_captured(device, *stream) == Some(true);
        if let Some(stream) = [self.owner, reader].into_iter().find(is_captured) {
            return Err(Unready::Captured(stream));
        }
        if reader == self.owner {
            return Ok(());
        }
        match self.alive().order(device, reader, self.owner) {
            // It has begun between the two calls.
            Err(error) if error.kind() == ErrorKind::Captured => Err(Unready::Captured(reader)),
            result => result.map_err(|_| Unready::Failed),
        }
    }

    fn give_back_after_the_capture(self: &Arc<Self>, stream: Stream, waiting: Vec<Waiting>) {
        let (group, mut waiting) = (Arc::clone(self), Some(waiting));
        let attempt = move || {
            match group.order() {
                Err(Unready::Captured(_)) => return false,
                Ok(()) => waiting.take().into_iter().for_each(|waiting| group.give_back(waiting)),
                Err(Unready::Failed) => waiting = None,
            }
            true
        };
        self.alive().defer(self.device, stream, Box::new(attempt));
    }

    /// Drops buffers for whose readers the owner's stream waits.
    fn give_back(&self, waiting: Vec<Waiting>) {
        let mut deferred: Vec<Box<dyn DeviceBuffer>> = Vec::new();
        for Waiting { buffer, reuse } in waiting {
            match reuse {
                // External code: its panic must not prevent the other drops.
                Reuse::InStreamOrder => drop(catch_unwind(AssertUnwindSafe(|| drop(buffer.into_ordered())))),
                Reuse::Unknown => deferred.push(buffer.into_ordered()),
            }
        }
        if !deferred.is_empty() {
            self.alive().release_all_later(self.device, self.owner, deferred);
        }
    }
}

/// Why the owner's stream does not wait for the reader yet.
enum Unready {
    /// This stream is being captured.
    Captured(Stream),
    /// The ordering has failed.
    Failed,
}
