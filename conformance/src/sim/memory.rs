//! The memory of the simulated device, and the checker of races on it.

use super::clock::Clock;
use std::ops::Range;

/// A read or a write of a range of addresses.
#[derive(Debug, Clone)]
pub(super) struct Access {
    pub(super) bytes: Range<usize>,
    pub(super) writes: bool,
}

impl Access {
    pub(super) fn read(bytes: Range<usize>) -> Self {
        Self { bytes, writes: false }
    }

    pub(super) fn write(bytes: Range<usize>) -> Self {
        Self { bytes, writes: true }
    }
}

/// An access that was submitted to a stream.
#[derive(Debug)]
struct Past {
    access: Access,
    stream: usize,
    tick: u64,
}

/// One block of physical memory. It outlives its owners: an allocator reuses it.
#[derive(Debug)]
struct Block {
    address: usize,
    data: Vec<u8>,
    owned: bool,
    past: Vec<Past>,
}

/// All blocks, in the order of their addresses.
#[derive(Debug, Default)]
pub(super) struct Memory {
    blocks: Vec<Block>,
    /// The index of the block that was found last: the next access is nearly always to the same one.
    last: usize,
}

/// Blocks begin at multiples of this many bytes, like those of real allocators.
pub(super) const GRAIN: usize = 512;

/// The length, in bytes, from which the garbage of a block is zeros.
const LARGE: usize = 1 << 28;

impl Memory {
    /// Makes a block of `len` bytes of garbage.
    pub(super) fn reserve(&mut self, len: usize) -> usize {
        // A gap on either side: an access past the end hits no block.
        let end = self.blocks.last().map_or(0, |block| block.address + block.data.len().next_multiple_of(GRAIN));
        let address = end + 2 * GRAIN;
        // The system makes pages of zeros when they are first used, so that gigabytes cost nothing.
        let garbage = if len < LARGE { 0xcd } else { 0 };
        self.blocks.push(Block { address, data: vec![garbage; len], owned: true, past: Vec::new() });
        address
    }

    /// Sets whether the block at `address` is owned. Returns whether it was.
    pub(super) fn own(&mut self, address: usize, owned: bool) -> bool {
        self.block(&(address..address)).is_some_and(|block| std::mem::replace(&mut block.owned, owned))
    }

    /// Returns the block in which these bytes lie.
    fn block(&mut self, bytes: &Range<usize>) -> Option<&mut Block> {
        let holds = |block: &Block| block.address <= bytes.start && bytes.end <= block.address + block.data.len();
        if !self.blocks.get(self.last).is_some_and(holds) {
            self.last = self.blocks.partition_point(|block| block.address <= bytes.start).checked_sub(1)?;
        }
        self.blocks.get_mut(self.last).filter(|block| holds(block))
    }

    /// Returns the bytes at these addresses, if they lie in one block.
    pub(super) fn bytes(&mut self, bytes: Range<usize>) -> Option<&mut [u8]> {
        let block = self.block(&bytes)?;
        Some(&mut block.data[bytes.start - block.address..bytes.end - block.address])
    }

    /// Judges an access by the `tick`-th piece of work of `stream`, whose past is `clock`, and records it.
    pub(super) fn judge(&mut self, access: &Access, stream: usize, tick: u64, clock: &Clock) -> Result<(), String> {
        let Access { bytes, writes } = access;
        if bytes.is_empty() {
            return Ok(());
        }
        let what = if *writes { "write" } else { "read" };
        let Some(block) = self.block(bytes) else {
            return Err(format!("a {what} of {bytes:x?} outside any block"));
        };
        if !block.owned {
            return Err(format!("a {what} of {bytes:x?} after the memory was released"));
        }
        let overlap = |past: &Past| past.access.bytes.start < bytes.end && bytes.start < past.access.bytes.end;
        let mut races = block
            .past
            .iter()
            .filter(|past| (past.access.writes || *writes) && overlap(past) && !clock.has_seen(past.stream, past.tick));
        let race = races.next().map(|past| {
            let other = if past.access.writes { "write" } else { "read" };
            format!(
                "a {what} of {bytes:x?} in stream {stream} is not ordered after a {other} in stream {}",
                past.stream
            )
        });
        // Work that is ordered after this access is ordered after those that it covers.
        let covers = |past: &Past| {
            let within = bytes.start <= past.access.bytes.start && past.access.bytes.end <= bytes.end;
            within && (*writes || !past.access.writes) && clock.has_seen(past.stream, past.tick)
        };
        block.past.retain(|past| !covers(past));
        block.past.push(Past { access: access.clone(), stream, tick });
        race.map_or(Ok(()), Err)
    }

    /// Forgets every access: all lie in the past of all later work.
    pub(super) fn forget_past(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.past.clear());
    }
}
