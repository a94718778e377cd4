//! Many copies on one device: a launch over a table, which is made for one call or kept for many.

use super::pieces::{Laid, Table};
use super::table::Kernel;
use super::{askew, casts, halfway, launch, one, parameters, planned};
use crate::copy::moves;
use bridge_core::{Cast, Device, DeviceBuffer, Failed, Layout, Piece, Planned, Result, Stream, Strided};
use smallvec::SmallVec;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

/// With fewer pieces the upload of a table takes longer than their launches.
const FEWEST: usize = 8;

/// Makes many copies on one device: those that suit a table in one launch, casts in another one, and each of the
/// others in a separate launch.
///
/// # Errors
///
/// Those of [`copy`](super::copy), with the index of the piece. Nothing is launched after an error of kind
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
        pieces.len() >= FEWEST && !moves::is_captured(device, stream).map_err(|error| Failed::new(0, error))?;
    let (tables, others) = tables(pieces, if tabled { FEWEST } else { usize::MAX });
    let mut launches = 0;
    for index in others {
        // SAFETY: the caller's promises.
        let launched = unsafe { one(&pieces[index], stream) };
        launched.map_err(|error| Failed::new(index, halfway(launches, error)))?;
        launches += 1;
    }
    for table in tables {
        let launched = || {
            let uploaded = moves::upload(device, &table.bytes, stream)?;
            // SAFETY: the table is in memory that is freed in the stream, after the kernel. The rest is the caller's
            // promise.
            unsafe { table.at(uploaded.address()).launch(device, stream) }
        };
        // The table is as good as its first piece.
        launched().map_err(|error| Failed::new(table.index, halfway(launches, error)))?;
        launches += 1;
    }
    Ok(())
}

/// Returns a table of copies and one of casts, of those of which there are so many at least, and the indices of the
/// pieces that are launched by themselves.
fn tables(pieces: &[Piece<'_>], fewest: usize) -> (SmallVec<[Laid; 2]>, Vec<usize>) {
    type Lay = fn(&[Piece<'_>], &[usize]) -> (Laid, Vec<usize>);
    let (casts, copies): (Vec<usize>, Vec<usize>) = (0..pieces.len()).partition(|index| pieces[*index].cast.is_some());
    let (mut tables, mut others) = (SmallVec::new(), Vec::new());
    for (indices, lay) in [(copies, Table::lay as Lay), (casts, casts::Table::lay)] {
        if indices.len() < fewest {
            others.extend(indices);
            continue;
        }
        let (laid, rest) = lay(pieces, &indices);
        tables.extend(Some(laid).filter(|laid| laid.blocks > 0));
        others.extend(rest);
    }
    (tables, others)
}

/// The same for copies that are made again and again. A single copy is launched by itself, with its own kernel.
fn kept_tables(pieces: &[Piece<'_>]) -> (SmallVec<[Laid; 2]>, Vec<usize>) {
    tables(pieces, if pieces.len() == 1 { usize::MAX } else { 0 })
}

/// Refuses bits to flip in elements that are not aligned, before anything is launched.
fn refuse_askew(pieces: &[Piece<'_>]) -> Result<(), Failed> {
    let is_askew = |Piece { from, to, flips, cast }: &Piece<'_>| {
        *flips != 0 && cast.is_none() && planned(from, to, *flips).is_none()
    };
    match pieces.iter().position(is_askew) {
        Some(index) => Err(Failed::new(index, askew())),
        None => Ok(()),
    }
}

impl Laid {
    /// Returns the table that was uploaded to this address.
    fn at(&self, address: usize) -> Uploaded {
        let (pieces, owners) = (address as u64, (address + self.owners_at) as u64);
        Uploaded { kernel: self.kernel, blocks: self.blocks, table: parameters::Pieces { pieces, owners } }
    }
}

/// A table in device memory.
struct Uploaded {
    kernel: Kernel,
    blocks: u32,
    table: parameters::Pieces,
}

impl Uploaded {
    /// Makes the copies of the table.
    ///
    /// # Safety
    ///
    /// That of [`copy_all`]. The table stays in its memory until the kernel has run.
    unsafe fn launch(&self, device: Device, stream: Stream) -> Result<()> {
        let Self { kernel, blocks, table } = *self;
        // SAFETY: the parameters are those of the kernel; the rest is the caller's promise.
        unsafe {
            match kernel {
                Kernel::Cast => launch(device, kernel, blocks, &parameters::Casts::of(table), stream),
                _ => launch(device, kernel, blocks, &table, stream),
            }
        }
    }
}

/// Plans many copies on one device, to be made again and again. The host waits until the table is there.
///
/// # Errors
///
/// Those of [`copy_all`] before anything is launched, and [`ErrorKind::Captured`] in a captured stream.
pub(crate) fn plan(device: Device, pieces: &[Piece<'_>], stream: Stream) -> Result<Box<dyn Planned>, Failed> {
    refuse_askew(pieces)?;
    let (laid, others) = kept_tables(pieces);
    let owned = |index: usize| {
        let Piece { from, to, flips, cast } = pieces[index];
        Owned { index, from: (from.data, from.layout.clone()), to: (to.data, to.layout.clone()), flips, cast }
    };
    let others = others.into_iter().map(owned).collect();
    let mut tables = SmallVec::new();
    for table in laid {
        let memory = moves::kept(device, &table.bytes, stream).map_err(|error| Failed::new(table.index, error))?;
        tables.push((table.at(memory.address()), memory));
    }
    Ok(Box::new(Kept { device, tables, others, is_in_a_graph: AtomicBool::new(false) }))
}

/// Copies that are planned.
struct Kept {
    device: Device,
    /// The tables, and the memory that they are in.
    tables: SmallVec<[(Uploaded, Box<dyn DeviceBuffer>); 2]>,
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
    cast: Option<Cast>,
}

// SAFETY: a copy that returns no error writes every element, and the tables live as long as a launch may read them.
unsafe impl Planned for Kept {
    unsafe fn copy(&self, stream: Option<Stream>) -> Result<(), Failed> {
        let stream = stream.unwrap_or(Stream::LEGACY);
        let first = |error| Failed::new(0, error);
        if moves::is_captured(self.device, stream).map_err(first)? {
            self.is_in_a_graph.store(true, Relaxed);
        }
        for Owned { index, from, to, flips, cast } in &self.others {
            let side = |(data, layout): &'_ (usize, Layout)| (*data, layout.clone());
            let ((source, read), (target, written)) = (side(from), side(to));
            let from = Strided { device: self.device, data: source, layout: &read };
            let to = Strided { device: self.device, data: target, layout: &written };
            let piece = Piece { from, to, flips: *flips, cast: *cast };
            // SAFETY: the caller's promises.
            unsafe { one(&piece, stream) }.map_err(|error| Failed::new(*index, error))?;
        }
        for (table, _) in &self.tables {
            // SAFETY: the drop keeps the table until the kernel has run; the rest is the caller's promise.
            unsafe { table.launch(self.device, stream) }.map_err(first)?;
        }
        Ok(())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        for (_, memory) in self.tables.drain(..) {
            match self.is_in_a_graph.load(Relaxed) {
                true => std::mem::forget(memory),
                // Any stream may have launched with it.
                // SAFETY: the stream is a default stream.
                false => unsafe { crate::ordering().release_after_all_work(self.device, Stream::LEGACY, memory) },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bridge_core::{DType, ErrorKind};

    #[test]
    fn copies_and_casts_are_a_table_each_where_there_are_enough() {
        let row = |dtype, strides: Option<&[i64]>| Layout::new(dtype, &[64, 64], strides, 0).unwrap();
        let (float, half) = (row(DType::FLOAT32, None), row(DType::BFLOAT16, None));
        let turned = row(DType::FLOAT32, Some(&[1, 64]));
        let piece = |number: usize, from, to, cast| {
            let side = |address, layout| Strided { device: Device::cuda(0), data: address + (number << 20), layout };
            Piece { from: side(1 << 40, from), to: side(1 << 41, to), flips: 0, cast }
        };
        let cast = Cast::new(DType::FLOAT32, DType::BFLOAT16).ok();
        // Two of three are cast, one is transposed.
        let pieces: Vec<_> = (0..24)
            .map(|number| match number {
                5 => piece(number, &turned, &float, None),
                _ if number % 3 == 2 => piece(number, &float, &float, None),
                _ => piece(number, if number % 2 == 0 { &float } else { &turned }, &half, cast),
            })
            .collect();
        let made = |pieces: &[Piece<'_>], fewest| {
            let (tables, others) = tables(pieces, fewest);
            let tables: Vec<_> = tables.iter().map(|table| (table.kernel, table.index, table.blocks)).collect();
            (tables, others)
        };
        let (copies, casts) = ((Kernel::Pieces16, 2, 7), (Kernel::Cast, 0, 16));
        assert_eq!(made(&pieces, FEWEST), (vec![copies, casts], vec![5]));
        assert_eq!(made(&pieces, 0), (vec![copies, casts], vec![5]));
        assert_eq!(made(&pieces, 9), (vec![casts], vec![2, 5, 8, 11, 14, 17, 20, 23]), "eight copies");
        assert_eq!(made(&pieces, usize::MAX).1.len(), 24, "each by itself");
        assert_eq!(made(&pieces[..2], 0), (vec![(Kernel::Cast, 0, 2)], vec![]), "no empty table");
        assert_eq!(made(&[], 0), (vec![], vec![]));
        let kept = |pieces: &[Piece<'_>]| (kept_tables(pieces).0.len(), kept_tables(pieces).1);
        assert_eq!(kept(&pieces[2..3]), (0, vec![0]), "a single copy");
        assert_eq!(kept(&[pieces[2], pieces[8]]), (1, vec![]), "two copies");
    }

    #[test]
    fn bits_are_flipped_in_aligned_elements_only_and_casts_flip_their_own() {
        let layout = |dtype| Layout::new(dtype, &[4], None, 0).unwrap();
        let (line, half) = (layout(DType::FLOAT32), layout(DType::FLOAT16));
        let cast = Some(Cast::new(DType::FLOAT32, DType::FLOAT16).unwrap());
        let piece = |beyond: usize, flips, cast: Option<Cast>| {
            let side = |data, layout| Strided { device: Device::cuda(0), data, layout };
            let to = if cast.is_some() { &half } else { &line };
            Piece { from: side(0x1000 + beyond, &line), to: side(0x2000, to), flips, cast }
        };
        let fine = [piece(0, 1 << 31, None), piece(1, 0, None), piece(0, 1 << 31, cast), piece(1, 1 << 31, cast)];
        assert!(refuse_askew(&fine).is_ok());
        let failed = refuse_askew(&[fine[0], fine[1], piece(1, 1 << 31, None)]).unwrap_err();
        assert_eq!((failed.index, failed.error.kind()), (2, ErrorKind::CopyNeeded));
    }
}
