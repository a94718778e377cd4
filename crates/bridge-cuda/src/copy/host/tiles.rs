//! Transposes: tiles that are read in lines of the source and written in lines of the target.
//!
//! A tile goes through a buffer in the first cache. So every cache line of the source is read once and every one of the
//! target is written once, however the strides map them to cache sets: in a matrix with rows of a power of two bytes,
//! all lines of a column share one set. Blocks are transposed in registers before they are written to the buffer.

use super::plane::{Kernel, Loops, Plane, compiled};
use super::unit::Unit;
use super::{Ends, Flips};
use crate::copy::plan::Dim;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use vectors::{Bytes, Doubles, Halves, Words};

/// A vector of `N` units. A single unit is a vector, too.
pub(super) trait Lanes<const N: usize>: Copy {
    /// Reads a vector.
    ///
    /// # Safety
    ///
    /// The bytes of `N` units are readable at `at`, which need not be aligned.
    unsafe fn load(at: *const u8) -> Self;
    /// Writes a vector.
    ///
    /// # Safety
    ///
    /// The bytes of `N` units are writable at `at`, which need not be aligned.
    unsafe fn store(self, at: *mut u8);
    /// Returns the units of both, in turns.
    fn zip(self, other: Self) -> (Self, Self);
    /// Flips the bits of a pattern.
    fn flip(self, mask: Self) -> Self;
}

impl<U: Unit> Lanes<1> for U {
    #[inline(always)]
    unsafe fn load(at: *const u8) -> Self {
        // SAFETY: the caller's promise.
        unsafe { at.cast::<U>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { at.cast::<U>().write_unaligned(self) }
    }

    #[inline(always)]
    fn zip(self, other: Self) -> (Self, Self) {
        (self, other)
    }

    #[inline(always)]
    fn flip(self, mask: Self) -> Self {
        Unit::flip(self, mask)
    }
}

#[cfg(target_arch = "x86_64")]
mod vectors {
    use super::Lanes;
    use std::arch::x86_64::*;

    macro_rules! vectors {
        ($($name:ident $lanes:literal $low:ident $high:ident;)*) => {$(
            /// Units in a vector of SSE2, which every x86-64 processor has.
            #[derive(Clone, Copy)]
            pub(crate) struct $name(__m128i);

            impl Lanes<$lanes> for $name {
                #[inline(always)]
                unsafe fn load(at: *const u8) -> Self {
                    // SAFETY: the caller's promise; the instruction takes any address.
                    Self(unsafe { _mm_loadu_si128(at.cast()) })
                }

                #[inline(always)]
                unsafe fn store(self, at: *mut u8) {
                    // SAFETY: the caller's promise; the instruction takes any address.
                    unsafe { _mm_storeu_si128(at.cast(), self.0) }
                }

                #[inline(always)]
                fn zip(self, other: Self) -> (Self, Self) {
                    // SAFETY: SSE2 is part of x86-64.
                    unsafe { (Self($low(self.0, other.0)), Self($high(self.0, other.0))) }
                }

                #[inline(always)]
                fn flip(self, mask: Self) -> Self {
                    // SAFETY: SSE2 is part of x86-64.
                    Self(unsafe { _mm_xor_si128(self.0, mask.0) })
                }
            }
        )*};
    }

    vectors! {
        Bytes 16 _mm_unpacklo_epi8 _mm_unpackhi_epi8;
        Halves 8 _mm_unpacklo_epi16 _mm_unpackhi_epi16;
        Words 4 _mm_unpacklo_epi32 _mm_unpackhi_epi32;
        Doubles 2 _mm_unpacklo_epi64 _mm_unpackhi_epi64;
    }
}

/// Units of other processors go through the buffer one by one.
#[cfg(not(target_arch = "x86_64"))]
mod vectors {
    pub(super) type Bytes = u8;
    pub(super) type Halves = u16;
    pub(super) type Words = u32;
    pub(super) type Doubles = u64;
}

/// Returns the units in a vector.
const fn lanes<U>() -> usize {
    if cfg!(target_arch = "x86_64") { 16 / size_of::<U>() } else { 1 }
}

/// Returns the kernel for planes whose two fastest dimensions are contiguous, that of the source and that of the
/// target. Returns `None` for others, where one of them is shorter than a vector, and for units of 16 bytes: a cache
/// line has so few of them that a detour through a buffer costs more than it saves.
///
/// A tile has at least 256 bytes in a line of the target and 128 in one of the source. The pages of a large matrix are
/// more than the processor can look up at once, so that each visit to one has to be worth it.
pub(super) fn kernel(plane: &Plane) -> Option<Kernel> {
    let unit = plane.unit as i64;
    let contiguous = plane.across.from.abs() == unit && plane.along.to == unit;
    let shorter = plane.along.length.min(plane.across.length);
    match plane.unit {
        _ if !contiguous => None,
        1 => tiled::<u8, Bytes, { lanes::<u8>() }, 256, 128>(shorter),
        2 => tiled::<u16, Halves, { lanes::<u16>() }, 256, 64>(shorter),
        4 => tiled::<u32, Words, { lanes::<u32>() }, 128, 32>(shorter),
        8 => tiled::<u64, Doubles, { lanes::<u64>() }, 64, 16>(shorter),
        _ => None,
    }
}

fn tiled<U: Unit, V: Lanes<N>, const N: usize, const WIDE: usize, const HIGH: usize>(shorter: usize) -> Option<Kernel> {
    (shorter >= N).then(compiled::<Tiles<U, V, N, WIDE, HIGH>>)
}

/// Tiles of `WIDE` units in a line of the target and `HIGH` in one of the source, transposed in vectors of `N`.
pub(super) struct Tiles<U, V, const N: usize, const WIDE: usize, const HIGH: usize>(PhantomData<(U, V)>);

/// A tile as the target has it.
#[repr(align(64))]
struct Buffer<U, const WIDE: usize, const HIGH: usize>(MaybeUninit<[[U; WIDE]; HIGH]>);

impl<U: Unit, V: Lanes<N>, const N: usize, const WIDE: usize, const HIGH: usize> Loops for Tiles<U, V, N, WIDE, HIGH> {
    #[inline(always)]
    unsafe fn copy(plane: &Plane, mut ends: Ends, flips: Flips) {
        let Plane { along, mut across, .. } = *plane;
        if across.from < 0 {
            ends = ends.steps(across.length - 1, across.from, across.to);
            across = Dim { from: -across.from, to: -across.to, ..across };
        }
        let (size, line) = (size_of::<U>(), size_of::<[U; WIDE]>());
        let mut buffer = Buffer::<U, WIDE, HIGH>(MaybeUninit::uninit());
        let buffer = buffer.0.as_mut_ptr().cast::<u8>();
        // SAFETY: a pattern has the bytes of a vector.
        let mask = unsafe { V::load(flips.as_ptr()) };
        for (i, wide) in pieces(along.length, WIDE, N) {
            for (j, high) in pieces(across.length, HIGH, N) {
                let at = ends.steps(i, along.from, along.to).steps(j, across.from, across.to);
                let next = at.steps(HIGH, across.from, 0);
                (0..high).for_each(|column| fetch::<true>(at.steps(column, 0, across.to).target, size * wide));
                if j + HIGH < across.length {
                    (0..wide).for_each(|row| fetch::<false>(next.steps(row, along.from, 0).source, size * HIGH));
                }
                for (row, _) in pieces(wide, N, N) {
                    for (column, _) in pieces(high, N, N) {
                        let source = at.steps(row, along.from, 0).steps(column, across.from, 0).source;
                        // SAFETY: the caller's promises, for `N` rows of `N` units of the source; the buffer has room
                        // for the columns.
                        unsafe {
                            let into = buffer.add(column * line + row * size);
                            block::<V, N>(source, along.from as isize, into, line, mask);
                        }
                    }
                }
                for column in 0..high {
                    let target = at.steps(column, 0, across.to).target;
                    // SAFETY: the caller's promises, for `wide` units of the target; the blocks above have filled as
                    // many in this line of the buffer.
                    unsafe { buffer.add(column * line).copy_to_nonoverlapping(target, wide * size) };
                }
            }
        }
    }
}

/// Has the processor fetch these bytes into its second cache, for writing if `WRITE`. The address may be any.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn fetch<const WRITE: bool>(at: *const u8, length: usize) {
    for line in (0..length).step_by(64) {
        use std::arch::x86_64::*;
        let at = at.wrapping_add(line).cast();
        // SAFETY: the instruction neither reads nor faults: it is a hint.
        unsafe {
            match WRITE {
                true => _mm_prefetch::<_MM_HINT_ET0>(at),
                false => _mm_prefetch::<_MM_HINT_T1>(at),
            }
        }
    }
}

/// Other processors look ahead by themselves.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn fetch<const WRITE: bool>(_: *const u8, _: usize) {}

/// Returns starts and lengths of pieces that cover `length`: each of `size`, but for the last, which has at least
/// `least` and overlaps the one before it for that. `length` is no less than `least`.
#[inline(always)]
fn pieces(length: usize, size: usize, least: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..length).step_by(size).map(move |start| {
        let start = start.min(length - least);
        (start, size.min(length - start))
    })
}

/// Transposes `N` rows of `N` units in registers.
///
/// In each round, row `i` and row `i + N / 2` are zipped into the rows `2 * i` and `2 * i + 1`. That rotates the bits
/// of an element's row and column by one; after as many rounds as a row number has bits, the two are swapped.
///
/// # Safety
///
/// `N` rows of `N` units are readable `from` bytes apart, and as many are writable `to` bytes apart.
#[inline(always)]
unsafe fn block<V: Lanes<N>, const N: usize>(source: *const u8, from: isize, target: *mut u8, to: usize, mask: V) {
    // SAFETY: the caller's promise.
    let mut rows: [V; N] = std::array::from_fn(|i| unsafe { V::load(source.offset(i as isize * from)) }.flip(mask));
    for _ in 0..N.ilog2() {
        let mut zipped = rows;
        for i in 0..N / 2 {
            (zipped[2 * i], zipped[2 * i + 1]) = rows[i].zip(rows[i + N / 2]);
        }
        rows = zipped;
    }
    for (i, row) in rows.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { row.store(target.add(i * to)) };
    }
}
