//! The live views of a framework, and the streams that they are used on.

use crate::planted::is_planted;
use crate::sync::{AtomicUsize, Mutex, MutexGuard};
use crate::{Device, Spans, Stream};
use smallvec::SmallVec;
use std::ops::Range;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alive::used;

    const GPU: Device = Device::cuda(0);
    // SAFETY: no driver sees this stream.
    const A: Stream = unsafe { Stream::from_handle(0xa0) };
    // SAFETY: no driver sees this stream.
    const B: Stream = unsafe { Stream::from_handle(0xb0) };

    fn recorded(streams: Vec<Used>) -> Vec<Stream> {
        streams.iter().map(|used| used.stream).collect()
    }

    #[test]
    fn a_use_reaches_every_view_of_the_address() {
        let views = Views::default();
        let (whole, part) = (0x1000..0x1100, 0x1040..0x1050);
        for bytes in [&whole, &whole, &part] {
            views.enter(GPU, bytes);
        }
        views.enter(Device::cuda(1), &whole);
        assert_eq!(used(&views, GPU, 0x1044, A, || None), 3);
        assert_eq!(used(&views, GPU, 0x1050, B, || None), 2);
        assert_eq!(used(&views, GPU, 0x1100, B, || None), 0, "the byte after the last");
        assert_eq!(recorded(views.leave(GPU, &part)), [A]);
        assert_eq!(recorded(views.leave(GPU, &whole)), [A, B]);
        assert_eq!(recorded(views.leave(GPU, &whole)), [A, B]);
        assert_eq!((used(&views, GPU, 0x1044, A, || None), views.len()), (0, 1));
        assert_eq!(recorded(views.leave(Device::cuda(1), &whole)), []);
        assert!(views.is_empty());
    }

    #[test]
    fn addresses_in_the_same_views_are_told_from_others() {
        let views = Views::default();
        // More than a list has, so that some are in classes.
        let ranges = [0x1000..0x1100, 0x1040..0x1050, 0x1000..0x1080, 0x1010..0x1020, 0x1015..0x1016, 0x1070..0x1090];
        ranges.iter().for_each(|bytes| views.enter(GPU, bytes));
        for one in 0x0ff0..0x1110 {
            let inside =
                |address| ranges.iter().filter(move |bytes| bytes.contains(&address)).cloned().collect::<Vec<_>>();
            let mut around = views.around(GPU, one).to_vec();
            around.sort_by_key(|bytes| (bytes.start, bytes.end));
            let mut expected = inside(one);
            expected.sort_by_key(|bytes| (bytes.start, bytes.end));
            assert_eq!(around, expected);
            for other in [one + 1, 0x1017, 0x1050] {
                assert_eq!(views.around(GPU, one) == views.around(GPU, other), inside(one) == inside(other));
            }
            assert!(views.around(Device::cuda(1), one).is_empty());
        }
    }

    #[test]
    fn a_handle_used_again_is_kept_although_it_was_noted_raw_before() {
        let views = Views::default();
        views.enter(GPU, &(0x1000..0x1100));
        let keep: Keep = Arc::new(());
        used(&views, GPU, 0x1000, A, || None);
        used(&views, GPU, 0x1000, A, || Some(keep.clone()));
        used(&views, GPU, 0x1000, A, || Some(keep.clone()));
        assert_eq!(Arc::strong_count(&keep), 2, "it is kept, once");
        drop(views.leave(GPU, &(0x1000..0x1100)));
        assert_eq!(Arc::strong_count(&keep), 1);
    }

    #[test]
    fn a_handle_that_nothing_keeps_is_noted_once() {
        let views = Views::default();
        views.enter(GPU, &(0x1000..0x1100));
        for _ in 0..3 {
            used(&views, GPU, 0x1000, A, || None);
        }
        assert_eq!(recorded(views.leave(GPU, &(0x1000..0x1100))), [A]);
    }

    #[test]
    fn a_use_that_is_known_asks_for_no_keep() {
        let views = Views::default();
        views.enter(GPU, &(0x1000..0x1100));
        let keep: Keep = Arc::new(());
        let use_of = |address| {
            let mut asked = false;
            let kept = || {
                asked = true;
                Some(keep.clone())
            };
            (used(&views, GPU, address, A, kept), asked)
        };
        assert_eq!([use_of(0x1000), use_of(0x1000)], [(1, true), (1, false)]);
        views.enter(GPU, &(0x1000..0x1010));
        assert_eq!([use_of(0x1000), use_of(0x1000)], [(2, true), (2, false)], "one of the two had no record");
        assert_eq!(use_of(0x2000), (0, false));
    }

    #[test]
    fn a_keep_may_use_the_views_itself() {
        let views = Views::default();
        views.enter(GPU, &(0x1000..0x1100));
        let reentered = || {
            used(&views, GPU, 0x1000, B, || None);
            None
        };
        assert_eq!(used(&views, GPU, 0x1000, A, reentered), 1);
    }

    #[test]
    fn views_of_no_bytes_have_no_address() {
        let views = Views::default();
        views.enter(GPU, &(0x1000..0x1000));
        assert_eq!((used(&views, GPU, 0x1000, A, || None), views.len()), (0, 0));
        assert!(views.leave(GPU, &(0x1000..0x1000)).is_empty());
    }
}
