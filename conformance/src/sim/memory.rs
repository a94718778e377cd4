//! The memory of the simulated device, and the checker of races on it.

use super::clock::Clock;
use std::collections::BTreeMap;
use std::ops::Range;

/// What a piece of work does with a range of addresses.
#[derive(Debug, Clone)]
pub(super) struct Access {
    pub(super) bytes: Range<usize>,
    pub(super) writes: bool,
}

/// An access that has been put into a stream.
#[derive(Debug)]
struct Past {
    access: Access,
    stream: usize,
    tick: u64,
}

/// One block of physical memory. It outlives its owners: an allocator hands it out again and again.
#[derive(Debug)]
struct Block {
    data: Vec<u8>,
    owned: bool,
    past: Vec<Past>,
}

/// All blocks, by their address.
#[derive(Debug, Default)]
pub(super) struct Memory {
    blocks: BTreeMap<usize, Block>,
    end: usize,
}

/// Blocks begin at multiples of it, as those of real allocators do.
pub(super) const GRAIN: usize = 512;

impl Memory {
    /// A new block of `len` bytes of rubbish.
    pub(super) fn reserve(&mut self, len: usize) -> usize {
        // A gap on either side: whoever runs over the end hits nothing.
        let address = self.end + 2 * GRAIN;
        self.end = address + len.next_multiple_of(GRAIN);
        self.blocks.insert(address, Block { data: vec![0xcd; len], owned: true, past: Vec::new() });
        address
    }

    /// Notes whether somebody owns the block at `address`; gives what was noted before.
    pub(super) fn own(&mut self, address: usize, owned: bool) -> bool {
        self.blocks.get_mut(&address).is_some_and(|block| std::mem::replace(&mut block.owned, owned))
    }

    fn block(&mut self, bytes: &Range<usize>) -> Option<(usize, &mut Block)> {
        let (start, block) = self.blocks.range_mut(..=bytes.start).next_back()?;
        (bytes.end - start <= block.data.len()).then_some((*start, block))
    }

    /// The bytes at these addresses, if they lie in one block.
    pub(super) fn bytes(&mut self, bytes: Range<usize>) -> Option<&mut [u8]> {
        let (start, block) = self.block(&bytes)?;
        Some(&mut block.data[bytes.start - start..bytes.end - start])
    }

    /// Judges an access by the `tick`-th piece of work of `stream`, whose past is `clock`, and remembers it.
    pub(super) fn judge(&mut self, access: &Access, stream: usize, tick: u64, clock: &Clock) -> Result<(), String> {
        let Access { bytes, writes } = access;
        if bytes.is_empty() {
            return Ok(());
        }
        let what = if *writes { "write" } else { "read" };
        let Some((_, block)) = self.block(bytes) else {
            return Err(format!("a {what} of {bytes:x?} outside any block"));
        };
        if !block.owned {
            return Err(format!("a {what} of {bytes:x?} after the memory was given back"));
        }
        let overlap = |past: &Past| past.access.bytes.start < bytes.end && bytes.start < past.access.bytes.end;
        let mut races = block
            .past
            .iter()
            .filter(|past| (past.access.writes || *writes) && overlap(past) && !clock.has_seen(past.stream, past.tick));
        let race = races.next().map(|past| {
            let other = if past.access.writes { "write" } else { "read" };
            format!(
                "a {what} of {bytes:x?} in stream {stream} is not ordered behind a {other} in stream {}",
                past.stream
            )
        });
        // Whatever is ordered behind this access is ordered behind those that it covers.
        let covers = |past: &Past| {
            let within = bytes.start <= past.access.bytes.start && past.access.bytes.end <= bytes.end;
            within && (*writes || !past.access.writes) && clock.has_seen(past.stream, past.tick)
        };
        block.past.retain(|past| !covers(past));
        block.past.push(Past { access: access.clone(), stream, tick });
        race.map_or(Ok(()), Err)
    }

    /// Forgets every access: they all lie in the past of everything to come.
    pub(super) fn forget_past(&mut self) {
        self.blocks.values_mut().for_each(|block| block.past.clear());
    }
}
