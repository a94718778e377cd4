//! The caching allocator of a simulated framework: blocks are reused on the stream on which they were allocated.

use super::device::{Event, SimDevice};
use super::memory::GRAIN;
use bridge_core::{ErrorKind, Keep, Stream};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
struct Blocks {
    /// Addresses that can be handed out at once, by stream and length.
    free: HashMap<(Stream, usize), Vec<usize>>,
    /// Blocks that were used on other streams as well, and the points there to wait for.
    waiting: Vec<(Vec<Point>, (Stream, usize), usize)>,
    in_use: usize,
}

/// A point in a stream.
enum Point {
    At(Event),
    /// It can be marked only after a capture.
    After(Stream, Option<Keep>),
}

impl Point {
    /// Returns `None` for a stream that was destroyed.
    fn of(device: &SimDevice, (stream, keep): (Stream, Option<Keep>)) -> Option<Self> {
        match device.record(stream) {
            Ok(event) => Some(Self::At(event)),
            Err(error) => (error.kind() == ErrorKind::Captured).then_some(Self::After(stream, keep)),
        }
    }

    /// Returns the points that have not been reached.
    fn unreached(device: &SimDevice, points: Vec<Self>) -> Vec<Self> {
        let marked = points.into_iter().filter_map(|point| match point {
            Self::After(stream, keep) => Self::of(device, (stream, keep)),
            marked => Some(marked),
        });
        marked.filter(|point| !matches!(point, Self::At(event) if device.reached(event))).collect()
    }
}

/// An allocator.
pub(super) struct Pool {
    pub(super) device: SimDevice,
    blocks: Mutex<Blocks>,
}

/// A block in use. Dropping it releases the block.
pub(super) struct Block {
    pool: Arc<Pool>,
    pub(super) address: usize,
    len: usize,
    stream: Stream,
    /// The streams on which it was used, next to the one on which it was allocated, and what keeps them.
    used: Mutex<Vec<(Stream, Option<Keep>)>>,
}

impl Pool {
    pub(super) fn new(device: SimDevice) -> Arc<Self> {
        Arc::new(Self { device, blocks: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates a block of at least `nbytes` for use on `stream`, with its former content.
    pub(super) fn allocate(self: &Arc<Self>, nbytes: usize, stream: Stream) -> Block {
        self.device.pass_time();
        let len = nbytes.max(1).next_multiple_of(GRAIN);
        let mut blocks = self.lock();
        let waiting = std::mem::take(&mut blocks.waiting);
        for (points, home, address) in waiting {
            let points = Point::unreached(&self.device, points);
            if points.is_empty() {
                blocks.free.entry(home).or_default().push(address);
            } else {
                blocks.waiting.push((points, home, address));
            }
        }
        blocks.in_use += len;
        let address = match blocks.free.get_mut(&(stream, len)).and_then(Vec::pop) {
            Some(address) => {
                self.device.hand_out(address);
                address
            }
            None => self.device.reserve(len),
        };
        Block { pool: Arc::clone(self), address, len, stream, used: Mutex::default() }
    }

    /// Returns the bytes in use.
    pub(super) fn in_use(&self) -> usize {
        self.lock().in_use
    }
}

impl Block {
    /// Records a use on `stream`: the block is not reused before that work is done.
    pub(super) fn record_stream(&self, stream: Stream, keep: Option<Keep>) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if stream != self.stream && !used.iter().any(|(known, _)| *known == stream) {
            used.push((stream, keep));
        }
    }

    /// Returns its addresses.
    pub(super) fn bytes(&self) -> Range<usize> {
        self.address..self.address + self.len
    }

    /// Gives the block back. Only the drop may do so.
    pub(super) fn give_back(&self) {
        let Self { pool, address, len, stream, used } = self;
        if !pool.device.give_back(*address) {
            return;
        }
        let used = std::mem::take(&mut *used.lock().unwrap_or_else(PoisonError::into_inner));
        let points: Vec<_> = used.into_iter().filter_map(|used| Point::of(&pool.device, used)).collect();
        let mut blocks = pool.lock();
        blocks.in_use -= len;
        if points.is_empty() {
            blocks.free.entry((*stream, *len)).or_default().push(*address);
        } else {
            blocks.waiting.push((points, (*stream, *len), *address));
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.give_back();
    }
}
