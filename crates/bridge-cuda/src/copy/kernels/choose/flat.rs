//! The target in its own order: rows, and units one by one or in items.

use super::{Candidate, Candidates, FEW_TIMES, Launch, Parameters, Pass, SECTOR, Step, Steps, VECTOR, WORD, Work};
use crate::copy::kernels::parameters::{Flat, JOINED, TURNED, dims};
use crate::copy::kernels::table::Kernel;

/// Units that repeat a few times are read once for all places if these are so many at least.
const LEAST_PLACES: usize = 64;

// By the binary logarithm of the unit.
/// Units one by one, with those of a thread; and items of several units, with their bytes and the items of a thread.
type InOrder = ((Kernel, u32), Option<(Kernel, usize, u32)>);
const IN_ORDER: [InOrder; 5] = [
    ((Kernel::Flat1, 4), None),
    ((Kernel::Flat2, 4), Some((Kernel::Gather2, 8, 2))),
    ((Kernel::Flat4, 4), Some((Kernel::Gather4, 16, 2))),
    ((Kernel::Flat8, 4), None),
    ((Kernel::Flat16, 2), None),
];

impl Pass {
    /// The target in its own order: by rows, by units, and by items of several units.
    pub(super) fn in_order(&self) -> Candidates {
        let candidate = |launch, item| Candidate { launch, work: Work::InOrder(item) };
        let rows = if self.unit <= WORD && self.run * self.unit >= VECTOR { Some(self.rows()) } else { None };
        let mut found: Candidates = rows.into_iter().map(|launch| candidate(launch, 1)).collect();
        if let Some(turned) = self.turned() {
            return vec![candidate(turned, 1)];
        }
        let units = self.in_units();
        found.push(candidate(units.clone().flat(), 1));
        if let Some((kernel, item, each)) = units.gathers() {
            let count: usize = units.dims.iter().map(|dim| dim.length).product();
            let per = item / self.unit;
            let launch = units.counted(kernel, each, count as i64, count.div_ceil(per), &units.dims);
            found.push(candidate(launch, per));
        }
        found
    }

    /// Long rows that are contiguous on both sides.
    fn rows(&self) -> Launch {
        let (nbytes, is_joined) = (self.run * self.unit, self.is_without_gaps());
        let first = |length| Step { length, from: 0, to: 0 };
        let dims = |length| [first(length)].into_iter().chain(self.dims.iter().copied()).collect::<Steps>();
        let kernel = Kernel::Rows;
        if is_joined {
            let units = self.dims.iter().fold(self.run, |units, dim| units * dim.length);
            let vectors = (self.beyond.1 + units * self.unit).div_ceil(VECTOR);
            let mut launch = self.counted(kernel, 2, units as i64, vectors, &dims(self.run));
            if let Parameters::Flat(flat) = &mut launch.parameters {
                flat.mode = JOINED;
            }
            return launch;
        }
        // A row may begin anywhere in its first vector.
        let vectors = if self.aligned_to(|dim| dim.to, self.beyond.1, None) {
            nbytes.div_ceil(VECTOR)
        } else {
            (nbytes + 2 * VECTOR - 2) / VECTOR
        };
        self.walked(kernel, 2, nbytes as i64, &dims(vectors))
    }

    /// Returns whether 16 divides the start and all strides of a side but that of one dimension.
    fn aligned_to(&self, stride: impl Fn(&Step) -> i64, beyond: usize, except: Option<usize>) -> bool {
        let counted = self.dims.iter().enumerate().filter(|(d, _)| Some(*d) != except);
        beyond == 0 && counted.fold(0, |bits, (_, dim)| bits | stride(dim)) % VECTOR as i64 == 0
    }

    /// Units one by one.
    fn flat(mut self) -> Launch {
        let ((flat, each), _) = IN_ORDER[self.index()];
        let Some(fastest) = self.dims.first() else {
            let one = [Step { length: 1, from: 0, to: 0 }];
            return self.walked(flat, each, 0, &one);
        };
        // A sector of which one unit is used is read once for all places that the unit is repeated in.
        let repeats = self.dims.iter().position(|dim| dim.from == 0 && dim.length < FEW_TIMES);
        let is_alone = self.unit >= WORD && fastest.from.unsigned_abs() >= SECTOR && fastest.length >= LEAST_PLACES;
        if let Some(repeats) = repeats.filter(|_| is_alone) {
            self.dims[..=repeats].rotate_right(1);
            return self.walked(flat, each, 0, &self.dims);
        }
        let extra = if self.is_without_gaps() { self.unit as i64 } else { 0 };
        self.walked(flat, each, extra, &self.dims)
    }

    /// Vectors whose units the source has in reverse.
    fn turned(&self) -> Option<Launch> {
        let (step, per_vector) = (self.unit as i64, VECTOR / self.unit);
        let fastest = self.dims.first().filter(|dim| self.run == 1 && (dim.from, dim.to) == (-step, step))?;
        // The last unit of the first vector is the first of its memory.
        let fits = self.unit < VECTOR
            && fastest.length.is_multiple_of(per_vector)
            && self.aligned_to(|dim| dim.to, self.beyond.1, Some(0))
            && self.aligned_to(|dim| dim.from, (self.beyond.0 + self.unit) % VECTOR, Some(0));
        fits.then(|| {
            let (mut pass, by) = (self.clone(), VECTOR as i64);
            pass.from -= (VECTOR - self.unit) as i64;
            pass.dims[0] = Step { length: fastest.length / per_vector, from: -by, to: by };
            let mut launch = pass.walked(Kernel::Rows, 2, 0, &pass.dims);
            if let Parameters::Flat(flat) = &mut launch.parameters {
                flat.mode = TURNED;
            }
            launch
        })
    }

    fn is_without_gaps(&self) -> bool {
        let run = (self.run * self.unit) as i64;
        self.dims.iter().try_fold(run, |end, dim| (dim.to == end).then(|| end * dim.length as i64)).is_some()
    }

    /// Returns the kernel that stores several units at once, with the bytes of an item and the items of a thread, where the
    /// target has no gaps.
    fn gathers(&self) -> Option<(Kernel, usize, u32)> {
        let fits = |item: usize| !self.dims.is_empty() && self.is_without_gaps() && self.beyond.1.is_multiple_of(item);
        IN_ORDER[self.index()].1.filter(|(_, item, _)| fits(*item))
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
            Flat { sides, extra, low, high, items, ndim, unit: self.index() as u8, near, mode: 0, dims: dims(steps) };
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
