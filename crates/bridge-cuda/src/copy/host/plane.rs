//! Two dimensions of a walk, and what the kernels that copy them are.

use super::{Ends, Flips};
use crate::copy::plan::{Dim, Walk};
use smallvec::SmallVec;

/// The two dimensions of a walk that a kernel copies at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plane {
    /// Bytes of a unit.
    pub unit: usize,
    /// The fastest dimension of the target.
    pub along: Dim,
    /// The fastest dimension of the source, where that is another one. Otherwise the next one of the target.
    pub across: Dim,
}

/// Copies a plane from these addresses on.
pub(super) type Kernel = unsafe fn(&Plane, Ends, Flips);

impl Plane {
    /// Takes the two dimensions out of a walk. Returns the others, the fastest of the target last.
    pub fn new(walk: Walk) -> (Self, SmallVec<[Dim; 6]>) {
        let (unit, mut outer) = (walk.unit, walk.dims);
        let once = Dim { length: 1, from: unit as i64, to: unit as i64 };
        let along = outer.pop().unwrap_or(once);
        let step = |d: &usize| outer[*d].from.unsigned_abs();
        let fastest = (0..outer.len()).filter(|d| step(d) != 0).min_by_key(step);
        let across = match fastest.filter(|d| step(d) < along.from.unsigned_abs()) {
            Some(d) => outer.remove(d),
            None => outer.pop().unwrap_or(once),
        };
        let plane = Self { unit, along, across };
        (plane, outer)
    }

    /// Returns whether the source is fastest in another dimension than the target.
    pub fn is_transposed(&self) -> bool {
        self.across.length > 1
            && self.across.from != 0
            && self.across.from.unsigned_abs() < self.along.from.unsigned_abs()
    }
}

/// The loops of a kernel.
pub(super) trait Loops {
    /// Copies a plane from these addresses on, and flips these bits.
    ///
    /// # Safety
    ///
    /// The units of the plane are readable in the source and writable in the target, and the two do not overlap.
    unsafe fn copy(plane: &Plane, ends: Ends, flips: Flips);
}

/// Returns these loops, compiled for the vectors of this processor.
pub(super) fn compiled<L: Loops>() -> Kernel {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        unsafe fn with_avx2<L: Loops>(plane: &Plane, ends: Ends, flips: Flips) {
            // SAFETY: the caller's promises.
            unsafe { L::copy(plane, ends, flips) }
        }
        return with_avx2::<L>;
    }
    L::copy
}
