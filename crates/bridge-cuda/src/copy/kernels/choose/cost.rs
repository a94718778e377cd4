//! What a launch costs, by a model of the caches: of all kernels that can copy a walk, the one that costs least is taken.
//!
//! To add a kernel, return it from `Pass::candidates` and give it a row of [`COSTS`]: time all candidates of some thousand
//! random layouts on a device, and fit the row to these times.

use super::{Launch, Pass, SECTOR, Step};
use crate::copy::kernels::table::Kernel;
use smallvec::SmallVec;

/// Units of each dimension, which need not be whole.
pub(super) type Chunks = SmallVec<[f64; 6]>;

/// A launch that makes the copy, and what its blocks do.
pub(super) struct Candidate {
    pub launch: Launch,
    pub work: Work,
}

pub(super) enum Work {
    /// Threads walk the target in its own order, and each takes items of so many units.
    InOrder(usize),
    /// Blocks read what is one run of the source, and write whole rows without looking at their bounds or not.
    Split(bool),
    /// Blocks read rows of one chunk and write rows of the other one, and together a box of both.
    Tile(Chunks, Chunks),
}

/// What the model knows of a card. Other figures are relative to these.
struct Card {
    /// Bytes that the memory delivers at once, and those of a line of the caches.
    burst: u64,
    line: u64,
    /// Bytes of the source that stay in the second cache until they are read again, and of a copy that does as a whole.
    cached: f64,
    cached_whole: f64,
    /// Bytes per microsecond, of the memory and of the second cache.
    memory: f64,
    cache: f64,
}

/// An H200.
const CARD: Card = Card { burst: 64, line: 128, cached: 30e6, cached_whole: 48e6, memory: 4.26e6, cache: 7.5e6 };

/// Threads of a warp, and units that a block of `flat` takes.
const WARP: usize = 32;
const BLOCK: usize = 512;

/// By kernel: a factor of the time that the memory takes, and the microseconds for 4 MB through the caches, for 16 MB of lines
/// that warps touch (of tiles, of sectors that they read), for 1 million units with the places beyond the last one, for 1,000
/// blocks (of `gather`, for 4 MB in items that end within a row), and for a launch. Fitted to 5,000 random layouts on an H200
/// (2026-11-30).
#[rustfmt::skip]
const COSTS: [(Kernel, [f64; 6]); 25] = [
    (Kernel::Flat1, [1.1, 0.91, 0.4, 1.6, 0.0, 2.6]),
    (Kernel::Flat2, [0.85, 0.88, 0.41, 1.8, 0.0, 1.9]),
    (Kernel::Flat4, [0.96, 0.87, 0.43, 1.8, 0.0, 2.1]),
    (Kernel::Flat8, [0.99, 0.99, 0.49, 1.3, 0.0, 2.5]),
    (Kernel::Flat16, [1.0, 0.72, 1.1, 0.0, 0.0, 2.2]),
    (Kernel::Gather2, [0.94, 0.74, 0.34, 1.1, 2.5, 2.3]),
    (Kernel::Gather4, [1.0, 0.86, 0.26, 0.34, 1.1, 2.5]),
    (Kernel::Rows, [1.2, 1.3, 0.0, 0.22, 0.0, 2.6]),
    (Kernel::Tile2, [0.6, 0.96, 0.0, 1.1, 3.6, 3.6]),
    (Kernel::Tile4, [1.0, 0.43, 1.8, 0.0, 4.2, 4.1]),
    (Kernel::Tile4Small, [1.0, 0.55, 2.0, 0.0, 2.2, 2.8]),
    (Kernel::Tile8, [0.97, 0.58, 0.0, 0.0, 2.0, 2.8]),
    (Kernel::Tile16, [0.93, 0.6, 0.0, 1.2, 2.1, 2.9]),
    (Kernel::Words, [0.93, 0.74, 2.5, 0.0, 5.7, 4.3]),
    (Kernel::Shifted1, [0.5, 1.1, 0.0, 0.26, 6.6, 8.0]),
    (Kernel::Shifted2, [0.93, 0.0, 3.2, 0.53, 6.8, 5.3]),
    (Kernel::Vectors1, [1.1, 0.0, 0.0, 0.14, 3.0, 1.7]),
    (Kernel::Vectors1Wide, [1.0, 0.43, 1.9, 0.0, 10.6, 4.1]),
    (Kernel::Vectors2, [1.0, 0.55, 1.4, 0.07, 2.0, 2.8]),
    (Kernel::Vectors2Wide, [0.99, 0.54, 1.2, 0.23, 5.0, 3.3]),
    (Kernel::Vectors4, [1.0, 0.49, 0.0, 0.52, 3.2, 2.8]),
    (Kernel::Split1, [0.72, 0.0, 0.0, 0.73, 3.3, 4.3]),
    (Kernel::Split2, [0.85, 0.0, 0.0, 0.94, 3.7, 3.7]),
    (Kernel::Split4, [0.9, 0.0, 0.0, 1.5, 3.7, 3.5]),
    (Kernel::Box, [0.62, 0.94, 6.3, 0.59, 3.8, 5.0]),
];

/// The bytes of a step on a side.
type Side = fn(&Step) -> u64;

fn from(dim: &Step) -> u64 {
    dim.from.unsigned_abs()
}

fn to(dim: &Step) -> u64 {
    dim.to.unsigned_abs()
}

impl Candidate {
    /// Returns the microseconds that the copy of a pass takes about: these kinds of work overlap.
    pub fn cost(&self, traffic: &Traffic<'_>) -> f64 {
        let (_, costs) = COSTS.iter().find(|(kernel, _)| *kernel == self.launch.kernel).expect("a kernel has costs");
        let parts = traffic.of(self);
        let sum: f64 = parts.iter().zip(costs).map(|(part, cost)| (part * cost).powi(3)).sum();
        costs[5] + sum.cbrt()
    }
}

/// The bytes that any kernel moves.
pub(super) struct Traffic<'a> {
    pass: &'a Pass,
    units: f64,
    read: f64,
    written: f64,
}

impl<'a> Traffic<'a> {
    /// Of a pass with runs of one unit.
    pub fn new(pass: &'a Pass) -> Self {
        let whole: Chunks = pass.dims.iter().map(|dim| dim.length as f64).collect();
        let mut traffic = Self { pass, units: whole.iter().product(), read: 0.0, written: 0.0 };
        traffic.read = traffic.all(&whole, from, CARD.burst, true);
        traffic.written = traffic.all(&whole, to, SECTOR, true);
        traffic
    }

    fn of(&self, Candidate { launch, work }: &Candidate) -> [f64; 5] {
        let (size, blocks) = (self.pass.unit as f64, f64::from(launch.blocks));
        match work {
            Work::InOrder(item) => {
                let read = self.read.max(self.all(&self.cached(), from, CARD.burst, true));
                let row = self.pass.dims[0];
                let lines = if *item > 1 && row.from != 0 {
                    let span = self.lines(&self.first(WARP * item)).clamp(1.0, WARP as f64);
                    self.units / WARP as f64 * span * CARD.line as f64
                } else {
                    self.all(&self.first(WARP), from, CARD.line, true)
                };
                let across = match row.length {
                    whole if whole % item == 0 => 0.0,
                    long if long >= *item => 0.25,
                    _ => 1.0,
                };
                let caches = self.all(&self.first(BLOCK), from, SECTOR, true);
                let across = across * self.units * size / 4e6;
                [memory(read + self.written), caches / 4e6, lines / 16e6, self.units / 1e6, across]
            }
            Work::Split(is_full) => {
                let units = if *is_full { 0.0 } else { self.units / 1e6 };
                [memory(self.read + self.written), 0.0, 0.0, units, blocks / 1e3]
            }
            Work::Tile(read, written) => {
                let both: Chunks = read.iter().zip(written).map(|(a, b)| a.max(*b)).collect();
                let blocks: f64 =
                    (self.pass.dims.iter().zip(&both)).map(|(dim, chunk)| (dim.length as f64 / chunk).ceil()).product();
                let units = blocks * both.iter().product::<f64>();
                let source = self.all(read, from, SECTOR, true);
                let caches = source + self.all(written, to, SECTOR, false);
                let moved = self.all(&both, from, CARD.burst, true) + self.all(&both, to, SECTOR, false);
                // What a block leaves of a burst, the next one mostly finds in the cache.
                let memory = memory((self.read + self.written + moved) / 2.0);
                [memory, caches / 4e6, source / 16e6, units / 1e6, blocks / 1e3]
            }
        }
    }

    /// Returns the bytes that all chunks touch of a side, in whole `grains`, also where chunks touch the same ones. `joins`: gaps
    /// of less than a grain are touched.
    fn all(&self, chunks: &[f64], side: Side, grain: u64, joins: bool) -> f64 {
        let count: f64 = self.pass.dims.iter().zip(chunks).map(|(dim, chunk)| dim.length as f64 / chunk).product();
        count * self.touched(chunks, side, grain, joins)
    }

    /// The same of one chunk: intervals of a side, each of the dimensions that lie next to each other.
    fn touched(&self, chunks: &[f64], side: Side, grain: u64, joins: bool) -> f64 {
        let mut dims: SmallVec<[(u64, f64, f64); 6]> = (self.pass.dims.iter().zip(chunks))
            .map(|(dim, chunk)| (side(dim), *chunk, dim.length as f64))
            .filter(|(stride, ..)| *stride > 0)
            .collect();
        dims.sort_unstable_by_key(|(stride, ..)| *stride);
        let gap = if joins { grain - 1 } else { 0 } as f64;
        let (mut span, mut spans, mut bits) = (self.pass.unit as f64, 1.0, grain);
        for (stride, chunk, length) in dims {
            if chunk > 1.0 && stride as f64 <= span + gap {
                span += stride as f64 * (chunk - 1.0);
                bits |= if chunk < length { stride * chunk as u64 } else { 0 };
            } else {
                spans *= chunk;
                bits |= stride;
            }
        }
        // Intervals begin anywhere at multiples of so many bytes.
        let (phase, grain) = ((1u64 << bits.trailing_zeros()) as f64, grain as f64);
        let grains = if phase == grain { (span / grain).ceil() } else { 1.0 + (span - phase).max(0.0) / grain };
        spans * grains * grain
    }

    /// Returns the first units of the target.
    fn first(&self, units: usize) -> Chunks {
        let mut rest = units as f64;
        let part = |dim: &Step| {
            let chunk = rest.clamp(1.0, dim.length as f64);
            rest /= dim.length as f64;
            chunk
        };
        self.pass.dims.iter().map(part).collect()
    }

    /// Returns as many of the target's first units as have the lines of their source in the cache.
    fn cached(&self) -> Chunks {
        let mut chunks: Chunks = self.pass.dims.iter().map(|_| 1.0).collect();
        for d in 0..chunks.len() {
            let one = self.lines(&chunks) * CARD.line as f64;
            chunks[d] = self.pass.dims[d].length as f64;
            if self.lines(&chunks) * CARD.line as f64 > CARD.cached {
                chunks[d] = (CARD.cached / one).clamp(1.0, chunks[d]);
                break;
            }
        }
        chunks
    }

    /// Returns the lines of the source that a chunk touches.
    fn lines(&self, chunks: &[f64]) -> f64 {
        self.touched(chunks, from, CARD.line, true) / CARD.line as f64
    }
}

/// Returns the microseconds in which the memory moves so many bytes.
fn memory(nbytes: f64) -> f64 {
    nbytes / if nbytes < CARD.cached_whole { CARD.cache } else { CARD.memory }
}
