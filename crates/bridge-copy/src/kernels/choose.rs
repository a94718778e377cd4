//! Which kernels copy a walk, and with which parameters: a pure function of the walk and of both addresses modulo 16.

mod channels;
mod tiles;

use super::parameters::{Dim, Flat, Group, Sides, Tile, dims};
use super::table::Kernel;
use crate::plan::{Dim as Step, Walk};
use smallvec::SmallVec;

/// The largest unit, and the alignment of vectors, in bytes.
const VECTOR: usize = 16;

/// The most units of one launch, so that every index fits into 31 bits.
pub(crate) const MOST_UNITS: usize = 1 << 31;

/// Rows of at least so many bytes are copied as a whole at any address, by the binary logarithm of the unit: into a target
/// without gaps, whose units can be gathered, and into others. Larger units take as long one by one.
const LONG_ROWS: [(usize, usize); 3] = [(128, 64), (128, 128), (usize::MAX, 256)];

/// Shorter rows are moved in tiles where the order changes.
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

/// Two large units with gaps between them are moved in tiles, and halves of one row are stored one by one, in copies of at
/// least so many bytes: less stays in the cache.
const LEAST_APART: usize = 10 << 20;

/// The same of the lines of the source that are next to each other in the target: units of 1 and 2 bytes are moved in tiles
/// where they reach over so many bytes.
const LEAST_PLANE: u64 = 512 << 10;

/// The most units of a row that are stored one by one where the next row is far.
const FEW: usize = 4;

/// Planes of more rows, or of at least so many items, are gathered by items.
const FEW_ROWS: usize = 3;
const SMALL_PLANE: usize = 7;

/// The least units of both dimensions of large units in a line of the cache that are not gathered.
const LEAST_OF_LINE: usize = 2304;

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
    let pass = Pass {
        unit,
        run: walk.unit / unit,
        apart: 1,
        dims: walk.dims.iter().rev().copied().collect(),
        from: walk.from,
        to: walk.to,
        beyond,
        flips,
    };
    let mut launches = Vec::new();
    pass.cut(&mut |piece| launches.push(piece.launch()));
    Some(launches)
}

impl Pass {
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
        let nbytes = self.run * self.unit;
        if let Some((gathered, other)) = LONG_ROWS.get(self.index())
            && nbytes >= if self.gathers().is_some() { *gathered } else { *other }
        {
            return self.rows();
        }
        if nbytes < SHORT_ROW
            && let Some(launch) = self.transposed()
        {
            return launch;
        }
        self.flat()
    }

    /// Rows that are contiguous on both sides.
    fn rows(&self) -> Launch {
        let nbytes = self.run * self.unit;
        // A row may begin anywhere in its first vector.
        let vectors = if self.aligned_to(|dim| dim.to, self.beyond.1, None) {
            nbytes.div_ceil(VECTOR)
        } else {
            (nbytes + 2 * VECTOR - 2) / VECTOR
        };
        let mut dims: Steps = [Step { length: vectors, from: 0, to: 0 }].into_iter().collect();
        dims.extend(self.dims.iter().copied());
        self.walked(ROWS[self.index()], 2, nbytes as i64, &dims)
    }

    /// Returns whether 16 divides the start and all strides of a side but that of one dimension.
    fn aligned_to(&self, stride: impl Fn(&Step) -> i64, beyond: usize, except: Option<usize>) -> bool {
        let counted = self.dims.iter().enumerate().filter(|(d, _)| Some(*d) != except);
        beyond == 0 && counted.fold(0, |bits, (_, dim)| bits | stride(dim)) % VECTOR as i64 == 0
    }

    /// The target in its own order.
    fn flat(mut self) -> Launch {
        let step = self.unit as i64;
        let (flat, each) = FLATS[self.index()];
        if self.run > 1 {
            self.dims.insert(0, Step { length: self.run, from: step, to: step });
            self.run = 1;
        }
        let Some(fastest) = self.dims.first().copied() else {
            let one = [Step { length: 1, from: 0, to: 0 }];
            return self.walked(flat, each, 0, &one);
        };
        // A sector of which one unit is used is read once for all places that the unit is repeated in.
        let repeats = self.dims.iter().position(|dim| dim.from == 0 && dim.length < LEAST_ACROSS);
        let is_alone = self.unit >= 4 && fastest.from.unsigned_abs() >= SECTOR && fastest.length >= LEAST_POINTS;
        if let Some(repeats) = repeats.filter(|_| is_alone && !self.is_cached()) {
            self.dims[..=repeats].rotate_right(1);
            return self.walked(flat, each, 0, &self.dims);
        }
        let (turned, per_vector) = (fastest.from == -step, VECTOR / self.unit);
        if let Some(turn) = TURNS.get(self.index())
            && turned && fastest.to == step && fastest.length.is_multiple_of(per_vector) && self.aligned_to(|dim| dim.to, self.beyond.1, Some(0))
            // The last unit of the first vector is the first of its memory.
            && self.aligned_to(|dim| dim.from, (self.beyond.0 + self.unit) % VECTOR, Some(0))
        {
            self.from -= (VECTOR - self.unit) as i64;
            let by = VECTOR as i64;
            self.dims[0] = Step { length: fastest.length / per_vector, from: -by, to: by };
            let dims = std::mem::take(&mut self.dims);
            return self.walked(*turn, 2, 0, &dims);
        }
        // Runs are adjacent already, and large units need no help.
        let is_run = self.unit >= 8 && fastest.from == step;
        if let Some((kernel, item, each)) =
            self.gathers().filter(|(_, item, _)| !is_run && !self.is_split(item / self.unit))
        {
            let units: usize = self.dims.iter().map(|dim| dim.length).product();
            return self.counted(kernel, each, units as i64, units.div_ceil(item / self.unit), &self.dims);
        }
        let extra = if self.is_without_gaps() { step } else { 0 };
        self.walked(flat, each, extra, &self.dims)
    }

    fn is_without_gaps(&self) -> bool {
        let run = (self.run * self.unit) as i64;
        self.dims.iter().try_fold(run, |end, dim| (dim.to == end).then(|| end * dim.length as i64)).is_some()
    }

    /// Returns the kernel that stores several units at once, with the bytes of an item and the items of a thread, where the
    /// target has no gaps.
    fn gathers(&self) -> Option<(Kernel, usize, u32)> {
        let found = GATHERS.get(self.index()).copied();
        found.filter(|(_, item, _)| self.is_without_gaps() && self.beyond.1.is_multiple_of(*item))
    }

    /// Returns whether units are faster stored one by one than in items of so many: halves of one row, a few units and large
    /// ones with gaps at places that are far from each other, and where most items are of several planes.
    fn is_split(&self, count: usize) -> bool {
        let (row, rows) = match &self.dims[..] {
            [] => return true,
            [_] => return self.unit == 2 && self.nbytes() >= LEAST_APART,
            [row, rows, ..] => (row, rows),
        };
        let step = row.from.unsigned_abs();
        let are_spread = row.length <= FEW || (self.unit >= 4 && step > 2 * self.unit as u64);
        let is_plane = row.length % count != 0
            && rows.length <= FEW_ROWS
            && row.length * rows.length < SMALL_PLANE * count
            && (self.unit >= 4 || row.length >= count);
        (are_spread && step <= 2 * SECTOR && rows.from.unsigned_abs() >= SECTOR) || (is_plane && self.dims.len() > 2)
    }

    /// Returns whether points of a few large units, which are next to each other along dimension `i`, are in a line of the
    /// cache.
    fn is_in_line(&self, i: usize) -> bool {
        let (points, channels) = (&self.dims[0], &self.dims[i]);
        i == 1 && points.from.unsigned_abs() <= LINE && points.length * channels.length < LEAST_OF_LINE
    }

    /// Returns the bytes that are copied.
    fn nbytes(&self) -> usize {
        self.dims.iter().fold(self.run * self.unit, |nbytes, dim| nbytes * dim.length)
    }

    fn walked(&self, kernel: Kernel, each: u32, extra: i64, steps: &[Step]) -> Launch {
        self.counted(kernel, each, extra, steps.iter().map(|step| step.length).product(), steps)
    }

    fn counted(&self, kernel: Kernel, each: u32, extra: i64, items: usize, steps: &[Step]) -> Launch {
        let (near, ndim) = (u16::from(fits_in_32_bits(steps)), steps.len() as u16);
        let flat = Flat { sides: self.sides(), extra, items: items as u32, ndim, near, dims: dims(steps) };
        let blocks = (items as u32).div_ceil(kernel.threads() * each);
        Launch { kernel, blocks, shared: 0, parameters: Parameters::Flat(Box::new(flat)) }
    }

    /// A change of order, if there is one: the fastest dimension of the source is not that of the target.
    fn transposed(&self) -> Option<Launch> {
        // What repeats is read from the cache.
        if self.dims.first()?.from == 0 {
            return None;
        }
        if let Some(launch) = self.mix() {
            return Some(launch);
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
        if self.unit >= 4 && (self.is_soon(i) || self.is_in_line(i)) {
            return None;
        }
        let few = self.dims[0].length;
        let is_run = self.unit <= 2 && self.run == 1 && few == 2 && self.dims[0].to == self.unit as i64;
        self.join()
            .or_else(|| self.split(1))
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

/// Returns whether all offsets fit into 32 bits, also those of one unit more in each dimension.
fn fits_in_32_bits(steps: &[Step]) -> bool {
    let reach = |stride: fn(&Step) -> i64| {
        let ends = steps.iter().map(|step| stride(step).unsigned_abs().saturating_mul(step.length as u64));
        ends.fold(0, u64::saturating_add)
    };
    reach(|step| step.from).max(reach(|step| step.to)) <= i32::MAX as u64
}

/// Bytes beyond a multiple of [`VECTOR`], after a step of `by` bytes.
fn moved(beyond: usize, by: i64) -> usize {
    (beyond as i64 + by).rem_euclid(VECTOR as i64) as usize
}

// By the binary logarithm of the unit.
/// With the units of a thread.
const FLATS: [(Kernel, u32); 5] =
    [(Kernel::Flat1, 4), (Kernel::Flat2, 4), (Kernel::Flat4, 4), (Kernel::Flat8, 4), (Kernel::Flat16, 2)];
/// With the bytes of an item, and the items of a thread.
const GATHERS: [(Kernel, usize, u32); 4] =
    [(Kernel::Gather1, 4, 4), (Kernel::Gather2, 8, 4), (Kernel::Gather4, 16, 2), (Kernel::Gather8, 16, 2)];
const TURNS: [Kernel; 4] = [Kernel::Turn1, Kernel::Turn2, Kernel::Turn4, Kernel::Turn8];
const ROWS: [Kernel; 3] = [Kernel::Rows1, Kernel::Rows2, Kernel::Rows4];
