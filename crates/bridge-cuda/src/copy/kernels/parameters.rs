//! The kernels' parameters: twins of the structures in kernels/common.cuh.

use crate::copy::plan::Dim as Step;

/// A dimension, and the multiplication that divides by its length.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Dim {
    pub from: i64,
    pub to: i64,
    pub length: u32,
    magic: u32,
    shift: u32,
    pub more: u32,
}

impl Dim {
    /// The quotient of `n < 2^31` is `(high half of n * magic + n) >> shift` (Granlund and Montgomery, "Division by
    /// invariant integers using multiplication", 1994).
    pub fn new(length: u32, from: i64, to: i64) -> Self {
        let shift = length.next_power_of_two().trailing_zeros();
        let magic = ((1u64 << 32) * ((1u64 << shift) - u64::from(length))) / u64::from(length) + 1;
        Self { from, to, length, magic: magic as u32, shift, more: 0 }
    }

    /// Returns the same with what the kernel keeps with it.
    pub fn with(self, more: u32) -> Self {
        Self { more, ..self }
    }

    /// Returns the bytes of the structure.
    pub fn bytes(&self) -> [u8; size_of::<Self>()] {
        bytes(self.words())
    }

    fn words(&self) -> [u64; 4] {
        let Self { from, to, length, magic, shift, more } = *self;
        [from as u64, to as u64, pair(length, magic), pair(shift, more)]
    }
}

/// Lengths are below 2^31: `cut` has seen to it.
impl From<Step> for Dim {
    fn from(step: Step) -> Self {
        Self::new(step.length as u32, step.from, step.to)
    }
}

/// Both sides and the bits to flip. `from` and `to` are offsets from the first elements until the launch adds those.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Sides {
    pub from: i64,
    pub to: i64,
    pub flips: u128,
}

impl Sides {
    /// Returns the same with addresses for offsets: the first elements are at these.
    pub fn at(self, from: usize, to: usize) -> Self {
        let at = |offset: i64, address: usize| offset.wrapping_add_unsigned(address as u64);
        Self { from: at(self.from, from), to: at(self.to, to), ..self }
    }
}

/// Dimensions walked as one, the fastest first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Group {
    pub total: u32,
    pub ndim: u32,
    pub dims: [Dim; Self::MOST],
}

impl Group {
    /// The most dimensions of a group.
    pub const MOST: usize = 4;
}

/// Parameters of kernels that walk the target in its own order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Flat {
    pub sides: Sides,
    pub extra: i64,
    /// Where the source begins and ends, in bytes after its first unit.
    pub low: i64,
    pub high: i64,
    pub items: u32,
    pub ndim: u8,
    /// The binary logarithm of the unit's bytes.
    pub unit: u8,
    /// Whether all offsets fit into 32 bits.
    pub near: u8,
    /// What `rows` copies: [`JOINED`], [`TURNED`], or rows into a target with gaps.
    pub mode: u8,
    pub dims: [Dim; Self::MOST],
}

/// Rows into a target without gaps, and vectors that are turned around.
pub(crate) const JOINED: u8 = 1;
pub(crate) const TURNED: u8 = 2;

impl Flat {
    /// The most dimensions: each has two units at least, and there are fewer than 2^63 bytes.
    pub const MOST: usize = 64;
}

/// Parameters of kernels that change the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Tile {
    pub sides: Sides,
    pub run: u32,
    pub pitch: u32,
    pub extent: u32,
    pub span_i: u32,
    pub span_o: u32,
    pub ndim: u32,
    /// Whether the next block is the next one along `i`; else it is the next one along `o`.
    pub along_i: u32,
    pub channels: u32,
    pub tiles_i: Dim,
    pub tiles_o: Dim,
    pub pitches: Dim,
    pub i: Group,
    pub o: Group,
    pub rest: [Dim; Self::MOST],
}

impl Tile {
    /// The most dimensions besides those of the groups.
    pub const MOST: usize = 48;
}

/// Parameters of kernels that change the order through boxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Box {
    pub sides: Sides,
    pub low: i64,
    pub high: i64,
    pub below: i64,
    pub above: i64,
    pub cells: u32,
    pub pitch: u32,
    pub lines: u32,
    pub runs: u32,
    pub units: u32,
    pub passes: u32,
    pub rows: u32,
    pub ngrid: u8,
    pub nlines: u8,
    pub nalong: u8,
    pub nruns: u8,
    pub nplaces: u8,
    pub unit: u8,
    pub unused: [u8; 6],
    pub most: [u32; 3],
    pub total: [u32; 3],
    pub vectors: Dim,
    pub lanes: Dim,
    pub dims: [Dim; 24],
    pub grid: [Dim; Self::MOST],
}

impl Box {
    /// The most dimensions.
    pub const MOST: usize = 8;
}

/// One of many copies that one launch makes: rows of `nbytes` bytes at these addresses. `rows` counts the vectors that a
/// row of the target touches, and has the bytes from row to row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Piece {
    pub from: u64,
    pub to: u64,
    pub nbytes: i64,
    pub items: u32,
    /// Its first block.
    pub first: u32,
    pub rows: Dim,
}

impl Piece {
    /// Returns the bytes of the structure.
    pub fn bytes(&self) -> [u8; size_of::<Self>()] {
        let Self { from, to, nbytes, items, first, rows } = self;
        let words = [*from, *to, *nbytes as u64, pair(*items, *first)];
        bytes(words.into_iter().chain(rows.words()))
    }
}

/// A cast, without its dimensions, which are next to it in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Cast {
    pub from: u64,
    pub to: u64,
    pub flips: u64,
    pub items: u32,
    /// Its first block.
    pub first: u32,
    pub ndim: u32,
    pub mode: u8,
    pub from_float: u8,
    pub to_float: u8,
    pub unused: u8,
    pub unused_too: u64,
}

impl Cast {
    /// Returns the bytes of the structure.
    pub fn bytes(&self) -> [u8; size_of::<Self>()] {
        let Self { from, to, flips, items, first, ndim, mode, from_float, to_float, unused, unused_too } = self;
        let last = u32::from_le_bytes([*mode, *from_float, *to_float, *unused]);
        bytes([*from, *to, *flips, pair(*items, *first), pair(*ndim, last), *unused_too])
    }
}

/// Parameters of the kernel for casts: a table, or without one the only cast with its dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Casts {
    pub table: Pieces,
    pub only: Cast,
    pub dims: [Dim; Self::MOST],
}

impl Casts {
    /// The most dimensions: each has two elements at least, and there are fewer than 2^63 bytes.
    pub const MOST: usize = 64;

    /// Returns the parameters for a table.
    pub fn of(table: Pieces) -> Self {
        Self { table, only: Cast::default(), dims: [Dim::default(); Self::MOST] }
    }

    /// Returns the parameters for a cast by itself.
    pub fn only(cast: Cast, steps: &[Dim]) -> Self {
        let mut dims = [Dim::default(); Self::MOST];
        dims[..steps.len()].copy_from_slice(steps);
        Self { table: Pieces::default(), only: cast, dims }
    }
}

/// Returns words as bytes.
fn bytes<const N: usize>(words: impl IntoIterator<Item = u64>) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.chunks_exact_mut(8).zip(words).for_each(|(place, word)| place.copy_from_slice(&word.to_le_bytes()));
    bytes
}

/// Returns two fields that are next to each other, as one.
fn pair(first: u32, second: u32) -> u64 {
    u64::from(first) | u64::from(second) << 32
}

/// Parameters of the kernels for many copies: addresses in device memory of the pieces, and of the piece of each block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Pieces {
    pub pieces: u64,
    pub owners: u64,
}

/// Returns the dimensions as the kernels have them, the rest of the array unused.
pub(crate) fn dims<const N: usize>(steps: &[Step]) -> [Dim; N] {
    let mut dims = [Dim::default(); N];
    for (dim, step) in dims.iter_mut().zip(steps) {
        *dim = (*step).into();
    }
    dims
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn divide(n: u32, dim: Dim) -> u32 {
        let high = (u64::from(n) * u64::from(dim.magic)) >> 32;
        (high as u32 + n) >> dim.shift
    }

    #[test]
    fn sizes_are_those_of_the_structures_in_cuda() {
        // The sums of the fields in common.cuh, each aligned to its size.
        assert_eq!((size_of::<Dim>(), size_of::<Sides>(), size_of::<Group>()), (32, 32, 136));
        assert_eq!(size_of::<Flat>(), 32 + 4 * 8 + 64 * 32);
        assert_eq!((size_of::<Piece>(), size_of::<Pieces>()), (3 * 8 + 2 * 4 + 32, 16));
        assert_eq!((size_of::<Cast>(), size_of::<Casts>()), (48, 16 + 48 + 64 * 32));
        assert_eq!(size_of::<Box>(), 32 + 4 * 8 + 7 * 4 + 12 + 6 * 4 + (2 + 24 + 8) * 32);
        assert_eq!(size_of::<Tile>(), 32 + 32 + 3 * 32 + 2 * 136 + 48 * 32);
    }

    proptest! {
        /// The multiplication divides exactly.
        #[test]
        fn division_is_exact(n in 0u32..1 << 31, length in 1u32..1 << 31, small in 1u32..1000) {
            for length in [length, small] {
                prop_assert_eq!(divide(n, Dim::new(length, 0, 0)), n / length);
                let multiple = n / length * length;
                prop_assert_eq!(divide(multiple, Dim::new(length, 0, 0)), n / length);
                prop_assert_eq!(divide(multiple.saturating_sub(1), Dim::new(length, 0, 0)), multiple.saturating_sub(1) / length);
            }
        }
    }
}
