//! Many copies on one device: a launch over a table, which is made for one call or kept for many.

use super::pieces::Table;
use super::table::Kernel;
use super::{KERNELS, askew, copy, parameters, planned};
use crate::moves;
use bridge_core::{Device, DeviceBuffer, Failed, Layout, Piece, Planned, Result, Stream, Strided};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

/// With fewer pieces the upload of a table takes longer than their launches.
const FEWEST: usize = 8;

/// Makes many copies on one device: those that suit a table in one launch, the others in launches of their own.
///
/// # Errors
///
/// Those of [`copy`], with the index of the piece. Nothing is launched after an error of kind
/// [`ErrorKind::CopyNeeded`].
///
/// # Safety
///
/// That of [`bridge_core::Copies::copy_all`].
pub(crate) unsafe fn copy_all(pieces: &[Piece<'_>], stream: Stream) -> Result<(), Failed> {
    let Some(first) = pieces.first() else { return Ok(()) };
    let device = first.from.device;
    refuse_askew(pieces)?;
    // A graph would launch again with a table that is released by then.
    let tabled =
        pieces.len() >= FEWEST && !moves::is_captured(device, stream).map_err(|error| Failed { index: 0, error })?;
    let (table, others) = if tabled { Table::of(pieces) } else { (Table::default(), (0..pieces.len()).collect()) };
    for index in others {
        let Piece { from, to, flips } = pieces[index];
        // SAFETY: the caller's promises.
        unsafe { copy(from, to, flips, stream) }.map_err(|error| Failed { index, error })?;
    }
    // The table is as good as its first piece.
    let launched = || {
        let bytes = table.bytes();
        let uploaded = moves::upload(device, &bytes, stream)?;
        // SAFETY: the table is in memory that is freed in the stream, after the kernel. The rest is the caller's promise.
        unsafe { launch(device, &Uploaded::new(&table, uploaded.address()), stream) }
    };
    if table.pieces.is_empty() { Ok(()) } else { launched().map_err(|error| Failed { index: 0, error }) }
}

/// Refuses bits to flip in elements that are not aligned, before anything is launched.
fn refuse_askew(pieces: &[Piece<'_>]) -> Result<(), Failed> {
    let is_askew = |Piece { from, to, flips }: &Piece<'_>| *flips != 0 && planned(from, to, *flips).is_none();
    match pieces.iter().position(is_askew) {
        Some(index) => Err(Failed { index, error: askew() }),
        None => Ok(()),
    }
}

/// A table in device memory.
struct Uploaded {
    kernel: Kernel,
    blocks: u32,
    parameters: parameters::Pieces,
}

impl Uploaded {
    fn new(table: &Table, address: usize) -> Self {
        let (pieces, owners) = (address as u64, (address + table.owners_at()) as u64);
        let parameters = parameters::Pieces { pieces, owners };
        Self { kernel: table.kernel(), blocks: table.owners.len() as u32, parameters }
    }
}

/// Makes the copies of a table.
///
/// # Safety
///
/// That of [`copy_all`]. The table stays in its memory until the kernel has run.
unsafe fn launch(device: Device, table: &Uploaded, stream: Stream) -> Result<()> {
    let Uploaded { kernel, blocks, parameters } = table;
    let launch =
        bridge_cuda::Launch { kernel: *kernel as usize, blocks: *blocks, threads: kernel.threads(), shared: 0 };
    // SAFETY: the parameters are those of the kernel; the rest is the caller's promise.
    unsafe { KERNELS.launch(device, stream, launch, parameters) }
}

/// Plans many copies on one device, to be made again and again. The host waits until the table is there.
///
/// # Errors
///
/// Those of [`copy_all`] before anything is launched, and [`ErrorKind::Captured`] in a captured stream.
pub(crate) fn plan(device: Device, pieces: &[Piece<'_>], stream: Stream) -> Result<Box<dyn Planned>, Failed> {
    refuse_askew(pieces)?;
    let (table, others) = Table::of(pieces);
    let owned = |index: usize| {
        let Piece { from, to, flips } = pieces[index];
        Owned { index, from: (from.data, from.layout.clone()), to: (to.data, to.layout.clone()), flips }
    };
    let others = others.into_iter().map(owned).collect();
    let kept = || {
        if table.pieces.is_empty() {
            return Ok(None);
        }
        let memory = moves::kept(device, &table.bytes(), stream)?;
        let uploaded = Uploaded::new(&table, memory.address());
        Ok(Some((uploaded, memory)))
    };
    let table = kept().map_err(|error| Failed { index: 0, error })?;
    Ok(Box::new(Kept { device, table, others, is_in_a_graph: AtomicBool::new(false) }))
}

/// Copies that are planned.
struct Kept {
    device: Device,
    /// The table, and the memory that it is in.
    table: Option<(Uploaded, Box<dyn DeviceBuffer>)>,
    others: Vec<Owned>,
    /// Whether a graph may launch with the table at any time.
    is_in_a_graph: AtomicBool,
}

/// A copy that is launched by itself.
struct Owned {
    index: usize,
    from: (usize, Layout),
    to: (usize, Layout),
    flips: u128,
}

// SAFETY: a copy that returns no error writes every element, and the table lives as long as a launch may read it.
unsafe impl Planned for Kept {
    unsafe fn copy(&self, stream: Option<Stream>) -> Result<(), Failed> {
        let stream = stream.unwrap_or(Stream::LEGACY);
        let first = |error| Failed { index: 0, error };
        if moves::is_captured(self.device, stream).map_err(first)? {
            self.is_in_a_graph.store(true, Relaxed);
        }
        for Owned { index, from, to, flips } in &self.others {
            let side = |(data, layout): &'_ (usize, Layout)| (*data, layout.clone());
            let ((source, read), (target, written)) = (side(from), side(to));
            let from = Strided { device: self.device, data: source, layout: &read };
            let to = Strided { device: self.device, data: target, layout: &written };
            // SAFETY: the caller's promises.
            unsafe { copy(from, to, *flips, stream) }.map_err(|error| Failed { index: *index, error })?;
        }
        match &self.table {
            // SAFETY: the drop keeps the table until the kernel has run; the rest is the caller's promise.
            Some((table, _)) => unsafe { launch(self.device, table, stream) }.map_err(first),
            None => Ok(()),
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let Some((_, memory)) = self.table.take() else { return };
        match self.is_in_a_graph.load(Relaxed) {
            true => std::mem::forget(memory),
            // Any stream may have launched with it.
            false => bridge_cuda::ordering().retire_after_all(self.device, Stream::LEGACY, memory),
        }
    }
}
