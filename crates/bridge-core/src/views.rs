//! Which streams the live views of a framework are used on.

use crate::{Device, Stream};
use slab::Slab;
use smallvec::{SmallVec, smallvec};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The streams on which one view has been used.
pub type Streams = SmallVec<[Stream; 2]>;

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
pub struct Views(Mutex<Slab<View>>);

impl Views {
    fn lock(&self) -> MutexGuard<'_, Slab<View>> {
        // The slab is consistent between any two statements here, so a panic elsewhere does not spoil it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the memory at `address` is used on `stream`. Gives the number of live views that contain it; 0 means
    /// that the memory is the framework's own.
    pub fn used(&self, device: Device, address: usize, stream: Stream) -> usize {
        let mut count = 0;
        for (_, view) in self.lock().iter_mut() {
            if view.device == device && view.bytes.contains(&address) {
                count += 1;
                if !view.streams.contains(&stream) {
                    view.streams.push(stream);
                }
            }
        }
        count
    }

    pub(crate) fn enter(&self, device: Device, bytes: Range<usize>, stream: Stream) -> usize {
        self.lock().insert(View { device, bytes, streams: smallvec![stream] })
    }

    pub(crate) fn leave(&self, key: usize) -> Streams {
        self.lock().remove(key).streams
    }

    /// Number of live views.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether there is no live view.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
