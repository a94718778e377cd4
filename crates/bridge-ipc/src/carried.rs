//! Tensors on their way to another host, in one block of memory for each device.
//!
//! A carrier, the process that moves them, packs them as [`Outgoing`]. At the other host a carrier makes the same blocks
//! as [`Incoming`], fills them byte by byte, and shares the tensors there. It knows the tensors as a text alone.

use crate::device::{self, Mark, Role};
use crate::exporter::Exporter;
use crate::importer::Opened;
use crate::line::{SLICE, broken, goes_on};
use crate::own::Own;
use crate::parcel::{MAX_TENSORS, Parcel, Part, lending_of};
use crate::tensor::{Arena, Ipc, IpcTensor, Keeps};
use crate::ticket::Ticket;
use crate::wire::{Described, MAX_FILES};
use bridge_core::{
    Access, Adapter, COPY_ALIGNMENT, DType, Device, Error, ErrorKind, Layout, Ordering, Pair, Result, Stream, copy_all,
};
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The longest pause between two looks at the work that fills a block.
const PAUSE: Duration = Duration::from_millis(1);

/// Memory on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// The device that it is on.
    pub device: Device,
    /// Its first address.
    pub address: usize,
    /// Its length in bytes.
    pub nbytes: usize,
}

impl Block {
    fn new(device: Device, bytes: &Range<usize>) -> Self {
        Self { device, address: bytes.start, nbytes: bytes.len() }
    }
}

/// A compact tensor: its dtype, its shape, the number of its block, and its offset there in bytes.
#[derive(Serialize, Deserialize)]
struct Item(DType, Vec<i64>, usize, usize);

/// The tensors of a ticket, in blocks that another host can read.
pub struct Outgoing {
    blocks: Vec<Block>,
    tensors: String,
    tree: Option<String>,
    /// The work that fills the blocks.
    work: Vec<Mark>,
    /// What keeps the blocks.
    _owners: Vec<Box<dyn Any + Send + Sync>>,
}

bridge_core::debug_fields!(impl[] Outgoing: blocks);

impl Outgoing {
    /// Packs opened tensors: enqueues the copies, which [`wait`](Self::wait) waits for.
    ///
    /// Tensors of a device are copied by one call of [`copy_all`] into memory of this process: no other memory can be
    /// registered with every transport. Tensors of the host stay where they are if they lie side by side.
    ///
    /// # Errors
    ///
    /// Those of [`copy_all`], and [`ErrorKind::OutOfMemory`].
    pub fn of(opened: Opened, ordering: &Arc<dyn Ordering>) -> Result<Self> {
        let Opened { tensors, tree } = opened;
        let mut items: Vec<Option<Item>> = tensors.iter().map(|_| None).collect();
        let (mut blocks, mut owners): (Vec<Block>, Vec<Box<dyn Any + Send + Sync>>) = Default::default();
        if let Some(bytes) = side_by_side(&tensors) {
            for (item, tensor) in items.iter_mut().zip(&tensors).filter(|(_, tensor)| is_on_host(tensor)) {
                let offset = if tensor.layout().numel() == 0 { 0 } else { tensor.data() - bytes.start };
                *item = Some(Item(tensor.dtype(), tensor.layout().shape().to_vec(), 0, offset));
            }
            blocks.push(Block::new(Device::CPU, &bytes));
        }
        let packed: Vec<usize> = (0..items.len()).filter(|index| items[*index].is_none()).collect();
        let (mut pairs, mut streams) = (Vec::with_capacity(packed.len()), Vec::new());
        for (device, indices) in by_device(&packed, &tensors) {
            let mut nbytes = 0usize;
            for index in &indices {
                nbytes = nbytes.saturating_add(Arena::room_for(device, tensors[*index].layout().nbytes()));
            }
            let (loan, number) = (Arc::new(Loan::new(device, nbytes.max(1))?), blocks.len());
            let (start, mut offset) = (loan.bytes().start, 0);
            let stream = loan.stream()?;
            for index in indices {
                let (dtype, shape) = (tensors[index].dtype(), tensors[index].layout().shape().to_vec());
                let place = (start + offset, dtype, Layout::new(dtype, &shape, None, 0)?);
                let on = (device, Access::ReadWrite, stream.map(|(_, stream)| stream));
                pairs.push((&tensors[index], IpcTensor::imported(place, on, Arc::clone(&loan) as _)));
                items[index] = Some(Item(dtype, shape, number, offset));
                offset += Arena::room_for(device, tensors[index].layout().nbytes());
            }
            streams.extend(stream);
            blocks.push(Block { device, address: start, nbytes: offset });
            owners.push(Box::new(loan));
        }
        copy(&pairs, ordering)?;
        drop(pairs);
        let work = streams.into_iter().map(|(device, stream)| Mark::new(device, stream)).collect::<Result<_>>()?;
        let text = serde_json::to_string(&items).expect("items are numbers and strings");
        // What was copied is returned to the process that shares it.
        if packed.len() < tensors.len() {
            owners.push(Box::new(tensors));
        }
        Ok(Self { blocks, tensors: text, tree, work, _owners: owners })
    }

    /// Waits until the blocks are filled.
    ///
    /// # Errors
    ///
    /// The driver's, and those of the program ([`while_waiting`](crate::while_waiting)).
    pub fn wait(&self) -> Result<()> {
        let (began, mut asked) = (Instant::now(), Instant::now());
        for work in &self.work {
            while !work.is_reached()? {
                // A sixteenth of the time so far: the wait is hardly longer than the work.
                thread::sleep((began.elapsed() / 16).min(PAUSE));
                if asked.elapsed() >= SLICE {
                    goes_on()?;
                    asked = Instant::now();
                }
            }
        }
        Ok(())
    }

    /// Returns the blocks.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Returns what [`Incoming::new`] reads at the other host.
    pub fn tensors(&self) -> &str {
        &self.tensors
    }

    /// Returns the text about the tree of the tensors.
    pub fn tree(&self) -> Option<&str> {
        self.tree.as_deref()
    }
}

fn is_on_host(tensor: &IpcTensor) -> bool {
    !device::in_streams(tensor.device())
}

/// Returns whether elements at this offset of a block, in bytes, are aligned: a block begins at a multiple of 16.
fn is_aligned(offset: usize, dtype: DType) -> bool {
    let itemsize = dtype.itemsize().unwrap_or(1);
    offset.trailing_zeros() >= itemsize.trailing_zeros().min(4)
}

/// Returns the addresses of the tensors of the host, if they are compact, aligned with one another, and little else lies
/// between them.
///
/// Memory of the host is shared as a copy: between the tensors is nothing of the program's.
fn side_by_side(tensors: &[IpcTensor]) -> Option<Range<usize>> {
    let (mut hull, mut sum): (Option<Range<usize>>, usize) = (None, 0);
    for tensor in tensors.iter().filter(|tensor| is_on_host(tensor) && tensor.layout().numel() > 0) {
        let (data, nbytes) = (tensor.data(), tensor.layout().nbytes());
        if !tensor.layout().is_compact() {
            return None;
        }
        let known = hull.unwrap_or(data..data);
        hull = Some(known.start.min(data)..known.end.max(data + nbytes));
        sum = sum.saturating_add(nbytes);
    }
    let hull =
        hull.filter(|hull| hull.len() <= sum.saturating_mul(2).saturating_add(COPY_ALIGNMENT * tensors.len()))?;
    let mut offsets = tensors.iter().filter(|tensor| is_on_host(tensor) && tensor.layout().numel() > 0);
    offsets.all(|tensor| is_aligned(tensor.data() - hull.start, tensor.dtype())).then_some(hull)
}

/// Returns the tensors of each device.
fn by_device(indices: &[usize], tensors: &[IpcTensor]) -> Vec<(Device, Vec<usize>)> {
    let mut found: Vec<(Device, Vec<usize>)> = Vec::new();
    for index in indices {
        let device = tensors[*index].device();
        match found.iter_mut().find(|(known, _)| *known == device) {
            Some((_, indices)) => indices.push(*index),
            None => found.push((device, vec![*index])),
        }
    }
    found
}

/// Memory for one block. That of a device is used again: to allocate it, and to map it into the processes at both ends,
/// takes milliseconds for each gigabyte.
struct Loan(Option<Arc<Arena>>);

/// The memory of devices that nothing uses.
static IDLE: Own<Vec<Arc<Arena>>> = Own::new();

impl Loan {
    /// Returns memory of at least this length: such that is idle, or new one in the place of all that is.
    fn new(device: Device, nbytes: usize) -> Result<Self> {
        let mut idle = IDLE.lock();
        let fits = |arena: &Arc<Arena>| {
            let length = arena.bytes().len();
            arena.device() == device && (nbytes..=nbytes.saturating_mul(2)).contains(&length)
        };
        if let Some(at) = idle.iter().position(fits) {
            return Ok(Self(Some(idle.swap_remove(at))));
        }
        let (old, others) = idle.drain(..).partition(|arena| arena.device() == device);
        *idle = others;
        drop(idle);
        drop::<Vec<_>>(old);
        Ok(Self(Some(Arc::new(Arena::new(device, nbytes, false)?))))
    }

    fn arena(&self) -> &Arc<Arena> {
        self.0.as_ref().expect("it is there until it is dropped")
    }

    fn bytes(&self) -> Range<usize> {
        self.arena().bytes()
    }

    fn stream(&self) -> Result<Option<(Device, Stream)>> {
        lent_in(self.arena().device())
    }
}

/// Returns the stream in which memory of a device is lent; `None` on the host.
fn lent_in(device: Device) -> Result<Option<(Device, Stream)>> {
    if device::in_streams(device) { Ok(Some((device, device::stream(device, Role::Lends)?))) } else { Ok(None) }
}

impl Keeps for Loan {}

impl Drop for Loan {
    fn drop(&mut self) {
        let Some(arena) = self.0.take() else { return };
        // Readers of other processes have that stream wait for them.
        if let Ok(Some(stream)) = lent_in(arena.device()) {
            device::drop_after(&[stream], Arc::new(Idle(arena)));
        }
    }
}

/// Memory that is idle when this is dropped.
struct Idle(Arc<Arena>);

impl Drop for Idle {
    fn drop(&mut self) {
        IDLE.lock().push(Arc::clone(&self.0));
    }
}

/// Frees the memory of devices that is kept for the next [`Outgoing`] and [`Incoming`].
pub fn free_idle() {
    let idle = std::mem::take(&mut *IDLE.lock());
    drop(idle);
}

fn copy(pairs: &[(&IpcTensor, IpcTensor)], ordering: &Arc<dyn Ordering>) -> Result<()> {
    // SAFETY: the targets are known here alone. The process that shares the sources answers for the order of its writes.
    let ipc = unsafe { Ipc::of_opened() };
    let adapter: &dyn Adapter<Tensor = IpcTensor> = &ipc;
    let pair = |(tensor, out)| Pair { from: adapter, tensor, to: adapter, out, dtype: None };
    let pairs: Vec<_> = pairs.iter().map(|(tensor, out)| pair((*tensor, out))).collect();
    copy_all(&pairs, ordering).map(drop).map_err(|misfit| misfit.error)
}

/// Blocks of memory that are filled from another host, and the tensors in them.
pub struct Incoming {
    loans: Vec<Loan>,
    tensors: Vec<Described>,
    nbytes: usize,
}

bridge_core::debug_fields!(impl[] Incoming: nbytes);

impl Incoming {
    /// Makes memory for the tensors of another host, which describes them with [`Outgoing::tensors`]: for each of its
    /// blocks one of the same length, on a device of this host.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Protocol`]: the text does not describe tensors in these blocks. [`ErrorKind::OutOfMemory`].
    /// [`ErrorKind::Device`], and those of the driver: this process does not have the device.
    pub fn new(tensors: &str, blocks: &[(Device, usize)]) -> Result<Self> {
        let items: Vec<Item> = serde_json::from_str(tensors).map_err(|error| nonsense().caused_by(error))?;
        if !(1..=MAX_TENSORS).contains(&items.len()) || blocks.len() > MAX_FILES {
            return Err(nonsense());
        }
        let mut total = 0usize;
        let found = items.into_iter().map(|Item(dtype, shape, segment, offset)| {
            let layout = Layout::new(dtype, &shape, None, 0).map_err(|error| nonsense().caused_by(error))?;
            let room = blocks.get(segment).map_or(0, |(_, nbytes)| *nbytes);
            let (end, offset) = match layout.numel() {
                0 => (blocks.get(segment).map(|_| 0), 0),
                _ => (offset.checked_add(layout.nbytes()), offset),
            };
            if end.is_none_or(|end| end > room) || !is_aligned(offset, dtype) {
                return Err(nonsense());
            }
            total = total.saturating_add(layout.nbytes());
            Ok(Described { segment, offset, dtype, strides: layout.strides().to_vec(), shape })
        });
        let tensors = found.collect::<Result<_>>()?;
        let loan = |(device, nbytes): &(Device, usize)| {
            if *device != Device::CPU && !device::in_streams(*device) {
                return Err(elsewhere(*device));
            }
            Loan::new(*device, (*nbytes).max(1)).map_err(|error| match error.kind() {
                ErrorKind::Device => elsewhere(*device).caused_by(error),
                _ => error,
            })
        };
        Ok(Self { loans: blocks.iter().map(loan).collect::<Result<_>>()?, tensors, nbytes: total })
    }

    /// Returns the blocks to fill.
    pub fn blocks(&self) -> Vec<Block> {
        self.loans.iter().map(|loan| Block::new(loan.arena().device(), &loan.bytes())).collect()
    }

    /// Shares the tensors, for a ticket of this host that expires after `time`. Nothing may write to the blocks any
    /// more. `tree` is text for the process that opens it.
    ///
    /// # Errors
    ///
    /// Those of [`Parcel::share`].
    pub fn share(self, exporter: &Exporter, time: Duration, tree: Option<String>) -> Result<Ticket> {
        let mut parcel = Parcel::empty(None, false);
        for mut loan in self.loans {
            let part = match loan.stream()? {
                Some(stream) => {
                    let (lending, arena) = (lending_of(loan.arena())?, Arc::clone(loan.arena()));
                    parcel.streams.push(stream);
                    parcel.owners.push(Box::new((Arc::clone(&lending.named), loan)));
                    Part::Filled(lending, arena)
                }
                None => {
                    parcel.bytes = parcel.bytes.saturating_add(loan.bytes().len());
                    let Some(arena) = loan.0.take() else { continue };
                    Part::Fresh(arena)
                }
            };
            parcel.segments.push(part);
        }
        (parcel.tensors, parcel.nbytes) = (self.tensors, self.nbytes);
        parcel.about = "a tensor of another host".into();
        parcel.share(exporter, time, tree)
    }
}

fn nonsense() -> Error {
    broken("it describes tensors that make no sense")
}

fn elsewhere(device: Device) -> Error {
    let text = format!("the tensors would arrive on {device}: pass device=\"cpu\", or a device of this host");
    Error::new(ErrorKind::Device, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_that_are_not_aligned_with_one_another_are_packed() {
        let arena = Arc::new(Arena::new(Device::CPU, 64, false).unwrap());
        let at = |offset: usize, dtype| {
            let place = (arena.bytes().start + offset, dtype, Layout::new(dtype, &[2], None, 0).unwrap());
            IpcTensor::imported(place, (Device::CPU, Access::ReadOnly, None), Arc::clone(&arena) as _)
        };
        let start = arena.bytes().start;
        let both = |offset| side_by_side(&[at(offset, DType::UINT8), at(8, DType::INT64)]);
        assert_eq!(both(0), Some(start..start + 24));
        assert_eq!(both(1), None, "the integers would begin at 7");
        assert!(side_by_side(&[at(3, DType::UINT8), at(5, DType::UINT8)]).is_some());
    }
}
