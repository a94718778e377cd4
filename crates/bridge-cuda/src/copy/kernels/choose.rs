//! Which kernels copy a walk, and with which parameters: a pure function of the walk and of both addresses modulo 16.

mod boxes;
mod channels;
mod flat;
mod tiles;

use super::parameters::{Dim, Flat, Group, Sides, Tile, dims};
use super::table::Kernel;
use crate::copy::plan::{Dim as Step, Walk};
use smallvec::SmallVec;

/// The largest unit, and the alignment of vectors, in bytes.
const VECTOR: usize = 16;

/// The most units of one launch, so that every index fits into 31 bits.
pub(crate) const MOST_UNITS: usize = 1 << 31;

/// Rows of fewer bytes are moved in tiles where the order changes.
const SHORT_ROW: usize = 64;

/// Repeated units of at least 8 bytes, and smaller ones, are read where they lie up to so many bytes: they stay in the
/// caches.
const CACHED_LARGE: usize = 4 << 20;
const CACHED_SMALL: usize = 4 << 10;

/// The least points of a row that is copied together with its channels or with what repeats.
const LEAST_POINTS: usize = 64;

/// Bytes that a thread moves at once where units are smaller.
const WORD: usize = 4;

/// Bytes that the memory delivers at once, and those of a line of the caches.
const SECTOR: u64 = 32;
const LINE: u64 = 128;

/// The least units across a tile: with fewer most of it is empty.
const LEAST_ACROSS: usize = 12;

/// The most units that a tile keeps together.
const LONGEST_RUN: usize = 2;

/// Copies of fewer bytes stay in the cache: pairs of large units with gaps between them are not moved in tiles there, and
/// halves of one row not stored one by one.
const LEAST_APART: usize = 10 << 20;

/// Lines of the source that are next to each other in the target stay in the cache where they reach over fewer bytes.
const LEAST_PLANE: u64 = 512 << 10;

/// Points in one line of the cache are gathered where the two fastest dimensions have fewer units of 4 bytes and more.
const LEAST_OF_LINE: usize = 2304;

/// Copies of fewer bytes gain less in boxes than the first plan of a box takes: 60 µs.
const SMALL: usize = 256 << 10;

/// Kernels than which boxes are faster, from how many bytes on, and whether only where units of the source are adjacent.
const BOXED: [(Kernel, usize, bool); 11] = [
    (Kernel::Shifted1, SMALL, true),
    (Kernel::Shifted2, SMALL, true),
    (Kernel::Tile2, SMALL, true),
    (Kernel::Flat1, 2 << 20, false),
    (Kernel::Flat2, 2 << 20, false),
    (Kernel::Flat4, LARGE, false),
    (Kernel::Gather1, LARGE, true),
    (Kernel::Gather2, LARGE, true),
    (Kernel::Split1, LARGE, false),
    (Kernel::Split2, LARGE, false),
    (Kernel::Split4, LARGE, false),
];

/// Lines of at most so many bytes are read in boxes as a whole, also where these end within sectors of the target.
const SHORT_LINE: usize = 256;

/// Boxes lose where so many bytes are read for each that is copied: their lines are short.
const MOST_READ: usize = 3;

/// Copies of more bytes are far beyond the caches.
const LARGE: usize = 64 << 20;

/// A launch, with offsets instead of addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Launch {
    pub kernel: Kernel,
    pub blocks: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared: u32,
    pub parameters: Parameters,
}

/// The parameters of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Parameters {
    Flat(Box<Flat>),
    Tile(Box<Tile>),
    Box(Box<super::parameters::Box>),
}

/// Dimensions, the fastest first.
type Steps = SmallVec<[Step; 6]>;

/// Units, and the dimensions to walk with them.
#[derive(Debug, Clone)]
struct Pass {
    /// Bytes of a unit: a power of two, at most [`VECTOR`], that divides all strides and both addresses.
    unit: usize,
    /// Units at each index of `dims` that are adjacent in the target, and in the source `apart` units from each other.
    run: usize,
    apart: usize,
    /// The fastest of the target first.
    dims: Steps,
    /// Bytes from the first elements.
    from: i64,
    to: i64,
    /// Bytes by which the first units are beyond a multiple of [`VECTOR`].
    beyond: (usize, usize),
    /// An element, repeated over a vector.
    flips: u128,
}

/// Returns the launches for a walk whose first elements are at addresses that are `beyond` multiples of 16 by so many
/// bytes. Returns `None` where bits are to be flipped in elements that are not aligned.
pub(crate) fn choose(walk: Walk, beyond: (usize, usize), flips: u128) -> Option<Vec<Launch>> {
    let mut launches = Vec::new();
    Pass::new(walk, beyond, flips)?.cut(&mut |piece| launches.push(piece.launch()));
    Some(launches)
}

/// Returns the launch in boxes, if there is one, whatever is faster.
#[cfg(test)]
pub(super) fn boxed(walk: Walk, beyond: (usize, usize), flips: u128) -> Option<Launch> {
    Pass::new(walk, beyond, flips)?.boxed().map(|boxed| boxed.launch)
}

impl Pass {
    fn new(walk: Walk, beyond: (usize, usize), flips: u128) -> Option<Self> {
        let itemsize = walk.unit;
        // Elements of other sizes than a power of two have no sign to flip.
        let flips = (0..VECTOR).step_by(itemsize).fold(0, |all, at| all | flips << (8 * at));
        let walk = walk.widen();
        let beyond = (moved(beyond.0, walk.from), moved(beyond.1, walk.to));
        let strides = walk.dims.iter().flat_map(|dim| [dim.from, dim.to]);
        let bits = strides.fold((VECTOR | walk.unit | beyond.0 | beyond.1) as i64, |bits, stride| bits | stride);
        let unit = 1 << bits.trailing_zeros();
        if flips != 0 && unit % itemsize != 0 {
            return None;
        }
        Some(Self {
            unit,
            run: walk.unit / unit,
            apart: 1,
            dims: walk.dims.iter().rev().copied().collect(),
            from: walk.from,
            to: walk.to,
            beyond,
            flips,
        })
    }

    /// Calls `each` with pieces of at most [`MOST_UNITS`] units.
    fn cut(mut self, each: &mut impl FnMut(Pass)) {
        let units = self.dims.iter().fold(self.run, |units, dim| units.saturating_mul(dim.length));
        if units < MOST_UNITS {
            return each(self);
        }
        let step = self.unit as i64;
        let outer =
            self.dims.pop().unwrap_or(Step { length: std::mem::replace(&mut self.run, 1), from: step, to: step });
        let inner = units / outer.length;
        // Whole vectors, so that every piece of a run is aligned as the first.
        let most = ((MOST_UNITS - 1) / inner.max(1)).clamp(1, outer.length);
        let most = if most > VECTOR { most - most % VECTOR } else { most };
        for first in (0..outer.length).step_by(most) {
            let mut piece = self.clone();
            let length = most.min(outer.length - first);
            let (from, to) = (first as i64 * outer.from, first as i64 * outer.to);
            (piece.from, piece.to) = (piece.from + from, piece.to + to);
            piece.beyond = (moved(self.beyond.0, from), moved(self.beyond.1, to));
            if piece.dims.is_empty() && piece.run == 1 && (outer.from, outer.to) == (step, step) {
                piece.run = length;
            } else if length > 1 {
                piece.dims.push(Step { length, ..outer });
            }
            piece.cut(each);
        }
    }

    /// The binary logarithm of the unit, by which tables list kernels.
    fn index(&self) -> usize {
        self.unit.trailing_zeros() as usize
    }

    fn sides(&self) -> Sides {
        Sides { from: self.from, to: self.to, flips: self.flips }
    }

    fn launch(self) -> Launch {
        if let Some(launch) = self.rows() {
            return launch;
        }
        let transposed = if self.run * self.unit < SHORT_ROW { self.transposed() } else { None };
        let launch = transposed.unwrap_or_else(|| self.clone().flat());
        self.in_place_of(launch.kernel).unwrap_or(launch)
    }

    /// A copy in boxes where that is faster than by a kernel.
    fn in_place_of(&self, kernel: Kernel) -> Option<Launch> {
        let (_, least, dense) = BOXED.iter().find(|(slower, ..)| *slower == kernel)?;
        let adjacent = self.dims.iter().find(|dim| dim.from.unsigned_abs() == self.unit as u64);
        let is_dense = self.run > 1 && self.apart == 1 || adjacent.is_some();
        if self.nbytes() < *least || *dense && !is_dense {
            return None;
        }
        let boxed = self.boxed()?;
        let loses = match kernel {
            _ if boxed.reads >= MOST_READ => true,
            Kernel::Shifted1 | Kernel::Shifted2 => {
                boxed.cuts_sectors && adjacent.is_some_and(|dim| dim.length * self.unit > SHORT_LINE)
            }
            Kernel::Tile2 => boxed.cuts_sectors,
            _ => boxed.cuts_rows,
        };
        (!loses).then_some(boxed.launch)
    }

    /// Returns whether the target's fastest dimension steps by at most a line of the cache, and its next one, which is `i`, is
    /// the fastest of the source, with few units in both.
    fn is_in_line(&self, i: usize) -> bool {
        let (points, channels) = (&self.dims[0], &self.dims[i]);
        i == 1 && points.from.unsigned_abs() <= LINE && points.length * channels.length < LEAST_OF_LINE
    }

    /// Returns the bytes that are copied.
    fn nbytes(&self) -> usize {
        self.dims.iter().fold(self.run * self.unit, |nbytes, dim| nbytes * dim.length)
    }

    /// A change of order, if there is one: the fastest dimension of the source is not that of the target.
    fn transposed(&self) -> Option<Launch> {
        // What repeats is read from the cache.
        if self.dims.first()?.from == 0 {
            return None;
        }
        if self.is_mixed()
            && let Some(boxed) = self.boxed()
        {
            return Some(boxed.launch);
        }
        let mut i = self.fastest_of_source()?;
        // One load of a repeated unit reads one sector, whatever lies next to it.
        if self.dims[i].from.unsigned_abs() >= SECTOR {
            let repeats = |d: &usize| self.dims[*d].from == 0 && self.dims[*d].length >= LEAST_ACROSS;
            i = (0..self.dims.len()).find(repeats).unwrap_or(i);
        }
        // Vectors lose little in rows of a few, and where they are close to each other.
        let lose_little = self.dims[0].length < 16 || self.dims[0].from.unsigned_abs() <= 2 * SECTOR;
        let is_alone = self.dims[i].from.unsigned_abs() >= LINE;
        if (self.unit == VECTOR && (lose_little || is_alone)) || self.is_cached() {
            return None;
        }
        if i == 0 {
            return self.beyond_few();
        }
        if self.unit >= 4 && (self.is_still_cached(i) || self.is_in_line(i)) {
            return None;
        }
        let few = self.dims[0].length;
        let is_run = self.unit <= 2 && self.run == 1 && few == 2 && self.dims[0].to == self.unit as i64;
        if self.is_joined()
            && let Some(boxed) = self.boxed()
        {
            return Some(boxed.launch);
        }
        self.split(1)
            .or_else(|| if is_run { self.split(few) } else { None })
            .or_else(|| if self.is_near() { None } else { self.forwards(1).tiles(i) })
    }

    /// Returns whether the source repeats units that are few enough for the caches. Many in a row that are far from each
    /// other take too much of what the caches deliver.
    fn is_cached(&self) -> bool {
        let is_dense = self.unit == VECTOR || self.dims[0].length * self.unit <= 2 * SECTOR as usize;
        let most = if self.unit >= 8 && is_dense { CACHED_LARGE } else { CACHED_SMALL };
        let moving = self.dims.iter().filter(|dim| dim.from != 0);
        moving.clone().count() < self.dims.len()
            && moving.fold(self.run * self.unit, |nbytes, dim| nbytes * dim.length) <= most
    }

    /// A change of order beyond a few units that are the fastest on both sides, with gaps in the source.
    fn beyond_few(&self) -> Option<Launch> {
        let mut pass = self.clone();
        let (few, unit) = (pass.dims.remove(0), self.unit as i64);
        let least = if self.unit >= 8 { LEAST_APART } else { 0 };
        let is_run = self.run == 1 && few.length <= LONGEST_RUN && few.to == unit && self.nbytes() >= least;
        let i = pass.fastest_of_source().filter(|i| *i > 0)?;
        let next = pass.dims[0];
        let is_wide = pass.dims[i].length.min(next.length) >= LEAST_ACROSS;
        let is_far = next.from.unsigned_abs() * next.length as u64 >= LEAST_PLANE;
        if !is_run || !is_wide || !is_far || !(1..=2 * SECTOR as i64).contains(&few.from) {
            return None;
        }
        (pass.run, pass.apart) = (few.length, (few.from / unit) as usize);
        pass.forwards(1).tiles(i)
    }

    /// Returns the dimension that is the fastest of the source.
    fn fastest_of_source(&self) -> Option<usize> {
        let speed = |d: &usize| self.dims[*d].from.unsigned_abs();
        (0..self.dims.len()).filter(|d| speed(d) > 0).min_by_key(speed)
    }

    /// Returns whether the target's fastest dimension takes small units from sectors that it mostly uses: gathering them
    /// is faster than small units in tiles.
    fn is_near(&self) -> bool {
        let most = if self.unit == 4 { SECTOR } else { 4 * self.unit as u64 };
        self.unit <= 4 && self.dims[0].from.unsigned_abs() <= most
    }

    /// The same with the source forwards in all dimensions but the first `kept`: the target may run backwards then.
    fn forwards(&self, kept: usize) -> Self {
        let mut pass = self.clone();
        for dim in pass.dims.iter_mut().skip(kept).filter(|dim| dim.from < 0) {
            let last = dim.length as i64 - 1;
            let (from, to) = (last * dim.from, last * dim.to);
            (dim.from, dim.to) = (-dim.from, -dim.to);
            (pass.from, pass.to) = (pass.from + from, pass.to + to);
            pass.beyond = (moved(pass.beyond.0, from), moved(pass.beyond.1, to));
        }
        pass
    }

    fn tiled(&self, kernel: Kernel, i: &[usize], o: &[usize], (span_i, span_o): (usize, usize), shared: u32) -> Launch {
        let group = |chosen: &[usize]| {
            let steps: SmallVec<[Step; 4]> = chosen.iter().map(|d| self.dims[*d]).collect();
            let total = steps.iter().map(|step| step.length as u32).product();
            Group { total, ndim: steps.len() as u32, dims: dims(&steps) }
        };
        let rest: Steps =
            (0..self.dims.len()).filter(|d| !i.contains(d) && !o.contains(d)).map(|d| self.dims[d]).collect();
        let (i, o) = (group(i), group(o));
        let tiles = |group: &Group, span: usize| Dim::new(group.total.div_ceil(span as u32), 0, 0);
        let (tiles_i, tiles_o) = (tiles(&i, span_i), tiles(&o, span_o));
        let blocks = rest.iter().fold(tiles_i.length * tiles_o.length, |blocks, step| blocks * step.length as u32);
        let (span_i, span_o) = (span_i as u32, span_o as u32);
        let (run, ndim, rest) = (self.run as u32, rest.len() as u32, dims(&rest));
        let tile = Tile {
            sides: self.sides(),
            run,
            pitch: 0,
            extent: self.apart as u32,
            pitches: Dim::default(),
            span_i,
            span_o,
            ndim,
            along_i: 0,
            channels: 0,
            tiles_i,
            tiles_o,
            i,
            o,
            rest,
        };
        Launch { kernel, blocks, shared, parameters: Parameters::Tile(Box::new(tile)) }
    }
}

/// Bytes beyond a multiple of [`VECTOR`], after a step of `by` bytes.
fn moved(beyond: usize, by: i64) -> usize {
    (beyond as i64 + by).rem_euclid(VECTOR as i64) as usize
}
