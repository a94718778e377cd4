//! What of a move is made at once: a large piece, or many small ones that are packed. A pure function of the pieces.

use super::{is_host, same};
use bridge_core::{DType, Device, Error, ErrorKind, Failed, Layout, Piece, Result, Strided};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::ops::Range;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

/// Fewer small pieces are moved one by one: a kernel and its memory take longer than their copies.
pub(super) const FEWEST: usize = 8;

/// Each piece begins at a multiple of so many bytes: those of a vector of the kernels.
const ALIGNMENT: usize = 16;

/// Makes copies on the host, in so many threads or fewer.
pub(super) type OnHost = unsafe fn(&[Piece<'_>], usize) -> Result<(), Failed>;

/// Copies so many bytes.
pub(super) type Plain = unsafe fn(*const u8, *mut u8, usize);

/// A part of a move.
pub(super) enum Load<'a> {
    Alone(Wired<'a>),
    Packed(Packed<'a>),
}

impl Load<'_> {
    /// Returns the number of its first piece.
    pub fn index(&self) -> usize {
        match self {
            Self::Alone(wired) => wired.index,
            Self::Packed(packed) => packed.index(),
        }
    }

    /// Returns how many bytes move.
    pub fn nbytes(&self) -> usize {
        match self {
            Self::Alone(wired) => wired.wire.nbytes(),
            Self::Packed(packed) => packed.nbytes(),
        }
    }
}

/// A piece with the layout in which its bytes move.
pub(super) struct Wired<'a> {
    pub index: usize,
    pub piece: Piece<'a>,
    pub wire: Layout,
}

impl Wired<'_> {
    /// Returns the copy that the device makes, between its side and the bytes that move, which lie at `address`. It
    /// also changes the elements. Of two devices it is that of the source.
    pub fn on_device(&self, address: usize) -> Piece<'_> {
        let Piece { from, to, .. } = self.piece;
        match is_host(from.device) {
            true => Piece { from: self.moving(to.device, address), ..self.piece },
            false => Piece { to: self.moving(from.device, address), ..self.piece },
        }
    }

    /// Returns the copy of the other side, of the host or of a target on another device, with the bytes that move at
    /// `address`.
    pub fn on_other(&self, address: usize) -> Piece<'_> {
        let Piece { from, to, .. } = self.piece;
        let (from, to) = match is_host(from.device) {
            true => (from, self.moving(from.device, address)),
            false => (self.moving(to.device, address), to),
        };
        Piece { from, to, flips: 0, cast: None }
    }

    fn moving(&self, device: Device, data: usize) -> Strided<'_> {
        Strided { device, data, layout: &self.wire }
    }

    /// Returns whether a device changes the elements.
    pub fn changes(&self) -> bool {
        self.piece.flips != 0 || self.piece.cast.is_some()
    }
}

/// Small pieces, one after another.
pub(crate) struct Packed<'a> {
    pub pieces: Vec<Wired<'a>>,
    /// Where each ends. The next one begins there.
    ends: Vec<usize>,
    on_host: OnHost,
}

impl<'a> Packed<'a> {
    fn new(on_host: OnHost) -> Self {
        Self { pieces: Vec::new(), ends: Vec::new(), on_host }
    }

    fn push(&mut self, wired: Wired<'a>) {
        self.ends.push(self.nbytes() + wired.wire.nbytes().next_multiple_of(ALIGNMENT));
        self.pieces.push(wired);
    }

    pub fn index(&self) -> usize {
        self.pieces[0].index
    }

    pub fn nbytes(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    pub fn ends(&self) -> &[usize] {
        &self.ends
    }

    /// Returns each piece with its place among the bytes.
    fn placed(&self, pieces: Range<usize>) -> impl Iterator<Item = (usize, &Wired<'a>)> {
        let start = |number: usize| number.checked_sub(1).map_or(0, |before| self.ends[before]);
        pieces.map(move |number| (start(number), &self.pieces[number]))
    }

    /// Returns the copies on the device, whose block of packed bytes is at this address.
    pub fn on_device(&self, block: usize) -> Vec<Piece<'_>> {
        self.placed(0..self.pieces.len()).map(|(start, wired)| wired.on_device(block + start)).collect()
    }

    /// Returns the copies on another device of the targets, whose block of packed bytes is at this address.
    pub fn on_other(&self, block: usize) -> Vec<Piece<'_>> {
        self.placed(0..self.pieces.len()).map(|(start, wired)| wired.on_other(block + start)).collect()
    }

    /// Copies between the pieces of the host that are these bytes, whole ones, and staging at this address, on this
    /// thread: plain bytes by `plain`, and others by loops.
    ///
    /// # Safety
    ///
    /// Staging has room for the bytes, and the pieces are as [`bridge_core::Copies::copy_all`] says.
    pub unsafe fn on_host(&self, bytes: Range<usize>, staging: usize, plain: Plain) -> Result<()> {
        let number = |end: usize| self.ends.partition_point(|other| *other <= end);
        let pieces = self.placed(number(bytes.start)..number(bytes.end));
        let mut strided = Vec::new();
        for (start, wired) in pieces {
            let piece = wired.on_other(staging + start - bytes.start);
            if !same(piece.from.layout, piece.to.layout) {
                strided.push(piece);
                continue;
            }
            let (from, to) = (piece.from.data, piece.to.data);
            // SAFETY: the caller's promises. Both sides are in one layout without gaps.
            unsafe { plain(with_exposed_provenance(from), with_exposed_provenance_mut(to), wired.wire.nbytes()) };
        }
        // SAFETY: the caller's promises.
        unsafe { (self.on_host)(&strided, 1) }.map_err(|failed| failed.error)
    }
}

/// Divides pieces between the same two devices: those of at most `small` bytes into blocks of at most `block` bytes,
/// where there are enough of them. What another device has to spread is always in a block. Pieces without elements are
/// left out.
///
/// # Errors
///
/// [`ErrorKind::CopyNeeded`] for a piece that cannot be moved.
pub(super) fn loads<'a>(
    pieces: &[Piece<'a>],
    (small, block): (usize, usize),
    host: OnHost,
) -> Result<Vec<Load<'a>>, Failed> {
    let moved = |piece: &Piece<'_>| piece.from.layout.numel() > 0;
    let is_small = |piece: &Piece<'_>| piece.to.layout.numel().saturating_mul(itemsize(piece)) <= small;
    let on_host = |piece: &Piece<'_>| is_host(piece.from.device) || is_host(piece.to.device);
    let is_spread = |piece: &Piece<'_>| !on_host(piece) && !is_dense(piece.to.layout);
    let together = pieces.iter().filter(|piece| moved(piece) && is_small(piece)).count() >= FEWEST;
    let (mut loads, mut blocks) = (Vec::new(), Vec::new());
    for (index, piece) in pieces.iter().enumerate().filter(|(_, piece)| moved(piece)) {
        let is_packed = (together && is_small(piece)) || is_spread(piece);
        let wire = if is_packed { wire_of_device(piece) } else { wire(piece) };
        let wired = Wired { index, piece: *piece, wire: wire.map_err(|error| Failed::new(index, error))? };
        if !is_packed {
            loads.push(Load::Alone(wired));
            continue;
        }
        let is_full = |packed: &Packed<'_>| packed.nbytes() + wired.wire.nbytes() > block;
        if blocks.last().is_none_or(is_full) {
            blocks.push(Packed::new(host));
        }
        blocks.last_mut().expect("there is one").push(wired);
    }
    loads.extend(blocks.into_iter().map(Load::Packed));
    Ok(loads)
}

/// Returns the bytes of an element that moves: a device casts, before a move to the host and after a move to the
/// device.
fn itemsize(piece: &Piece<'_>) -> usize {
    if is_host(piece.from.device) { piece.from.layout.itemsize() } else { piece.to.layout.itemsize() }
}

/// Returns the layout in which the bytes of a piece move that is not packed: in the order of the target, else in that
/// of the source, else row by row.
fn wire(piece: &Piece<'_>) -> Result<Layout> {
    let (from, to, itemsize) = (piece.from.layout, piece.to.layout, itemsize(piece));
    match [to, from].into_iter().find(|layout| is_dense(layout)) {
        Some(dense) if dense.itemsize() == itemsize => Ok(dense.clone()),
        Some(dense) => ordered(dense, itemsize),
        None => Layout::new(bits(itemsize)?, to.shape(), None, 0),
    }
}

/// Returns the layout in which the bytes of a packed piece move: in the order of the device's side, so that its rows
/// stay adjacent there.
fn wire_of_device(piece: &Piece<'_>) -> Result<Layout> {
    let on_device = if is_host(piece.from.device) { piece.to.layout } else { piece.from.layout };
    ordered(on_device, itemsize(piece))
}

/// Returns the layout without gaps whose dimensions follow one another as in `like`; those that repeat elements there
/// come first.
fn ordered(like: &Layout, itemsize: usize) -> Result<Layout> {
    let mut dims: SmallVec<[usize; 8]> = (0..like.shape().len()).collect();
    dims.sort_by_key(|d| (like.strides()[*d] != 0, Reverse(like.strides()[*d].unsigned_abs())));
    let mut strides: SmallVec<[i64; 8]> = SmallVec::from_elem(0, dims.len());
    let mut step = 1;
    for d in dims.into_iter().rev() {
        strides[d] = step;
        step *= like.shape()[d];
    }
    Layout::new(bits(itemsize)?, like.shape(), Some(&strides), 0)
}

/// Returns a dtype of as many bytes.
fn bits(itemsize: usize) -> Result<DType> {
    let bits = u8::try_from(itemsize * 8).map_err(|_| {
        let text = format!("elements of {itemsize} bytes cannot be moved: view them as smaller ones");
        Error::new(ErrorKind::CopyNeeded, text)
    })?;
    Ok(DType { bits, ..DType::UINT8 })
}

/// Returns whether the elements fill the bytes from the first one on, each once, in any order of the dimensions.
pub(super) fn is_dense(layout: &Layout) -> bool {
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
