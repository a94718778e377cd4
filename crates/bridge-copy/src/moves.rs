//! Moves between the host and a device, and between two devices.
//!
//! Bytes move without gaps, in the order of the target, else in that of the source, else row by row. Where a side has
//! another layout, the device packs and spreads its own with the kernels, in memory of the driver's pool, and the host
//! with its own loops. The device also flips the pending bits.

mod cut;
mod pieces;
mod staging;
mod stores;
#[cfg(test)]
mod tests;
mod tick;

use crate::{host, kernels};
use bridge_core::{
    Access, Allocation, DType, Device, DeviceBuffer, DeviceKind, Error, ErrorKind, Keep, Layout, Memory, Result, Reuse,
    Stream, Strided, poison,
};
use bridge_cuda::Link;
pub use cut::{Cut, Cuts};
use pieces::{Bytes, CUTS};
use smallvec::SmallVec;
use staging::Pool;
pub use tick::{Tick, ticking};

static POOL: Pool = Pool::new(&CUTS);

/// Moves the elements between two different devices, as [`bridge_core::Copies::copy`] says.
///
/// # Safety
///
/// As of [`bridge_core::Copies::copy`].
pub(crate) unsafe fn copy(from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Stream) -> Result<()> {
    let link = bridge_cuda::link()?;
    let moves = Moves { link, pool: &POOL, cuts: &CUTS, on_device: kernels::copy, on_host: host::copy };
    // SAFETY: the caller's promises.
    unsafe { moves.copy(from, to, flips, stream) }
}

/// Moves over another link, or cut in another way, for the example that measures what costs time.
#[doc(hidden)]
pub struct Trial<'a> {
    link: &'a dyn Link,
    pool: Pool,
    cuts: Cuts,
}

bridge_core::debug_fields!(impl[] Trial<'_>: cuts);

impl<'a> Trial<'a> {
    /// The figures of [`Copier`](crate::Copier).
    pub const USUAL: Cuts = CUTS;

    /// Returns moves with staging of their own, which stays allocated.
    pub const fn new(link: &'a dyn Link, cuts: Cuts) -> Self {
        Self { link, pool: Pool::new(&cuts), cuts }
    }

    /// Moves the elements.
    ///
    /// # Errors
    ///
    /// As of [`bridge_core::Copies::copy`].
    ///
    /// # Safety
    ///
    /// As of [`bridge_core::Copies::copy`].
    pub unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, stream: Stream) -> Result<()> {
        let Self { link, pool, cuts } = self;
        let moves = Moves { link: *link, pool, cuts, on_device: kernels::copy, on_host: host::copy };
        // SAFETY: the caller's promises.
        unsafe { moves.copy(from, to, 0, stream) }
    }
}

/// Checks a device, as [`bridge_core::Copies::reaches`] says.
pub(crate) fn reaches(device: Device) -> Result<()> {
    if is_host(device) {
        return Ok(());
    }
    bridge_cuda::available()?;
    let count = bridge_cuda::device_count();
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
    let block = Block::new(bridge_cuda::link()?, device, nbytes, stream)?;
    let bytes = block.address..block.address + nbytes;
    let allocation =
        Allocation { bytes, device, access: Access::ReadWrite, stream: Some(stream), reuse: Reuse::InStreamOrder };
    // SAFETY: the driver's pool maps the bytes until the block is dropped and reuses them after the stream, which
    // `keep` keeps alive; no other code knows them. Freeing neither blocks nor panics, and needs no GIL.
    Ok(Box::new(unsafe { Memory::new(allocation, (block, keep)) }))
}

/// Returns whether the stream is being captured into a graph.
pub(crate) fn is_captured(device: Device, stream: Stream) -> Result<bool> {
    bridge_cuda::link()?.is_captured(device, stream)
}

/// Copies bytes through pinned staging into memory of a device, in stream order. Work in the stream may read them from
/// then on; the memory is freed in stream order when the block is dropped.
pub(crate) fn upload(device: Device, bytes: &[u8], stream: Stream) -> Result<Block<'static>> {
    // The threads of a move share the stream.
    let (link, stream) = (bridge_cuda::link()?, stream.on_any_thread());
    let block = Block::new(link, device, bytes.len(), stream)?;
    let (host, address) = (bytes.as_ptr().expose_provenance(), block.address);
    let bytes = Bytes { link, pool: &POOL, cuts: &CUTS, device, stream, address, host, nbytes: bytes.len() };
    // SAFETY: the block is fresh, as long as the bytes, and used in the stream only. These are alive during the call.
    unsafe { bytes.up() }?;
    Ok(block)
}

/// Copies bytes into memory of a device that any stream may read once this returns, at any time.
///
/// # Errors
///
/// Those of the driver, and [`ErrorKind::Captured`] where `stream` is being captured.
pub(crate) fn kept(device: Device, bytes: &[u8], stream: Stream) -> Result<Box<dyn DeviceBuffer>> {
    let link = bridge_cuda::link()?;
    if link.is_captured(device, stream)? {
        let text = format!("{stream} is being captured into a CUDA graph: prepare the copies before the capture");
        return Err(Error::new(ErrorKind::Captured, text));
    }
    // Freed in the legacy stream, which always exists.
    let memory = allocate(device, bytes.len(), Stream::LEGACY, None)?;
    let (host, address) = (bytes.as_ptr().expose_provenance(), memory.address());
    let bytes =
        Bytes { link, pool: &POOL, cuts: &CUTS, device, stream: Stream::LEGACY, address, host, nbytes: bytes.len() };
    // SAFETY: the memory is fresh, as long as the bytes, and known here only. The bytes are alive during the call.
    unsafe { bytes.up() }?;
    bytes.wait_for_stream()?;
    Ok(memory)
}

/// Memory of the driver's pool.
pub(crate) struct Block<'a> {
    link: &'a dyn Link,
    device: Device,
    stream: Stream,
    address: usize,
    nbytes: usize,
}

impl<'a> Block<'a> {
    fn new(link: &'a dyn Link, device: Device, nbytes: usize, stream: Stream) -> Result<Self> {
        // The driver allocates no 0 bytes.
        Ok(Self { link, device, stream, nbytes, address: link.allocate(device, nbytes.max(1), stream)? })
    }
}

impl Block<'_> {
    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// Overwrites the memory, after all work on it.
    #[cold]
    fn poison(&self) {
        // SAFETY: the memory is this block's until it is freed, in the same stream. A driver that fails leaves it.
        let _ = unsafe { self.link.poison(self.device, self.address, self.nbytes, self.stream) };
    }
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        if poison::is_on() {
            self.poison();
        }
        // SAFETY: the memory comes from this link. Core, and `Moves` in the stream itself, have ordered all work on it
        // before the stream. A driver that has shut down keeps the memory.
        let _ = unsafe { self.link.free(self.device, self.address, self.stream) };
    }
}

/// The link, the kernels and the staging buffers of moves. The tests have their own.
struct Moves<'a> {
    link: &'a dyn Link,
    pool: &'a Pool,
    cuts: &'a Cuts,
    on_device: unsafe fn(Strided<'_>, Strided<'_>, u128, Stream) -> Result<()>,
    on_host: unsafe fn(Strided<'_>, Strided<'_>, u128) -> Result<()>,
}

impl Moves<'_> {
    unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Stream) -> Result<()> {
        let device = if is_host(from.device) { to.device } else { from.device };
        if from.layout.numel() == 0 {
            return Ok(());
        }
        if self.link.is_captured(device, stream)? {
            let text = format!(
                "{stream} is being captured into a CUDA graph, which would repeat the move with memory that is released by then: move the tensor before the capture"
            );
            return Err(Error::new(ErrorKind::Captured, text));
        }
        // The threads of a move share the stream.
        let stream = stream.on_any_thread();
        // SAFETY: the caller's promises.
        unsafe {
            match (is_host(from.device), is_host(to.device)) {
                (true, true) => (self.on_host)(from, to, flips),
                (true, false) => self.up(from, to, flips, stream),
                (false, true) => self.down(from, to, flips, stream),
                (false, false) => self.across(from, to, flips, stream),
            }
        }
    }

    unsafe fn down(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Stream) -> Result<()> {
        let wire = wire(from.layout, to.layout)?;
        let fresh = Scratch::unless(same(to.layout, &wire), wire.nbytes())?;
        // SAFETY: the caller's promises; the scratch memory has room for all elements and is used here only.
        unsafe {
            let (source, _block) = self.packed(from, flips, &wire, stream)?;
            let target = fresh.as_ref().map_or(to.data, |fresh| fresh.address);
            self.bytes(from.device, source, target, wire.nbytes(), stream).down().map_err(undefined)?;
            match fresh {
                Some(_) => (self.on_host)(Strided { device: Device::CPU, data: target, layout: &wire }, to, 0),
                None => Ok(()),
            }
        }
    }

    unsafe fn up(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Stream) -> Result<()> {
        let wire = wire(from.layout, to.layout)?;
        let packed = Scratch::unless(same(from.layout, &wire), wire.nbytes())?;
        // SAFETY: the caller's promises; the scratch memory has room for all elements and is used here only. The block
        // is freed in the stream, after the kernel that reads it.
        unsafe {
            let source = packed.as_ref().map_or(from.data, |packed| packed.address);
            if packed.is_some() {
                (self.on_host)(from, Strided { device: Device::CPU, data: source, layout: &wire }, 0)?;
            }
            if same(to.layout, &wire) && flips == 0 {
                return self.bytes(to.device, to.data, source, wire.nbytes(), stream).up().map_err(undefined);
            }
            let block = Block::new(self.link, to.device, wire.nbytes(), stream)?;
            self.bytes(to.device, block.address, source, wire.nbytes(), stream).up()?;
            (self.on_device)(Strided { device: to.device, data: block.address, layout: &wire }, to, flips, stream)
        }
    }

    unsafe fn across(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Stream) -> Result<()> {
        if !is_dense(to.layout) {
            let text = format!(
                "a tensor of {} cannot be moved into a view with gaps on {}: move it to {} first, and copy it there",
                from.device, to.device, to.device
            );
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        // SAFETY: the caller's promises. The block is freed in the stream, after the copy that reads it.
        unsafe {
            let (source, _block) = self.packed(from, flips, to.layout, stream)?;
            let copied = self.link.copy((from.device, source), (to.device, to.data), to.layout.nbytes(), stream);
            copied.map_err(undefined)
        }
    }

    /// Returns the address of the elements of a view on a device, in the layout `wire` and with `flips` flipped, and
    /// the memory that holds them where it is not the view's own.
    unsafe fn packed(
        &self,
        from: Strided<'_>,
        flips: u128,
        wire: &Layout,
        stream: Stream,
    ) -> Result<(usize, Option<Block<'_>>)> {
        if same(from.layout, wire) && flips == 0 {
            return Ok((from.data, None));
        }
        let block = Block::new(self.link, from.device, wire.nbytes(), stream)?;
        let packed = Strided { device: from.device, data: block.address, layout: wire };
        // SAFETY: the caller's promises; the block is fresh and has room for all elements.
        unsafe { (self.on_device)(from, packed, flips, stream) }?;
        Ok((block.address, Some(block)))
    }

    fn bytes(&self, device: Device, address: usize, host: usize, nbytes: usize, stream: Stream) -> Bytes<'_> {
        Bytes { link: self.link, pool: self.pool, cuts: self.cuts, device, stream, address, host, nbytes }
    }
}

/// Host memory for the length of a move.
struct Scratch {
    address: usize,
    _memory: Vec<u128>,
}

impl Scratch {
    fn unless(is_compact: bool, nbytes: usize) -> Result<Option<Self>> {
        if is_compact {
            return Ok(None);
        }
        let mut memory: Vec<u128> = Vec::new();
        memory.try_reserve_exact(nbytes.div_ceil(size_of::<u128>())).map_err(|error| {
            let text = format!("no host memory for a compact copy of {nbytes} bytes: free some first");
            Error::new(ErrorKind::OutOfMemory, text).caused_by(error)
        })?;
        Ok(Some(Self { address: memory.as_mut_ptr().expose_provenance(), _memory: memory }))
    }
}

fn is_host(device: Device) -> bool {
    [DeviceKind::CPU, DeviceKind::CUDA_HOST].contains(&device.kind)
}

/// Returns the layout in which the bytes move.
fn wire(from: &Layout, to: &Layout) -> Result<Layout> {
    if let Some(dense) = [to, from].into_iter().find(|layout| is_dense(layout)) {
        return Ok(dense.clone());
    }
    let bits = u8::try_from(from.itemsize() * 8).ok();
    let dtype = bits.map(|bits| DType { bits, ..DType::UINT8 });
    let unknown = || {
        let text = format!("elements of {} bytes cannot be moved: view them as smaller ones", from.itemsize());
        Error::new(ErrorKind::CopyNeeded, text)
    };
    Layout::new(dtype.ok_or_else(unknown)?, from.shape(), None, 0)
}

/// Returns whether the elements fill the bytes from the first one on, each once, in any order of the dimensions.
fn is_dense(layout: &Layout) -> bool {
    let steps = layout.shape().iter().zip(layout.strides()).filter(|(length, _)| **length > 1);
    let mut steps: SmallVec<[(i64, i64); 8]> = steps.map(|(length, stride)| (*stride, *length)).collect();
    steps.sort_unstable();
    let mut expected = 1;
    steps.into_iter().all(|(stride, length)| {
        let follows = stride == expected;
        expected *= length;
        follows
    })
}

/// Returns whether two layouts of one shape put each element at the same offset.
fn same(one: &Layout, other: &Layout) -> bool {
    let lengths = one.shape().iter().zip(one.strides().iter().zip(other.strides()));
    lengths.into_iter().all(|(length, (one, other))| *length <= 1 || one == other)
}

/// Returns the error of a move that stopped half-way.
fn undefined(error: Error) -> Error {
    let text = format!("{error}; the move has stopped, and the elements of its target are undefined");
    Error::new(error.kind(), text).caused_by(error)
}
