//! Casts on a device: a walk over elements, or over vectors of eight where rows have them. A pure function of the walk
//! and the addresses.

use super::parameters::{Cast, Dim};
use super::pieces::Laid;
use super::table::Kernel;
use crate::copy::floats;
use crate::copy::plan::{Dim as Step, Walk};
use bridge_core::Piece;
use smallvec::SmallVec;

/// The elements that a block casts: kernels/cast.cuh has the same number.
const SHARE: u32 = 16384;

/// The elements of a vector, and the alignment that none needs more than, in bytes.
const EIGHT: usize = 8;
const ALIGNMENT: usize = 16;

/// The most elements of a cast, so that every index fits into 31 bits.
const MOST: usize = (1 << 31) - 1;

/// What an item is: kernels/cast.cuh has the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// An element at any address.
    Bytes,
    /// An element at a multiple of its size.
    Elements,
    /// Eight neighbours on both sides, at multiples of [`ALIGNMENT`] or of their size.
    Vectors,
}

/// A cast as the kernel has it, with its dimensions, the fastest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Walked {
    pub cast: Cast,
    pub dims: SmallVec<[Dim; 6]>,
    pub blocks: u32,
}

/// Returns what the kernel walks in order to make a cast, which is one piece in most cases. The ends of rows that are
/// no whole vectors are another.
pub(crate) fn walked(piece: &Piece<'_>, cast: bridge_core::Cast) -> Vec<Walked> {
    let mut all = Vec::new();
    if let Some(walk) = Walk::new(piece.from.layout, piece.to.layout) {
        let sizes = (piece.from.layout.itemsize(), piece.to.layout.itemsize());
        let planned =
            Planned { sizes, floats: [cast.from(), cast.to()].map(|dtype| floats::number(dtype) as u8), piece };
        cut(walk, MOST, &mut |walk| planned.vectors(walk, &mut all));
    }
    all
}

/// Calls `each` with parts of at most so many elements.
fn cut(walk: Walk, most: usize, each: &mut impl FnMut(Walk)) {
    let elements = walk.dims.iter().fold(1usize, |elements, dim| elements.saturating_mul(dim.length));
    let longest = (0..walk.dims.len()).max_by_key(|d| walk.dims[*d].length);
    let Some(d) = longest.filter(|_| elements > most) else { return each(walk) };
    let length = walk.dims[d].length;
    // At whole vectors, so that both parts are aligned as the whole.
    let half = if length < 16 * EIGHT { length / 2 } else { (length / 2).next_multiple_of(EIGHT) };
    for (first, length) in [(0, half), (half, length - half)] {
        cut(part(&walk, d, first, length), most, each);
    }
}

/// Returns the part of a walk from an index of a dimension on.
fn part(walk: &Walk, d: usize, first: usize, length: usize) -> Walk {
    let mut part = walk.clone();
    part.from += first as i64 * walk.dims[d].from;
    part.to += first as i64 * walk.dims[d].to;
    match length {
        1 => drop(part.dims.remove(d)),
        _ => part.dims[d].length = length,
    }
    part
}

/// What a cast does at every index of its walk.
struct Planned<'a> {
    sizes: (usize, usize),
    floats: [u8; 2],
    piece: &'a Piece<'a>,
}

impl Planned<'_> {
    /// Adds a walk: its rows in vectors, where it has such, and the elements that remain.
    fn vectors(&self, walk: Walk, all: &mut Vec<Walked>) {
        let (read, written) = self.sizes;
        let Some((row, outer)) = walk.dims.split_last() else { return all.push(self.elements(&walk)) };
        let aligned = |size: usize, start: usize, stride: fn(&Step) -> i64| {
            let bits = outer.iter().fold(start as i64, |bits, dim| bits | stride(dim));
            (bits as usize).is_multiple_of(ALIGNMENT.min(EIGHT * size))
        };
        let (from, to) = self.start(&walk);
        let is_dense = (row.from, row.to) == (read as i64, written as i64) && row.length >= 2 * EIGHT;
        if !is_dense || !aligned(read, from, |dim| dim.from) || !aligned(written, to, |dim| dim.to) {
            return all.push(self.elements(&walk));
        }
        let (d, whole) = (walk.dims.len() - 1, row.length / EIGHT);
        let by = |stride: i64| stride * EIGHT as i64;
        let mut vectors = walk.clone();
        vectors.dims[d] = Step { length: whole, from: by(row.from), to: by(row.to) };
        all.push(self.walk(&vectors, Mode::Vectors));
        if whole * EIGHT < row.length {
            all.push(self.elements(&part(&walk, d, whole * EIGHT, row.length - whole * EIGHT)));
        }
    }

    fn elements(&self, walk: &Walk) -> Walked {
        let (from, to) = self.start(walk);
        let is_aligned = from.is_multiple_of(self.sizes.0) && to.is_multiple_of(self.sizes.1);
        self.walk(walk, if is_aligned { Mode::Elements } else { Mode::Bytes })
    }

    /// Returns the addresses at which a walk begins.
    fn start(&self, walk: &Walk) -> (usize, usize) {
        let Piece { from, to, .. } = self.piece;
        (from.data.wrapping_add_signed(walk.from as isize), to.data.wrapping_add_signed(walk.to as isize))
    }

    fn walk(&self, walk: &Walk, mode: Mode) -> Walked {
        let (from, to) = self.start(walk);
        let mut dims: SmallVec<[Dim; 6]> = walk.dims.iter().rev().map(|dim| Dim::from(*dim)).collect();
        if dims.is_empty() {
            dims.push(Dim::new(1, 0, 0));
        }
        let items: u32 = dims.iter().map(|dim| dim.length).product();
        let share = if mode == Mode::Vectors { SHARE / EIGHT as u32 } else { SHARE };
        let [from_float, to_float] = self.floats;
        let cast = Cast {
            from: from as u64,
            to: to as u64,
            flips: self.piece.flips as u64,
            items,
            first: 0,
            ndim: dims.len() as u32,
            mode: mode as u8,
            from_float,
            to_float,
            ..Cast::default()
        };
        Walked { cast, dims, blocks: items.div_ceil(share) }
    }
}

/// What one launch casts.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// Each cast, and its dimensions after it.
    casts: Vec<u8>,
    /// Where the cast of each block is, in units of 16 bytes.
    owners: Vec<u32>,
}

impl Table {
    /// Lays a table of the casts with these indices. Returns the indices of those for which it has no room, too.
    pub fn lay(pieces: &[Piece<'_>], indices: &[usize]) -> (Laid, Vec<usize>) {
        let mut table = Self::default();
        let mut enters = |index: usize| pieces[index].cast.is_none_or(|cast| table.enter(walked(&pieces[index], cast)));
        let others = indices.iter().copied().filter(|index| !enters(*index)).collect();
        let (blocks, bytes, owners_at) = (table.owners.len() as u32, table.bytes(), table.owners_at());
        let index = indices.first().copied().unwrap_or(0);
        (Laid { index, kernel: Kernel::Cast, blocks, bytes, owners_at }, others)
    }

    /// Enters a cast. Returns `false` where the table is full; then nothing is entered.
    fn enter(&mut self, walks: Vec<Walked>) -> bool {
        let blocks =
            walks.iter().fold(self.owners.len(), |blocks, walked| blocks.saturating_add(walked.blocks as usize));
        if blocks > MOST {
            return false;
        }
        for Walked { cast, dims, blocks } in walks {
            let at = (self.casts.len() / 16) as u32;
            let cast = Cast { first: self.owners.len() as u32, ..cast };
            self.casts.extend_from_slice(&cast.bytes());
            dims.iter().for_each(|dim| self.casts.extend_from_slice(&dim.bytes()));
            self.owners.resize(self.owners.len() + blocks as usize, at);
        }
        true
    }

    /// Returns the table as the kernel has it: the casts, and then the owners.
    fn bytes(&self) -> Vec<u8> {
        let owners = self.owners.iter().flat_map(|owner| owner.to_le_bytes());
        self.casts.iter().copied().chain(owners).collect()
    }

    /// Returns where the owners begin in these bytes.
    fn owners_at(&self) -> usize {
        self.casts.len()
    }
}

#[cfg(test)]
mod tests;
