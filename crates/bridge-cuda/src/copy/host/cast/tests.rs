//! Casts of all kinds against exact arithmetic and an independent walk over the elements.

use super::super::{How, Part, copy_all, threads};
use super::*;
use crate::copy::floats::tests::exact;
use crate::copy::plan::Walk;
use bridge_core::{DType, Device, Layout, Piece, Strided};
use proptest::prelude::*;
use std::ptr;

/// Two views, with a stride in elements for either side of each dimension.
#[derive(Debug, Clone)]
struct Case {
    dtypes: (DType, DType),
    dims: Vec<(i64, i64, i64)>,
    /// Bytes from an aligned address to the lowest byte of either side.
    shifts: (usize, usize),
    negated: bool,
    /// Threads, or as many as the cast is worth.
    threads: Option<usize>,
}

fn element(bytes: &[u8], at: usize, size: usize) -> u64 {
    let mut element = [0; 8];
    element[..size].copy_from_slice(&bytes[at..at + size]);
    u64::from_le_bytes(element)
}

impl Case {
    /// Casts, and compares every element of the target and every byte between them.
    fn check(&self) -> Result<(), TestCaseError> {
        let (from, to) = self.dtypes;
        let shape: Vec<_> = self.dims.iter().map(|dim| dim.0).collect();
        let layout = |dtype, stride: fn(&(i64, i64, i64)) -> i64| {
            let strides: Vec<_> = self.dims.iter().map(stride).collect();
            Layout::new(dtype, &shape, Some(&strides), 0).unwrap()
        };
        let (read, written) = (layout(from, |dim| dim.1), layout(to, |dim| dim.2));
        let (size, out) = (read.itemsize(), written.itemsize());
        let tried = exact::tried(from);
        let mut source = vec![0u8; self.shifts.0 + read.byte_extent().0 + read.byte_extent().1];
        let first = self.shifts.0 + read.byte_extent().0;
        let lowest = self.shifts.0;
        for (index, place) in source[lowest..].chunks_exact_mut(size).enumerate() {
            place.copy_from_slice(&tried[index * 7919 % tried.len()].to_le_bytes()[..size]);
        }
        let mut target: Vec<u8> =
            (0..self.shifts.1 + written.byte_extent().0 + written.byte_extent().1).map(|i| i as u8).collect();
        let into = self.shifts.1 + written.byte_extent().0;
        let sign = 1u64 << (size * 8 - 1);

        let mut pairs = vec![(first as i64, into as i64)];
        for &(length, by_from, by_to) in &self.dims {
            let (size, out) = (size as i64, out as i64);
            let steps = |&(a, b): &(i64, i64)| (0..length).map(move |i| (a + i * by_from * size, b + i * by_to * out));
            pairs = pairs.iter().flat_map(steps).collect();
        }
        let before = target.clone();
        let (data, start) =
            (source.as_ptr().expose_provenance() + first, target.as_mut_ptr().expose_provenance() + into);
        let cast = Cast::new(from, to).unwrap();
        let flips = if self.negated { u128::from(sign) } else { 0 };
        match self.threads {
            None => {
                let side = |data, layout| Strided { device: Device::CPU, data, layout };
                let piece = Piece { from: side(data, &read), to: side(start, &written), flips, cast: Some(cast) };
                // SAFETY: both layouts stay inside their vectors, and no elements of the target overlap.
                unsafe { copy_all(&[piece], usize::MAX) }.unwrap();
            }
            Some(threads) => {
                let (source, target) = (ptr::with_exposed_provenance(data), ptr::with_exposed_provenance_mut(start));
                let part = |walk| Part { walk, ends: Ends { source, target }, how: How::Cast(Rows::new(cast, flips)) };
                let parts: Vec<_> = Walk::new(&read, &written).map(part).into_iter().collect();
                // SAFETY: as above.
                unsafe { threads::run(&parts, threads) };
            }
        }
        let mut between = before;
        for (a, b) in pairs {
            let bits = element(&source, a as usize, size) ^ flips as u64;
            let found = element(&target, b as usize, out);
            match exact::cast(from, to, bits) {
                Some(expected) => prop_assert_eq!(found, expected, "{:#x} at {} of {:?}", bits, b, self),
                None => prop_assert!(exact::is_nan(to, found), "{:#x} at {} of {:?}", bits, b, self),
            }
            between[b as usize..b as usize + out].copy_from_slice(&target[b as usize..b as usize + out]);
        }
        prop_assert!(between == target, "bytes between elements: {:?}", self);
        Ok(())
    }
}

/// Strides of a view whose dimensions are laid out in this order, the fastest first, each with a gap after it.
fn strides(lengths: &[i64], order: &[usize], gaps: &[i64], signs: &[bool]) -> Vec<i64> {
    let (mut strides, mut step) = (vec![0; lengths.len()], 1);
    for &d in order {
        strides[d] = if signs[d] { -step } else { step };
        step = step * lengths[d].max(1) + gaps[d];
    }
    strides
}

fn cases(dims: usize, lengths: &'static [i64]) -> impl Strategy<Value = Case> {
    let sides = prop::collection::vec(prop::sample::select(lengths), 0..=dims).prop_flat_map(|lengths| {
        let n = lengths.len();
        let order = || Just((0..n).collect::<Vec<_>>()).prop_shuffle();
        let gaps = || prop::collection::vec(prop_oneof![3 => Just(0i64), 1 => 1i64..4], n);
        let signs = || prop::collection::vec(prop::bool::weighted(0.2), n);
        (
            Just(lengths),
            (order(), gaps(), signs()),
            (order(), gaps(), signs()),
            prop::collection::vec(prop::bool::weighted(0.1), n),
        )
    });
    let dtype = || prop::sample::select(&Cast::DTYPES[..]);
    let threads = prop_oneof![2 => Just(None), 1 => (1usize..4).prop_map(Some)];
    let dtypes = (dtype(), dtype()).prop_filter("a cast", |(from, to)| from != to);
    (sides, dtypes, (0usize..17, 0usize..17), any::<bool>(), threads).prop_map(
        |((lengths, from, to, repeats), dtypes, shifts, negated, threads)| {
            let source = strides(&lengths, &from.0, &from.1, &from.2);
            let target = strides(&lengths, &to.0, &to.1, &to.2);
            let dim = |d: usize| (lengths[d], if repeats[d] { 0 } else { source[d] }, target[d]);
            Case { dtypes, dims: (0..lengths.len()).map(dim).collect(), shifts, negated, threads }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Few elements in many dimensions.
    #[test]
    fn small_views_are_cast(case in cases(5, &[0, 1, 2, 3, 4, 5])) {
        case.check()?;
    }

    /// Rows with ragged ends for vectors.
    #[test]
    fn matrices_are_cast(case in cases(2, &[1, 2, 7, 8, 15, 17, 33, 65, 130, 1025])) {
        case.check()?;
    }
}

/// All numbers of the small dtypes, and many of the others, in one row that threads share.
#[test]
fn every_dtype_is_cast_to_every_other() {
    for from in Cast::DTYPES {
        let length = exact::tried(from).len().min(70_000) as i64;
        for to in Cast::DTYPES.into_iter().filter(|to| *to != from) {
            let case = |dims, threads| Case { dtypes: (from, to), dims, shifts: (0, 0), negated: false, threads };
            case(vec![(length, 1, 1)], Some(2)).check().unwrap();
            case(vec![(300, 2, 3)], None).check().unwrap();
        }
    }
}
