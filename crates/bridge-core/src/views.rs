//! The live views of a framework by their addresses, the streams that they are used on, and the part of a framework that
//! has them ([`Consumer`]).

use crate::planted::is_planted;
use crate::sync::{AtomicUsize, Mutex, MutexGuard};
use crate::{Device, Result, Stream};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry::Occupied;
use std::ops::{Range, RangeInclusive};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

/// Keeps a stream from being destroyed while the value lives.
pub type Keep = Arc<dyn Send + Sync>;

/// A stream on which a view has been used.
#[derive(Clone)]
pub(crate) struct Used {
    pub(crate) stream: Stream,
    pub(crate) keep: Option<Keep>,
}

impl Used {
    /// Returns whether this entry makes `later` redundant: the same stream, kept alive if `later` would keep it alive.
    /// An entry without a `keep` may be stale: its stream may have been destroyed, and its handle reused.
    fn covers(&self, later: &Used) -> bool {
        self.stream == later.stream && (self.keep.is_some() || later.keep.is_none())
    }
}

/// Views over the same bytes share one entry: a use of the address is a use of each of them.
#[derive(Default)]
struct Entry {
    views: usize,
    /// Nearly always empty; a vector keeps the entries small.
    recorded: Vec<Used>,
}

/// The views of imported memory that a framework holds, and the streams recorded for each.
///
/// The key is the address, so a record for a slice of a view, or on a view of the view in a third framework, reaches
/// the view. The cost of each method grows with the logarithm of the number of views, and with the number of views that
/// overlap at the address. No method calls external code while it holds the lock.
#[derive(Default)]
pub struct Views {
    live: Mutex<Spans<Device, Entry>>,
    /// The number of views, readable without the lock.
    count: AtomicUsize,
}

crate::debug_fields!(impl[] Views: count);

impl Views {
    fn lock(&self) -> MutexGuard<'_, Spans<Device, Entry>> {
        // The map is consistent between any two statements here, so a panic elsewhere leaves it sound.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the memory at `address` is used on `stream`, for every view that contains the address. `keep` keeps
    /// the stream alive until those views are dropped. Returns the number of these views.
    ///
    /// # Safety
    ///
    /// `stream` is alive until the value that `keep` returns has been dropped; without a value, as long as there is a view of
    /// these bytes, also one that is made later. The drop of a view gives the stream to the driver.
    pub unsafe fn used(
        &self,
        device: Device,
        address: usize,
        stream: Stream,
        keep: impl FnOnce() -> Option<Keep>,
    ) -> usize {
        if self.is_empty() {
            return 0;
        }
        let ignored = |bytes: Range<usize>| bytes.start != address && is_planted("core_part_not_noted");
        let (mut views, mut known) = (0, true);
        self.lock().containing(device, address, |bytes, entry| {
            if ignored(bytes) {
                return;
            }
            views += entry.views;
            known &= entry.recorded.iter().any(|recorded| recorded.stream == stream && recorded.keep.is_some());
        });
        // No views, or the same use once more.
        if known {
            return views;
        }
        // Not under the lock: `keep` may enter the interpreter.
        let keep = keep().filter(|_| !is_planted("core_noted_stream_not_kept"));
        let used = Used { stream, keep };
        self.lock().containing(device, address, |bytes, entry| {
            if !ignored(bytes) && !entry.recorded.iter().any(|recorded| recorded.covers(&used)) {
                entry.recorded.push(used.clone());
            }
        });
        views
    }

    /// Returns the bytes of every view that contains the address. Where two addresses have the same, a use of one is a use
    /// of the other.
    pub(crate) fn around(&self, device: Device, address: usize) -> SmallVec<[Range<usize>; 1]> {
        let mut around = SmallVec::new();
        self.lock().containing(device, address, |bytes, _| around.push(bytes));
        around
    }

    /// Changes the number of views. The caller holds the lock, so no other thread writes the number.
    fn count(&self, change: isize) {
        self.count.store(self.len().wrapping_add_signed(change), Relaxed);
    }

    /// Adds a view of these bytes.
    pub(crate) fn enter(&self, device: Device, bytes: &Range<usize>) {
        if let Some(entry) = self.lock().enter(device, bytes) {
            entry.views += 1;
            self.count(1);
        }
    }

    /// Removes one view of these bytes, and returns the streams recorded for it.
    pub(crate) fn leave(&self, device: Device, bytes: &Range<usize>) -> Vec<Used> {
        let mut recorded = Vec::new();
        let removed = self.lock().leave(device, bytes, |entry| {
            self.count(-1);
            entry.views -= 1;
            let is_last = entry.views == 0;
            if !is_last {
                // Streams recorded before this view was made are harmless: the owner waits for them once more.
                recorded = entry.recorded.clone();
            }
            is_last
        });
        removed.map_or(recorded, |entry| entry.recorded)
    }

    /// Returns the number of live views.
    pub fn len(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// Returns whether there is no live view.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The part of an importing framework that a lease needs at its end. It outlives every view.
///
/// # Safety
///
/// Core gives the streams that a consumer names to the driver, and the owner of memory gets it back once they have done
/// the work that they hold then. So an implementer promises: the stream that [`current_stream`](Self::current_stream)
/// returns is alive until the operation of core that asked for it has ended; the framework uses views in no other
/// stream than [`current_stream`](Self::current_stream) names and those that are recorded in [`views`](Self::views), or
/// [`uses_other_streams`](Self::uses_other_streams) says so; a stream for which [`keep`](Self::keep) was called lives
/// as long as the value that it returned, or as the process; and
/// [`exports_in_current_stream`](Self::exports_in_current_stream) is not true of a tensor with its own stream.
pub unsafe trait Consumer: Send + Sync {
    /// Returns the stream into which the framework would put work for `device` now, on this thread. `None` for memory
    /// that the framework reads on the host, and while the interpreter shuts down, when the stream is unknown.
    ///
    /// # Errors
    ///
    /// Errors of the framework.
    fn current_stream(&self, device: Device) -> Result<Option<Stream>>;

    /// Returns a value that keeps `stream` from being destroyed: one that [`current_stream`](Self::current_stream)
    /// returned, or that a tensor of the framework was exported in, which is alive during the call. A view may outlive the
    /// stream it was made under, and waiting for a destroyed stream crashes the driver. `None` for streams that live as
    /// long as the process.
    fn keep(&self, device: Device, stream: Stream) -> Option<Keep> {
        let _ = (device, stream);
        None
    }

    /// Returns whether every tensor of the framework is exported in the stream that is current for its device then. Then
    /// copies that are made again and again ([`Prepared`](crate::Prepared)) ask for that stream instead of an export. The
    /// default is `false`: a tensor may have its own stream.
    fn exports_in_current_stream(&self) -> bool {
        false
    }

    /// Returns whether views may be used in streams that neither [`current_stream`](Self::current_stream) nor a record in
    /// [`views`](Self::views) names, as by a library that is known only by a protocol. The memory of a view then also
    /// waits for all work that the device has when the view is dropped.
    fn uses_other_streams(&self) -> bool {
        false
    }

    /// The framework's live views of imported memory.
    fn views(&self) -> &Views;
}

/// Consumer without streams: for export-only sources, and for frameworks whose tensors are in host memory.
// SAFETY: memory of the host has no streams. An adapter with streams has another consumer.
unsafe impl Consumer for Views {
    fn current_stream(&self, _: Device) -> Result<Option<Stream>> {
        Ok(None)
    }

    fn views(&self) -> &Views {
        self
    }
}

/// Number of classes: one for each bit of a length.
const CLASSES: usize = usize::BITS as usize;

/// Number of entries outside the classes. A program with few live views allocates nothing for them.
const FEW: usize = 4;

/// A place and a range.
type Key<P> = (P, usize, usize);

/// Values by place, such as a device, and range of addresses. Ranges may overlap.
///
/// The first few entries are in a list. The others are in classes by the highest bit of their length, so a range of
/// class `k` that contains an address starts less than `2^(k+1)` before it. A look-up visits the list, and only such
/// neighbours of the address in the classes that are not empty.
#[derive(Debug)]
pub struct Spans<P, T> {
    few: SmallVec<[(Key<P>, T); FEW]>,
    classes: [BTreeMap<Key<P>, T>; CLASSES],
    /// Bit set of the classes that are not empty.
    occupied: usize,
}

impl<P, T> Default for Spans<P, T> {
    fn default() -> Self {
        Self { few: SmallVec::new(), classes: [const { BTreeMap::new() }; CLASSES], occupied: 0 }
    }
}

/// Returns the class of a range; `None` for an empty range.
fn class(bytes: &Range<usize>) -> Option<usize> {
    Some(bytes.end.checked_sub(bytes.start)?.checked_ilog2()? as usize)
}

impl<P: Copy + Ord, T> Spans<P, T> {
    /// Returns the value for this range, after inserting the default if there is none. `None` for an empty range.
    pub fn enter(&mut self, place: P, bytes: &Range<usize>) -> Option<&mut T>
    where
        T: Default,
    {
        let (class, key) = (class(bytes)?, (place, bytes.start, bytes.end));
        if let Some(at) = self.place_of(&key) {
            return Some(&mut self.few[at].1);
        }
        if self.few.len() < FEW && !self.classes[class].contains_key(&key) {
            self.few.push((key, T::default()));
            return self.few.last_mut().map(|(_, value)| value);
        }
        self.occupied |= 1 << class;
        Some(self.classes[class].entry(key).or_default())
    }

    /// Returns where the list has this key.
    fn place_of(&self, key: &Key<P>) -> Option<usize> {
        self.few.iter().position(|(known, _)| known == key)
    }

    /// Removes and returns the value for this range if `is_last` returns `true` for it.
    pub fn leave(&mut self, place: P, bytes: &Range<usize>, is_last: impl FnOnce(&mut T) -> bool) -> Option<T> {
        let (class, key) = (class(bytes)?, (place, bytes.start, bytes.end));
        if let Some(at) = self.place_of(&key) {
            return is_last(&mut self.few[at].1).then(|| self.few.swap_remove(at).1);
        }
        let Occupied(mut entry) = self.classes[class].entry(key) else { return None };
        let removed = is_last(entry.get_mut()).then(|| entry.remove());
        if self.classes[class].is_empty() {
            self.occupied &= !(1 << class);
        }
        removed
    }

    /// Calls `visit` with every range that contains the address, and its value. The order depends only on the ranges
    /// that are there.
    pub fn containing(&mut self, place: P, address: usize, mut visit: impl FnMut(Range<usize>, &mut T)) {
        let covers = |(at, start, end): &Key<P>| *at == place && (*start..*end).contains(&address);
        let few = self.few.iter_mut().filter(|(key, _)| covers(key));
        few.for_each(|((_, start, end), value)| visit(*start..*end, value));
        let mut occupied = self.occupied;
        while occupied != 0 {
            let class = occupied.trailing_zeros() as usize;
            occupied &= occupied - 1;
            let near = Self::near(place, address, class);
            let nearby = self.classes[class].range_mut(near);
            let nearby = nearby.filter(|((_, _, end), _)| *end > address);
            nearby.for_each(|((_, start, end), value)| visit(*start..*end, value));
        }
    }

    /// Returns the keys of this class whose ranges may contain the address.
    fn near(place: P, address: usize, class: usize) -> RangeInclusive<Key<P>> {
        let farthest = usize::MAX >> (CLASSES - 1 - class);
        (place, address.saturating_sub(farthest), 0)..=(place, address, usize::MAX)
    }

    /// Returns whether there is no range.
    pub fn is_empty(&self) -> bool {
        self.few.is_empty() && self.occupied == 0
    }
}

#[cfg(test)]
mod tests;
