//! Which kernels copy a walk, and with which parameters: a pure function of the walk and of both addresses modulo 16.

mod boxes;
mod channels;
mod cost;
mod flat;
mod tiles;

use super::parameters::{Dim, Flat, Group, Sides, Tile, dims};
use super::table::Kernel;
use crate::copy::plan::{Dim as Step, Walk};
use cost::{Candidate, Chunks, Traffic, Work};
use smallvec::SmallVec;

/// The largest unit, and the alignment of vectors, in bytes.
const VECTOR: usize = 16;

/// The most units of one launch, so that every index fits into 31 bits.
pub(crate) const MOST_UNITS: usize = 1 << 31;

/// Rows of at least so many bytes are copied as they lie.
const LONG_ROW: usize = 512;

/// Bytes that a thread moves at once where units are smaller, and that the caches deliver at once.
const WORD: usize = 4;
const SECTOR: u64 = 32;

/// A unit that repeats fewer times does not fill a side of a tile.
const FEW_TIMES: usize = 12;

/// The most units of a tile that are kept together.
const LONGEST_RUN: usize = 2;

/// Copies of fewer bytes gain less in boxes than the first plan of a box takes: 60 µs.
const SMALL: usize = 256 << 10;

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

/// The launches that make a copy, the simplest first.
type Candidates = Vec<Candidate>;

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

/// Returns every launch that makes the copy, whatever is faster, also the box of a small one.
#[cfg(test)]
pub(super) fn candidates(walk: Walk, beyond: (usize, usize), flips: u128) -> Option<Vec<Launch>> {
    let pass = Pass::new(walk, beyond, flips)?;
    let boxed = if pass.nbytes() < SMALL { pass.boxed() } else { None };
    Some(pass.candidates().into_iter().chain(boxed).map(|candidate| candidate.launch).collect())
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

    /// Returns the launch that costs least.
    fn launch(self) -> Launch {
        let mut candidates = self.candidates();
        let units = self.in_units();
        let least = if candidates.len() > 1 {
            let traffic = Traffic::new(&units);
            let costs = candidates.iter().map(|candidate| candidate.cost(&traffic));
            costs.enumerate().min_by(|one, other| one.1.total_cmp(&other.1)).map_or(0, |(index, _)| index)
        } else {
            0
        };
        candidates.swap_remove(least).launch
    }

    fn candidates(&self) -> Candidates {
        let mut found = self.in_order();
        let (nbytes, unit) = (self.run * self.unit, self.unit as i64);
        if nbytes >= LONG_ROW || self.dims.is_empty() {
            return found;
        }
        if let Some(i) = self.fastest_of_source() {
            match i {
                0 => found.extend(self.beyond_few()),
                // What repeats in the target's own order is read from the cache.
                _ if self.dims[0].from == 0 => {}
                _ => {
                    found.extend(self.tiles(i));
                    let few = self.dims[0].length;
                    let is_run = self.unit <= 2 && self.run == 1 && few == LONGEST_RUN && self.dims[0].to == unit;
                    found.extend(self.split(1).or_else(|| if is_run { self.split(few) } else { None }));
                }
            }
        }
        if self.nbytes() >= SMALL {
            found.extend(self.boxed());
        }
        found
    }

    /// Returns the bytes that are copied.
    fn nbytes(&self) -> usize {
        self.dims.iter().fold(self.run * self.unit, |nbytes, dim| nbytes * dim.length)
    }

    /// Tiles beyond a few units that are the fastest on both sides, with gaps in the source.
    fn beyond_few(&self) -> Candidates {
        let mut pass = self.clone();
        let (few, unit) = (pass.dims.remove(0), self.unit as i64);
        let is_run = self.run == 1 && few.length <= LONGEST_RUN && few.to == unit;
        if !is_run || !(1..=2 * SECTOR as i64).contains(&few.from) {
            return Candidates::new();
        }
        (pass.run, pass.apart) = (few.length, (few.from / unit) as usize);
        match pass.fastest_of_source() {
            Some(i) if i > 0 => pass.tiles(i),
            _ => Candidates::new(),
        }
    }

    /// Returns the dimension that is the fastest of the source.
    fn fastest_of_source(&self) -> Option<usize> {
        let speed = |d: &usize| self.dims[*d].from.unsigned_abs();
        (0..self.dims.len()).filter(|d| speed(d) > 0).min_by_key(speed)
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
            pitch: self.unit as u32,
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
