//! Tiles, where the fastest dimension of the source is not that of the target.

use super::{Candidate, Candidates, Chunks, FEW_TIMES, Parameters, Pass, SECTOR, Step, WORD, Work};
use crate::copy::kernels::parameters::{Dim, Group, Tile};
use crate::copy::kernels::table::{KERNELS, Kernel};
use smallvec::SmallVec;

/// Bytes of `shifted`. It writes whole sectors where a copy has `copy` bytes and a row of its target `row`. Less stays in the
/// cache, which joins the parts of a sector.
struct Shifted {
    /// The most across a tile: of the source's rows without a word for the neighbours, and of the target's with a part
    /// before the tile.
    i: usize,
    o: usize,
    copy: usize,
    row: usize,
}

const SHIFTED: Shifted = Shifted { i: 31 * WORD, o: 64 * WORD, copy: 24 << 20, row: 128 };

// By the binary logarithm of the unit.
/// Units of any alignment, with the units across a tile. Bytes are copied in boxes.
const TILES: [&[(Kernel, usize)]; 5] = [
    &[],
    &[(Kernel::Tile2, 64)],
    &[(Kernel::Tile4, 64), (Kernel::Tile4Small, 32)],
    &[(Kernel::Tile8, 32)],
    &[(Kernel::Tile16, 32)],
];

/// A kernel for sides in whole vectors.
struct Whole {
    kernel: Kernel,
    /// Bytes of a unit.
    unit: usize,
    /// Bytes of a vector.
    vector: usize,
    /// Units across a tile in both groups.
    span: usize,
}

const WHOLE: &[Whole] = &[
    Whole { kernel: Kernel::Vectors1Wide, unit: 1, vector: 16, span: 256 },
    Whole { kernel: Kernel::Vectors1, unit: 1, vector: 16, span: 128 },
    Whole { kernel: Kernel::Vectors2Wide, unit: 2, vector: 16, span: 128 },
    Whole { kernel: Kernel::Vectors2, unit: 2, vector: 16, span: 64 },
    Whole { kernel: Kernel::Vectors4, unit: 4, vector: 16, span: 64 },
    Whole { kernel: Kernel::Words, unit: 1, vector: 4, span: 128 },
    Whole { kernel: Kernel::Words, unit: 2, vector: 4, span: 128 },
];

impl Pass {
    /// Tiles of the dimension that is fastest in the source and of the one that is fastest in the target, and of their
    /// next ones where these are short. In a source whose units are apart, what repeats counts as the fastest: one load of a
    /// unit serves all places.
    pub(super) fn tiles(&self, i: usize) -> Candidates {
        let pass = self.forwards(1);
        let repeats = |d: &usize| self.dims[*d].from == 0 && self.dims[*d].length >= FEW_TIMES;
        let is_apart = self.dims[i].from.unsigned_abs() >= SECTOR;
        let i = (0..self.dims.len()).find(|d| is_apart && repeats(d)).unwrap_or(i);
        let shared = |kernel: Kernel| KERNELS[kernel as usize].1;
        let whole = WHOLE.iter().filter(|whole| (whole.unit, 1) == (self.unit, self.run)).filter_map(|whole| {
            let (group_i, group_o) = pass.groups(i, whole.span);
            let fits = pass.whole(whole.vector, &group_i, &group_o);
            fits.then(|| pass.in_tiles(whole.kernel, &group_i, &group_o, whole.span, shared(whole.kernel)))?
        });
        let any = TILES[self.index()].iter().filter(|(_, side)| self.run <= side / 2).filter_map(|(kernel, side)| {
            let (group_i, group_o) = pass.groups(i, side / self.run);
            pass.in_tiles(*kernel, &group_i, &group_o, side / self.run, 0)
        });
        whole.chain(pass.shifted(i)).chain(any).collect()
    }

    fn in_tiles(&self, kernel: Kernel, i: &[usize], o: &[usize], across: usize, shared: u32) -> Option<Candidate> {
        let fits = self.dims.len() - i.len() - o.len() <= Tile::MOST;
        let work = || Work::Tile(self.chunk(i, across), self.chunk(o, across));
        fits.then(|| Candidate { launch: self.tiled(kernel, i, o, (across, across), shared), work: work() })
    }

    /// Returns the first units of a group, with those of a run.
    fn chunk(&self, group: &[usize], units: usize) -> Chunks {
        let (mut chunks, mut rest): (Chunks, _) = (self.dims.iter().map(|_| 1.0).collect(), units);
        for d in group {
            chunks[*d] = self.dims[*d].length.min(rest) as f64;
            rest = rest.div_ceil(self.dims[*d].length);
        }
        if self.run > 1 {
            chunks.insert(0, self.run as f64);
        }
        chunks
    }

    /// Returns the dimensions of both groups, for tiles of so many units across.
    fn groups(&self, i: usize, across: usize) -> (SmallVec<[usize; 4]>, SmallVec<[usize; 4]>) {
        let mut rest: SmallVec<[usize; 6]> = (0..self.dims.len()).filter(|d| *d != 0 && *d != i).collect();
        let (mut group_i, mut group_o): (SmallVec<[usize; 4]>, SmallVec<[usize; 4]>) =
            (smallvec::smallvec![i], smallvec::smallvec![0]);
        let total = |group: &[usize]| group.iter().map(|d| self.dims[*d].length).product::<usize>();
        // Groups that fill their tiles badly get the next dimensions of their side, the shorter group first.
        loop {
            let (have_i, have_o) = (total(&group_i), total(&group_o));
            let is_short = |have: usize| 4 * have < 3 * have.next_multiple_of(across);
            let (short_i, short_o) =
                (is_short(have_i) && group_i.len() < Group::MOST, is_short(have_o) && group_o.len() < Group::MOST);
            let by_source = |at: &usize| self.dims[rest[*at]].from.unsigned_abs();
            let by_target = |at: &usize| self.dims[rest[*at]].to.unsigned_abs();
            if short_i && (have_i <= have_o || !short_o) {
                let Some(next) = (0..rest.len()).min_by_key(by_source) else { break };
                group_i.push(rest.remove(next));
            } else if short_o {
                let Some(next) = (0..rest.len()).min_by_key(by_target) else { break };
                group_o.push(rest.remove(next));
            } else {
                break;
            }
        }
        // Both sides are walked in long stretches, one block after the other.
        for (group, stride) in [(&mut group_i, (|dim| dim.from) as fn(&Step) -> i64), (&mut group_o, |dim| dim.to)] {
            while group.len() < Group::MOST {
                let last = &self.dims[group[group.len() - 1]];
                let end = stride(last).checked_mul(last.length as i64);
                let Some(next) = rest.iter().position(|d| Some(stride(&self.dims[*d])) == end) else { break };
                group.push(rest.remove(next));
            }
        }
        (group_i, group_o)
    }

    /// Tiles of small adjacent units at any address.
    fn shifted(&self, i: usize) -> Option<Candidate> {
        let kernel = *[Kernel::Shifted1, Kernel::Shifted2].get(self.index())?;
        let (length_i, length_o) = (self.dims[i].length, self.dims[0].length);
        let fills = length_i.min(length_o) * self.unit >= SHIFTED.i / 2;
        // The kernel reads beyond rows that others lie next to.
        let is_near = self.dims[0].from.unsigned_abs() < 2 * SECTOR;
        if !fills || is_near || self.run > 1 || !self.whole(self.unit, &[i], &[0]) {
            return None;
        }
        let nbytes = self.dims.iter().fold(self.unit, |nbytes, dim| nbytes * dim.length);
        let whole = nbytes >= SHIFTED.copy && length_o * self.unit >= SHIFTED.row;
        let part = if whole { SECTOR as usize } else { WORD };
        // Tiles of about one size, of whole words and parts.
        let even = |units: usize, most: usize, part: usize| {
            (units.div_ceil(units.div_ceil(most / self.unit)) * self.unit).next_multiple_of(part) / self.unit
        };
        let span_i = even(length_i, SHIFTED.i, WORD);
        // A tile may end up to a part before its span.
        let more = part / self.unit - 1;
        let span_o = even(length_o + more, SHIFTED.o - part, part);
        let mut launch = self.tiled(kernel, &[i], &[0], (span_i, span_o), 0);
        if let Parameters::Tile(tile) = &mut launch.parameters {
            tile.extent = (part / WORD) as u32;
            let rest = launch.blocks / (tile.tiles_i.length * tile.tiles_o.length);
            tile.tiles_o = Dim::new((tile.o.total + more as u32).div_ceil(tile.span_o), 0, 0);
            tile.along_i = u32::from(tile.tiles_i.length < tile.tiles_o.length);
            launch.blocks = rest * tile.tiles_i.length * tile.tiles_o.length;
        }
        let work = Work::Tile(self.chunk(&[i], SHIFTED.i / self.unit), self.chunk(&[0], SHIFTED.o / self.unit));
        Some(Candidate { launch, work })
    }

    /// Returns whether both sides can be walked in vectors of this many bytes.
    fn whole(&self, vector: usize, group_i: &[usize], group_o: &[usize]) -> bool {
        let (i, o) = (group_i[0], group_o[0]);
        let step = self.unit as i64;
        let others = |stride: fn(&Step) -> i64, beyond: usize, except: usize| {
            let dims = (0..self.dims.len()).filter(|d| *d != except).map(|d| stride(&self.dims[d]));
            dims.fold(beyond as i64, |bits, stride| bits | stride) % vector as i64 == 0
        };
        let adjacent = self.dims[i].from == step && self.dims[o].to == step;
        adjacent
            && others(|dim| dim.from, self.beyond.0, i)
            && others(|dim| dim.to, self.beyond.1, o)
            && [i, o].iter().all(|d| (self.dims[*d].length * self.unit).is_multiple_of(vector))
    }
}
