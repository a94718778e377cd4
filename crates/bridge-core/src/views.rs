//! Which streams the live views of a framework are used on.

use crate::{Device, Stream};
use iset::IntervalMap;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Keeps a stream from being destroyed while the value lives.
pub type Keep = Arc<dyn Send + Sync>;

/// A stream on which a view has been used.
#[derive(Clone)]
pub(crate) struct Used {
    pub(crate) stream: Stream,
    pub(crate) keep: Option<Keep>,
}

impl Used {
    /// Whether this entry makes `later` superfluous: the same stream, kept alive if `later` would keep it alive. A raw
    /// handle keeps nothing alive, so its stream may have been destroyed, and the handle may name another one now.
    fn covers(&self, later: &Used) -> bool {
        self.stream == later.stream && (self.keep.is_some() || later.keep.is_none())
    }
}

pub(crate) type Streams = SmallVec<[Used; 2]>;

/// An address on a device.
type Address = (Device, usize);

/// The memory of one or more views, from its first byte to the byte behind its last.
pub(crate) type Span = Range<Address>;

/// Views over the same bytes share one entry: a use of the address is a use of each of them.
#[derive(Default)]
struct Entry {
    views: usize,
    noted: Streams,
}

/// The views of foreign memory that a framework holds, and the streams noted for each.
///
/// The key is the address. So a note reaches a view, a slice of a view, and a view that was lent on to a third framework.
/// The cost of each method grows with the logarithm of the number of views, and with the number of views that overlap
/// at the address. No method calls foreign code while it holds the lock.
#[derive(Default)]
pub struct Views {
    live: Mutex<IntervalMap<Address, Entry>>,
    /// The number of views, to be read without the lock.
    count: AtomicUsize,
}

impl Views {
    fn lock(&self) -> MutexGuard<'_, IntervalMap<Address, Entry>> {
        // The map is consistent between any two statements here, so a panic elsewhere does not spoil it.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the memory at `address` is used on `stream`, for every view that contains the address. `keep` keeps the
    /// stream alive until those views are dropped. Returns their number; 0 means that no view contains the address.
    pub fn used(&self, device: Device, address: usize, stream: Stream, keep: impl FnOnce() -> Option<Keep>) -> usize {
        let at = (device, address);
        if self.is_empty() || !self.lock().has_overlap(at..=at) {
            return 0;
        }
        // Not under the lock: it may enter the interpreter.
        let used = Used { stream, keep: keep() };
        let mut views = 0;
        for entry in self.lock().values_overlap_mut(at) {
            views += entry.views;
            if !entry.noted.iter().any(|noted| noted.covers(&used)) {
                entry.noted.push(used.clone());
            }
        }
        views
    }

    /// Enters a view of `len` bytes. A view of no bytes has no address, and so no entry.
    pub(crate) fn enter(&self, device: Device, address: usize, len: usize) -> Option<Span> {
        let span = (device, address)..(device, address.checked_add(len)?);
        if len == 0 {
            return None;
        }
        let mut live = self.lock();
        live.entry(span.clone()).or_default().views += 1;
        self.count.fetch_add(1, Relaxed);
        Some(span)
    }

    /// Removes one view of this memory, and returns the streams noted for it.
    pub(crate) fn leave(&self, span: Span) -> Streams {
        let mut live = self.lock();
        let Some(entry) = live.get_mut(span.clone()) else { return Streams::new() };
        self.count.fetch_sub(1, Relaxed);
        entry.views -= 1;
        match entry.views {
            0 => live.remove(span).map(|entry| entry.noted).unwrap_or_default(),
            // Streams that were noted before this view was made do no harm: they are waited for once more.
            _ => entry.noted.clone(),
        }
    }

    /// Number of live views.
    pub fn len(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// Whether there is no live view.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: Device = Device::cuda(0);
    const A: Stream = Stream::from_handle(0xa0);
    const B: Stream = Stream::from_handle(0xb0);

    fn noted(streams: Streams) -> Vec<Stream> {
        streams.iter().map(|used| used.stream).collect()
    }

    #[test]
    fn a_use_reaches_every_view_of_the_address() {
        let views = Views::default();
        let whole = views.enter(GPU, 0x1000, 0x100).unwrap();
        let twin = views.enter(GPU, 0x1000, 0x100).unwrap();
        let part = views.enter(GPU, 0x1040, 0x10).unwrap();
        let other = views.enter(Device::cuda(1), 0x1000, 0x100).unwrap();
        assert_eq!(views.used(GPU, 0x1044, A, || None), 3);
        assert_eq!(views.used(GPU, 0x1050, B, || None), 2);
        assert_eq!(views.used(GPU, 0x1100, B, || None), 0, "the byte behind the last");
        assert_eq!(noted(views.leave(part)), [A]);
        assert_eq!(noted(views.leave(twin)), [A, B]);
        assert_eq!(noted(views.leave(whole)), [A, B]);
        assert_eq!((views.used(GPU, 0x1044, A, || None), views.len()), (0, 1));
        assert_eq!(noted(views.leave(other)), []);
        assert!(views.is_empty());
    }

    #[test]
    fn a_handle_used_again_is_kept_although_it_was_noted_raw_before() {
        let views = Views::default();
        let view = views.enter(GPU, 0x1000, 0x100).unwrap();
        let keep: Keep = Arc::new(());
        views.used(GPU, 0x1000, A, || None);
        views.used(GPU, 0x1000, A, || Some(keep.clone()));
        views.used(GPU, 0x1000, A, || Some(keep.clone()));
        assert_eq!(Arc::strong_count(&keep), 2, "it is kept, once");
        drop(views.leave(view));
        assert_eq!(Arc::strong_count(&keep), 1);
    }

    #[test]
    fn a_keep_may_use_the_views_itself() {
        let views = Views::default();
        let _view = views.enter(GPU, 0x1000, 0x100).unwrap();
        let reentered = || {
            views.used(GPU, 0x1000, B, || None);
            None
        };
        assert_eq!(views.used(GPU, 0x1000, A, reentered), 1);
    }

    #[test]
    fn views_of_no_bytes_have_no_address() {
        let views = Views::default();
        assert!(views.enter(GPU, 0x1000, 0).is_none() && views.enter(GPU, usize::MAX, 2).is_none());
        assert_eq!((views.used(GPU, 0x1000, A, || None), views.len()), (0, 0));
    }

    #[test]
    fn the_map_agrees_with_a_list() {
        let views = Views::default();
        let mut list: Vec<Span> = Vec::new();
        let mut random = 1u64;
        for _ in 0..4000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (start, len) = ((random >> 33) as usize % 512, (random >> 45) as usize % 64 + 1);
            match random >> 61 {
                0..=3 => list.extend(views.enter(GPU, start, len)),
                4..=6 if !list.is_empty() => drop(views.leave(list.swap_remove(start % list.len()))),
                _ => {
                    let expected = list.iter().filter(|span| span.contains(&(GPU, start))).count();
                    assert_eq!(views.used(GPU, start, A, || None), expected);
                }
            }
        }
        assert_eq!(views.len(), list.len());
    }
}
