//! Moves between two devices: while a block of pieces moves, the next one is packed and the one before is spread.

use super::memory::Block;
use super::packed::Load;
use super::{Moves, same, undefined, wait};
use crate::{Event, Link};
use bridge_core::{Device, Failed, Piece, Result, Stream};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A stream of a device.
type Place = (Device, Stream);

/// Two streams for moves from one device to another.
struct Lane {
    moving: Place,
    spreading: Place,
    /// The caller's stream of the last move, and the end of that move in it. Without it only that stream can have them.
    caller: Place,
    end: Option<Event>,
}

/// Streams of the package, for one move at a time. An earlier move from the same stream of the caller leaves its streams
/// to the next one, which waits for it anyway; any other move takes those of a move that has ended. So no move waits for
/// another stream of the caller.
pub(super) struct Lanes(Mutex<Vec<Lane>>);

impl Lanes {
    pub const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    fn lanes(&self) -> MutexGuard<'_, Vec<Lane>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the streams in which a move from `caller` to a device moves and spreads. No other move has them.
    fn take(&self, link: &dyn Link, caller: Place, to: Device) -> Result<(Place, Place)> {
        let mut lanes = self.lanes();
        let fits = |lane: &Lane| (lane.moving.0, lane.spreading.0) == (caller.0, to);
        let reached = |end: &Event| link.is_complete(caller.0, end).unwrap_or(false);
        let has_ended = |lane: &Lane| lane.end.as_ref().is_some_and(reached);
        let own = lanes.iter().position(|lane| fits(lane) && lane.caller == caller);
        if let Some(at) = own.or_else(|| lanes.iter().position(|lane| fits(lane) && has_ended(lane))) {
            let Lane { moving, spreading, end, .. } = lanes.swap_remove(at);
            if let Some(end) = end {
                link.release(caller.0, end);
            }
            return Ok((moving, spreading));
        }
        drop(lanes);
        Ok(((caller.0, link.new_stream(caller.0)?), (to, link.new_stream(to)?)))
    }

    /// Takes the streams back after the caller's was made to wait for them.
    fn give(&self, link: &dyn Link, caller: Place, (moving, spreading): (Place, Place)) {
        // SAFETY: the stream is alive, as the module `moves` says.
        let end = unsafe { link.record(caller.0, caller.1) }.ok();
        self.lanes().push(Lane { moving, spreading, caller, end });
    }
}

/// The streams and the blocks of a move. Each kind of work has its own stream, so that they overlap.
pub(super) struct Relay<'a> {
    moves: &'a Moves<'a>,
    /// The caller's stream, in which the source's device packs.
    packing: Place,
    /// In which blocks move: the caller's where nothing can overlap.
    moving: Place,
    /// In which the target's device spreads.
    spreading: Place,
    /// The target's device.
    to: Device,
    /// Blocks that are packed, until their copy has left; and blocks for what arrives, until it is spread.
    packed: VecDeque<Block<'a>>,
    arriving: VecDeque<Block<'a>>,
    /// The streams that are returned.
    lane: Option<(Place, Place)>,
}

impl<'a> Relay<'a> {
    /// Begins a move in `stream`, which belongs to the first device.
    pub fn new(moves: &'a Moves<'a>, (from, to): (Device, Device), stream: Stream, loads: &[Load<'_>]) -> Result<Self> {
        let packing = (from, stream);
        let spreads = loads.iter().any(is_spread);
        let overlaps = loads.len() > 1 && loads.iter().any(is_packed);
        let lane = match overlaps || spreads {
            true => Some(moves.lanes.take(moves.link, packing, to)?),
            false => None,
        };
        let (own, spreading) = lane.unwrap_or((packing, packing));
        let moving = if overlaps { own } else { packing };
        let (packed, arriving) = Default::default();
        let relay = Self { moves, packing, moving, spreading, to, packed, arriving, lane };
        // What moves first may not be packed.
        match relay.order(packing, moving) {
            Ok(()) => Ok(relay),
            Err(error) => relay.end().and(Err(error)),
        }
    }

    /// Moves a load. The next one is prepared for.
    ///
    /// # Safety
    ///
    /// As of [`bridge_core::Copies::copy_all`].
    pub unsafe fn carry(&mut self, load: &Load<'_>, next: Option<&Load<'_>>) -> Result<(), Failed> {
        let of_all = |error| Failed::new(load.index(), error);
        // SAFETY: the caller's promises.
        let source = unsafe { self.pack(load) }?;
        let target = match load {
            Load::Alone(wired) => wired.piece.to.data,
            Load::Packed(_) => self.capacity(load.nbytes()).map_err(of_all)?,
        };
        // SAFETY: the caller's promises. A block has room for the bytes, and is used only for them until they are
        // spread.
        unsafe {
            let (from, to) = ((self.packing.0, source), (self.to, target));
            self.moves.link.copy(from, to, load.nbytes(), self.moving.1)
        }
        .map_err(|error| of_all(undefined(error)))?;
        if let Some(next) = next.filter(|next| is_spread(next)) {
            // Before what arrives now is spread, so that the next copy does not wait for that.
            self.make_space(next.nbytes()).map_err(|error| of_all(undefined(error)))?;
        }
        match load {
            Load::Alone(_) => Ok(()),
            // SAFETY: as above.
            Load::Packed(packed) => unsafe {
                self.order(self.moving, self.spreading).map_err(of_all)?;
                let spread = (self.moves.on_device)(&packed.on_other(target), self.spreading.1);
                // It is freed in the stream of the kernel, of which a part may run although the launch has failed.
                self.arriving.pop_front();
                spread.map_err(|failed| Failed::new(packed.pieces[failed.index].index, failed.error))
            },
        }
    }

    /// Packs what is not side by side already. Returns the address of the bytes that move.
    unsafe fn pack(&mut self, load: &Load<'_>) -> Result<usize, Failed> {
        let of_all = |error| Failed::new(load.index(), error);
        if !is_packed(load) {
            let Load::Alone(wired) = load else { unreachable!("a block is packed") };
            return Ok(wired.piece.from.data);
        }
        let Self { moves, packing, moving, .. } = *self;
        self.packed.push_back(Block::new(moves.link, packing.0, load.nbytes(), packing.1).map_err(of_all)?);
        let address = self.packed[self.packed.len() - 1].address;
        // SAFETY: the caller's promises; the block is fresh and has room for all pieces, each at its own place.
        let packed = unsafe { (moves.on_device)(&on_device(load, address), packing.1) };
        packed.map_err(|failed| Failed::new(index_of(load, failed.index), failed.error))?;
        if self.packed.len() > 1 {
            // The block after this one waits for the copy before it.
            self.order(moving, packing).map_err(of_all)?;
            self.packed.pop_front();
        }
        self.order(packing, moving).map_err(of_all)?;
        Ok(address)
    }

    /// Returns the address of the block for what arrives next.
    fn capacity(&mut self, nbytes: usize) -> Result<usize> {
        if self.arriving.is_empty() {
            self.make_space(nbytes)?;
        }
        Ok(self.arriving[0].address)
    }

    fn make_space(&mut self, nbytes: usize) -> Result<()> {
        let (device, stream) = self.spreading;
        self.arriving.push_back(Block::new(self.moves.link, device, nbytes, stream)?);
        self.order(self.spreading, self.moving)
    }

    /// Lets the caller's stream wait for everything, or the host where streams cannot wait for each other.
    ///
    /// # Errors
    ///
    /// The host cannot wait either. Memory that copies may still use is leaked.
    pub fn end(self) -> Result<()> {
        let Self { packing, moving, spreading, .. } = self;
        let meet = |earlier, later| self.order(earlier, later).or_else(|_| wait(self.moves.link, earlier));
        // Blocks of a move that has failed are freed in the stream that would have spread them.
        let arrived = if self.arriving.is_empty() { Ok(()) } else { meet(moving, spreading) };
        let moved = meet(moving, packing);
        let spread = meet(spreading, packing);
        for (met, blocks) in [(&arrived, self.arriving), (&moved, self.packed)] {
            match met {
                Ok(()) => drop(blocks),
                Err(_) => blocks.into_iter().for_each(std::mem::forget),
            }
        }
        let met = arrived.and(moved).and(spread);
        if let (Ok(()), Some(lane)) = (&met, self.lane) {
            self.moves.lanes.give(self.moves.link, packing, lane);
        }
        met.map_err(undefined)
    }

    fn order(&self, earlier: Place, later: Place) -> Result<()> {
        if earlier == later { Ok(()) } else { (self.moves.order)(earlier, later) }
    }
}

/// Returns whether the source's device makes a copy of it that moves.
fn is_packed(load: &Load<'_>) -> bool {
    match load {
        Load::Alone(wired) => wired.changes() || !same(wired.piece.from.layout, &wired.wire),
        Load::Packed(_) => true,
    }
}

/// Returns whether the target's device copies it from where it has arrived.
fn is_spread(load: &Load<'_>) -> bool {
    matches!(load, Load::Packed(_))
}

fn on_device<'a>(load: &'a Load<'_>, address: usize) -> Vec<Piece<'a>> {
    match load {
        Load::Alone(wired) => vec![wired.on_device(address)],
        Load::Packed(packed) => packed.on_device(address),
    }
}

/// Returns the number among all pieces of one of a load.
fn index_of(load: &Load<'_>, number: usize) -> usize {
    match load {
        Load::Alone(wired) => wired.index,
        Load::Packed(packed) => packed.pieces[number].index,
    }
}
