//! The target in its own order: rows, and units one by one or in items.

use super::{LEAST_ACROSS, LEAST_APART, LEAST_POINTS, Launch, Parameters, Pass, SECTOR, Step, Steps, VECTOR, WORD};
use crate::copy::kernels::parameters::{Flat, dims};
use crate::copy::kernels::table::Kernel;

/// Rows of at least so many bytes are copied as a whole at any address, by the binary logarithm of the unit: into a target
/// without gaps, and into others. Words that can be gathered, and larger units, take as long one by one.
const LONG_ROWS: [(usize, usize); 3] = [(16, 64), (32, 128), (256, 256)];

/// The most units of a row that are stored one by one where the next row is far.
const FEW: usize = 4;

/// Planes of more rows, or of at least so many items, are gathered by items.
const FEW_ROWS: usize = 3;
const SMALL_PLANE: usize = 7;

// By the binary logarithm of the unit.
/// With the units of a thread.
const FLATS: [(Kernel, u32); 5] =
    [(Kernel::Flat1, 4), (Kernel::Flat2, 4), (Kernel::Flat4, 4), (Kernel::Flat8, 4), (Kernel::Flat16, 2)];
/// With the bytes of an item, and the items of a thread.
const GATHERS: [(Kernel, usize, u32); 4] =
    [(Kernel::Gather1, 4, 4), (Kernel::Gather2, 8, 2), (Kernel::Gather4, 16, 2), (Kernel::Gather8, 16, 2)];

impl Pass {
    /// Long rows that are contiguous on both sides.
    pub(super) fn rows(&self) -> Option<Launch> {
        let (without_gaps, with_gaps) = LONG_ROWS.get(self.index())?;
        let (nbytes, is_joined) = (self.run * self.unit, self.is_without_gaps());
        let is_gathered = self.unit == WORD && self.gathers().is_some();
        if is_gathered || nbytes < if is_joined { *without_gaps } else { *with_gaps } {
            return None;
        }
        let first = |length| Step { length, from: 0, to: 0 };
        let dims = |length| [first(length)].into_iter().chain(self.dims.iter().copied()).collect::<Steps>();
        let kernel = Kernel::Rows;
        if is_joined {
            let units = self.dims.iter().fold(self.run, |units, dim| units * dim.length);
            let vectors = (self.beyond.1 + units * self.unit).div_ceil(VECTOR);
            let mut launch = self.counted(kernel, 2, units as i64, vectors, &dims(self.run));
            if let Parameters::Flat(flat) = &mut launch.parameters {
                flat.joined = 1;
            }
            return Some(launch);
        }
        // A row may begin anywhere in its first vector.
        let vectors = if self.aligned_to(|dim| dim.to, self.beyond.1, None) {
            nbytes.div_ceil(VECTOR)
        } else {
            (nbytes + 2 * VECTOR - 2) / VECTOR
        };
        Some(self.walked(kernel, 2, nbytes as i64, &dims(vectors)))
    }

    /// Returns whether 16 divides the start and all strides of a side but that of one dimension.
    fn aligned_to(&self, stride: impl Fn(&Step) -> i64, beyond: usize, except: Option<usize>) -> bool {
        let counted = self.dims.iter().enumerate().filter(|(d, _)| Some(*d) != except);
        beyond == 0 && counted.fold(0, |bits, (_, dim)| bits | stride(dim)) % VECTOR as i64 == 0
    }

    /// The target in its own order.
    pub(super) fn flat(mut self) -> Launch {
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
        if self.unit < VECTOR && turned && fastest.to == step && fastest.length.is_multiple_of(per_vector) && self.aligned_to(|dim| dim.to, self.beyond.1, Some(0))
            // The last unit of the first vector is the first of its memory.
            && self.aligned_to(|dim| dim.from, (self.beyond.0 + self.unit) % VECTOR, Some(0))
        {
            self.from -= (VECTOR - self.unit) as i64;
            let by = VECTOR as i64;
            self.dims[0] = Step { length: fastest.length / per_vector, from: -by, to: by };
            let dims = std::mem::take(&mut self.dims);
            return self.walked(Kernel::Turn, 2, 0, &dims);
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

    fn walked(&self, kernel: Kernel, each: u32, extra: i64, steps: &[Step]) -> Launch {
        self.counted(kernel, each, extra, steps.iter().map(|step| step.length).product(), steps)
    }

    fn counted(&self, kernel: Kernel, each: u32, extra: i64, items: usize, steps: &[Step]) -> Launch {
        let (near, ndim) = (u8::from(fits_in_32_bits(steps)), steps.len() as u8);
        let ends = |end: fn(i64, i64) -> i64| {
            steps.iter().map(|step| end((step.length as i64 - 1) * step.from, 0)).sum::<i64>()
        };
        let (low, high) = (ends(i64::min), ends(i64::max) + (self.run * self.unit) as i64);
        let (sides, items) = (self.sides(), items as u32);
        let flat =
            Flat { sides, extra, low, high, items, ndim, unit: self.index() as u8, near, joined: 0, dims: dims(steps) };
        let blocks = items.div_ceil(kernel.threads() * each);
        Launch { kernel, blocks, shared: 0, parameters: Parameters::Flat(Box::new(flat)) }
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
