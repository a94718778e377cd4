//! Many copies in one launch: a table of pieces, and for each block the piece that it works on. A pure function of the
//! walks and the addresses.

use super::parameters::{Dim, Piece};
use super::table::Kernel;
use crate::copy::plan::Walk;

/// The vectors of a piece that a block copies: kernels/pieces.cuh has the same number.
pub(crate) const SHARE: u32 = 4096;

/// The alignment of vectors, in bytes.
const VECTOR: usize = 16;

/// The most vectors of a piece, so that every index fits into 31 bits.
const MOST_VECTORS: usize = (1 << 31) - 1;

/// The most bytes of a row of a piece.
const LONGEST_ROW: usize = 1 << 34;

/// Rows of at least so many bytes are worth their vectors.
const LONG_ROW: usize = 64;

/// A walk whose rows are shorter is worth less than a launch up to so many bytes.
const SMALL: usize = 64 << 10;

/// Two dimensions of a walk with more are at least so many bytes.
const LARGE: usize = 16 << 10;

/// A table as it is uploaded.
pub(super) struct Laid {
    /// The index of its first piece.
    pub index: usize,
    pub kernel: Kernel,
    pub blocks: u32,
    pub bytes: Vec<u8>,
    /// Where the owners begin in these.
    pub owners_at: usize,
}

/// What one launch copies.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub pieces: Vec<Piece>,
    /// The piece of each block, by its index.
    pub owners: Vec<u32>,
    /// All addresses, strides and lengths, to find what divides them.
    bits: usize,
}

impl Table {
    /// Lays a table of all that suit one, of the pieces with these indices. Returns the indices of the others, too.
    pub fn lay(pieces: &[bridge_core::Piece<'_>], indices: &[usize]) -> (Laid, Vec<usize>) {
        let (entered, owners) = (Vec::with_capacity(indices.len()), Vec::with_capacity(indices.len()));
        let (mut table, mut others) = (Self { pieces: entered, owners, bits: 0 }, Vec::new());
        for &index in indices {
            let piece = &pieces[index];
            let Some(walk) = Walk::new(piece.from.layout, piece.to.layout) else { continue };
            if piece.flips != 0 || !table.enter(&walk.widen(), piece.from.data, piece.to.data) {
                others.push(index);
            }
        }
        let (kernel, bytes, owners_at) = (table.kernel(), table.bytes(), table.owners_at());
        let index = indices.first().copied().unwrap_or(0);
        (Laid { index, kernel, blocks: table.owners.len() as u32, bytes, owners_at }, others)
    }

    /// Returns the kernel for the units that divide everything.
    pub fn kernel(&self) -> Kernel {
        const KERNELS: [Kernel; 5] =
            [Kernel::Pieces1, Kernel::Pieces2, Kernel::Pieces4, Kernel::Pieces4, Kernel::Pieces16];
        KERNELS[self.bits.trailing_zeros().min(4) as usize]
    }

    /// Enters a walk whose first elements are at these addresses. Returns `false` where its own launch suits it
    /// better, or the table is full; then nothing is entered.
    pub fn enter(&mut self, walk: &Walk, from: usize, to: usize) -> bool {
        let (rows, outer) = match &*walk.dims {
            [] => (None, &[][..]),
            [outer @ .., rows] => (Some(*rows), outer),
        };
        let nbytes = walk.unit.saturating_mul(rows.map_or(1, |rows| rows.length));
        let suits = match (rows, outer) {
            (None, _) => true,
            (Some(_), []) => walk.unit >= LONG_ROW || nbytes <= SMALL,
            _ => walk.unit >= LONG_ROW && nbytes >= LARGE,
        };
        let parts = outer.iter().fold(1usize, |parts, dim| parts.saturating_mul(dim.length));
        let blocks = parts.saturating_mul(nbytes / (SHARE as usize * VECTOR) + 2);
        if !suits || self.owners.len().saturating_add(blocks) > MOST_VECTORS {
            return false;
        }
        let (from, to) = (from.wrapping_add_signed(walk.from as isize), to.wrapping_add_signed(walk.to as isize));
        for part in 0..parts {
            let (mut rest, mut at) = (part, (from, to));
            for dim in outer.iter().rev() {
                let index = (rest % dim.length) as i64;
                at = moved(at, (index * dim.from, index * dim.to));
                rest /= dim.length;
            }
            let rows = rows.map_or((1, 0, 0), |rows| (rows.length, rows.from, rows.to));
            self.rows(at, walk.unit, rows);
        }
        true
    }

    /// Enters rows of `unit` bytes: their number, and the bytes from one to the next on both sides.
    fn rows(&mut self, at: (usize, usize), unit: usize, (count, from, to): (usize, i64, i64)) {
        for first in (0..unit).step_by(LONGEST_ROW) {
            let nbytes = LONGEST_ROW.min(unit - first);
            let at = moved(at, (first as i64, first as i64));
            // A row may begin anywhere in its first vector.
            let aligned = (at.1 | to as usize).is_multiple_of(VECTOR);
            let vectors = if aligned { nbytes.div_ceil(VECTOR) } else { (nbytes + 2 * VECTOR - 2) / VECTOR };
            let most = MOST_VECTORS / vectors;
            for row in (0..count).step_by(most) {
                let rows = most.min(count - row);
                let at = moved(at, (row as i64 * from, row as i64 * to));
                self.push(at, nbytes, (rows, from, to), vectors);
            }
        }
    }

    fn push(&mut self, (from, to): (usize, usize), nbytes: usize, rows: (usize, i64, i64), vectors: usize) {
        let (count, by) = (rows.0, (rows.1, rows.2));
        self.bits |= from | to | nbytes | if count > 1 { (by.0 | by.1) as usize } else { 0 };
        let items = (count * vectors) as u32;
        let (index, first) = (self.pieces.len() as u32, self.owners.len() as u32);
        let rows = Dim::new(vectors as u32, by.0, by.1);
        self.pieces.push(Piece { from: from as u64, to: to as u64, nbytes: nbytes as i64, items, first, rows });
        self.owners.resize(self.owners.len() + items.div_ceil(SHARE) as usize, index);
    }

    /// Returns the table as the kernel has it: the pieces, and then the owners.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.owners_at() + size_of_val(&*self.owners));
        self.pieces.iter().for_each(|piece| bytes.extend_from_slice(&piece.bytes()));
        self.owners.iter().for_each(|owner| bytes.extend_from_slice(&owner.to_le_bytes()));
        bytes
    }

    /// Returns where the owners begin in these bytes.
    pub fn owners_at(&self) -> usize {
        size_of_val(&*self.pieces)
    }
}

fn moved((from, to): (usize, usize), by: (i64, i64)) -> (usize, usize) {
    (from.wrapping_add_signed(by.0 as isize), to.wrapping_add_signed(by.1 as isize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::kernels::on_host::OnHost;
    use crate::copy::kernels::parameters::Pieces;
    use bridge_core::{DType, Layout};
    use proptest::prelude::*;

    fn layout(dtype: DType, shape: &[i64], strides: Option<&[i64]>) -> Layout {
        Layout::new(dtype, shape, strides, 0).unwrap()
    }

    /// Copies that the kernel makes on a device on the host.
    #[derive(Default)]
    struct Scene {
        host: OnHost,
        table: Table,
        /// Where targets are, and what the kernel is to make of their bytes.
        expected: Vec<(usize, Vec<u8>)>,
    }

    impl Scene {
        /// Enters a copy, whose sides begin so many bytes beyond a multiple of 16. Returns whether it suits the table.
        fn enter(&mut self, (source, target): (&Layout, &Layout), beyond: (usize, usize)) -> bool {
            let bytes: Vec<u8> = (0..source.byte_extent().1).map(|n| (n * 37 + n / 256) as u8).collect();
            let mut expected = vec![0xa5; target.byte_extent().1];
            let (from, to) = (self.host.memory(&bytes, beyond.0), self.host.memory(&expected, beyond.1));
            let walk = Walk::new(source, target).expect("there are elements");
            if !self.table.enter(&walk.widen(), from, to) {
                return false;
            }
            let mut at = vec![(0, 0)];
            for (&length, (from, to)) in source.shape().iter().zip(source.strides().iter().zip(target.strides())) {
                let steps = |&at: &(i64, i64)| (0..length).map(move |i| (at.0 + i * from, at.1 + i * to));
                at = at.iter().flat_map(steps).collect();
            }
            let size = source.itemsize();
            for (from, to) in at {
                expected[to as usize * size..][..size].copy_from_slice(&bytes[from as usize * size..][..size]);
            }
            self.expected.push((to, expected));
            true
        }

        fn check(mut self) {
            let (table, at) = (self.host.memory(&self.table.bytes(), 0), self.table.owners_at());
            let pieces = Pieces { pieces: table as u64, owners: (table + at) as u64 };
            self.host.launch(self.table.kernel(), self.table.owners.len() as u32, 0, &pieces);
            for (at, expected) in self.expected {
                assert!(self.host.read(at, expected.len()) == expected, "a byte is wrong: {:?}", self.table.pieces);
            }
        }
    }

    proptest! {
        /// Many pieces: each byte of a target is the byte of the source that belongs there, and no other is written.
        #[test]
        fn every_byte_is_copied_to_its_place(
            pieces in prop::collection::vec(
                (prop::sample::select(vec![1i64, 2, 3, 30, 100, 700]), 1i64..5, 1i64..70, 0i64..40, 0i64..40, 0usize..32, 0usize..32),
                1..6,
            ),
            dtype in prop::sample::select(vec![DType::UINT8, DType::FLOAT16, DType::FLOAT32, DType::COMPLEX128]),
        ) {
            let mut scene = Scene::default();
            for (rows, outer, row, gap, other, from, to) in pieces {
                let shape = [outer, rows, row];
                let source = layout(dtype, &shape, Some(&[rows * (row + gap) + other, row + gap, 1]));
                let target = layout(dtype, &shape, Some(&[rows * (row + other), row + other, 1]));
                scene.enter((&source, &target), (from % 16, to % 16));
            }
            scene.check();
        }
    }

    #[test]
    fn blocks_have_similar_work() {
        let mut table = Table::default();
        let (large, small) = (layout(DType::UINT8, &[3_000_000], None), layout(DType::UINT8, &[44_000], None));
        for (index, layout) in [&large, &small, &small].into_iter().enumerate() {
            assert!(table.enter(&Walk::new(layout, layout).unwrap().widen(), 1 << 30, (index + 2) << 30));
        }
        assert_eq!(table.pieces.len(), 3);
        assert_eq!(table.owners.len(), 46 + 1 + 1, "64 KiB each");
        assert_eq!(table.kernel(), Kernel::Pieces16);
        let askew = Walk::new(&small, &small).unwrap().widen();
        assert!(table.enter(&askew, (1 << 40) + 2, 1 << 41));
        assert_eq!(table.kernel(), Kernel::Pieces2);
    }

    #[test]
    fn what_does_not_suit_the_table_is_not_entered() {
        let mut table = Table::default();
        let matrix = layout(DType::FLOAT32, &[512, 512], None);
        let turned = layout(DType::FLOAT32, &[512, 512], Some(&[1, 512]));
        assert!(!table.enter(&Walk::new(&turned, &matrix).unwrap().widen(), 1 << 30, 1 << 31));
        let column = layout(DType::FLOAT32, &[1 << 20], Some(&[2]));
        assert!(!table.enter(
            &Walk::new(&column, &layout(DType::FLOAT32, &[1 << 20], None)).unwrap().widen(),
            1 << 30,
            1 << 31
        ));
        assert!(table.pieces.is_empty() && table.owners.is_empty());
    }

    /// A wider unit would read and write at addresses that it does not divide.
    #[test]
    fn the_unit_of_the_kernel_divides_every_address_row_and_stride() {
        let kernel = |from: usize, to: usize, [row, source, target]: [i64; 3]| {
            let side = |stride| layout(DType::UINT8, &[3, row], Some(&[stride, 1]));
            let mut table = Table::default();
            let walk = Walk::new(&side(source), &side(target)).unwrap().widen();
            assert!(table.enter(&walk, (1 << 40) + from, (1 << 41) + to));
            table.kernel()
        };
        assert_eq!(kernel(0, 0, [80, 96, 112]), Kernel::Pieces16);
        assert_eq!(kernel(8, 0, [80, 96, 112]), Kernel::Pieces4);
        assert_eq!(kernel(0, 4, [80, 96, 112]), Kernel::Pieces4);
        assert_eq!(kernel(2, 2, [80, 96, 112]), Kernel::Pieces2);
        assert_eq!(kernel(0, 0, [81, 96, 112]), Kernel::Pieces1);
        assert_eq!(kernel(2, 0, [82, 96, 112]), Kernel::Pieces2);
        assert_eq!(kernel(0, 2, [82, 96, 112]), Kernel::Pieces2);
        assert_eq!(kernel(0, 0, [80, 100, 112]), Kernel::Pieces4);
        assert_eq!(kernel(0, 0, [80, 96, 113]), Kernel::Pieces1);
        assert_eq!(kernel(0, 0, [80, 98, 98]), Kernel::Pieces2);
        assert_eq!(kernel(0, 0, [84, 100, 112]), Kernel::Pieces4);
    }

    #[test]
    fn rows_of_four_dimensions_are_copied_to_their_places() {
        let shape = [2, 4, 256, 64];
        let source = layout(DType::UINT8, &shape, Some(&[4 * 20_000, 20_000, 72, 1]));
        let target = layout(DType::UINT8, &shape, Some(&[17_000, 2 * 17_000, 65, 1]));
        let mut scene = Scene::default();
        assert!(scene.enter((&source, &target), (0, 0)));
        scene.check();
    }

    #[test]
    fn giants_are_cut() {
        let giant = layout(DType::UINT8, &[(1 << 36) + 48], None);
        let mut table = Table::default();
        assert!(table.enter(&Walk::new(&giant, &giant).unwrap().widen(), 1 << 40, (1 << 41) + 1));
        assert_eq!(table.pieces.len(), 5);
        assert_eq!(table.pieces.iter().map(|piece| piece.nbytes).sum::<i64>(), (1 << 36) + 48);
        assert!(table.pieces.iter().all(|piece| piece.items as usize <= MOST_VECTORS));
        let rows = layout(DType::UINT8, &[1 << 30, 64], Some(&[128, 1]));
        let compact = layout(DType::UINT8, &[1 << 30, 64], None);
        let mut table = Table::default();
        assert!(table.enter(&Walk::new(&rows, &compact).unwrap().widen(), 1 << 40, 1 << 41));
        assert_eq!(table.pieces.len(), 3, "2^32 vectors");
        assert_eq!(table.pieces.iter().map(|piece| u64::from(piece.items)).sum::<u64>(), 1 << 32);
    }
}
