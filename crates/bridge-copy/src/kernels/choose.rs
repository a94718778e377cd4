//! Which kernels copy a walk, and with which parameters: a pure function of the walk and of both addresses modulo 16.

use super::parameters::{Dim, Flat, Group, Sides, Tile, dims};
use super::table::{KERNELS, Kernel};
use crate::plan::{Dim as Step, Walk};
use smallvec::SmallVec;

/// The largest unit, and the alignment of vectors, in bytes.
const VECTOR: usize = 16;

/// The most units of one launch, so that every index fits into 31 bits.
pub(crate) const MOST_UNITS: usize = 1 << 31;

/// Rows of at least so many bytes are copied as a whole at any address, by the binary logarithm of the unit.
const LONG_ROWS: [usize; 4] = [64, 128, 256, 512];

/// Shorter rows are moved in tiles where the order changes.
const SHORT_ROW: usize = 64;

/// The most channels of `split` and `join`.
const MOST_CHANNELS: usize = 32;

/// The least points of a row, and the most bytes from one point to the next on the dense side, for these.
const LEAST_POINTS: usize = 64;
const LONGEST_PITCH: i64 = 256;

/// The most rows of a block of these, and the least points of a row where a block takes several.
const MOST_ROWS: usize = 256;
const LEAST_SHORT: usize = 16;

/// Repeated units of at least 8 bytes, and smaller ones, are read where they lie up to so many bytes: they stay in the
/// caches.
const CACHED_LARGE: usize = 4 << 20;
const CACHED_SMALL: usize = 4 << 10;

/// The least units of a row of points with their channels: with fewer most threads of a block have nothing to do.
const LEAST_UNITS: usize = 512;

/// The least and the most bytes of a block of these.
const LEAST_CHUNK: usize = 1 << 10;
const SPLIT: usize = 16 << 10;
const JOINED: usize = 32 << 10;

/// The most units of a point of `mix`, and the least and the most bytes of a block.
const MIXED: usize = 1024;
const LEAST_MIXED: usize = 4 << 10;
const MOST_MIXED: usize = 16 << 10;

/// The points of a row of which a thread of `split` and `join` takes several, by the binary logarithm of the unit.
const FULL_ROW: [usize; 4] = [4096, 2048, 2048, 1024];

/// Bytes that the memory delivers at once.
const SECTOR: u64 = 32;

/// The least units across a tile: with fewer most of it is empty.
const LEAST_ACROSS: usize = 12;

/// Tiles of small units are at least one part in so many full.
const FULL: usize = 8;

/// The most units that a tile keeps together.
const LONGEST_RUN: usize = 4;

/// Bytes of what `shifted` moves at once.
const WORD: usize = 4;

/// The least bytes across a tile of `shifted`, and the most: of the source's rows without a word for the neighbours, and
/// of the target's with a part before the tile.
const SHIFTED_LEAST: usize = 62;
const SHIFTED_I: usize = 31 * WORD;
const SHIFTED_O: usize = 64 * WORD;

/// It writes whole sectors where a copy and a row of its target have at least so many bytes. Less stays in the cache, which
/// joins the parts of a sector.
const SHIFTED_SECTORS: usize = 24 << 20;
const SHIFTED_ROW: usize = 128;

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
        if LONG_ROWS.get(self.index()).is_some_and(|long| nbytes >= *long) {
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
        if self.run > 1 {
            self.dims.insert(0, Step { length: self.run, from: step, to: step });
            self.run = 1;
        }
        let Some(fastest) = self.dims.first().copied() else {
            let one = [Step { length: 1, from: 0, to: 0 }];
            return self.walked(FLATS[self.index()], 4, 0, &one);
        };
        // A sector of which one unit is used is read once for all places that the unit is repeated in.
        let repeats = self.dims.iter().position(|dim| dim.from == 0 && dim.length < LEAST_ACROSS);
        let is_alone = self.unit >= 4 && fastest.from.unsigned_abs() >= SECTOR && fastest.length >= LEAST_POINTS;
        if let Some(repeats) = repeats.filter(|_| is_alone && !self.is_cached()) {
            self.dims[..=repeats].rotate_right(1);
            return self.walked(FLATS[self.index()], 4, 0, &self.dims);
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
        // A target without gaps takes several units at once.
        let ends = self.dims.iter().try_fold(step, |end, dim| (dim.to == end).then(|| end * dim.length as i64));
        // Runs are adjacent already, and large units need no help.
        let gathers = self.unit < 8 || fastest.from != step;
        if let Some((kernel, item, each)) = GATHERS.get(self.index())
            && ends.is_some()
            && gathers
            && self.beyond.1.is_multiple_of(*item)
        {
            let units: usize = self.dims.iter().map(|dim| dim.length).product();
            let dims = std::mem::take(&mut self.dims);
            return self.counted(*kernel, *each, units as i64, units.div_ceil(item / self.unit), &dims);
        }
        let extra = if ends.is_some() { step } else { 0 };
        self.walked(FLATS[self.index()], 4, extra, &self.dims)
    }

    fn walked(&self, kernel: Kernel, each: u32, extra: i64, steps: &[Step]) -> Launch {
        self.counted(kernel, each, extra, steps.iter().map(|step| step.length).product(), steps)
    }

    fn counted(&self, kernel: Kernel, each: u32, extra: i64, items: usize, steps: &[Step]) -> Launch {
        let flat =
            Flat { sides: self.sides(), extra, items: items as u32, ndim: steps.len() as u32, dims: dims(steps) };
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
        // Vectors lose little in rows of a few.
        if (self.unit == VECTOR && self.dims[0].length < 16) || self.is_cached() {
            return None;
        }
        if i == 0 {
            return self.beyond_few();
        }
        let few = self.dims[0].length;
        let is_run = self.run == 1 && few <= LONGEST_RUN && self.dims[0].to == self.unit as i64;
        let splits = |run: usize| self.forwards(0).split(run, SPLITS, SPLIT, |dim| dim.from, |dim| dim.to);
        self.split(1, JOINS, JOINED, |dim| dim.to, |dim| dim.from)
            .or_else(|| splits(1))
            .or_else(|| if is_run { splits(few) } else { None })
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
        let is_run = self.run == 1 && few.length <= LONGEST_RUN && few.to == unit;
        let i = pass.fastest_of_source().filter(|i| *i > 0)?;
        let is_wide = pass.dims[i].length.min(pass.dims[0].length) >= LEAST_ACROSS;
        if !is_run || !is_wide || !(1..=2 * SECTOR as i64).contains(&few.from) {
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
        self.unit <= 4 && self.dims[0].from.abs() <= 4 * self.unit as i64
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

    /// A few channels close to each other for each point on one side, a row of points for each on the other. The first
    /// channels may be a `run`, which is adjacent on both.
    fn split(
        &self,
        run: usize,
        kernels: [Kernel; 4],
        chunk: usize,
        dense: fn(&Step) -> i64,
        row: fn(&Step) -> i64,
    ) -> Option<Launch> {
        let (unit, joins) = (self.unit as i64, kernels == JOINS);
        // Large units lose little where they are read as they lie: runs, and what repeats and is in the cache.
        let repeats = self.dims.iter().any(|dim| dim.from == 0);
        if self.unit == VECTOR || (self.unit == VECTOR / 2 && (self.run > 1 || repeats)) {
            return None;
        }
        if self.run > 1 {
            let mut pass = self.clone();
            pass.dims.insert(0, Step { length: std::mem::replace(&mut pass.run, 1), from: unit, to: unit });
            return pass.split(self.run, kernels, chunk, dense, row);
        }
        // The points run fastest in the row, and come next after the channels on the dense side.
        // A dimension that repeats is not a row.
        let moving = (usize::from(run > 1)..self.dims.len()).filter(|d| row(&self.dims[*d]) != 0);
        let points = moving.min_by_key(|d| row(&self.dims[*d]).abs())?;
        let pitch = dense(&self.dims[points]);
        let channels: SmallVec<[usize; 4]> =
            (0..self.dims.len()).filter(|d| dense(&self.dims[*d]).abs() < pitch).collect();
        let count = channels.iter().fold(1, |count: usize, d| count.saturating_mul(self.dims[*d].length));
        let ends = channels.iter().map(|d| dense(&self.dims[*d]) * (self.dims[*d].length as i64 - 1));
        let extent = ends.clone().sum::<i64>() + unit;
        let fits = (2..=MOST_CHANNELS).contains(&count)
            && channels.len() <= Group::MOST
            && ends.clone().all(|end| end >= 0)
            && extent <= pitch
            && pitch <= LONGEST_PITCH;
        // Only a target without gaps is written.
        let whole = !joins || (extent == pitch && count as i64 * unit == pitch);
        let length = self.dims[points].length;
        let step = row(&self.dims[points]).abs();
        if !fits || !whole || step > 2 * unit * run as i64 {
            return None;
        }
        // Short rows: a block takes several, of the dimensions that follow on the dense side. A source may have small
        // gaps between them.
        let row_bytes = length * pitch as usize;
        let (mut lines, mut rows, mut stride) = (channels.clone(), 1, row_bytes as i64);
        if row_bytes <= chunk / 4 && (step == unit || !joins && self.unit < VECTOR / 2) {
            while lines.len() < Group::MOST {
                let end = stride * rows as i64;
                let most = if joins || rows > 1 { end } else { end + end / 4 };
                let follows =
                    |d: &usize| *d != points && !lines.contains(d) && (end..=most).contains(&dense(&self.dims[*d]));
                let Some(next) = (0..self.dims.len()).find(follows) else { break };
                if rows == 1 {
                    stride = dense(&self.dims[next]);
                }
                rows *= self.dims[next].length;
                lines.push(next);
            }
        }
        let each = rows.min(chunk / stride as usize).min(MOST_ROWS / count);
        let several = each > 1 && length >= LEAST_SHORT;
        let (taken, least) = if several { (each * length, LEAST_SHORT) } else { (length, LEAST_POINTS) };
        if length < least || taken * (pitch as usize) < LEAST_CHUNK || taken * count < LEAST_UNITS {
            return None;
        }
        let most = (chunk / pitch as usize).min(4096 / self.unit.min(2));
        let (group, spans, nbytes) = if several {
            (&lines, (each * count, length), each * stride as usize)
        } else {
            let full = 1 << most.ilog2();
            // Threads that have one row each need a power of two. Few blocks of other rows are about equal.
            let blocks = length.div_ceil(most - most % VECTOR);
            let even = length.div_ceil(blocks).next_multiple_of(VECTOR);
            let span = if length.min(full) >= FULL_ROW[self.index()] || blocks > 4 { full } else { even };
            (&channels, (count, span), span * pitch as usize)
        };
        let mut launch = self.tiled(kernels[self.index()], group, &[points], spans, shared(nbytes));
        let items = spans.1.div_ceil((WORD / self.unit).max(1));
        if let Parameters::Tile(tile) = &mut launch.parameters {
            (tile.pitch, tile.extent) = ((pitch / unit) as u32, (extent / unit) as u32);
            (tile.channels, tile.pitches) = (count as u32, Dim::new(items as u32, 0, 0));
        }
        Some(launch)
    }

    /// Points that are dense on both sides, with their units in another order.
    fn mix(&self) -> Option<Launch> {
        let unit = self.unit as i64;
        let (points, pitch) =
            self.dims.iter().enumerate().find(|(_, dim)| dim.from == dim.to).map(|(d, dim)| (d, dim.to))?;
        let units: SmallVec<[usize; 4]> = (0..self.dims.len()).filter(|d| self.dims[*d].to < pitch).collect();
        let count = units.iter().fold(1, |count: usize, d| count.saturating_mul(self.dims[*d].length));
        let ends = units.iter().map(|d| self.dims[*d].from * (self.dims[*d].length as i64 - 1));
        let (below, above): (i64, i64) =
            ends.fold((0, 0), |(below, above), end| (below - end.min(0), above + end.max(0)));
        let fits = self.run == 1
            && self.unit < VECTOR
            && units.len() <= Group::MOST
            && (2..=MIXED).contains(&count)
            && count as i64 * unit == pitch
            && below + above + unit == pitch;
        if !fits || self.dims[points].length * (pitch as usize) < LEAST_MIXED {
            return None;
        }
        let span = (MOST_MIXED / pitch as usize).min(self.dims[points].length);
        // Whole vectors, so that all blocks begin as the first.
        let span = if span > VECTOR { span - span % VECTOR } else { span };
        let shared = shared(span * pitch as usize);
        let mut launch = self.tiled(MIXES[self.index()], &units, &[points], (count, span), shared);
        if let Parameters::Tile(tile) = &mut launch.parameters {
            (tile.pitch, tile.extent) = (count as u32, (below / unit) as u32);
            tile.pitches = Dim::new(count as u32, 0, 0);
        }
        Some(launch)
    }

    /// Tiles of the dimension that is fastest in the source and of the one that is fastest in the target, and of their
    /// next ones where these are short.
    fn tiles(&self, i: usize) -> Option<Launch> {
        let index = self.index();
        let side = SIDES[index];
        // Runs fill a tile worse, the longer they are.
        if self.run > LONGEST_RUN {
            return None;
        }
        let across = side / self.run;
        let mut rest: SmallVec<[usize; 6]> = (0..self.dims.len()).filter(|d| *d != 0 && *d != i).collect();
        let (mut group_i, mut group_o): (SmallVec<[usize; 4]>, SmallVec<[usize; 4]>) =
            (smallvec::smallvec![i], smallvec::smallvec![0]);
        let total = |group: &[usize]| group.iter().map(|d| self.dims[*d].length).product::<usize>();
        // Short groups get the next dimensions of their side, the shorter group first.
        loop {
            let (have_i, have_o) = (total(&group_i), total(&group_o));
            let (short_i, short_o) =
                (have_i < across && group_i.len() < Group::MOST, have_o < across && group_o.len() < Group::MOST);
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
                let end = stride(last) * last.length as i64;
                let Some(next) = rest.iter().position(|d| stride(&self.dims[*d]) == end) else { break };
                group.push(rest.remove(next));
            }
        }
        let across_of = |group: &[usize]| total(group).min(across);
        let narrow = self.run * across_of(&group_i).min(across_of(&group_o)) < LEAST_ACROSS;
        // Small units are better gathered than moved in tiles that are mostly empty, and runs of large ones read as they
        // lie.
        let least = match (self.unit, self.run) {
            (1 | 2, _) => Some(FULL),
            (8, 2..) => Some(2),
            _ => None,
        };
        let filled = across_of(&group_i) * across_of(&group_o);
        let empty = least.is_some_and(|least| filled * least <= across * across);
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
        // Pieces of less than a sector are better gathered where the next ones are near, but for very short ones of bytes.
        let (fastest, next) = (&self.dims[0], self.dims.get(1));
        let half_empty = filled * 2 <= across * across;
        let is_piece = self.run == 1 && (fastest.length * self.unit) < SECTOR as usize;
        let is_next = next.is_some_and(|next| next.from.unsigned_abs() < SECTOR);
        if whole.is_none() && is_piece && is_next && (self.unit > 1 || fastest.length >= WORD || half_empty) {
            return None;
        }
        let in_words = |whole: &Whole| {
            let spans = (whole.span, whole.span);
            self.tiled(whole.kernel, &group_i, &group_o, spans, KERNELS[whole.kernel as usize].1)
        };
        whole
            .filter(|whole| whole.vector == VECTOR)
            .map(in_words)
            .or_else(|| self.shifted(i))
            .or_else(|| whole.map(in_words))
            .or_else(|| Some(self.tiled(TILES[index], &group_i, &group_o, (across, across), 0)))
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

/// Shared memory, in bytes, for a chunk that begins anywhere in a vector: whole lines of 128 bytes.
fn shared(nbytes: usize) -> u32 {
    (nbytes + VECTOR).next_multiple_of(128) as u32
}

// By the binary logarithm of the unit.
const FLATS: [Kernel; 5] = [Kernel::Flat1, Kernel::Flat2, Kernel::Flat4, Kernel::Flat8, Kernel::Flat16];
/// With the bytes of an item, and the items of a thread.
const GATHERS: [(Kernel, usize, u32); 4] =
    [(Kernel::Gather1, 4, 4), (Kernel::Gather2, 8, 4), (Kernel::Gather4, 16, 2), (Kernel::Gather8, 16, 2)];
const TURNS: [Kernel; 4] = [Kernel::Turn1, Kernel::Turn2, Kernel::Turn4, Kernel::Turn8];
const ROWS: [Kernel; 4] = [Kernel::Rows1, Kernel::Rows2, Kernel::Rows4, Kernel::Rows8];
const TILES: [Kernel; 5] = [Kernel::Tile1, Kernel::Tile2, Kernel::Tile4, Kernel::Tile8, Kernel::Tile16];
const SIDES: [usize; 5] = [128, 64, 64, 64, 32];
const SHIFTED: [Kernel; 2] = [Kernel::Shifted1, Kernel::Shifted2];
const SPLITS: [Kernel; 4] = [Kernel::Split1, Kernel::Split2, Kernel::Split4, Kernel::Split8];
const MIXES: [Kernel; 4] = [Kernel::Mix1, Kernel::Mix2, Kernel::Mix4, Kernel::Mix8];
const JOINS: [Kernel; 4] = [Kernel::Join1, Kernel::Join2, Kernel::Join4, Kernel::Join8];

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
