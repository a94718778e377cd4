//! Tiles, where the fastest dimension of the source is not that of the target.

use super::{LEAST_ACROSS, LEAST_PLANE, LONGEST_RUN, Launch, Parameters, Pass, SECTOR, Step, VECTOR, WORD};
use crate::copy::kernels::parameters::{Dim, Group, Tile};
use crate::copy::kernels::table::{KERNELS, Kernel};
use smallvec::SmallVec;
use std::ops::Range;

/// Tiles of small units are at least one part in so many full.
const FULL: usize = 8;

/// Units of 8 and 16 bytes, and runs of small ones, are read from the cache where their neighbours follow after at most so
/// many places. Copies of units of 8 and 16 bytes that have at most so many bytes stay in the cache, with more places.
const LONGEST_CACHED: usize = 16;
const CACHED_WHOLE: [(usize, usize); 3] = [(6 << 20, 200), (14 << 20, 56), (20 << 20, 24)];

/// The same for units of 4 bytes.
const LONGEST_CACHED_WORDS: usize = 32;

/// Where the lines of the source are near each other and no vectors fit, halves are gathered up to so many places in tiles
/// with so many bytes at the shorter side, and bytes where no words fit.
const LONGEST_CACHED_BYTES: usize = 96;
const LONGEST_CACHED_HALVES: usize = 1024;
const SHORT_HALVES: Range<usize> = 62..128;

/// The most bytes of a pixel, and the least bytes of a row of pixels.
const LONGEST_PIXEL: usize = 7;
const LEAST_OF_PIXELS: usize = 48;

/// The least bytes across a tile of `shifted`, and the most: of the source's rows without a word for the neighbours, and
/// of the target's with a part before the tile.
const SHIFTED_LEAST: usize = 62;
const SHIFTED_I: usize = 31 * WORD;
const SHIFTED_O: usize = 64 * WORD;

/// It writes whole sectors where a copy and a row of its target have at least so many bytes. Less stays in the cache, which
/// joins the parts of a sector.
const SHIFTED_SECTORS: usize = 24 << 20;
const SHIFTED_ROW: usize = 128;

// By the binary logarithm of the unit; bytes are copied in boxes.
const TILES: [Kernel; 5] = [Kernel::Box, Kernel::Tile2, Kernel::Tile4, Kernel::Tile8, Kernel::Tile16];
const SIDES: [usize; 5] = [128, 64, 64, 64, 32];
const SHIFTED: [Kernel; 2] = [Kernel::Shifted1, Kernel::Shifted2];

/// A kernel for sides in whole vectors.
struct Whole {
    kernel: Kernel,
    /// Bytes of a unit.
    unit: usize,
    /// Bytes of a vector.
    vector: usize,
    /// Spans of a tile in both groups, in units.
    span: usize,
    /// The least number of tiles across in both groups.
    least: usize,
}

/// The best first.
const WHOLE: &[Whole] = &[
    Whole { kernel: Kernel::Vectors1Wide, unit: 1, vector: 16, span: 256, least: 4 },
    Whole { kernel: Kernel::Vectors1, unit: 1, vector: 16, span: 128, least: 0 },
    Whole { kernel: Kernel::Vectors2Wide, unit: 2, vector: 16, span: 128, least: 4 },
    Whole { kernel: Kernel::Vectors2, unit: 2, vector: 16, span: 64, least: 0 },
    Whole { kernel: Kernel::Vectors4, unit: 4, vector: 16, span: 64, least: 0 },
    Whole { kernel: Kernel::Words1, unit: 1, vector: 4, span: 128, least: 0 },
    Whole { kernel: Kernel::Words2, unit: 2, vector: 4, span: 128, least: 0 },
];

impl Pass {
    /// Tiles of the dimension that is fastest in the source and of the one that is fastest in the target, and of their
    /// next ones where these are short.
    pub(super) fn tiles(&self, i: usize) -> Option<Launch> {
        let side = SIDES[self.index()];
        if self.is_of_pixels(i)
            && let Some(boxed) = self.boxed()
        {
            return Some(boxed.launch);
        }
        // Runs fill a tile worse, the longer they are. Those of large units are read as they lie.
        let longest = if self.unit < VECTOR / 2 || self.apart > 1 { LONGEST_RUN } else { 1 };
        if self.run > longest || self.is_still_cached(i) {
            return None;
        }
        let across = side / self.run;
        let (group_i, group_o) = self.groups(i, across);
        let total = |group: &[usize]| group.iter().map(|d| self.dims[*d].length).product::<usize>();
        let across_of = |group: &[usize]| total(group).min(across);
        let narrow = self.run * across_of(&group_i).min(across_of(&group_o)) < LEAST_ACROSS;
        // Small units are better gathered than moved in tiles that are mostly empty.
        let filled = across_of(&group_i) * across_of(&group_o);
        let empty = self.unit <= 2 && filled * FULL <= across * across;
        if narrow || empty || self.dims.len() - group_i.len() - group_o.len() > Tile::MOST {
            return None;
        }
        let least = total(&group_i).min(total(&group_o));
        let fits = |whole: &&Whole| {
            (whole.unit, 1) == (self.unit, self.run)
                && least >= whole.least * whole.span
                && self.whole(whole.vector, &group_i, &group_o)
        };
        let whole = WHOLE.iter().find(fits);
        // Pieces of less than a sector are better gathered where the next ones are near.
        let (fastest, next) = (&self.dims[0], self.dims.get(1));
        let lines_are_near = fastest.from.unsigned_abs() * (fastest.length as u64) < LEAST_PLANE;
        let is_piece = self.run == 1 && (fastest.length * self.unit) < SECTOR as usize;
        let nearest = if lines_are_near { 2 * SECTOR } else { SECTOR };
        if whole.is_none() && is_piece && next.is_some_and(|next| next.from.unsigned_abs() < nearest) {
            return None;
        }
        let in_words = |whole: &Whole| {
            let spans = (whole.span, whole.span);
            self.tiled(whole.kernel, &group_i, &group_o, spans, KERNELS[whole.kernel as usize].1)
        };
        if let Some(whole) = whole.filter(|whole| whole.vector == VECTOR) {
            return Some(in_words(whole));
        }
        // Small adjacent units are gathered where lines are near: halves where a side is short, and bytes without words.
        let (until, is_dense) = (self.until(i), lines_are_near && self.dims[i].from == self.unit as i64);
        let side = self.unit * self.dims[i].length.min(fastest.length);
        if self.unit == 2 && is_dense && until <= LONGEST_CACHED_HALVES && SHORT_HALVES.contains(&side) {
            return None;
        }
        let launch = self.shifted(i).or_else(|| whole.map(in_words));
        if launch.is_none() && self.unit == 1 && is_dense && until <= LONGEST_CACHED_BYTES {
            return None;
        }
        if launch.is_none() && self.unit == 1 {
            return self.boxed().map(|boxed| boxed.launch);
        }
        launch.or_else(|| Some(self.tiled(TILES[self.index()], &group_i, &group_o, (across, across), 0)))
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

    /// Returns whether a neighbour along dimension `i` follows so soon that it is still in the cache.
    pub(super) fn is_still_cached(&self, i: usize) -> bool {
        let whole = || CACHED_WHOLE.iter().find(|(whole, _)| self.nbytes() <= *whole).map(|(_, most)| *most);
        let most = match self.unit {
            4 => LONGEST_CACHED_WORDS,
            8.. => whole().unwrap_or(LONGEST_CACHED),
            _ if self.run > 1 => LONGEST_CACHED,
            _ => return false,
        };
        self.until(i) <= most
    }

    /// Returns after how many places of the target a neighbour along dimension `i` follows.
    fn until(&self, i: usize) -> usize {
        self.dims[..i].iter().map(|dim| dim.length).product()
    }

    /// Returns whether short runs of small units, which are adjacent on both sides, change their order.
    fn is_of_pixels(&self, i: usize) -> bool {
        let nbytes = self.run * self.unit;
        let (along_i, along_o) = (self.dims[i], self.dims[0]);
        self.unit <= 2
            && (2..=LONGEST_PIXEL / self.unit).contains(&self.run)
            && self.apart == 1
            && (along_i.from, along_o.to) == (nbytes as i64, nbytes as i64)
            && along_i.length.min(along_o.length) * nbytes >= LEAST_OF_PIXELS
            && self.until(i) > LONGEST_CACHED
    }

    /// Tiles of small adjacent units at any address.
    fn shifted(&self, i: usize) -> Option<Launch> {
        let kernel = *SHIFTED.get(self.index())?;
        let (length_i, length_o) = (self.dims[i].length, self.dims[0].length);
        let fills = length_i.min(length_o) * self.unit >= SHIFTED_LEAST;
        if !fills || self.run > 1 || !self.whole(self.unit, &[i], &[0]) {
            return None;
        }
        let nbytes = self.dims.iter().fold(self.unit, |nbytes, dim| nbytes * dim.length);
        let whole = nbytes >= SHIFTED_SECTORS && length_o * self.unit >= SHIFTED_ROW;
        let part = if whole { SECTOR as usize } else { WORD };
        // Tiles of about one size, of whole words and parts.
        let even = |units: usize, most: usize, part: usize| {
            (units.div_ceil(units.div_ceil(most / self.unit)) * self.unit).next_multiple_of(part) / self.unit
        };
        let span_i = even(length_i, SHIFTED_I, WORD);
        // A tile may end up to a part before its span.
        let more = part / self.unit - 1;
        let span_o = even(length_o + more, SHIFTED_O - part, part);
        let mut launch = self.tiled(kernel, &[i], &[0], (span_i, span_o), 0);
        if let Parameters::Tile(tile) = &mut launch.parameters {
            tile.extent = (part / WORD) as u32;
            let rest = launch.blocks / (tile.tiles_i.length * tile.tiles_o.length);
            tile.tiles_o = Dim::new((tile.o.total + more as u32).div_ceil(tile.span_o), 0, 0);
            tile.along_i = u32::from(tile.tiles_i.length < tile.tiles_o.length);
            launch.blocks = rest * tile.tiles_i.length * tile.tiles_o.length;
        }
        Some(launch)
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
