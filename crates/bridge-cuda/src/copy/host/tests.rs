//! Copies of all kinds against an independent walk over the elements.

use super::plane::Loops;
use super::tiles::Tiles;
use super::*;
use bridge_core::{DType, Device, Layout};
use proptest::prelude::*;

/// One dimension of a case.
#[derive(Debug, Clone, Copy)]
struct Side {
    length: i64,
    from: i64,
    to: i64,
}

/// Two views, with strides in elements, and what to do.
#[derive(Debug, Clone)]
struct Case {
    itemsize: usize,
    sides: Vec<Side>,
    /// Bytes from an aligned address to the lowest byte of the source and of the target.
    shifts: (usize, usize),
    flips: u128,
    /// Threads, or as many as the copy is worth.
    threads: Option<usize>,
}

impl Case {
    fn layout(&self, stride: impl Fn(&Side) -> i64) -> Layout {
        let dtype = match self.itemsize {
            16 => DType::COMPLEX128,
            bytes => DType { code: DType::UINT8.code, bits: 8, lanes: bytes as u16 },
        };
        let shape: Vec<_> = self.sides.iter().map(|side| side.length).collect();
        let strides: Vec<_> = self.sides.iter().map(stride).collect();
        Layout::new(dtype, &shape, Some(&strides), 0).unwrap()
    }

    /// Copies, and compares every byte of the target's memory, those between the elements included.
    fn check(&self) -> std::result::Result<(), TestCaseError> {
        let (from, to) = (self.layout(|side| side.from), self.layout(|side| side.to));
        let memory = |layout: &Layout, shift: usize, seed: usize| -> Vec<u8> {
            let (below, above) = layout.byte_extent();
            (0..shift + below + above + 32).map(|i| ((i + seed) * 37 % 251) as u8).collect()
        };
        let source = memory(&from, self.shifts.0, 0);
        let mut target = memory(&to, self.shifts.1, 99);
        let (first, into) = (self.shifts.0 + from.byte_extent().0, self.shifts.1 + to.byte_extent().0);

        let mut expected = target.clone();
        let mut pairs = vec![(first as i64, into as i64)];
        for side in &self.sides {
            let bytes = self.itemsize as i64;
            let steps = |&(a, b): &(i64, i64)| {
                (0..side.length).map(move |i| (a + i * side.from * bytes, b + i * side.to * bytes))
            };
            pairs = pairs.iter().flat_map(steps).collect();
        }
        let flips = self.flips.to_le_bytes();
        for (a, b) in pairs {
            for byte in 0..self.itemsize {
                expected[b as usize + byte] = source[a as usize + byte] ^ flips.get(byte).unwrap_or(&0);
            }
        }

        let data = source.as_ptr().expose_provenance() + first;
        let start = target.as_mut_ptr().expose_provenance() + into;
        match self.threads {
            // SAFETY: both layouts stay inside their vectors, and the caller of `check` lets no elements of the target
            // overlap.
            None => unsafe {
                let side = |data, layout| Strided { device: Device::CPU, data, layout };
                copy(side(data, &from), side(start, &to), self.flips).unwrap();
            },
            Some(threads) => {
                let ends = Ends {
                    source: ptr::with_exposed_provenance(data),
                    target: ptr::with_exposed_provenance_mut(start),
                };
                let flips = pattern(self.flips, self.itemsize).unwrap();
                if let Some(walk) = Walk::new(&from, &to) {
                    // SAFETY: as above.
                    unsafe { threads::run(&[Part { walk, ends, how: How::Copied(flips) }], threads) };
                }
            }
        }
        let wrong = expected.iter().zip(&target).position(|(expected, found)| expected != found);
        prop_assert_eq!(
            wrong.map(|byte| byte as i64 - into as i64),
            None,
            "offset of the first wrong byte: {:?}",
            self
        );
        Ok(())
    }
}

/// Strides of a view whose dimensions are laid out in this order, the fastest first, each with a gap after it.
fn strides(lengths: &[i64], order: &[usize], gaps: &[i64], signs: &[bool]) -> Vec<i64> {
    let mut strides = vec![0; lengths.len()];
    let mut step = 1;
    for &d in order {
        strides[d] = if signs[d] { -step } else { step };
        step = step * lengths[d].max(1) + gaps[d];
    }
    strides
}

/// Cases of up to `dims` dimensions of these lengths. Either side is in any order, with gaps here and there, and runs
/// backwards in some dimensions; the source may repeat elements.
fn cases(dims: usize, lengths: &'static [i64]) -> impl Strategy<Value = Case> {
    let sides = prop::collection::vec(prop::sample::select(lengths), 0..=dims).prop_flat_map(|lengths| {
        let n = lengths.len();
        let order = || Just((0..n).collect::<Vec<_>>()).prop_shuffle();
        let gaps = || prop::collection::vec(prop_oneof![3 => Just(0i64), 1 => 1i64..4], n);
        let signs = || prop::collection::vec(prop::bool::weighted(0.2), n);
        let repeats = prop::collection::vec(prop::bool::weighted(0.1), n);
        (Just(lengths), (order(), gaps(), signs()), (order(), gaps(), signs()), repeats)
    });
    let itemsize = prop::sample::select(&[1usize, 2, 4, 8, 16, 3, 12, 24, 40][..]);
    let threads = prop_oneof![2 => Just(None), 1 => (1usize..4).prop_map(Some)];
    (sides, itemsize, (0usize..17, 0usize..17), prop_oneof![Just(0u128), any::<u128>()], threads).prop_map(
        |((lengths, from, to, repeats), itemsize, shifts, flips, threads)| {
            let source = strides(&lengths, &from.0, &from.1, &from.2);
            let target = strides(&lengths, &to.0, &to.1, &to.2);
            let side =
                |d: usize| Side { length: lengths[d], from: if repeats[d] { 0 } else { source[d] }, to: target[d] };
            let sides = (0..lengths.len()).map(side).collect();
            let bits = itemsize as u32 * 8;
            let flips = match itemsize.is_power_of_two() {
                true => flips & u128::MAX >> (128 - bits),
                false => 0,
            };
            Case { itemsize, sides, shifts, flips, threads }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Few elements in many dimensions.
    #[test]
    fn small_views_are_copied(case in cases(6, &[0, 1, 2, 3, 4, 5])) {
        case.check()?;
    }

    /// Dimensions with ragged ends for vectors and blocks.
    #[test]
    fn matrices_are_copied(case in cases(2, &[1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 65, 130, 257, 300])) {
        case.check()?;
    }

    /// Channels, and batches of matrices.
    #[test]
    fn batches_of_images_are_copied(case in cases(3, &[2, 3, 4, 5, 16, 19, 33])) {
        case.check()?;
    }
}

/// The branch of every kernel for a copy that is worth threads.
#[test]
fn large_views_are_copied() {
    let case = |itemsize, sides: &[(i64, i64, i64)]| {
        let sides = sides.iter().map(|&(length, from, to)| Side { length, from, to }).collect();
        Case { itemsize, sides, shifts: (0, 0), flips: 0, threads: None }.check().unwrap();
    };
    case(4, &[(1000, 1, 1003), (1003, 1000, 1)]);
    case(1, &[(3, 1, 1 << 20), (1 << 20, 3, 1)]);
    case(2, &[(1 << 20, 1, 3), (3, 1 << 20, 1)]);
    case(8, &[(600_000, 1, 1)]);
    case(8, &[(600_000, -1, 1)]);
}

/// What processors without vectors do.
#[test]
fn tiles_of_single_units_are_transposed() {
    let source: Vec<u16> = (0..300 * 70).map(|i| i as u16).collect();
    let mut target = vec![0u16; 300 * 70];
    let plane = Plane {
        unit: 2,
        along: crate::copy::plan::Dim { length: 300, from: 140, to: 2 },
        across: crate::copy::plan::Dim { length: 70, from: 2, to: 600 },
    };
    let ends = Ends { source: source.as_ptr().cast(), target: target.as_mut_ptr().cast() };
    // SAFETY: both vectors have 300 * 70 elements.
    unsafe { Tiles::<u16, u16, 1, 256, 64>::copy(&plane, ends, [0; 16]) };
    for (i, found) in target.into_iter().enumerate() {
        assert_eq!(found, source[i % 300 * 70 + i / 300]);
    }
}

#[test]
fn hostile_views_are_refused() {
    let byte = 0u8;
    let data = (&raw const byte).expose_provenance();
    let tried = |from: (usize, &[i64]), to: (usize, &[i64]), flips, dtype| {
        let layout = |strides: &[i64]| Layout::new(dtype, &[2, 2], Some(strides), 0).unwrap();
        let (source, target) = (layout(from.1), layout(to.1));
        let side = |data, layout| Strided { device: Device::CPU, data, layout };
        // SAFETY: the views are refused before any of their memory is touched.
        unsafe { copy(side(from.0, &source), side(to.0, &target), flips) }.unwrap_err().kind()
    };
    let bytes = DType::UINT8;
    assert_eq!(tried((data, &[2, 1]), (data, &[0, 1]), 0, bytes), ErrorKind::Layout);
    assert_eq!(tried((0, &[2, 1]), (data, &[2, 1]), 0, bytes), ErrorKind::Layout);
    assert_eq!(tried((data, &[2, 1]), (usize::MAX, &[2, 1]), 0, bytes), ErrorKind::Layout);
    let triple = DType { lanes: 3, ..bytes };
    assert_eq!(tried((data, &[2, 1]), (data + 100, &[2, 1]), 1, triple), ErrorKind::CopyNeeded);
}
