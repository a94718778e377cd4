//! Copies along one dimension: whole rows of bytes, and units at any stride.

use super::plane::{Kernel, Loops, Plane, compiled};
use super::unit::Unit;
use super::{Ends, Flips};
use crate::copy::plan::Dim;
use std::marker::PhantomData;

/// Returns the kernel for planes of any kind: block by block where the two sides are fastest in different dimensions,
/// unless the units are rows of cache lines anyway.
pub(super) fn kernel(plane: &Plane) -> Kernel {
    match plane.unit {
        1 => ordered::<Lines<u8>>(plane),
        2 => ordered::<Lines<u16>>(plane),
        3 => ordered::<Lines<[u8; 3]>>(plane),
        4 => ordered::<Lines<u32>>(plane),
        6 => ordered::<Lines<[u16; 3]>>(plane),
        8 => ordered::<Lines<u64>>(plane),
        12 => ordered::<Lines<[u32; 3]>>(plane),
        16 => ordered::<Lines<u128>>(plane),
        24 => ordered::<Lines<[u64; 3]>>(plane),
        32 => ordered::<Lines<[u128; 2]>>(plane),
        _ => compiled::<Rows>(),
    }
}

fn ordered<L: Loops>(plane: &Plane) -> Kernel {
    match plane.is_transposed() {
        true => compiled::<Blocks<L>>(),
        false => compiled::<L>(),
    }
}

/// A plane in blocks, so that both sides stay on a few cache lines and pages at a time.
struct Blocks<L>(PhantomData<L>);

impl<L: Loops> Loops for Blocks<L> {
    #[inline(always)]
    unsafe fn copy(plane: &Plane, ends: Ends, flips: Flips) {
        /// Units on a side of a block.
        const SIDE: usize = 32;
        let Plane { unit, along, across } = *plane;
        for i in (0..along.length).step_by(SIDE) {
            for j in (0..across.length).step_by(SIDE) {
                let at = ends.steps(i, along.from, along.to).steps(j, across.from, across.to);
                let along = Dim { length: SIDE.min(along.length - i), ..along };
                let across = Dim { length: SIDE.min(across.length - j), ..across };
                // SAFETY: the caller's promises, for a part of the plane.
                unsafe { L::copy(&Plane { unit, along, across }, at, flips) };
            }
        }
    }
}

/// Rows of adjacent bytes.
struct Rows;

impl Loops for Rows {
    #[inline(always)]
    unsafe fn copy(plane: &Plane, ends: Ends, flips: Flips) {
        for row in 0..plane.across.length {
            let start = ends.steps(row, plane.across.from, plane.across.to);
            for i in 0..plane.along.length {
                let at = start.steps(i, plane.along.from, plane.along.to);
                // SAFETY: the caller's promises, for one unit of the plane.
                unsafe { row_of_bytes(at, plane.unit, flips) };
            }
        }
    }
}

/// Copies adjacent bytes.
///
/// # Safety
///
/// So many bytes are readable at the source and writable at the target, and the two do not overlap.
#[inline(always)]
unsafe fn row_of_bytes(at: Ends, length: usize, flips: Flips) {
    if flips == [0; 16] {
        // SAFETY: the caller's promises.
        return unsafe { at.source.copy_to_nonoverlapping(at.target, length) };
    }
    // SAFETY: the caller's promises.
    let (source, target) =
        unsafe { (std::slice::from_raw_parts(at.source, length), std::slice::from_raw_parts_mut(at.target, length)) };
    for (to, from) in target.chunks_mut(16).zip(source.chunks(16)) {
        to.iter_mut().zip(from).zip(flips).for_each(|((to, from), flip)| *to = from ^ flip);
    }
}

/// Lines of units at any stride.
struct Lines<U>(PhantomData<U>);

impl<U: Unit> Loops for Lines<U> {
    #[inline(always)]
    unsafe fn copy(plane: &Plane, ends: Ends, flips: Flips) {
        let size = size_of::<U>() as isize;
        let (from, to, length) = (plane.along.from as isize, plane.along.to as isize, plane.along.length);
        let mask = U::repeat(&flips);
        for row in 0..plane.across.length {
            let at = ends.steps(row, plane.across.from, plane.across.to);
            // SAFETY: the caller's promises, for one line of the plane. The branches state common strides as constants,
            // so that the compiler makes vectors of them.
            unsafe {
                match from {
                    _ if to != size => line::<U>(at, from, to, length, mask),
                    0 => line::<U>(at, 0, size, length, mask),
                    _ if from == -size => line::<U>(at, -size, size, length, mask),
                    _ if from == 2 * size => line::<U>(at, 2 * size, size, length, mask),
                    _ => line::<U>(at, from, size, length, mask),
                }
            }
        }
    }
}

/// Copies `n` units at these strides, in bytes.
///
/// # Safety
///
/// So many units are readable at the source and writable at the target at these strides, and the two do not overlap.
#[inline(always)]
unsafe fn line<U: Unit>(at: Ends, from: isize, to: isize, n: usize, mask: U) {
    for i in 0..n as isize {
        // SAFETY: the caller's promises, for one unit of the line.
        unsafe {
            let unit = at.source.offset(i * from).cast::<U>().read_unaligned();
            at.target.offset(i * to).cast::<U>().write_unaligned(unit.flip(mask));
        }
    }
}
