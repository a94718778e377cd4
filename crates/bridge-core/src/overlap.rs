//! Whether two views share bytes, and whether a view has two elements at one address.

use crate::planted::is_planted;
use crate::{Export, Layout};
use smallvec::SmallVec;

/// The most steps of a search. Views that come of slicing and permuting need a few for each dimension.
const MOST: u32 = 10_000;

/// A dimension of a view as a term of a sum: `factor * x` bytes for an `x` from 0 to `most`.
#[derive(Debug, Clone, Copy)]
struct Term {
    factor: i128,
    most: i128,
}

/// Returns whether two views, by the addresses of their first elements, share bytes. Where that takes long to find out,
/// the answer is `true`.
pub fn overlap(one: (usize, &Layout), other: (usize, &Layout)) -> bool {
    if one.1.numel() == 0 || other.1.numel() == 0 {
        return false;
    }
    if is_planted("core_overlap_by_first") {
        return one.0 == other.0;
    }
    // Byte `u` of an element of one is byte `v` of an element of the other:
    //   low + sum(strides * index) + u  =  low' + sum(strides' * index') + v.
    // With index' and v counted from their other end, all terms have one sign, and are to sum up to `target`.
    let low = |(data, layout): (usize, &Layout)| data as i128 - layout.byte_extent().0 as i128;
    let last_byte = |(data, layout): (usize, &Layout)| data as i128 + layout.byte_extent().1 as i128 - 1;
    if last_byte(one) < low(other) || last_byte(other) < low(one) {
        return false;
    }
    let bytes = one.1.itemsize() + other.1.itemsize() - 2;
    let mut terms: SmallVec<[Term; 8]> = SmallVec::new();
    terms.push(Term { factor: 1, most: bytes as i128 });
    for layout in [one.1, other.1] {
        let dims = layout.shape().iter().zip(layout.strides()).filter(|(length, stride)| **length > 1 && **stride != 0);
        terms.extend(dims.map(|(&length, &stride)| Term {
            factor: i128::from(stride.unsigned_abs()) * layout.itemsize() as i128,
            most: i128::from(length) - 1,
        }));
    }
    terms.sort_unstable_by_key(|term| term.factor);
    // Dimensions of equal strides count as one.
    terms.dedup_by(|next, term| {
        let same = next.factor == term.factor;
        term.most += if same { next.most } else { 0 };
        same
    });
    sums_up(&terms, last_byte(other) - low(one), &mut MOST.clone())
}

/// As [`overlap`], for exported tensors.
pub(crate) fn share_bytes(one: &Export, other: &Export) -> bool {
    overlap((one.data(), one.layout()), (other.data(), other.layout()))
}

/// Returns whether the terms, sorted by their factors, sum up to `target` for some values of theirs.
fn sums_up(terms: &[Term], target: i128, steps: &mut u32) -> bool {
    let Some((largest, rest)) = terms.split_last() else { return target == 0 };
    let reach: i128 = rest.iter().map(|term| term.factor * term.most).sum();
    let least = (target - reach + largest.factor - 1).div_euclid(largest.factor).max(0);
    let most = target.div_euclid(largest.factor).min(largest.most);
    let mut x = least;
    while x <= most {
        *steps = steps.saturating_sub(1);
        if *steps == 0 || sums_up(rest, target - x * largest.factor, steps) {
            return true;
        }
        x += 1;
    }
    false
}

/// Returns whether two elements of the view may have one address. Views that come of slicing and permuting a compact
/// tensor have none such; of others, some without are taken for views with.
pub fn repeats(layout: &Layout) -> bool {
    let dims = layout.shape().iter().zip(layout.strides()).filter(|(length, _)| **length > 1);
    let mut dims: SmallVec<[(u64, i64); 8]> = dims.map(|(length, stride)| (stride.unsigned_abs(), *length)).collect();
    dims.sort_unstable();
    // The distance of the first element to the last, by the dimensions so far.
    let mut reach = 0u128;
    layout.numel() > 0
        && !is_planted("core_target_repeats")
        && dims.iter().any(|(stride, length)| {
            let apart = u128::from(*stride) > reach;
            reach += u128::from(*stride) * (*length as u128 - 1);
            !apart
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn layout(dtype: DType, dims: &[(i64, i64)]) -> Layout {
        let (shape, strides): (Vec<_>, Vec<_>) = dims.iter().copied().unzip();
        Layout::new(dtype, &shape, Some(&strides), 0).unwrap()
    }

    /// The addresses of all elements.
    fn addresses(data: usize, layout: &Layout) -> Vec<i64> {
        let dims = layout.shape().iter().zip(layout.strides());
        dims.fold(vec![data as i64], |all, (&length, &stride)| {
            let bytes = stride * layout.itemsize() as i64;
            all.iter().flat_map(|at| (0..length).map(move |i| at + i * bytes)).collect()
        })
    }

    proptest! {
        #[test]
        fn views_overlap_where_they_share_a_byte(
            one in prop::collection::vec((0i64..5, -7i64..8), 0..4),
            other in prop::collection::vec((0i64..5, -7i64..8), 0..4),
            distance in 0usize..200,
            dtypes in prop::sample::select(&[
                (DType::UINT8, DType::UINT8), (DType::FLOAT32, DType::FLOAT32), (DType::INT16, DType::COMPLEX64),
            ][..]),
        ) {
            let (one, other) = (layout(dtypes.0, &one), layout(dtypes.1, &other));
            let (here, there) = (1000, 900 + distance);
            let bytes = |data, layout: &Layout| -> HashSet<i64> {
                let itemsize = layout.itemsize() as i64;
                addresses(data, layout).into_iter().flat_map(|at| at..at + itemsize).collect()
            };
            let share = !bytes(here, &one).is_disjoint(&bytes(there, &other));
            prop_assert_eq!(overlap((here, &one), (there, &other)), share);
        }

        #[test]
        fn no_view_with_two_elements_at_one_address_passes(dims in prop::collection::vec((0i64..5, -9i64..10), 0..4)) {
            let layout = layout(DType::INT16, &dims);
            let mut seen = HashSet::new();
            let twice = !addresses(1000, &layout).into_iter().all(|at| seen.insert(at));
            prop_assert!(!twice || repeats(&layout));
        }

        /// Slices of a compact tensor, permuted.
        #[test]
        fn slices_do_not_repeat(
            dims in prop::collection::vec((1i64..5, 1i64..4, any::<bool>()), 0..5),
            turned in any::<bool>(),
        ) {
            let mut below = 1;
            let mut sliced: Vec<_> = dims.iter().map(|&(length, step, negative)| {
                let stride = below * step * if negative { -1 } else { 1 };
                below *= (length - 1) * step + 1;
                (length, stride)
            }).collect();
            if turned {
                sliced.reverse();
            }
            prop_assert!(!repeats(&layout(DType::FLOAT32, &sliced)));
        }
    }

    #[test]
    fn halves_of_a_matrix_share_nothing() {
        // Columns 0 to 3 and 4 to 7 of a million rows of eight; even and odd rows.
        let half = layout(DType::FLOAT32, &[(1 << 20, 8), (4, 1)]);
        assert!(!overlap((1000, &half), (1016, &half)));
        assert!(overlap((1000, &half), (1012, &half)));
        let rows = layout(DType::FLOAT32, &[(1 << 20, 16), (8, 1)]);
        assert!(!overlap((1000, &rows), (1032, &rows)));
        let most = layout(DType::UINT8, &[(i64::MAX, 1)]);
        assert!(overlap((0, &most), (i64::MAX as usize - 1, &most)));
        assert!(!overlap((0, &most), (i64::MAX as usize, &most)));
    }
}
