//! The order in which a copy visits the elements: a pure function of two layouts.

use bridge_core::Layout;
use bridge_core::planted::is_planted;
use smallvec::SmallVec;
use std::cmp::Reverse;

/// One dimension of a [`Walk`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dim {
    /// Steps in this dimension, in units; at least 2.
    pub length: usize,
    /// Bytes from a unit of the source to the next one.
    pub from: i64,
    /// Bytes from a unit of the target to the next one; not negative.
    pub to: i64,
}

/// The dimensions that a copy has to visit, fewest first: those of length 1 are dropped, those that run the same way on
/// both sides are merged, and those in which the target runs backwards are turned around on both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Walk {
    /// Bytes that are adjacent on both sides, and are copied at each index.
    pub unit: usize,
    /// Bytes from the first element of the source to the unit that is visited first.
    pub from: i64,
    /// Bytes from the first element of the target to the unit that is visited first.
    pub to: i64,
    /// By the stride of the target, the fastest dimension last.
    pub dims: SmallVec<[Dim; 6]>,
}

impl Walk {
    /// Plans the copy of a view with layout `from` into a view of the same shape with layout `to`. The unit is one
    /// element, in bytes of the target: the source has another itemsize where elements are cast. Returns `None` for
    /// views without elements.
    ///
    /// No sum of offsets overflows: `Layout::new` has checked the extent of both sides.
    pub fn new(from: &Layout, to: &Layout) -> Option<Self> {
        debug_assert_eq!(from.shape(), to.shape());
        if from.numel() == 0 {
            return None;
        }
        let (read, unit) = (from.itemsize(), to.itemsize());
        if from.is_compact() && to.is_compact() {
            let row = Dim { length: from.numel(), from: read as i64, to: unit as i64 };
            let dims = Some(row).filter(|row| row.length > 1).into_iter().collect();
            return Some(Self { unit, from: 0, to: 0, dims });
        }
        let strides = from.strides().iter().zip(to.strides());
        let mut dims: SmallVec<[Dim; 6]> = from
            .shape()
            .iter()
            .zip(strides)
            .filter(|(length, _)| **length > 1)
            .map(|(&length, (from, to))| Dim {
                length: length as usize,
                from: from * read as i64,
                to: to * unit as i64,
            })
            .collect();
        if is_planted("copy_target_transposed")
            && let [one, other, ..] = &mut dims[..]
            && one.length == other.length
            && one.to < other.to
        {
            std::mem::swap(&mut one.from, &mut other.from);
        }
        let mut walk = Self { unit, from: 0, to: 0, dims: SmallVec::new() };
        for dim in dims.iter_mut().filter(|dim| dim.to < 0) {
            let last = dim.length as i64 - 1;
            walk.from += last * dim.from;
            walk.to += last * dim.to;
            (dim.from, dim.to) = (-dim.from, -dim.to);
        }
        dims.sort_by_key(|dim| (Reverse(dim.to), Reverse(dim.from.unsigned_abs())));
        for inner in dims {
            match walk.dims.last_mut() {
                Some(outer) if continues(outer.from, inner.from, inner) && continues(outer.to, inner.to, inner) => {
                    *outer = Dim { length: outer.length * inner.length, ..inner };
                }
                _ => walk.dims.push(inner),
            }
        }
        Some(walk)
    }

    /// Makes the fastest dimension part of the unit, where it is contiguous on both sides.
    pub fn widen(mut self) -> Self {
        let step = self.unit as i64;
        if let Some(dim) = self.dims.last().filter(|dim| (dim.from, dim.to) == (step, step)) {
            self.unit *= dim.length;
            self.dims.pop();
        }
        self
    }
}

/// Returns whether a step of `outer` bytes leads to where the steps of the dimension `inner` end.
fn continues(outer: i64, step: i64, inner: Dim) -> bool {
    step.checked_mul(inner.length as i64) == Some(outer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bridge_core::DType;
    use proptest::prelude::*;

    fn layout(shape: &[i64], strides: &[i64]) -> Layout {
        Layout::new(DType::FLOAT32, shape, Some(strides), 0).unwrap()
    }

    fn walk(shape: &[i64], from: &[i64], to: &[i64]) -> Walk {
        Walk::new(&layout(shape, from), &layout(shape, to)).unwrap()
    }

    fn dims(dims: &[(usize, i64, i64)]) -> SmallVec<[Dim; 6]> {
        dims.iter().map(|&(length, from, to)| Dim { length, from, to }).collect()
    }

    #[test]
    fn dimensions_are_dropped_merged_and_sorted() {
        // One run, from the last byte to the first on both sides.
        let reversed = walk(&[2, 1, 3], &[-3, 77, -1], &[-3, 1, -1]);
        assert_eq!((reversed.from, reversed.to), (-20, -20));
        assert_eq!(reversed.dims, dims(&[(6, 4, 4)]));
        assert_eq!(reversed.widen(), Walk { unit: 24, from: -20, to: -20, dims: dims(&[]) });
        // NCHW to NHWC: height and width are one dimension.
        assert_eq!(
            walk(&[2, 3, 4, 5], &[60, 20, 5, 1], &[60, 1, 15, 3]).dims,
            dims(&[(2, 240, 240), (20, 4, 12), (3, 80, 4)])
        );
        // Swapped heads: the unit is a head.
        let heads = walk(&[2, 5, 3, 8], &[120, 24, 8, 1], &[120, 8, 40, 1]).widen();
        assert_eq!((heads.unit, heads.dims), (32, dims(&[(2, 480, 480), (3, 32, 160), (5, 96, 32)])));
        // A broadcast source stays one unit that is repeated.
        assert_eq!(walk(&[4, 5], &[0, 0], &[5, 1]).dims, dims(&[(20, 0, 4)]));
        assert_eq!(Walk::new(&layout(&[2, 0], &[1, 1]), &layout(&[2, 0], &[0, 1])), None);
    }

    #[test]
    fn offsets_beyond_32_bits_stay_exact() {
        let far = 1i64 << 40;
        let walk = walk(&[3, 1 << 33], &[-far, 1], &[1 << 33, 1]);
        assert_eq!(walk.dims, dims(&[(3, -4 * far, 1 << 35), (1 << 33, 4, 4)]));
        let backwards = layout(&[3, 1 << 33], &[-far, -1]);
        let walk = Walk::new(&layout(&[3, 1 << 33], &[0, 1]), &backwards).unwrap();
        assert_eq!((walk.from, walk.to), (4 * ((1 << 33) - 1), -4 * (2 * far + (1 << 33) - 1)));
        // The largest extents that a layout may have: the test whether two dimensions merge must not overflow.
        let edge = layout(&[2, 1 << 31], &[1 << 30, 1 << 29]);
        assert_eq!(Walk::new(&edge, &edge).unwrap().dims.len(), 2);
    }

    /// Offsets of all units on both sides.
    fn visited(walk: &Walk) -> Vec<(i64, i64)> {
        let mut at = vec![(walk.from, walk.to)];
        for dim in &walk.dims {
            let steps =
                |&(from, to): &(i64, i64)| (0..dim.length as i64).map(move |i| (from + i * dim.from, to + i * dim.to));
            at = at.iter().flat_map(steps).collect();
        }
        let bytes =
            |&(from, to): &(i64, i64)| (0..walk.unit as i64).step_by(4).map(move |byte| (from + byte, to + byte));
        at.iter().flat_map(bytes).collect()
    }

    proptest! {
        /// Every element is visited once, at its position on both sides, and the dimensions are in order.
        #[test]
        fn a_walk_pairs_the_same_elements(
            sides in prop::collection::vec((0i64..4, -9i64..10, -9i64..10), 0..6),
        ) {
            let shape: Vec<_> = sides.iter().map(|side| side.0).collect();
            let (from, to): (Vec<_>, Vec<_>) = sides.iter().map(|side| (side.1, side.2)).unzip();
            let mut expected = vec![(0, 0)];
            for &(length, from, to) in &sides {
                let steps = |at: &(i64, i64)| {
                    let at = *at;
                    (0..length).map(move |i| (at.0 + 4 * i * from, at.1 + 4 * i * to))
                };
                expected = expected.iter().flat_map(steps).collect();
            }
            expected.sort_unstable();
            let walk = Walk::new(&layout(&shape, &from), &layout(&shape, &to));
            for walk in [walk.clone(), walk.map(Walk::widen)] {
                let mut found = walk.as_ref().map(visited).unwrap_or_default();
                found.sort_unstable();
                prop_assert_eq!(&found, &expected);
                let dims = walk.map(|walk| walk.dims).unwrap_or_default();
                prop_assert!(dims.iter().all(|dim| dim.length > 1 && dim.to >= 0));
                prop_assert!(dims.is_sorted_by_key(|dim| Reverse(dim.to)));
            }
        }
    }
}
