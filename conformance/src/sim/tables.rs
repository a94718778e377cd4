//! Copies of many pieces in one launch: its work reads what to copy from a table in memory of the device.

use super::device::{Event, SimDevice};
use super::memory::{Access, Memory};
use super::tensor::View;
use crate::fault::Fault;
use crate::model;
use bridge_core::{Cast, DType, Error, ErrorKind, Failed, Piece, Planned, Result, Stream, Strided};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Unsigned integers by their size in bytes, and a dtype for 16: copies know no other property of elements.
const BITS: [DType; 5] = [DType::UINT8, DType::UINT16, DType::UINT32, DType::UINT64, DType::COMPLEX128];

/// Bytes of an entry of a table: the number of a piece.
const ENTRY: usize = 8;

/// What every launch has in common.
pub(super) struct Tables {
    device: SimDevice,
    fault: Option<Fault>,
    /// The memory of tables, where a launch may still read it.
    blocks: Mutex<Vec<Block>>,
    /// Every piece so far, by its number.
    pieces: Arc<Mutex<Vec<Entered>>>,
    /// The stream of the last launch.
    last: Mutex<Option<Stream>>,
    /// A stream of these copies.
    own: OnceLock<Stream>,
}

struct Block {
    address: usize,
    len: usize,
    /// After the last launch with it.
    used: Event,
}

/// A piece as a table has it.
#[derive(Clone)]
struct Entered {
    from: View,
    to: View,
    flips: u128,
    cast: Option<Cast>,
}

/// Returns a side of a copy, as bits.
pub(super) fn view(side: Strided<'_>) -> Option<View> {
    let dtype = BITS.into_iter().find(|dtype| dtype.itemsize() == Some(side.layout.itemsize()))?;
    let (shape, strides) = (side.layout.shape().into(), side.layout.strides().into());
    Some(View { dtype, shape, strides, address: side.data, pending: None })
}

/// Flips bits in each element.
pub(super) fn flip(bytes: &mut [u8], size: usize, flips: u128) {
    for element in bytes.chunks_mut(size).filter(|_| flips != 0) {
        element.iter_mut().zip(flips.to_le_bytes()).for_each(|(byte, flip)| *byte ^= flip);
    }
}

impl Entered {
    fn of(piece: &Piece<'_>) -> Result<Self> {
        let Piece { from, to, flips, cast } = *piece;
        let sides = view(from).zip(view(to));
        let (from, to) =
            sides.ok_or_else(|| Error::new(ErrorKind::CopyNeeded, "the simulated device copies no such elements"))?;
        Ok(Self { from, to, flips, cast })
    }

    fn copy(&self, memory: &mut Memory) {
        let size = model::itemsize(self.from.dtype);
        let mut bytes = self.from.gather(memory);
        flip(&mut bytes, size, self.flips);
        let bytes = match self.cast {
            Some(cast) => bytes.chunks(size).flat_map(|element| model::cast(cast.from(), cast.to(), element)).collect(),
            None => bytes,
        };
        self.to.scatter(memory, &bytes);
    }
}

/// A table in memory.
struct Table {
    address: usize,
    /// Its pieces, by their number.
    numbers: Vec<u64>,
}

impl Tables {
    pub(super) fn new(device: SimDevice, fault: Option<Fault>) -> Arc<Self> {
        let (blocks, pieces, last, own) = Default::default();
        Arc::new(Self { device, fault, blocks, pieces, last, own })
    }

    /// Returns whether the last launch was in this stream.
    pub(super) fn launched_in(&self, stream: Stream) -> bool {
        *locked(&self.last) == Some(stream)
    }

    /// Makes many copies. The memory of the table is reused after the launch.
    pub(super) fn copy_all(&self, pieces: &[Piece<'_>], stream: Stream) -> Result<(), Failed> {
        let numbers = self.enter(pieces)?;
        let launched = || {
            let table = self.lay(numbers)?;
            self.launch(&table, stream)?;
            self.reuse(&table, self.device.record(stream)?);
            Ok(())
        };
        launched().map_err(|error| Failed::new(0, error))
    }

    /// Plans many copies. The plan keeps the memory of its table.
    pub(super) fn plan(self: &Arc<Self>, pieces: &[Piece<'_>]) -> Result<Plan, Failed> {
        let table = self.lay(self.enter(pieces)?).map_err(|error| Failed::new(0, error))?;
        Ok(Plan { tables: Arc::clone(self), table, used: Mutex::default() })
    }

    /// Gives each piece a number.
    fn enter(&self, pieces: &[Piece<'_>]) -> Result<Vec<u64>, Failed> {
        let mut known = locked(&self.pieces);
        let first = known.len() as u64;
        for (index, piece) in pieces.iter().enumerate() {
            known.push(Entered::of(piece).map_err(|error| Failed::new(index, error))?);
        }
        let all = first..known.len() as u64;
        Ok(all.skip(usize::from(self.fault == Some(Fault::PieceLeftOut))).collect())
    }

    /// Writes a table into memory that no launch reads any more. The host writes it, at once.
    fn lay(&self, numbers: Vec<u64>) -> Result<Table> {
        let len = numbers.len() * ENTRY;
        let early = self.fault == Some(Fault::TableReusedEarly);
        let free = |block: &Block| block.len >= len && (early || self.device.reached(&block.used));
        let mut blocks = locked(&self.blocks);
        let block = blocks.iter().position(free).map(|index| blocks.swap_remove(index));
        drop(blocks);
        let address = block.map_or_else(|| self.device.reserve(len), |block| block.address);
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.device.write(address, &bytes)?;
        Ok(Table { address, numbers })
    }

    /// Lets other tables have the memory of one.
    fn reuse(&self, table: &Table, used: Event) {
        let Table { address, numbers } = table;
        locked(&self.blocks).push(Block { address: *address, len: numbers.len() * ENTRY, used });
    }

    /// Submits the copies of a table.
    fn launch(&self, table: &Table, stream: Stream) -> Result<()> {
        let (address, len) = (table.address, table.numbers.len() * ENTRY);
        let pieces = Arc::clone(&self.pieces);
        let mut accesses = vec![Access::read(address..address + len)];
        for number in &table.numbers {
            let Entered { from, to, .. } = &locked(&pieces)[*number as usize];
            accesses.extend([from.reads()?, to.writes()?]);
        }
        let work = move |memory: &mut Memory| {
            let table = memory.bytes(address..address + len).unwrap_or_default().to_vec();
            for number in table.chunks_exact(ENTRY) {
                let number = number.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte));
                let piece = locked(&pieces).get(number).cloned();
                piece.iter().for_each(|piece| piece.copy(memory));
            }
        };
        *locked(&self.last) = Some(stream);
        if self.fault != Some(Fault::UpdateNotOrdered) {
            return self.device.submit(stream, &accesses, Arc::new(work));
        }
        let own = *self.own.get_or_init(|| self.device.stream());
        self.device.submit(own, &accesses, Arc::new(work))?;
        self.device.wait(own, stream)
    }
}

/// Copies that are planned.
pub(super) struct Plan {
    tables: Arc<Tables>,
    table: Table,
    /// After the last launch.
    used: Mutex<Option<Event>>,
}

// SAFETY: simulated memory is a table of bytes, which faults spoil on purpose.
unsafe impl Planned for Plan {
    unsafe fn copy(&self, stream: Option<Stream>) -> Result<(), Failed> {
        let launched = || {
            let stream = stream.unwrap_or(Stream::LEGACY);
            self.tables.launch(&self.table, stream)?;
            *locked(&self.used) = Some(self.tables.device.record(stream)?);
            Ok(())
        };
        launched().map_err(|error| Failed::new(0, error))
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        if let Some(used) = locked(&self.used).take() {
            self.tables.reuse(&self.table, used);
        }
    }
}

fn locked<X>(of: &Mutex<X>) -> MutexGuard<'_, X> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
