//! Which streams the live views of a framework are used on.

use crate::{Device, Stream};
use slab::Slab;
use smallvec::{SmallVec, smallvec};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Keeps a stream from being destroyed while the value lives.
pub type Keep = Arc<dyn Send + Sync>;

/// A stream on which a view has been used.
pub(crate) struct Used {
    pub(crate) stream: Stream,
    _keep: Option<Keep>,
}

type Streams = SmallVec<[Used; 2]>;

struct View {
    device: Device,
    bytes: Range<usize>,
    streams: Streams,
}

/// The views of foreign memory that a framework holds at the moment, and the streams on which each is used.
///
/// It answers "somebody uses this address on that stream" for views, for slices of views, and for views that are lent
/// on to a third framework: all that matters is the address.
#[derive(Default)]
pub struct Views {
    live: Mutex<Slab<View>>,
    /// How many there are, to be read without the lock.
    count: AtomicUsize,
}

impl Views {
    fn lock(&self) -> MutexGuard<'_, Slab<View>> {
        // The slab is consistent between any two statements here, so a panic elsewhere does not spoil it.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the memory at `address` is used on `stream`, which `keep` keeps alive until the view is gone. Gives the
    /// number of live views that contain it; 0 means that the memory is the framework's own.
    pub fn used(&self, device: Device, address: usize, stream: Stream, keep: impl Fn() -> Option<Keep>) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut live = self.lock();
        let mut count = 0;
        for (_, view) in live.iter_mut().filter(|(_, view)| view.device == device && view.bytes.contains(&address)) {
            count += 1;
            if !view.streams.iter().any(|used| used.stream == stream) {
                view.streams.push(Used { stream, _keep: keep() });
            }
        }
        count
    }

    /// Whether a live view contains `address`.
    pub fn contains(&self, device: Device, address: usize) -> bool {
        !self.is_empty() && self.lock().iter().any(|(_, view)| view.device == device && view.bytes.contains(&address))
    }

    pub(crate) fn enter(&self, device: Device, bytes: Range<usize>, stream: Stream, keep: Option<Keep>) -> usize {
        let mut live = self.lock();
        let key = live.insert(View { device, bytes, streams: smallvec![Used { stream, _keep: keep }] });
        self.count.store(live.len(), Relaxed);
        key
    }

    pub(crate) fn leave(&self, key: usize) -> Streams {
        let mut live = self.lock();
        let view = live.remove(key);
        self.count.store(live.len(), Relaxed);
        view.streams
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
