//! Copies by the simulated device itself, and the faults that they can have.

use super::device::{Event, SimDevice};
use super::memory::Memory;
use super::tables::{Tables, flip, view};
use super::tensor::View;
use crate::fault::Fault;
use crate::model;
use bridge_core::{Cast, Copies, Device, Error, ErrorKind, Failed, Piece, Planned, Result, Stream, Strided};
use std::sync::{Arc, Mutex, PoisonError};

/// Copies strided tensors, those without compact strides through staging memory.
pub(super) struct SimCopies {
    device: SimDevice,
    fault: Option<Fault>,
    staging: Mutex<Vec<Staging>>,
    pub(super) tables: Arc<Tables>,
}

/// A block of memory between the two halves of a copy.
struct Staging {
    address: usize,
    len: usize,
    /// After the last copy through it.
    used: Event,
}

/// The length of a tile. Real tiles are longer, and so are the tensors that they copy.
const TILE: i64 = 4;

impl SimCopies {
    pub(super) fn new(device: SimDevice, fault: Option<Fault>) -> Self {
        let tables = Tables::new(device.clone(), fault);
        Self { device, fault, staging: Mutex::default(), tables }
    }

    /// Returns the address of staging memory that no work uses any more.
    fn staging(&self, blocks: &mut Vec<Staging>, len: usize, stream: Stream) -> Result<usize> {
        let early = self.fault == Some(Fault::StagingReusedEarly);
        let free = |block: &Staging| block.len >= len && (early || self.device.reached(&block.used));
        let block = blocks.iter().position(free).map(|i| blocks.swap_remove(i));
        let (address, len) = block.map_or_else(|| (self.device.reserve(len), len), |block| (block.address, block.len));
        // Two pieces of work follow in the stream: into the block, and out of it.
        let used = self.device.record(stream)?.after(2);
        blocks.push(Staging { address, len, used });
        Ok(address)
    }

    fn submit(&self, from: View, to: View, flips: u128, stream: Stream) -> Result<()> {
        let (reads, writes) = (from.reads()?, to.writes()?);
        let fault = self.fault;
        let work = move |memory: &mut Memory| {
            let size = model::itemsize(from.dtype);
            let from = if fault == Some(Fault::IndexWraps) { &wrapped(from.clone()) } else { &from };
            let mut bytes = from.gather(memory);
            flip(&mut bytes, size, flips);
            if fault == Some(Fault::TileEdgeSkipped) {
                leave_edge(&to, &mut bytes, &to.gather(memory));
            }
            to.scatter(memory, &bytes);
        };
        self.device.submit(stream, &[reads, writes], Arc::new(work))
    }
}

// SAFETY: simulated memory is a table of bytes, which faults spoil on purpose.
unsafe impl Copies for SimCopies {
    unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Option<Stream>) -> Result<()> {
        let (Some(from_view), Some(to_view), Some(stream)) = (view(from), view(to), stream) else {
            return Err(Error::new(ErrorKind::CopyNeeded, "the simulated device copies no such elements"));
        };
        let stream = if self.fault == Some(Fault::CopyOutsideStream) { Stream::LEGACY } else { stream };
        if from.layout.is_compact() {
            return self.submit(from_view, to_view, flips, stream);
        }
        // Until both pieces of work are in the stream: another thread may copy in the same one.
        let mut blocks = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let address = self.staging(&mut blocks, from.layout.nbytes(), stream)?;
        let strides = model::row_major(&from_view.shape);
        let staged = View { address, strides, ..from_view.clone() };
        self.submit(from_view, staged.clone(), flips, stream)?;
        self.submit(staged, to_view, 0, stream)
    }

    unsafe fn copy_all(&self, pieces: &[Piece<'_>], stream: Option<Stream>) -> Result<(), Failed> {
        self.tables.copy_all(pieces, stream.unwrap_or(Stream::LEGACY))
    }

    unsafe fn plan(
        &self,
        _: Device,
        pieces: &[Piece<'_>],
        _: Option<Stream>,
    ) -> Result<Option<Box<dyn Planned>>, Failed> {
        Ok(Some(Box::new(self.tables.plan(pieces)?)))
    }

    fn casts(&self, _: Cast) -> Result<()> {
        Ok(())
    }
}

/// Returns the view as code sees it whose index has 32 bits.
fn wrapped(view: View) -> View {
    let strides = view.strides.iter().map(|stride| i64::from(*stride as i32)).collect();
    View { strides, ..view }
}

/// Leaves the elements of the target after its last whole tile as they are.
fn leave_edge(target: &View, bytes: &mut [u8], old: &[u8]) {
    let Some(&length) = target.shape.last() else { return };
    let size = model::itemsize(target.dtype);
    let whole = (length - length % TILE) as usize;
    if whole == 0 {
        return;
    }
    for (i, (new, old)) in bytes.chunks_mut(size).zip(old.chunks(size)).enumerate() {
        if i % length as usize >= whole {
            new.copy_from_slice(old);
        }
    }
}
