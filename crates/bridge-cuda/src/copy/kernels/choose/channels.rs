//! Points with a few channels each: `split`, `join` and `mix`.

use super::{LEAST_POINTS, Launch, Parameters, Pass, Step, VECTOR, WORD};
use crate::copy::kernels::parameters::{Dim, Group};
use crate::copy::kernels::table::Kernel;
use smallvec::SmallVec;

/// The most channels of `split` and `join`.
const MOST_CHANNELS: usize = 32;

/// The most bytes from one point to the next on the dense side, for these.
const LONGEST_PITCH: i64 = 256;

/// Runs of at least so many bytes are read as they lie.
const LONG_RUN: usize = 4;

/// The most rows of a block of these, and the least points of a row where a block takes several.
const MOST_ROWS: usize = 256;
const LEAST_SHORT: usize = 16;

/// The least units of a row of points with their channels: with fewer most threads of a block have nothing to do.
const LEAST_UNITS: usize = 512;

/// The least and the most bytes of a block of these.
const LEAST_CHUNK: usize = 1 << 10;
const SPLIT: usize = 16 << 10;
const JOINED: usize = 32 << 10;

/// Small copies of `join` are divided into so many blocks, about two for each multiprocessor of an H200, of so many bytes
/// at least: they take little longer than one block.
const JOIN_BLOCKS: usize = 256;
const LEAST_JOINED: usize = 4 << 10;

/// The most units of a point of `mix`, of one that is only turned around, and the least and the most bytes of a block.
const MIXED: usize = 1024;
const LONGEST_TURNED: usize = 16;
const LEAST_MIXED: usize = 4 << 10;
const MOST_MIXED: usize = 16 << 10;

/// The points of a row of which a thread of `split` and `join` takes several, by the binary logarithm of the unit.
const FULL_ROW: [usize; 4] = [4096, 2048, 2048, 1024];

// By the binary logarithm of the unit.
const SPLITS: [Kernel; 4] = [Kernel::Split1, Kernel::Split2, Kernel::Split4, Kernel::Split8];
const JOINS: [Kernel; 2] = [Kernel::Join1, Kernel::Join2];
const MIXES: [Kernel; 2] = [Kernel::Mix1, Kernel::Mix2];

impl Pass {
    /// Rows of points in the source, one for each channel. The channels are dense in the target.
    pub(super) fn join(&self) -> Option<Launch> {
        self.channels(1, &JOINS, JOINED, |dim| dim.to, |dim| dim.from)
    }

    /// The reverse. The first channels may be a `run`, which is adjacent on both sides.
    pub(super) fn split(&self, run: usize) -> Option<Launch> {
        self.forwards(0).channels(run, &SPLITS, SPLIT, |dim| dim.from, |dim| dim.to)
    }

    /// A few channels close to each other for each point on one side, a row of points for each on the other.
    fn channels(
        &self,
        run: usize,
        kernels: &[Kernel],
        chunk: usize,
        dense: fn(&Step) -> i64,
        row: fn(&Step) -> i64,
    ) -> Option<Launch> {
        let (unit, joins) = (self.unit as i64, kernels == JOINS.as_slice());
        // Large units lose little where they are read as they lie: on the way to dense points, in runs, and where they repeat
        // and are in the cache.
        let repeats = self.dims.iter().any(|dim| dim.from == 0);
        let loses_little = match self.unit {
            1 | 2 => !joins && self.run * self.unit >= LONG_RUN,
            4 | 8 => joins || self.run > 1 || repeats,
            _ => true,
        };
        if loses_little {
            return None;
        }
        if self.run > 1 {
            let mut pass = self.clone();
            pass.dims.insert(0, Step { length: std::mem::replace(&mut pass.run, 1), from: unit, to: unit });
            return pass.channels(self.run, kernels, chunk, dense, row);
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
        let small = (self.nbytes() / JOIN_BLOCKS).next_power_of_two().clamp(LEAST_JOINED, JOINED);
        let chunk = if joins { small } else { chunk };
        // Several rows remain several.
        let each = each.min((chunk / stride as usize).max(2));
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
    pub(super) fn mix(&self) -> Option<Launch> {
        let (unit, kernel) = (self.unit as i64, *MIXES.get(self.index())?);
        let (points, pitch) =
            self.dims.iter().enumerate().find(|(_, dim)| dim.from == dim.to).map(|(d, dim)| (d, dim.to))?;
        let units: SmallVec<[usize; 4]> = (0..self.dims.len()).filter(|d| self.dims[*d].to < pitch).collect();
        let count = units.iter().fold(1, |count: usize, d| count.saturating_mul(self.dims[*d].length));
        let ends = units.iter().map(|d| self.dims[*d].from * (self.dims[*d].length as i64 - 1));
        let (below, above): (i64, i64) =
            ends.fold((0, 0), |(below, above), end| (below - end.min(0), above + end.max(0)));
        let fits = self.run == 1
            && units.len() <= Group::MOST
            && (units.len() > 1 || count <= LONGEST_TURNED)
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
        let mut launch = self.tiled(kernel, &units, &[points], (count, span), shared);
        if let Parameters::Tile(tile) = &mut launch.parameters {
            (tile.pitch, tile.extent) = (count as u32, (below / unit) as u32);
            tile.pitches = Dim::new(count as u32, 0, 0);
        }
        Some(launch)
    }
}

/// Shared memory, in bytes, for a chunk that begins anywhere in a vector: whole lines of 128 bytes.
fn shared(nbytes: usize) -> u32 {
    (nbytes + VECTOR).next_multiple_of(128) as u32
}
