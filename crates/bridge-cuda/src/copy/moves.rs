//! Moves between the host and a device, and between two devices.
//!
//! Bytes move without gaps, in the order of the target, else in that of the source, else row by row. Where a side has
//! another layout, the device packs and spreads its own with the kernels, in memory of the driver's pool, and the host
//! with its own loops. The device also flips the pending bits, and casts.
//!
//! Many small pieces move together, one after another in blocks: the threads of the host copy each piece into staging
//! or out of it, and the device copies all pieces of a block in one launch.
//!
//! The driver takes handles of streams unchecked. Functions of this crate that take a stream are only for the crate,
//! and each stream is alive: it is that of an unsafe method of `Copies` or `Planned`, whose caller has promised it; or
//! one of the package ([`Link::new_stream`]) or a default stream, which live as long as the process.

mod across;
mod cut;
mod memory;
mod packed;
mod pieces;
mod staging;
mod stores;
#[cfg(test)]
mod tests;
mod tick;

use crate::Link;
use crate::copy::{host, kernels};
use across::{Lanes, Relay};
use bridge_core::{
    Access, Allocation, Device, DeviceBuffer, DeviceKind, Error, ErrorKind, Failed, Keep, Layout, Memory, Piece,
    Result, Reuse, Stream, Strided,
};
pub use cut::{Cut, Cuts};
pub(crate) use memory::Block;
use memory::Scratch;
use packed::{Load, OnHost, Packed, Wired, loads};
use pieces::{Bytes, CUTS, Host, UNHURRIED};
use staging::Pool;
use std::slice;
pub(crate) use stores::prefer_huge_pages;
pub use tick::{Tick, ticking};

static POOL: Pool = Pool::new(&CUTS);
static UPLOADS: Pool = Pool::new(&UNHURRIED);
static LANES: Lanes = Lanes::new();

/// Moves the elements between two different devices, as [`bridge_core::Copies::copy`] says.
///
/// # Safety
///
/// As of [`bridge_core::Copies::copy`].
pub(crate) unsafe fn copy(from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Stream) -> Result<()> {
    // SAFETY: the caller's promises.
    unsafe { copy_all(&[Piece { from, to, flips, cast: None }], stream) }.map_err(|failed| failed.error)
}

/// Moves the elements of many pieces between the same two devices, as [`bridge_core::Copies::copy_all`] says.
///
/// # Safety
///
/// As of [`bridge_core::Copies::copy_all`].
pub(crate) unsafe fn copy_all(pieces: &[Piece<'_>], stream: Stream) -> Result<(), Failed> {
    let link = crate::link().map_err(|error| Failed::new(0, error))?;
    let (pool, lanes, cuts, on_host) = (&POOL, &LANES, &CUTS, host::copy_all);
    let moves = Moves { link, pool, lanes, cuts, on_device: kernels::copy_all, on_host, order };
    // SAFETY: the caller's promises.
    unsafe { moves.copy_all(pieces, stream) }
}

/// Moves over another link, or cut in another way, for the example that measures what costs time.
#[doc(hidden)]
pub struct Trial<'a> {
    link: &'a dyn Link,
    pool: Pool,
    lanes: Lanes,
    cuts: Cuts,
}

bridge_core::debug_fields!(impl[] Trial<'_>: cuts);

impl<'a> Trial<'a> {
    /// The figures of [`Copier`](crate::copy::Copier).
    pub const USUAL: Cuts = CUTS;

    /// Returns moves that own their staging buffers, which stay allocated.
    pub const fn new(link: &'a dyn Link, cuts: Cuts) -> Self {
        Self { link, pool: Pool::new(&cuts), lanes: Lanes::new(), cuts }
    }

    /// Moves the elements.
    ///
    /// # Errors
    ///
    /// As of [`bridge_core::Copies::copy`].
    ///
    /// # Safety
    ///
    /// As of [`bridge_core::Copies::copy`], and the link does what [`Link`] says.
    pub unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, stream: Stream) -> Result<()> {
        let Self { link, pool, lanes, cuts } = self;
        let (link, on_host) = (*link, host::copy_all);
        let moves = Moves { link, pool, lanes, cuts, on_device: kernels::copy_all, on_host, order };
        let piece = Piece { from, to, flips: 0, cast: None };
        // SAFETY: the caller's promises.
        unsafe { moves.copy_all(&[piece], stream) }.map_err(|failed| failed.error)
    }
}

/// Checks a device, as [`bridge_core::Copies::reaches`] says.
pub(crate) fn reaches(device: Device) -> Result<()> {
    if is_host(device) {
        return Ok(());
    }
    crate::available()?;
    let count = crate::device_count();
    if usize::try_from(device.index).is_ok_and(|index| index < count) {
        return Ok(());
    }
    let last = count - 1;
    let text = format!("there is no {device}: this process has {count} CUDA device(s), cuda:0 to cuda:{last}");
    Err(Error::new(ErrorKind::Device, text))
}

/// Allocates memory of a device, as [`bridge_core::Copies::allocate`] says.
pub(crate) fn allocate(
    device: Device,
    nbytes: usize,
    stream: Stream,
    keep: Option<Keep>,
) -> Result<Box<dyn DeviceBuffer>> {
    // The memory is freed on any thread.
    let stream = stream.on_any_thread();
    let block = Block::new(crate::link()?, device, nbytes, stream)?;
    let bytes = block.address..block.address + nbytes;
    let allocation = Allocation::new(bytes, device, Access::ReadWrite, Some(stream), Reuse::InStreamOrder);
    // SAFETY: the driver's pool maps the bytes until the block is dropped and reuses them after the stream, which
    // `keep` keeps alive; no other code knows them. Freeing neither blocks nor panics, and needs no GIL.
    Ok(Box::new(unsafe { Memory::new(allocation, (block, keep)) }))
}

/// Returns whether the stream is being captured into a graph.
pub(crate) fn is_captured(device: Device, stream: Stream) -> Result<bool> {
    // SAFETY: the streams of this crate are alive, as the module says.
    unsafe { crate::link()?.is_captured(device, stream) }
}

/// Copies bytes through pinned staging into memory of a device, in stream order, without a wait of the host. Work in the
/// stream may read them from then on; the memory is freed in stream order when the block is dropped.
pub(crate) fn upload(device: Device, bytes: &[u8], stream: Stream) -> Result<Block<'static>> {
    // The threads of a move share the stream.
    let (link, stream) = (crate::link()?, stream.on_any_thread());
    let block = Block::new(link, device, bytes.len(), stream)?;
    let (host, address) = (Host::At(bytes.as_ptr().expose_provenance()), block.address);
    let bytes = Bytes { link, pool: &UPLOADS, cuts: &UNHURRIED, device, stream, address, host, nbytes: bytes.len() };
    // SAFETY: the block is fresh, as long as the bytes, and used in the stream only. These are alive during the call.
    unsafe { bytes.up() }?;
    Ok(block)
}

/// Copies bytes into memory of a device that any stream may read once this returns, at any time.
///
/// # Errors
///
/// Those of the driver, and [`ErrorKind::Captured`] where `stream` or any blocking stream is being captured.
pub(crate) fn kept(device: Device, bytes: &[u8], stream: Stream) -> Result<Box<dyn DeviceBuffer>> {
    let link = crate::link()?;
    for stream in [stream, Stream::LEGACY] {
        // SAFETY: the streams are alive, as the module says.
        if unsafe { link.is_captured(device, stream) }? {
            let text = format!(
                "{stream}, or a stream that it would wait for, is being captured into a CUDA graph: prepare the copies before the capture"
            );
            return Err(Error::new(ErrorKind::Captured, text));
        }
    }
    // Freed in the legacy stream, which always exists.
    let memory = allocate(device, bytes.len(), Stream::LEGACY, None)?;
    let (host, address) = (Host::At(bytes.as_ptr().expose_provenance()), memory.address());
    // Staged: to query the legacy stream would end a capture of another stream that waits for it.
    let cuts = &Cuts { up: Cut { at_once: 0, ..CUTS.up }, ..CUTS };
    let bytes = Bytes { link, pool: &POOL, cuts, device, stream: Stream::LEGACY, address, host, nbytes: bytes.len() };
    // SAFETY: the memory is fresh, as long as the bytes, and known here only. The bytes are alive during the call.
    unsafe { bytes.up() }?;
    wait(link, (device, Stream::LEGACY))?;
    Ok(memory)
}

/// The link, the kernels and the staging buffers of moves. The tests have their own.
struct Moves<'a> {
    link: &'a dyn Link,
    pool: &'a Pool,
    lanes: &'a Lanes,
    cuts: &'a Cuts,
    on_device: unsafe fn(&[Piece<'_>], Stream) -> Result<(), Failed>,
    on_host: OnHost,
    order: Order,
}

/// Makes a stream of a device wait for the work that is now in a stream of another one.
type Order = fn((Device, Stream), (Device, Stream)) -> Result<()>;

fn order(earlier: (Device, Stream), later: (Device, Stream)) -> Result<()> {
    // SAFETY: the streams of this crate are alive, as the module says.
    unsafe { crate::ordering().order_across(earlier, later) }
}

impl Moves<'_> {
    unsafe fn copy_all(&self, pieces: &[Piece<'_>], stream: Stream) -> Result<(), Failed> {
        let Some(Piece { from, to, .. }) = pieces.first() else { return Ok(()) };
        let first = |error| Failed::new(0, error);
        let (is_up, is_down) = (is_host(from.device), is_host(to.device));
        if is_up && is_down {
            // SAFETY: the caller's promises.
            return unsafe { (self.on_host)(pieces, usize::MAX) };
        }
        let (small, block) = match (is_up, is_down) {
            (_, true) => (self.cuts.down.shortest, self.cuts.block),
            (true, _) => (self.cuts.up.shortest, self.cuts.block),
            _ => self.cuts.across,
        };
        let loads = loads(pieces, (small, block), self.on_host)?;
        if loads.is_empty() {
            return Ok(());
        }
        let device = if is_up { to.device } else { from.device };
        // SAFETY: the caller's promise.
        if unsafe { self.link.is_captured(device, stream) }.map_err(first)? {
            let text = format!(
                "{stream} is being captured into a CUDA graph, which would repeat the move with memory that is released by then: move the tensor before the capture"
            );
            return Err(first(Error::new(ErrorKind::Captured, text)));
        }
        // The threads of a move share the stream.
        let stream = stream.on_any_thread();
        let mut relay = match is_up || is_down {
            true => None,
            false => Some(Relay::new(self, (from.device, to.device), stream, &loads).map_err(first)?),
        };
        let mut moved = 0;
        let done = loads.iter().enumerate().try_for_each(|(number, load)| {
            // SAFETY: the caller's promises.
            let one = || unsafe {
                match (&mut relay, load) {
                    (Some(relay), load) => relay.carry(load, loads.get(number + 1)),
                    (None, Load::Packed(packed)) => self.packed(packed, stream),
                    (None, Load::Alone(wired)) => match is_up {
                        true => self.up(wired, stream),
                        false => self.down(wired, stream),
                    }
                    .map_err(|error| Failed::new(wired.index, error)),
                }
                .map(|()| load.nbytes())
            };
            moved += tick::after(moved, one).map_err(|failed| match moved {
                0 => failed,
                _ => Failed::new(failed.index, undefined(failed.error)),
            })?;
            Ok(())
        });
        let ended = relay.map_or(Ok(()), |relay| relay.end().map_err(first));
        done.and(ended)
    }

    /// Moves small pieces between the host and a device, through a block of it.
    unsafe fn packed(&self, packed: &Packed<'_>, stream: Stream) -> Result<(), Failed> {
        let Piece { from, to, .. } = packed.pieces[0].piece;
        let of_all = |error| Failed::new(packed.index(), error);
        let device = if is_host(from.device) { to.device } else { from.device };
        let block = Block::new(self.link, device, packed.nbytes(), stream).map_err(of_all)?;
        let bytes = self.bytes(device, block.address, Host::Packed(packed), packed.nbytes(), stream);
        let on_device = || {
            // SAFETY: the caller's promises; the block is fresh and has room for all pieces, each at a place of its
            // own. It is freed in the stream, after the kernel.
            let copied = unsafe { (self.on_device)(&packed.on_device(block.address), stream) };
            copied.map_err(|failed| Failed::new(packed.pieces[failed.index].index, failed.error))
        };
        if is_host(from.device) {
            // SAFETY: as above.
            unsafe { bytes.up() }.map_err(of_all)?;
            return on_device();
        }
        on_device()?;
        // SAFETY: as above.
        unsafe { bytes.down() }.map_err(|error| of_all(undefined(error)))
    }

    unsafe fn down(&self, wired: &Wired<'_>, stream: Stream) -> Result<()> {
        let Wired { piece: Piece { from, to, .. }, wire, .. } = wired;
        let fresh = Scratch::unless(same(to.layout, wire), wire.nbytes())?;
        // SAFETY: the caller's promises; the scratch memory has room for all elements and is used here only.
        unsafe {
            let (source, _block) = self.gathered(wired, stream)?;
            let target = fresh.as_ref().map_or(to.data, |fresh| fresh.address);
            self.bytes(from.device, source, Host::At(target), wire.nbytes(), stream).down().map_err(undefined)?;
            match fresh {
                Some(_) => self.on_host(&wired.on_other(target)),
                None => Ok(()),
            }
        }
    }

    unsafe fn up(&self, wired: &Wired<'_>, stream: Stream) -> Result<()> {
        let Wired { piece: Piece { from, to, .. }, wire, .. } = wired;
        let packed = Scratch::unless(same(from.layout, wire), wire.nbytes())?;
        // SAFETY: the caller's promises; the scratch memory has room for all elements and is used here only. The block
        // is freed in the stream, after the kernel that reads it.
        unsafe {
            let source = packed.as_ref().map_or(from.data, |packed| packed.address);
            if packed.is_some() {
                self.on_host(&wired.on_other(source))?;
            }
            let source = Host::At(source);
            if same(to.layout, wire) && !wired.changes() {
                return self.bytes(to.device, to.data, source, wire.nbytes(), stream).up().map_err(undefined);
            }
            let block = Block::new(self.link, to.device, wire.nbytes(), stream)?;
            self.bytes(to.device, block.address, source, wire.nbytes(), stream).up()?;
            self.on_device(&wired.on_device(block.address), stream)
        }
    }

    /// Returns the address of the bytes that move of a view on a device, and the memory that holds them where it is not
    /// the view's own.
    unsafe fn gathered(&self, wired: &Wired<'_>, stream: Stream) -> Result<(usize, Option<Block<'_>>)> {
        let (from, wire) = (wired.piece.from, &wired.wire);
        if same(from.layout, wire) && !wired.changes() {
            return Ok((from.data, None));
        }
        let block = Block::new(self.link, from.device, wire.nbytes(), stream)?;
        // SAFETY: the caller's promises; the block is fresh and has room for all elements.
        unsafe { self.on_device(&wired.on_device(block.address), stream) }?;
        Ok((block.address, Some(block)))
    }

    unsafe fn on_host(&self, piece: &Piece<'_>) -> Result<()> {
        // SAFETY: the caller's promises.
        unsafe { (self.on_host)(slice::from_ref(piece), usize::MAX) }.map_err(|failed| failed.error)
    }

    unsafe fn on_device(&self, piece: &Piece<'_>, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promises.
        unsafe { (self.on_device)(slice::from_ref(piece), stream) }.map_err(|failed| failed.error)
    }

    fn bytes<'b>(&'b self, device: Device, address: usize, host: Host<'b>, nbytes: usize, stream: Stream) -> Bytes<'b> {
        Bytes { link: self.link, pool: self.pool, cuts: self.cuts, device, stream, address, host, nbytes }
    }
}

/// Blocks the host until all work of a stream has run.
///
/// # Errors
///
/// Those of the driver.
fn wait(link: &dyn Link, (device, stream): (Device, Stream)) -> Result<()> {
    // SAFETY: the stream is alive, as the module says.
    let event = unsafe { link.record(device, stream) }?;
    let waited = link.wait(device, &event);
    link.release(device, event);
    waited
}

fn is_host(device: Device) -> bool {
    [DeviceKind::CPU, DeviceKind::CUDA_HOST].contains(&device.kind)
}

/// Returns whether two layouts of one shape put each element at the same offset.
fn same(one: &Layout, other: &Layout) -> bool {
    let lengths = one.shape().iter().zip(one.strides().iter().zip(other.strides()));
    lengths.into_iter().all(|(length, (one, other))| *length <= 1 || one == other)
}

/// Returns the error of a move that stopped half-way.
fn undefined(error: Error) -> Error {
    const TEXT: &str = "; the move has stopped, and the elements of its target are undefined";
    match error.to_string() {
        text if text.ends_with(TEXT) => error,
        text => Error::new(error.kind(), text + TEXT).caused_by(error),
    }
}
