//! Copies on the host: rows, lines and tiles, in threads where that pays.
//!
//! A [`Walk`] names the dimensions that the copy has to visit. [`Plane`] takes the two of them that matter for speed,
//! the fastest of the target and the fastest of the source, and a kernel copies these; a plain loop runs over the
//! others.

mod cast;
mod channels;
mod choose;
mod lines;
mod plane;
mod threads;
mod tiles;
mod unit;

pub(crate) use threads::at_most;

use crate::copy::plan::{Dim, Walk};
use bridge_core::{Error, ErrorKind, Failed, Piece, Result, Strided};
use cast::Rows;
use plane::Plane;
use std::{ptr, slice};

/// Bits to flip in 16 bytes of adjacent elements.
type Flips = [u8; 16];

/// Fills `to` with the elements of `from`, and flips `flips` in each.
///
/// # Errors
///
/// [`ErrorKind::Layout`] for a view that leaves the address space, and for a target that has several elements at one
/// address; [`ErrorKind::CopyNeeded`] for bits to flip in elements of other sizes than 1, 2, 4, 8 and 16 bytes. Nothing
/// is written then.
///
/// # Safety
///
/// Those of [`Copies::copy`](bridge_core::Copies::copy). Both layouts have the same shape and itemsize.
pub(crate) unsafe fn copy(from: Strided<'_>, to: Strided<'_>, flips: u128) -> Result<()> {
    let Some(part) = part(Piece { from, to, flips, cast: None })? else { return Ok(()) };
    // SAFETY: the caller's promises; the walk stays inside both views, and visits no byte of the target twice.
    unsafe { threads::run(slice::from_ref(&part), threads::count(to.layout.nbytes())) };
    Ok(())
}

/// Makes many copies, in `most` threads or fewer, which share all of them.
///
/// # Errors
///
/// Those of [`copy`], with the index of the piece. Nothing is written then.
///
/// # Safety
///
/// Those of [`Copies::copy_all`](bridge_core::Copies::copy_all). Both layouts of a piece have the same shape, and the
/// same itemsize or those of its cast.
pub(crate) unsafe fn copy_all(pieces: &[Piece<'_>], most: usize) -> Result<(), Failed> {
    let mut parts = Vec::with_capacity(pieces.len());
    for (index, piece) in pieces.iter().copied().enumerate() {
        parts.extend(part(piece).map_err(|error| Failed::new(index, error))?);
    }
    let nbytes = |piece: &Piece<'_>| piece.from.layout.nbytes().max(piece.to.layout.nbytes());
    let nbytes = pieces.iter().map(nbytes).fold(0, usize::saturating_add);
    // SAFETY: the caller's promises; the walks stay inside their views, and no byte of a target is visited twice.
    unsafe { threads::run(&parts, threads::count(nbytes).min(most)) };
    Ok(())
}

/// Plans the copy of a piece; `None` where there is nothing to copy.
fn part(Piece { from, to, flips, cast }: Piece<'_>) -> Result<Option<Part>> {
    let Some(walk) = Walk::new(from.layout, to.layout) else { return Ok(None) };
    from.layout.extent_at(from.data, None)?;
    to.layout.extent_at(to.data, None)?;
    if walk.dims.iter().any(|dim| dim.to == 0) {
        let text = format!("the target repeats elements ({}): pass one without strides of 0", to.layout);
        return Err(Error::new(ErrorKind::Layout, text));
    }
    let how = match cast {
        None => How::Copied(pattern(flips, walk.unit)?),
        Some(cast) => How::Cast(Rows::new(cast, flips)),
    };
    let (source, target) = (ptr::with_exposed_provenance(from.data), ptr::with_exposed_provenance_mut(to.data));
    Ok(Some(Part { walk, ends: Ends { source, target }, how }))
}

/// A walk, where it begins, and what is done at each index.
#[derive(Clone)]
struct Part {
    walk: Walk,
    ends: Ends,
    how: How,
}

/// How an element gets from one side to the other.
#[derive(Clone, Copy)]
enum How {
    Copied(Flips),
    Cast(Rows),
}

/// Returns the bits to flip in 16 bytes of elements of `itemsize` bytes.
fn pattern(flips: u128, itemsize: usize) -> Result<Flips> {
    if flips != 0 && !(itemsize.is_power_of_two() && itemsize <= 16) {
        let text = format!("cannot negate elements of {itemsize} bytes: copy the tensor, and negate the copy");
        return Err(Error::new(ErrorKind::CopyNeeded, text));
    }
    let bytes = flips.to_le_bytes();
    Ok(std::array::from_fn(|i| if flips == 0 { 0 } else { bytes[i % itemsize] }))
}

/// Addresses of two corresponding units.
#[derive(Debug, Clone, Copy)]
struct Ends {
    source: *const u8,
    target: *mut u8,
}

impl Ends {
    /// Returns the ends these numbers of bytes further on.
    fn step(self, from: i64, to: i64) -> Self {
        Self { source: self.source.wrapping_offset(from as isize), target: self.target.wrapping_offset(to as isize) }
    }

    /// Returns the ends `index` steps further on.
    fn steps(self, index: usize, from: i64, to: i64) -> Self {
        self.step(index as i64 * from, index as i64 * to)
    }
}

// SAFETY: addresses are shared, not memory. The safety of a copy is the contract of each function that takes them.
unsafe impl Send for Ends {}

// SAFETY: as above.
unsafe impl Sync for Ends {}

/// Makes a part on this thread.
///
/// # Safety
///
/// The units of the walk from `ends` on are readable in the source and writable in the target, and the two do not
/// overlap.
unsafe fn fill(Part { walk, ends, how }: Part) {
    let at = ends.step(walk.from, walk.to);
    match how {
        How::Copied(flips) => {
            let (plane, outer) = Plane::new(walk.widen());
            let kernel = choose::kernel(&plane);
            // SAFETY: the plane at each index is part of the walk.
            visit(&outer, at, |at| unsafe { kernel(&plane, at, flips) });
        }
        How::Cast(rows) => {
            let mut outer = walk.dims;
            let row = outer.pop().unwrap_or(Dim { length: 1, from: 0, to: 0 });
            let mut values = [0.0; cast::MOST];
            // SAFETY: the row at each index is part of the walk.
            visit(&outer, at, |at| unsafe { rows.cast(row, at, &mut values) });
        }
    }
}

/// Calls `each` at every index of the dimensions.
fn visit(outer: &[Dim], mut at: Ends, mut each: impl FnMut(Ends)) {
    let mut index = [0usize; bridge_core::MAX_NDIM];
    loop {
        each(at);
        let Some(d) = (0..outer.len()).rev().find(|d| index[*d] + 1 < outer[*d].length) else { return };
        index[d] += 1;
        at = at.step(outer[d].from, outer[d].to);
        for d in d + 1..outer.len() {
            at = at.steps(index[d], -outer[d].from, -outer[d].to);
            index[d] = 0;
        }
    }
}

#[cfg(test)]
mod tests;
