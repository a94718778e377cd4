//! Points with a few channels each.

use super::{Candidate, Launch, Parameters, Pass, Step, VECTOR, WORD, Work};
use crate::copy::kernels::parameters::{Dim, Group};
use crate::copy::kernels::table::Kernel;
use smallvec::SmallVec;

/// What a block of `split` takes. With fewer points, or units of points with their channels, most threads have nothing to do.
struct Limits {
    /// The most channels of a point, and the most bytes from one point to the next on the dense side.
    channels: usize,
    pitch: i64,
    /// The most rows, and the least points of one that has the block for itself, and of one of several.
    rows: usize,
    points: usize,
    few_points: usize,
    units: usize,
    /// The least and the most bytes.
    least: usize,
    nbytes: usize,
}

#[rustfmt::skip]
const LIMITS: Limits = Limits {
    channels: 32, pitch: 256, rows: 256, points: 64, few_points: 16, units: 512, least: 1 << 10, nbytes: 16 << 10,
};

/// By the binary logarithm of the unit, with the points of a row of which a thread takes several.
const SPLITS: [(Kernel, usize); 3] = [(Kernel::Split1, 4096), (Kernel::Split2, 2048), (Kernel::Split4, 2048)];

/// A few channels close to each other for each point on one side, the *dense* one; on the other a row of points for each.
struct Channels {
    points: usize,
    channels: SmallVec<[usize; 4]>,
    count: usize,
    /// Bytes from one point to the next on the dense side, and over which the channels of one reach.
    pitch: i64,
    extent: i64,
}

impl Pass {
    /// A row of points for each of a few channels, which are dense in the source. The first channels may be a `run`, which
    /// is adjacent on both sides.
    pub(super) fn split(&self, run: usize) -> Option<Candidate> {
        // Large units lose little where they are read as they lie: in runs, and where they repeat and are in the cache.
        let repeats = self.dims.iter().any(|dim| dim.from == 0);
        let loses_little = match self.unit {
            1 | 2 => self.run * self.unit >= WORD,
            4 => self.run > 1 || repeats,
            _ => true,
        };
        if loses_little {
            return None;
        }
        let pass = self.forwards(0).in_units();
        let few = pass.few_channels(run.max(self.run), |dim| dim.from, |dim| dim.to)?;
        let launch = pass.in_rows(&few)?;
        let Parameters::Tile(tile) = &launch.parameters else { return None };
        let is_full = tile.span_o as usize >= SPLITS[self.index()].1 && tile.o.total >= tile.span_o;
        Some(Candidate { launch, work: Work::Split(is_full) })
    }

    /// The same with the units of a run as a dimension.
    pub(super) fn in_units(&self) -> Self {
        let mut pass = self.clone();
        if self.run > 1 {
            let (unit, apart) = (self.unit as i64, self.apart as i64);
            pass.dims.insert(0, Step { length: self.run, from: unit * apart, to: unit });
            (pass.run, pass.apart) = (1, 1);
        }
        pass
    }

    fn few_channels(&self, run: usize, dense: fn(&Step) -> i64, row: fn(&Step) -> i64) -> Option<Channels> {
        let unit = self.unit as i64;
        // The points run fastest in the row, and come next after the channels on the dense side. A dimension that repeats is
        // not a row.
        let moving = (usize::from(run > 1)..self.dims.len()).filter(|d| row(&self.dims[*d]) != 0);
        let points = moving.min_by_key(|d| row(&self.dims[*d]).abs())?;
        let pitch = dense(&self.dims[points]);
        let channels: SmallVec<[usize; 4]> =
            (0..self.dims.len()).filter(|d| dense(&self.dims[*d]).abs() < pitch).collect();
        let count = channels.iter().fold(1, |count: usize, d| count.saturating_mul(self.dims[*d].length));
        let ends = channels.iter().map(|d| dense(&self.dims[*d]) * (self.dims[*d].length as i64 - 1));
        let extent = ends.clone().sum::<i64>() + unit;
        let fits = (2..=LIMITS.channels).contains(&count)
            && channels.len() <= Group::MOST
            && ends.clone().all(|end| end >= 0)
            && extent <= pitch
            && pitch <= LIMITS.pitch
            && row(&self.dims[points]).abs() <= 2 * unit * run as i64;
        fits.then_some(Channels { points, channels, count, pitch, extent })
    }

    fn in_rows(&self, few: &Channels) -> Option<Launch> {
        let Channels { points, channels, count, pitch, extent } = few;
        let (length, step) = (self.dims[*points].length, self.dims[*points].to.abs());
        // Short rows: a block takes several, of the dimensions that follow on the dense side, which may have small gaps
        // between them.
        let row_bytes = length * *pitch as usize;
        let (mut lines, mut rows, mut stride) = (channels.clone(), 1, row_bytes as i64);
        if row_bytes <= LIMITS.nbytes / 4 && (step == self.unit as i64 || self.unit < VECTOR / 2) {
            while lines.len() < Group::MOST {
                let end = stride * rows as i64;
                let most = if rows > 1 { end } else { end + end / 4 };
                let follows =
                    |d: &usize| d != points && !lines.contains(d) && (end..=most).contains(&self.dims[*d].from);
                let Some(next) = (0..self.dims.len()).find(follows) else { break };
                if rows == 1 {
                    stride = self.dims[next].from;
                }
                rows *= self.dims[next].length;
                lines.push(next);
            }
        }
        let each = rows.min(LIMITS.nbytes / stride as usize).min(LIMITS.rows / count);
        let several = each > 1 && length >= LIMITS.few_points;
        let (taken, least) = if several { (each * length, LIMITS.few_points) } else { (length, LIMITS.points) };
        if length < least || taken * (*pitch as usize) < LIMITS.least || taken * count < LIMITS.units {
            return None;
        }
        let most = (LIMITS.nbytes / *pitch as usize).min(4096 / self.unit.min(2));
        let (group, spans, nbytes) = if several {
            (&lines, (each * count, length), each * stride as usize)
        } else {
            let full = 1 << most.ilog2();
            // Threads that have one row each need a power of two. Few blocks of other rows are about equal.
            let blocks = length.div_ceil(most - most % VECTOR);
            let even = length.div_ceil(blocks).next_multiple_of(VECTOR);
            let span = if length.min(full) >= SPLITS[self.index()].1 || blocks > 4 { full } else { even };
            (channels, (*count, span), span * *pitch as usize)
        };
        let mut launch = self.tiled(SPLITS[self.index()].0, group, &[*points], spans, shared(nbytes));
        let items = spans.1.div_ceil((WORD / self.unit).max(1));
        if let Parameters::Tile(tile) = &mut launch.parameters {
            (tile.pitch, tile.extent) = (*pitch as u32 / self.unit as u32, *extent as u32 / self.unit as u32);
            (tile.channels, tile.pitches) = (*count as u32, Dim::new(items as u32, 0, 0));
        }
        Some(launch)
    }
}

/// Shared memory, in bytes, for a chunk that begins anywhere in a vector: whole lines of 128 bytes.
fn shared(nbytes: usize) -> u32 {
    (nbytes + VECTOR).next_multiple_of(128) as u32
}
