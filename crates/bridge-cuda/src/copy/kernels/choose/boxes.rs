//! Changes of order through boxes in shared memory. Of all boxes that fit, the one that costs least is taken.

use super::{Candidate, Chunks, Launch, Parameters, Pass, SECTOR, Step, VECTOR, WORD, Work};
use crate::copy::kernels::parameters::{Box as Parameter, Dim};
use crate::copy::kernels::table::Kernel;
use smallvec::SmallVec;

/// Bytes that a thread writes at once.
const ITEM: usize = 8;

/// What a box has at most: bytes, lines, and units of a run. It has a part of the copy for each of `blocks` blocks, three for
/// each multiprocessor, but `least` bytes.
struct Limits {
    least: usize,
    nbytes: usize,
    lines: usize,
    run: usize,
    blocks: usize,
}

const LIMITS: Limits = Limits { least: 2 << 10, nbytes: 32 << 10, lines: 2048, run: 1024, blocks: 3 * 132 };

/// What costs as much as to move a byte from or to memory: a byte of a sector that another block writes as well, one that
/// a thread reads or writes, one of a table, and a place beyond the last unit. `block` bytes cost as much as a block by itself.
struct Prices {
    shared_sector: f64,
    by_thread: f64,
    table: f64,
    empty: f64,
    block: f64,
}

const PRICES: Prices = Prices { shared_sector: 0.5, by_thread: 0.3, table: 0.5, empty: 0.5, block: 2048.0 };

type Some8<T> = SmallVec<[T; 8]>;

/// How a box is read: in lines, which are intervals of the source.
struct Lines {
    /// The dimensions inside a line, and the others.
    along: Some8<usize>,
    across: Some8<usize>,
    count: usize,
    /// Bytes of a line, and from one to the next in shared memory.
    nbytes: usize,
    pitch: usize,
}

/// How a box is written: in runs, which are adjacent in the target. A run has the dimensions before `split` and, of that
/// one, `step` units, if it goes on there.
struct Runs {
    split: usize,
    step: usize,
    units: usize,
    count: usize,
    goes_on: bool,
}

/// How the threads of a block write: each of `rows` of `lanes` threads a run, in as many passes.
struct Rows {
    rows: usize,
    lanes: usize,
    passes: usize,
    /// Items that a thread has time for.
    time: usize,
}

struct Shape {
    /// Units in each dimension.
    chunks: Some8<usize>,
    lines: Lines,
    runs: Runs,
    rows: Rows,
    /// Vectors of a line.
    vectors: usize,
    cost: f64,
}

impl Pass {
    /// A copy of small units into a target whose fastest dimension has no gaps.
    pub(super) fn boxed(&self) -> Option<Candidate> {
        let pass = self.forwards(1).in_units();
        let unit = self.unit as i64;
        let dims = &pass.dims;
        if pass.unit >= WORD || dims.len() > Parameter::MOST || dims.first().is_none_or(|dim| dim.to != unit) {
            return None;
        }
        let mut by_source: Some8<usize> = (0..dims.len()).filter(|d| dims[*d].from != 0).collect();
        by_source.sort_by_key(|d| dims[*d].from.unsigned_abs());
        let adjacent = dims.iter().scan(unit, |end, dim| (dim.to == *end).then(|| *end *= dim.length as i64)).count();
        let by_target: Some8<usize> = (0..adjacent).collect();
        let volume = (pass.nbytes() / LIMITS.blocks).clamp(LIMITS.least, LIMITS.nbytes) / pass.unit;
        // The fastest dimension of the target is not in a line where its units would be in few banks.
        let lies = dims[0].from == 0 || dims[0].from > 0 && conflicts(pass.unit, dims[0].from as usize) <= 2;
        let (mut best, mut last): (Option<Shape>, Some8<usize>) = (None, SmallVec::new());
        for written in (3..).map(|n| 1 << n).take_while(|units| *units <= volume) {
            let target = pass.cover(&by_target, written, |dim| dim.to);
            for read in (0..).map(|n| 1 << n).take_while(|units| *units <= volume) {
                let source = pass.cover(&by_source, read, |dim| dim.from);
                let chunks: Some8<usize> = target.iter().zip(&source).map(|(a, b)| *a.max(b)).collect();
                let fits = chunks.iter().product::<usize>() <= 2 * volume && chunks != last;
                last.clone_from(&chunks);
                if let Some(shape) = if fits { pass.shape(chunks, &by_source, lies) } else { None }
                    && best.as_ref().is_none_or(|best| shape.cost < best.cost)
                {
                    best = Some(shape);
                }
            }
        }
        let shape = best?;
        let launch = pass.in_boxes(&shape);
        let chunks: Chunks = shape.chunks.iter().map(|chunk| *chunk as f64).collect();
        Some(Candidate { launch, work: Work::Tile(chunks.clone(), chunks) })
    }

    /// Returns the chunks of about so many units that are next to each other, in these dimensions. A dimension that does not
    /// fit is cut into chunks of about one size, of whole sectors.
    fn cover(&self, order: &[usize], amount: usize, stride: fn(&Step) -> i64) -> Some8<usize> {
        let mut chunks: Some8<usize> = self.dims.iter().map(|_| 1).collect();
        let mut rest = amount;
        for &d in order {
            let length = self.dims[d].length;
            if length > rest {
                let even = length.div_ceil(length.div_ceil(rest));
                let part = SECTOR as usize >> stride(&self.dims[d]).trailing_zeros().min(5);
                chunks[d] = if even >= 2 * part { even.next_multiple_of(part) } else { even };
                break;
            }
            chunks[d] = length;
            rest /= length;
        }
        chunks
    }

    fn shape(&self, chunks: Some8<usize>, by_source: &[usize], lies: bool) -> Option<Shape> {
        let (dims, size) = (&self.dims, self.unit);
        let (lines, runs) = (self.lines(&chunks, by_source, lies), self.runs(&chunks));
        let spread = |stride: fn(&Step) -> i64| {
            let ends = dims
                .iter()
                .zip(&chunks)
                .map(|(dim, chunk)| (*chunk as u64 - 1).saturating_mul(stride(dim).unsigned_abs()));
            ends.fold(0, u64::saturating_add) / size as u64
        };
        let shared = lines.shared(&runs);
        // Offsets have 31 bits.
        let far = spread(|dim| dim.from).max(spread(|dim| dim.to)) > 1 << 30;
        if lines.count.max(runs.count) > LIMITS.lines || shared > LIMITS.nbytes / 4 * 5 || far {
            return None;
        }
        // The bits below those of which all lines, and all runs, are multiples.
        let bits = |stride: fn(&Step) -> i64, beyond: usize, within: &dyn Fn(usize) -> bool| {
            let all = dims.iter().enumerate().map(|(d, dim)| match stride(dim).unsigned_abs() {
                whole if !within(d) => whole,
                part if chunks[d] < dim.length => part * chunks[d] as u64,
                _ => 0,
            });
            all.fold(beyond as u64, |bits, stride| bits | stride)
        };
        let gap = |bits: u64, whole: usize| whole - (1 << (bits | whole as u64).trailing_zeros());
        let read = bits(|dim| dim.from, self.beyond.0, &|d| lines.along.contains(&d));
        let vectors = (lines.nbytes + gap(read, VECTOR)).div_ceil(VECTOR);
        let parted = if runs.goes_on && runs.step < chunks[runs.split] { (runs.units * size) as u64 } else { 0 };
        let written =
            parted | bits(|dim| dim.to, self.beyond.1, &|d| d < runs.split || d == runs.split && runs.goes_on);
        let items = (runs.units * size + gap(written, ITEM)).div_ceil(ITEM);
        let other = (runs.split..dims.len()).find(|d| chunks[*d] > 1).map_or(0, |d| dims[d].to.unsigned_abs());
        let next =
            if runs.split < dims.len() && runs.step < chunks[runs.split] && runs.goes_on { parted } else { other };
        let rows = Rows::new(items, runs.count, ITEM >> (next | ITEM as u64).trailing_zeros());
        let (useful, read) = (chunks.iter().product::<usize>() * size, lines.count * vectors * VECTOR);
        let moved = (read + rows.time * Rows::threads() * ITEM) as f64;
        let tables = (shared - lines.cells()) as f64;
        let places = dims
            .iter()
            .zip(&chunks)
            .map(|(dim, chunk)| (dim.length.next_multiple_of(*chunk)) as f64 / dim.length as f64);
        let cost = (self.sectors(&chunks, by_source) + PRICES.by_thread * moved + PRICES.table * tables + PRICES.block)
            / useful as f64
            + PRICES.empty * places.product::<f64>();
        Some(Shape { chunks, lines, runs, rows, vectors, cost })
    }

    /// Dimensions that the source has next to each other are in a line, unless the lanes of a warp would meet in one bank.
    fn lines(&self, chunks: &[usize], by_source: &[usize], lies: bool) -> Lines {
        let (dims, size) = (&self.dims, self.unit as i64);
        let (mut along, mut nbytes): (Some8<usize>, _) = (SmallVec::new(), size);
        let repeated = (0..dims.len()).filter(|d| dims[*d].from == 0);
        for d in repeated.chain(by_source.iter().copied()).filter(|d| chunks[*d] > 1) {
            let from = dims[d].from;
            let fits = (0..=nbytes + (nbytes / 4).max(3 * size)).contains(&from)
                && (d != 0 || lies)
                && nbytes + from * (chunks[d] as i64 - 1) < LIMITS.nbytes as i64 * 2;
            if fits {
                nbytes += from * (chunks[d] as i64 - 1);
                along.push(d);
            }
        }
        let across: Some8<usize> = (0..dims.len()).filter(|d| chunks[*d] > 1 && !along.contains(d)).collect();
        let (count, nbytes) = (across.iter().map(|d| chunks[*d]).product(), nbytes as usize);
        // An odd number of words, so that units of different lines are in different banks.
        Lines { along, across, count, nbytes, pitch: (nbytes.div_ceil(WORD) | 1) * WORD }
    }

    fn runs(&self, chunks: &[usize]) -> Runs {
        let dims = &self.dims;
        let (mut units, mut split, mut end) = (1, 0, self.unit as i64);
        let is_next = |split: usize, end: i64| split < dims.len() && dims[split].to == end;
        while is_next(split, end) && chunks[split] == dims[split].length && units * chunks[split] <= LIMITS.run {
            units *= chunks[split];
            end *= dims[split].length as i64;
            split += 1;
        }
        let goes_on = is_next(split, end) && chunks[split] > 1;
        let mut step = if goes_on { chunks[split].min(LIMITS.run / units).max(1) } else { 1 };
        let part = VECTOR / self.unit;
        if goes_on && step < chunks[split] && step * units > part {
            // Whole vectors, if there is such a step.
            step = (1..=step).rev().find(|step| step * units % part == 0).unwrap_or(1);
        }
        let parts = chunks.get(split).map_or(1, |chunk| chunk.div_ceil(step));
        let count = parts * chunks.iter().skip(split + 1).product::<usize>();
        Runs { split, step, units: units * step, count, goes_on }
    }

    /// Returns the bytes of the sectors that a box touches on both sides.
    fn sectors(&self, chunks: &[usize], by_source: &[usize]) -> f64 {
        let touched = |order: &[usize], stride: fn(&Step) -> i64, beyond: usize, gap: u64, shared: f64| {
            let (mut span, mut spans, mut bits) = (self.unit as u64, 1, beyond as u64 | SECTOR);
            for &d in order {
                let (by, chunk) = (stride(&self.dims[d]).unsigned_abs(), chunks[d]);
                if chunk > 1 && by <= span + gap {
                    span += by * (chunk as u64 - 1);
                    bits |= if chunk < self.dims[d].length { by * chunk as u64 } else { 0 };
                } else {
                    spans *= chunk;
                    bits |= by;
                }
            }
            let beyond = SECTOR - (1 << bits.trailing_zeros());
            let (beyond, shared) = if beyond == 0 && span % SECTOR == 0 {
                (0.0, 0.0)
            } else {
                (beyond as f64, shared * 2.0 * beyond as f64)
            };
            spans as f64 * (span as f64 + beyond + shared)
        };
        let all: Some8<usize> = (0..self.dims.len()).collect();
        touched(by_source, |dim| dim.from, self.beyond.0, SECTOR - 1, 0.0)
            + touched(&all, |dim| dim.to, self.beyond.1, 0, PRICES.shared_sector)
    }

    /// Returns the dimensions that a box has a part of, where the kernel must know how much.
    fn cuts(&self, Shape { chunks, runs, .. }: &Shape) -> Some8<usize> {
        let is_cut = |d: usize| chunks[d] < self.dims[d].length || d == runs.split && chunks[d] % runs.step > 0;
        (0..self.dims.len()).filter(|d| chunks[*d] > 1 && is_cut(*d)).collect()
    }

    /// Returns the lists of dimensions, one after the other, with the end of each: lines, along a line, runs, inside a run.
    fn listed(&self, shape: &Shape, cuts: &[usize]) -> (SmallVec<[Dim; 24]>, [u8; 4]) {
        let (dims, size) = (&self.dims, self.unit as i64);
        let Shape { chunks, lines, runs, .. } = shape;
        // Bytes of shared memory from one unit of a dimension to the next one.
        let cell = |d: usize| match lines.across.iter().position(|one| *one == d) {
            Some(n) => lines.across[..n].iter().fold(lines.pitch, |pitch, d| pitch * chunks[*d]) as i64,
            None => dims[d].from,
        };
        let across = lines.across.iter().map(|&d| part(chunks[d], dims[d].from / size, 0, cut(cuts, d)));
        let mut all: SmallVec<[Dim; 24]> = across.collect();
        let nlines = all.len();
        all.extend(lines.along.iter().map(|&d| part(chunks[d], dims[d].from, 0, cut(cuts, d))));
        let nalong = all.len();
        for d in (runs.split..dims.len()).filter(|d| chunks[*d] > 1) {
            let (step, below) = if d == runs.split { (runs.step, runs.units / runs.step) } else { (1, 0) };
            let (by, more) = (step as i64, cut(cuts, d) | (below as u32) << 2 | (step as u32 - 1) << 16);
            all.push(part(chunks[d].div_ceil(step), cell(d) * by, dims[d].to / size * by, more));
        }
        let nruns = all.len();
        let of_run =
            (0..dims.len().min(runs.split + 1)).map(|d| (d, if d == runs.split { runs.step } else { chunks[d] }));
        all.extend(of_run.filter(|(_, length)| *length > 1).map(|(d, length)| part(length, cell(d), 0, 0)));
        let ends = [nlines, nalong, nruns, all.len()].map(|end| end as u8);
        (all, ends)
    }

    fn in_boxes(&self, shape: &Shape) -> Launch {
        let dims = &self.dims;
        let Shape { chunks, lines, runs, rows, .. } = shape;
        let cuts = self.cuts(shape);
        let (all, [nlines, nalong, nruns, nplaces]) = self.listed(shape, &cuts);
        let outer = (0..dims.len()).filter(|d| chunks[*d] < dims[*d].length);
        let grid: Some8<Dim> = outer
            .map(|d| {
                let by = chunks[d] as i64;
                part(dims[d].length.div_ceil(chunks[d]), dims[d].from * by, dims[d].to * by, cut(&cuts, d))
            })
            .collect();
        let ends = |chunk: &dyn Fn(usize) -> usize, end: fn(i64, i64) -> i64| {
            (0..dims.len()).map(|d| end((chunk(d) as i64 - 1) * dims[d].from, 0)).sum::<i64>()
        };
        let length = |d: usize| dims[d].length;
        let across = |d: usize| if lines.across.contains(&d) { chunks[d] } else { 1 };
        let counts = |of: &dyn Fn(usize) -> usize| std::array::from_fn(|n| cuts.get(n).map_or(1, |d| of(*d) as u32));
        let parameter = Parameter {
            sides: self.sides(),
            low: ends(&length, i64::min),
            high: ends(&length, i64::max) + self.unit as i64,
            below: ends(&across, i64::min),
            above: ends(&across, i64::max),
            cells: lines.cells() as u32,
            pitch: lines.pitch as u32,
            lines: lines.count as u32,
            runs: runs.count as u32,
            units: runs.units as u32,
            passes: rows.passes as u32,
            rows: rows.rows as u32,
            ngrid: grid.len() as u8,
            nlines,
            nalong,
            nruns,
            nplaces,
            unit: self.index() as u8,
            unused: [0; 6],
            most: counts(&|d| chunks[d]),
            total: counts(&length),
            vectors: Dim::new(shape.vectors as u32, 0, 0),
            lanes: Dim::new(rows.lanes as u32, 0, 0),
            dims: std::array::from_fn(|n| all.get(n).copied().unwrap_or_default()),
            grid: std::array::from_fn(|n| grid.get(n).copied().unwrap_or_default()),
        };
        Launch {
            kernel: Kernel::Box,
            blocks: grid.iter().map(|dim| dim.length).product(),
            shared: lines.shared(runs) as u32,
            parameters: Parameters::Box(Box::new(parameter)),
        }
    }
}

/// A dimension of a list: `more` has the number of its cut, and of runs, the units below it and those of a step.
fn part(length: usize, from: i64, to: i64, more: u32) -> Dim {
    Dim::new(length as u32, from, to).with(more + (1 << 16))
}

/// Returns the number of a dimension that is cut, or 0.
fn cut(cuts: &[usize], d: usize) -> u32 {
    cuts.iter().position(|one| *one == d).map_or(0, |n| n as u32 + 1)
}

impl Lines {
    /// Bytes of shared memory.
    fn cells(&self) -> usize {
        (self.count * self.pitch).next_multiple_of(VECTOR)
    }

    /// The same with the tables: eight bytes for a run, four for a line, and two for a unit of a run.
    fn shared(&self, runs: &Runs) -> usize {
        self.cells() + 8 * runs.count + 4 * self.count + 2 * runs.units
    }
}

impl Rows {
    fn threads() -> usize {
        Kernel::Box.threads() as usize
    }

    /// For runs of so many items. Threads whose runs begin `period` apart find the units of their item once.
    fn new(items: usize, runs: usize, period: usize) -> Self {
        let least = items.div_ceil(Self::threads());
        let all = (least..=(least + 15).min(items)).map(|passes| {
            let lanes = items.div_ceil(passes);
            let rows = Self::threads() / lanes;
            let (rows, again) = if rows >= period { (rows - rows % period, 1) } else { (rows, runs.div_ceil(rows)) };
            let narrow = if lanes < 8 && lanes < items { 2 } else { 1 };
            Self { rows, lanes, passes, time: passes * (runs.div_ceil(rows) + again) * narrow }
        });
        all.min_by_key(|rows| rows.time).expect("a run has units")
    }
}

/// The most lanes of a warp that read different words of one bank, where the units of a run are `stride` bytes apart.
fn conflicts(size: usize, stride: usize) -> usize {
    let per = ITEM / size;
    let words: SmallVec<[usize; 32]> = (0..32).map(|lane| (per * lane + lane * per / 32) * stride / WORD).collect();
    let of_bank = |bank: usize| {
        let mut words: SmallVec<[usize; 32]> = words.iter().copied().filter(|word| word % 32 == bank).collect();
        words.dedup();
        words.len()
    };
    (0..32).map(of_bank).max().unwrap_or(1)
}
