//! Casts on the host, row by row: a piece of a row is read as float32, and written from there.

use super::Ends;
use crate::copy::floats::{self, BFloat16, Float, Float8E4M3FN, Float8E5M2, Float16, Float32, Float64};
use crate::copy::plan::Dim;
use bridge_core::Cast;
use bridge_core::planted::is_planted;

/// The most values on their way, which stay in the first cache.
pub(super) const MOST: usize = 1024;

/// Reads elements at this stride, in bytes, and flips the bits of a mask in each.
type Read = unsafe fn(*const u8, isize, u64, &mut [f32]);

/// Writes elements at this stride, in bytes.
type Write = unsafe fn(&[f32], *mut u8, isize);

/// How rows are cast.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    read: Read,
    write: Write,
    flips: u64,
}

impl Rows {
    /// Returns the loops for a cast of elements in which these bits are flipped first.
    pub fn new(cast: Cast, flips: u128) -> Self {
        /// In the order of [`Cast::DTYPES`].
        const LOOPS: [fn() -> (Read, Write); Cast::DTYPES.len()] = [
            compiled::<Float16>,
            compiled::<BFloat16>,
            compiled::<Float32>,
            compiled::<Float64>,
            compiled::<Float8E4M3FN>,
            compiled::<Float8E5M2>,
        ];
        let (read, _) = LOOPS[floats::number(cast.from())]();
        let (_, write) = LOOPS[floats::number(cast.to())]();
        Self { read, write, flips: flips as u64 }
    }

    /// Casts a row that begins at these addresses. `values` is room for those on their way.
    ///
    /// # Safety
    ///
    /// The elements of the row are readable in the source and writable in the target, and the two do not overlap.
    pub unsafe fn cast(&self, row: Dim, ends: Ends, values: &mut [f32; MOST]) {
        for first in (0..row.length).step_by(MOST) {
            let at = ends.steps(first, row.from, row.to);
            let values = &mut values[..MOST.min(row.length - first)];
            // SAFETY: the caller's promises, for a part of the row.
            unsafe {
                (self.read)(at.source, row.from as isize, self.flips, values);
                planted(values);
                (self.write)(values, at.target, row.to as isize);
            }
        }
    }
}

/// Mistakes that the conformance suite plants.
#[inline]
fn planted(values: &mut [f32]) {
    if is_planted("copy_cast_nan_lost") {
        values.iter_mut().filter(|value| value.is_nan()).for_each(|value| *value = f32::INFINITY);
    }
    if is_planted("copy_cast_subnormals_lost") {
        values.iter_mut().filter(|value| value.is_subnormal()).for_each(|value| *value = 0.0);
    }
}

/// Returns the loops for a dtype, compiled for the vectors of this processor.
fn compiled<F: Float>() -> (Read, Write) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        unsafe fn read_with_avx2<F: Float>(source: *const u8, step: isize, flips: u64, values: &mut [f32]) {
            // SAFETY: the caller's promises.
            unsafe { read::<F>(source, step, flips, values) }
        }
        #[target_feature(enable = "avx2")]
        unsafe fn write_with_avx2<F: Float>(values: &[f32], target: *mut u8, step: isize) {
            // SAFETY: the caller's promises.
            unsafe { write::<F>(values, target, step) }
        }
        return (read_with_avx2::<F>, write_with_avx2::<F>);
    }
    (read::<F>, write::<F>)
}

/// # Safety
///
/// As many elements as there are values are readable at this stride.
#[inline(always)]
unsafe fn read<F: Float>(source: *const u8, step: isize, flips: u64, values: &mut [f32]) {
    let mut line = |step: isize| {
        for (index, value) in values.iter_mut().enumerate() {
            // SAFETY: the caller's promises, for one element.
            let bits = unsafe { source.offset(index as isize * step).cast::<F::Bits>().read_unaligned() };
            *value = F::widen(F::flip(bits, flips));
        }
    };
    // The usual stride is stated as a constant, so that the compiler makes vectors of the loop.
    match size_of::<F::Bits>() as isize {
        size if size == step => line(size),
        _ => line(step),
    }
}

/// # Safety
///
/// As many elements as there are values are writable at this stride.
#[inline(always)]
unsafe fn write<F: Float>(values: &[f32], target: *mut u8, step: isize) {
    let line = |step: isize| {
        for (index, value) in values.iter().enumerate() {
            // SAFETY: the caller's promises, for one element.
            unsafe { target.offset(index as isize * step).cast::<F::Bits>().write_unaligned(F::narrow(*value)) };
        }
    };
    match size_of::<F::Bits>() as isize {
        size if size == step => line(size),
        _ => line(step),
    }
}

#[cfg(test)]
mod tests;
