//! Transposes with two, three or four units on one side, such as the channels of an image.

use super::plane::{Kernel, Loops, Plane, compiled};
use super::unit::Unit;
use super::{Ends, Flips};
use std::marker::PhantomData;

/// Returns the kernel for planes of a few channels: adjacent in the source and each contiguous in the target, or the
/// other way round. Returns `None` for others.
pub(super) fn kernel(plane: &Plane) -> Option<Kernel> {
    let unit = plane.unit as i64;
    if plane.across.from != unit || plane.along.to != unit {
        return None;
    }
    match (plane.unit, plane.across.length, plane.along.length) {
        (1, channels, _) if channels < 5 => Some(split::<u8>(channels)),
        (2, channels, _) if channels < 5 => Some(split::<u16>(channels)),
        (4, channels, _) if channels < 5 => Some(split::<u32>(channels)),
        (1, _, channels) if channels < 5 => Some(join::<u8>(channels)),
        (2, _, channels) if channels < 5 => Some(join::<u16>(channels)),
        (4, _, channels) if channels < 5 => Some(join::<u32>(channels)),
        _ => None,
    }
}

fn split<U: Unit>(channels: usize) -> Kernel {
    match channels {
        2 => compiled::<Split<U, 2>>(),
        3 => compiled::<Split<U, 3>>(),
        _ => compiled::<Split<U, 4>>(),
    }
}

fn join<U: Unit>(channels: usize) -> Kernel {
    match channels {
        2 => compiled::<Join<U, 2>>(),
        3 => compiled::<Join<U, 3>>(),
        _ => compiled::<Join<U, 4>>(),
    }
}

/// From `C` adjacent channels to separate channels.
struct Split<U, const C: usize>(PhantomData<U>);

impl<U: Unit, const C: usize> Loops for Split<U, C> {
    #[inline(always)]
    unsafe fn copy(plane: &Plane, ends: Ends, flips: Flips) {
        let mask = U::repeat(&flips);
        let channels: [*mut U; C] = std::array::from_fn(|c| ends.steps(c, 0, plane.across.to).target.cast());
        let pixel = |i: usize, step: isize| ends.source.wrapping_offset(i as isize * step).cast::<[U; C]>();
        let (step, dense) = (plane.along.from as isize, size_of::<[U; C]>() as isize);
        // SAFETY: the caller's promises, for `C` units.
        let copy = |i: usize, step: isize| unsafe {
            let units = pixel(i, step).read_unaligned();
            for c in 0..C {
                channels[c].add(i).write_unaligned(units[c].flip(mask));
            }
        };
        match step == dense {
            true => (0..plane.along.length).for_each(|i| copy(i, dense)),
            false => (0..plane.along.length).for_each(|i| copy(i, step)),
        }
    }
}

/// From separate channels to `C` adjacent channels.
struct Join<U, const C: usize>(PhantomData<U>);

impl<U: Unit, const C: usize> Loops for Join<U, C> {
    #[inline(always)]
    unsafe fn copy(plane: &Plane, ends: Ends, flips: Flips) {
        let mask = U::repeat(&flips);
        let channels: [*const U; C] = std::array::from_fn(|c| ends.steps(c, plane.along.from, 0).source.cast());
        let (step, dense) = (plane.across.to as isize, size_of::<[U; C]>() as isize);
        // SAFETY: the caller's promises, for `C` units.
        let copy = |i: usize, step: isize| unsafe {
            let pixel = ends.target.wrapping_offset(i as isize * step).cast::<[U; C]>();
            pixel.write_unaligned(std::array::from_fn(|c| channels[c].add(i).read_unaligned().flip(mask)));
        };
        match step == dense {
            true => (0..plane.across.length).for_each(|i| copy(i, dense)),
            false => (0..plane.across.length).for_each(|i| copy(i, step)),
        }
    }
}
