//! The plan, carried out by the kernels on a device on the host.

use super::choose::{Launch, MOST_UNITS, Parameters, candidates, choose};
use super::on_host::OnHost;
use super::parameters::{Flat, Tile};
use super::table::{KERNELS, Kernel};
use super::{halfway, in_one_run, planned};
use crate::copy::plan::Walk;
use bridge_core::{DType, Device, Error, ErrorKind, Layout, Strided};
use proptest::prelude::*;

/// Checks that the launches, made on a device on the host, copy each byte to its place and write no others.
fn check(from: &Layout, to: &Layout, beyond: (usize, usize)) -> Result<Vec<Kernel>, TestCaseError> {
    check_flipped(from, to, beyond, 0)
}

/// The same with these bits flipped in each element.
fn check_flipped(
    from: &Layout,
    to: &Layout,
    beyond: (usize, usize),
    flips: u128,
) -> Result<Vec<Kernel>, TestCaseError> {
    let launches =
        Walk::new(from, to).map(|walk| choose(walk, beyond, flips).expect("aligned elements")).unwrap_or_default();
    check_launches(&launches, (from, to), beyond, flips)?;
    Ok(launches.iter().map(|launch| launch.kernel).collect())
}

fn check_launches(
    launches: &[Launch],
    (from, to): (&Layout, &Layout),
    beyond: (usize, usize),
    flips: u128,
) -> Result<(), TestCaseError> {
    let mut host = OnHost::default();
    let mut side = |layout: &Layout, beyond: usize, byte: fn(u64) -> u8| {
        let (below, above) = layout.byte_extent();
        let bytes: Vec<u8> = (0..(below + above) as u64).map(byte).collect();
        (host.memory(&bytes, (beyond as i64 - below as i64).rem_euclid(16) as usize) + below, below, bytes)
    };
    let (source, first, read) = side(from, beyond.0, |n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8);
    let (target, first_written, mut expected) = side(to, beyond.1, |_| 0xa5);
    for Launch { kernel, blocks, shared, parameters } in launches {
        prop_assert!(*blocks > 0 && *shared <= KERNELS[*kernel as usize].1, "{:?}", launches);
        match parameters {
            Parameters::Flat(flat) => {
                // Offsets of 64 bits do for all: every other copy takes them.
                let near = if from.shape().iter().sum::<i64>() % 2 == 0 { flat.near } else { 0 };
                host.launch(*kernel, *blocks, *shared, &Flat { sides: flat.sides.at(source, target), near, ..**flat });
            }
            Parameters::Box(one) => {
                let sides = one.sides.at(source, target);
                host.launch(*kernel, *blocks, *shared, &super::parameters::Box { sides, ..**one });
            }
            Parameters::Tile(tile) => {
                host.launch(*kernel, *blocks, *shared, &Tile { sides: tile.sides.at(source, target), ..**tile });
            }
        }
    }
    let mut elements = vec![(first as i64, first_written as i64)];
    let size = from.itemsize();
    for (&length, (from, to)) in from.shape().iter().zip(from.strides().iter().zip(to.strides())) {
        let by = size as i64;
        let steps = |&at: &(i64, i64)| (0..length).map(move |i| (at.0 + i * from * by, at.1 + i * to * by));
        elements = elements.iter().flat_map(steps).collect();
    }
    for (from, to) in elements {
        let place = &mut expected[to as usize..][..size];
        place.copy_from_slice(&read[from as usize..][..size]);
        place.iter_mut().zip(flips.to_le_bytes()).for_each(|(byte, flips)| *byte ^= flips);
    }
    let found = host.read(target - first_written, expected.len());
    let wrong = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
    prop_assert!(wrong == 0, "{} bytes of {} are wrong: {:?}", wrong, found.len(), launches);
    Ok(())
}

fn layout(dtype: DType, shape: &[i64], strides: Option<&[i64]>) -> Layout {
    Layout::new(dtype, shape, strides, 0).unwrap()
}

/// A permuted, sliced and partly reversed view of compact memory, and its copies in any order.
fn sides() -> impl Strategy<Value = (Layout, Layout, (usize, usize))> {
    const DTYPES: [DType; 5] = [DType::UINT8, DType::FLOAT16, DType::FLOAT32, DType::FLOAT64, DType::COMPLEX128];
    let dims =
        prop::collection::vec((prop::sample::select(vec![1i64, 2, 3, 4, 8, 16, 33, 66, 131]), 0i64..2, -2i64..3), 1..5);
    let orders = (Just(()), any::<prop::sample::Index>(), any::<prop::sample::Index>());
    (dims, prop::sample::select(DTYPES.to_vec()), orders, 0usize..4, 0usize..4).prop_map(
        |(dims, dtype, (_, first, second), a, b)| {
            let mut shape: Vec<_> = dims.iter().map(|dim| dim.0).collect();
            while shape.iter().product::<i64>() > 6000 {
                let longest = (0..shape.len()).max_by_key(|d| shape[*d]).unwrap();
                shape[longest] = (shape[longest] / 2).max(1);
            }
            let strides = |seed: usize, odd: bool| {
                let mut order: Vec<_> = (0..shape.len()).collect();
                order.rotate_left(seed % shape.len());
                if seed % 2 == 1 {
                    order.reverse();
                }
                let mut strides = vec![0; shape.len()];
                let mut step = 1;
                for d in order {
                    let (padding, sign) = if odd { (dims[d].1, dims[d].2) } else { (0, 1) };
                    strides[d] = step * if sign == 0 { 1 } else { sign };
                    step *= (shape[d] + padding) * sign.abs().max(1);
                }
                strides
            };
            let from = layout(dtype, &shape, Some(&strides(first.index(100), true)));
            let to = layout(dtype, &shape, Some(&strides(second.index(100), false)));
            let itemsize = from.itemsize();
            (from, to, (a * itemsize % 16, b * itemsize % 16))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn every_byte_is_copied_to_its_place((from, to, beyond) in sides()) {
        check(&from, &to, beyond)?;
    }

    /// Also where another kernel is faster.
    #[test]
    fn every_candidate_copies((from, to, beyond) in sides(), flips in prop::sample::select(vec![0u128, 0x80])) {
        let flips = flips << (8 * (from.itemsize() - 1));
        if let Some(launches) = Walk::new(&from, &to).and_then(|walk| candidates(walk, beyond, flips)) {
            for launch in launches {
                check_launches(&[launch], (&from, &to), beyond, flips)?;
            }
        }
    }

    /// Addresses that the itemsize does not divide, and sources that repeat.
    #[test]
    fn any_address_and_any_stride(
        dims in prop::collection::vec((1i64..5, -7i64..8), 0..5),
        beyond in (0usize..16, 0usize..16),
    ) {
        let (shape, strides): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
        for dtype in [DType::UINT8, DType::FLOAT32, DType::COMPLEX128] {
            check(&layout(dtype, &shape, Some(&strides)), &layout(dtype, &shape, None), beyond)?;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Rows at any pitch and any address, whose order may be backwards, of a target without gaps and of one with them.
    #[test]
    fn rows_are_copied(
        (planes, rows, row) in (1i64..4, 2i64..40, 1i64..140),
        (gap, plane_gap, to_gap) in (0i64..9, 0i64..9, prop::sample::select(vec![0i64, 0, 1, 16])),
        is_backwards in (any::<bool>(), any::<bool>()),
        (beyond, size) in ((0usize..16, 0usize..16), prop::sample::select(vec![1usize, 2, 4])),
        flips in prop::sample::select(vec![0u128, 0x80]),
    ) {
        let dtype = [DType::UINT8, DType::FLOAT16, DType::FLOAT32][size.trailing_zeros() as usize];
        let sign = |is_backwards| if is_backwards { -1 } else { 1 };
        let pitch = row + gap;
        let strides = [sign(is_backwards.0) * (rows * pitch + plane_gap), sign(is_backwards.1) * pitch, 1];
        let to_strides = [rows * (row + to_gap), row + to_gap, 1];
        let side = |strides: &[i64]| layout(dtype, &[planes, rows, row], Some(strides));
        let (from, to) = (side(&strides), side(&to_strides));
        let beyond = (beyond.0 / size * size, beyond.1 / size * size);
        check_flipped(&from, &to, beyond, flips << (8 * (size - 1)))?;
    }

    /// Rows with any gaps on both sides, at any address, forwards and backwards.
    #[test]
    fn pixels_are_transposed(
        (rows, columns, pixel) in (30i64..140, 30i64..140, 2i64..8),
        (from_gap, to_gap) in (0i64..9, 0i64..9),
        (is_wide, is_backwards) in (any::<bool>(), any::<bool>()),
        beyond in (0usize..16, 0usize..16),
        flips in prop::sample::select(vec![0u128, 0x80]),
    ) {
        let (dtype, pixel, size) = if is_wide { (DType::FLOAT16, pixel.min(3), 2) } else { (DType::UINT8, pixel, 1) };
        let row = if is_backwards { -1 } else { 1 } * (columns * pixel + from_gap);
        let from = layout(dtype, &[columns, rows, pixel], Some(&[pixel, row, 1]));
        let to = layout(dtype, &[columns, rows, pixel], Some(&[rows * pixel + to_gap, pixel, 1]));
        let beyond = (beyond.0 / size * size, beyond.1 / size * size);
        let flips = flips << (8 * (size - 1));
        let mut launches = candidates(Walk::new(&from, &to).unwrap(), beyond, flips).unwrap();
        launches.retain(|launch| launch.kernel == Kernel::Box);
        for launch in launches {
            check_launches(&[launch], (&from, &to), beyond, flips)?;
        }
    }
}

/// Checks the copy by one kernel, which must be among those that can make it.
fn by(kernel: Kernel, from: &Layout, to: &Layout, beyond: (usize, usize)) {
    let launches = candidates(Walk::new(from, to).unwrap(), beyond, 0).unwrap();
    let found = launches.iter().position(|launch| launch.kernel == kernel);
    let found = found.unwrap_or_else(|| panic!("{kernel:?} does not copy {from:?}: {launches:?}"));
    check_launches(&launches[found..=found], (from, to), beyond, 0).unwrap();
}

/// The same for a permuted, compact tensor.
fn permuted_by(kernel: Kernel, dtype: DType, shape: &[i64], permutation: &[usize]) {
    let compact = layout(dtype, shape, None);
    let shape: Vec<_> = permutation.iter().map(|d| shape[*d]).collect();
    let strides: Vec<_> = permutation.iter().map(|d| compact.strides()[*d]).collect();
    by(kernel, &layout(dtype, &shape, Some(&strides)), &layout(dtype, &shape, None), (0, 0));
}

#[test]
fn kernels_are_candidates_for_what_they_were_made_for() {
    use Kernel::*;
    for (dtype, shape, permutation, kernel) in [
        (DType::UINT8, &[272, 288][..], &[1, 0][..], Vectors1),
        (DType::UINT8, &[272, 288], &[1, 0], Vectors1Wide),
        (DType::FLOAT16, &[136, 144], &[1, 0], Vectors2Wide),
        (DType::FLOAT16, &[2, 64, 7, 64], &[0, 2, 3, 1], Vectors2),
        (DType::FLOAT32, &[64, 128], &[1, 0], Vectors4),
        (DType::FLOAT32, &[65, 127], &[1, 0], Tile4),
        (DType::FLOAT32, &[65, 127], &[1, 0], Tile4Small),
        (DType::UINT8, &[264, 252], &[1, 0], Box),
        (DType::UINT8, &[515, 251], &[1, 0], Shifted1),
        (DType::UINT8, &[517, 1001], &[1, 0], Shifted1),
        (DType::UINT8, &[32, 12, 20], &[2, 1, 0], Words),
        (DType::FLOAT16, &[63, 65, 67], &[2, 1, 0], Box),
        (DType::FLOAT16, &[517, 201], &[1, 0], Shifted2),
        (DType::FLOAT16, &[7812, 33], &[1, 0], Box),
        (DType::COMPLEX128, &[300, 40], &[1, 0], Tile16),
        // An image of three channels, transposed; pixels of six bytes.
        (DType::UINT8, &[100, 83, 3], &[1, 0, 2], Box),
        (DType::FLOAT16, &[2, 41, 67, 3], &[0, 2, 1, 3], Box),
        (DType::UINT8, &[2, 1024, 3], &[0, 2, 1], Split1),
        (DType::FLOAT32, &[2, 3, 1024], &[0, 2, 1], Gather4),
        (DType::FLOAT16, &[2, 8, 4, 64], &[0, 2, 1, 3], Flat16),
        (DType::FLOAT32, &[40, 12, 3], &[1, 0, 2], Flat4),
        (DType::FLOAT32, &[100, 8, 3], &[0, 2, 1], Gather4),
        (DType::FLOAT32, &[8, 8, 8, 4, 4], &[4, 3, 2, 1, 0], Vectors4),
    ] {
        permuted_by(kernel, dtype, shape, permutation);
    }
    let rows = layout(DType::FLOAT32, &[16, 100], Some(&[101, 1]));
    by(Gather4, &rows, &layout(DType::FLOAT32, &[16, 100], None), (0, 0));
    by(Rows, &rows, &layout(DType::FLOAT32, &[16, 100], Some(&[102, 1])), (0, 0));
    let rows = layout(DType::FLOAT64, &[16, 100], Some(&[101, 1]));
    by(Flat8, &rows, &layout(DType::FLOAT64, &[16, 100], None), (0, 0));
    let rows = layout(DType::UINT8, &[16, 98], Some(&[99, 1]));
    by(Rows, &rows, &layout(DType::UINT8, &[16, 98], None), (0, 0));
    // A row that begins in the last byte of its first vector.
    let rows = layout(DType::UINT8, &[16, 98], Some(&[99, 1]));
    by(Rows, &rows, &layout(DType::UINT8, &[16, 98], None), (0, 15));
    // Rows whose starts are not aligned, although their strides together cancel out in the bits below 16.
    for shape in [&[16, 142][..], &[3, 17, 142]] {
        let (compact, padded) = (layout(DType::UINT8, shape, None), [18 * 143, 143, 1]);
        let rows = layout(DType::UINT8, shape, Some(&padded[3 - shape.len()..]));
        by(Rows, &rows, &compact, (0, 0));
    }
    // Whole vectors, also of a size that is not a power of two.
    for length in [1, 3] {
        permuted_by(Flat16, DType::COMPLEX128, &[length], &[0]);
    }
    // Three of four channels, and three in reverse; rows that are not whole words.
    let planes = layout(DType::UINT8, &[3, 1000], None);
    let some = layout(DType::UINT8, &[3, 1000], Some(&[1, 4]));
    by(Split1, &some, &planes, (3, 0));
    let swapped = layout(DType::UINT8, &[3, 1000], Some(&[-1, 3]));
    by(Split1, &swapped, &planes, (3, 0));
    let reversed = layout(DType::UINT8, &[2000, 3], Some(&[3, -1]));
    by(Box, &reversed, &layout(DType::UINT8, &[2000, 3], None), (2, 0));
    permuted_by(Box, DType::FLOAT16, &[2, 1001], &[1, 0]);
    let reversed = layout(DType::FLOAT32, &[16, 100], Some(&[-100, -1]));
    by(Rows, &reversed, &layout(DType::FLOAT32, &[16, 100], None), (12, 0));
    let every_second = layout(DType::FLOAT32, &[16, 100], Some(&[200, 2]));
    by(Gather4, &every_second, &layout(DType::FLOAT32, &[16, 100], None), (0, 0));
    let every_second = layout(DType::FLOAT32, &[16, 100], Some(&[201, 2]));
    by(Gather4, &every_second, &layout(DType::FLOAT32, &[16, 100], None), (0, 0));
    let every_third = layout(DType::FLOAT32, &[16, 100], Some(&[301, 3]));
    by(Flat4, &every_third, &layout(DType::FLOAT32, &[16, 100], None), (0, 0));
    // Large units: a few channels, more of them, a few in reverse; vectors that are close to each other.
    permuted_by(Flat8, DType::FLOAT64, &[200, 40], &[1, 0]);
    permuted_by(Tile8, DType::FLOAT64, &[201, 40], &[1, 0]);
    permuted_by(Gather4, DType::FLOAT32, &[32, 100], &[1, 0]);
    permuted_by(Tile4, DType::FLOAT32, &[33, 101], &[1, 0]);
    let reversed = layout(DType::FLOAT64, &[1000, 7], Some(&[1, -1000]));
    by(Flat8, &reversed, &layout(DType::FLOAT64, &[1000, 7], None), (0, 0));
    let near = layout(DType::COMPLEX128, &[40, 20, 2], Some(&[320, 4, 2]));
    by(Flat16, &near, &layout(DType::COMPLEX128, &[40, 20, 2], None), (0, 0));
    let near = layout(DType::COMPLEX128, &[40, 20], Some(&[1, 4]));
    by(Flat16, &near, &layout(DType::COMPLEX128, &[40, 20], None), (0, 0));
    // Few units at each place: of rows that a block takes together, also with gaps in the source; before a change of order.
    permuted_by(Box, DType::UINT8, &[4, 1000, 72], &[1, 2, 0]);
    permuted_by(Split1, DType::UINT8, &[40, 500, 4], &[0, 2, 1]);
    let gaps = layout(DType::UINT8, &[40, 4, 70], Some(&[288, 1, 4]));
    by(Split1, &gaps, &layout(DType::UINT8, &[40, 4, 70], None), (0, 0));
    let narrow = layout(DType::FLOAT16, &[3, 1000, 4], Some(&[-8, 24, 2]));
    by(Flat2, &narrow, &layout(DType::FLOAT16, &[3, 1000, 4], None), (0, 0));
    let planes = layout(DType::FLOAT32, &[2, 1000, 3], Some(&[1, 8, 2]));
    by(Flat4, &planes, &layout(DType::FLOAT32, &[2, 1000, 3], None), (0, 0));
    // Units that repeat and stay in the cache; of which each reads a sector; short pieces close to each other.
    let repeats = layout(DType::FLOAT64, &[100, 302, 5], Some(&[0, 1, 302]));
    by(Flat8, &repeats, &layout(DType::FLOAT64, &[100, 302, 5], None), (0, 0));
    let apart = layout(DType::FLOAT32, &[5, 2000], Some(&[0, 8]));
    by(Flat4, &apart, &layout(DType::FLOAT32, &[5, 2000], None), (0, 0));
    permuted_by(Gather4, DType::FLOAT32, &[4, 8, 5, 11], &[1, 0, 3, 2]);
    // Rows of a target, also with gaps between them.
    let planes = layout(DType::UINT8, &[40, 72, 4], Some(&[72, 1, 2880]));
    let with_gaps = layout(DType::UINT8, &[40, 72, 4], Some(&[300, 4, 1]));
    by(Box, &planes, &with_gaps, (0, 0));
    by(Box, &planes, &layout(DType::UINT8, &[40, 72, 4], None), (0, 0));
    // A target with gaps.
    let three = layout(DType::UINT8, &[100, 3], Some(&[6, 2]));
    by(Flat1, &three, &layout(DType::UINT8, &[100, 3], Some(&[4, 1])), (0, 0));
}

/// `shifted` reads up to 128 bytes of a row at once, which rows that lie closer than 64 bytes may not have.
#[test]
fn rows_that_overlap_are_not_shifted() {
    let to = layout(DType::UINT8, &[200, 600], None);
    for (pitch, is_shifted) in [(63, false), (64, true), (-63, false), (-65, true)] {
        let from = layout(DType::UINT8, &[200, 600], Some(&[1, pitch]));
        let launches = candidates(Walk::new(&from, &to).unwrap(), (0, 0), 0).unwrap();
        assert_eq!(launches.iter().any(|launch| launch.kernel == Kernel::Shifted1), is_shifted, "{pitch}");
        for launch in launches {
            check_launches(&[launch], (&from, &to), (0, 0), 0).unwrap();
        }
    }
}

/// The plan into a compact target, from lengths and the source's strides in bytes, the fastest dimension first.
fn plan(dtype: DType, dims: &[(i64, i64)]) -> Launch {
    let shape: Vec<_> = dims.iter().rev().map(|dim| dim.0).collect();
    let strides: Vec<_> = dims.iter().rev().map(|dim| dim.1 / dtype.itemsize().unwrap() as i64).collect();
    let (from, to) = (layout(dtype, &shape, Some(&strides)), layout(dtype, &shape, None));
    choose(Walk::new(&from, &to).unwrap(), (0, 0), 0).unwrap().remove(0)
}

/// Each pair differs in what the model weighs.
#[test]
fn the_kernel_that_costs_least_is_taken() {
    use Kernel::*;
    const U8: DType = DType::UINT8;
    const F32: DType = DType::FLOAT32;
    const F64: DType = DType::FLOAT64;
    let cases = [
        // A neighbour in the source follows soon, and late.
        (F32, &[(3, 1 << 20), (1 << 18, 4)][..], Flat4),
        (F32, &[(4099, 1 << 14), (4095, 4)], Tile4),
        // Few tiles, and many.
        (F32, &[(511, 2044), (511, 4)], Tile4Small),
        (F32, &[(4099, 16396), (4099, 4)], Tile4),
        // Long odd rows of the target, and short ones.
        (U8, &[(4099, 98304), (98304, 1)], Shifted1),
        (U8, &[(49, 1008000), (1008000, 1)], Box),
    ];
    let chosen: Vec<_> = cases.iter().map(|(dtype, dims, _)| plan(*dtype, dims).kernel).collect();
    assert_eq!(chosen, cases.map(|(.., kernel)| kernel));
    // 65 units of three tiles of 32 are joined by the next dimension of the source; 53 of two are not.
    let Parameters::Tile(tile) = plan(F64, &[(53, 576), (65, 8), (8, 32256), (81, 0)]).parameters else {
        panic!("it is not in tiles")
    };
    assert_eq!((tile.i.total, tile.o.total), (65 * 81, 53));
}

/// A block has 4 KiB of a copy of 1 MiB, and 32 KiB of one of 64 MiB.
#[test]
fn small_joins_have_many_blocks() {
    let blocks = |batch: i64| {
        let shape = [batch, 8192, 16];
        let from = layout(DType::FLOAT16, &shape, Some(&[16 * 8192, 1, 8192]));
        let walk = Walk::new(&from, &layout(DType::FLOAT16, &shape, None)).unwrap();
        let launches = candidates(walk, (0, 0), 0).unwrap();
        launches.iter().find(|launch| launch.kernel == Kernel::Box).unwrap().blocks
    };
    assert_eq!((blocks(4), blocks(256)), (256, 2048));
}

/// Those of both sides, and the sum of all dimensions.
#[test]
fn offsets_have_32_bits_where_all_fit() {
    let near = |from: &Layout, to: &Layout| {
        let launches = choose(Walk::new(from, to).unwrap(), (0, 0), 0).unwrap();
        let Parameters::Flat(flat) = &launches[0].parameters else { panic!("it is not flat: {launches:?}") };
        flat.near == 1
    };
    let bytes = |shape: &[i64], strides: Option<&[i64]>| layout(DType::UINT8, shape, strides);
    for (length, fits) in [(1023, true), (1024, false)] {
        for stride in [1 << 21, -1 << 21] {
            let (far, compact) = (bytes(&[length], Some(&[stride])), bytes(&[length], None));
            assert_eq!(near(&far, &compact), fits, "{length} times {stride} bytes");
            assert!(stride < 0 || near(&compact, &far) == fits, "{length} times {stride} bytes of the target");
        }
    }
    for (length, fits) in [(511, true), (512, false)] {
        let sum = bytes(&[length, 512], Some(&[1 << 21, 1 << 21]));
        assert_eq!(near(&sum, &bytes(&[length, 512], None)), fits, "{length} and 512 times 2 MiB");
    }
}

#[test]
fn more_than_two_to_the_31_units_are_several_launches() {
    // 2^33 bytes, transposed; a byte of each; one run.
    for (shape, strides) in [(&[1i64 << 17, 1 << 16][..], &[1i64, 1 << 17][..]), (&[1 << 33], &[2]), (&[1 << 34], &[1])]
    {
        let (from, to) = (layout(DType::UINT8, shape, Some(strides)), layout(DType::UINT8, shape, None));
        let launches = choose(Walk::new(&from, &to).unwrap(), (3, 3), 0).unwrap();
        let mut units = 0;
        let mut ends = vec![];
        for launch in &launches {
            let (to, count) = match &launch.parameters {
                Parameters::Flat(flat) if matches!(launch.kernel, Kernel::Flat1 | Kernel::Flat16) => {
                    (flat.sides.to, (flat.items as usize) << flat.unit)
                }
                Parameters::Flat(flat) => (flat.sides.to, flat.extra as usize),
                Parameters::Box(one) => {
                    // Dimensions that are cut have their length in `total`, others where they are listed.
                    let (lines, grid) = (&one.dims[..one.nalong.into()], &one.grid[..one.ngrid.into()]);
                    let whole = lines.iter().chain(grid).filter(|dim| dim.more & 3 == 0).map(|dim| dim.length);
                    (one.sides.to, whole.chain(one.total).map(|length| length as usize).product())
                }
                Parameters::Tile(tile) => (tile.sides.to, tile.i.total as usize * tile.o.total as usize),
            };
            assert!(count < MOST_UNITS && launch.blocks > 0);
            units += count;
            ends.push(to);
            // Where the target's element at this offset is in the source: the target is compact.
            let place =
                |(rest, at): (i64, i64), (length, stride): (&i64, &i64)| (rest / length, at + rest % length * stride);
            let from = match &launch.parameters {
                Parameters::Box(one) => one.sides.from,
                Parameters::Flat(flat) => flat.sides.from,
                Parameters::Tile(tile) => tile.sides.from,
            };
            assert_eq!(from, shape.iter().zip(strides).rev().fold((to, 0), place).1, "of the byte at {to}");
            let is_run = matches!(launch.kernel, Kernel::Rows | Kernel::Flat1);
            assert!(is_run || strides != [1], "a run is copied as one, but for a short rest");
            assert!(strides != [1] || to % 16 == 0, "the pieces of a run are aligned as the first");
        }
        assert!(launches.len() > 3 && units == from.numel(), "{} launches of {units}", launches.len());
        assert_eq!(ends[0], 0);
        assert!(ends.is_sorted() && ends.iter().any(|to| *to > 1 << 32), "offsets beyond 32 bits");
    }
}

/// Vectors need adjacent units, and addresses and strides that 16 divides: those of every dimension but the own one.
#[test]
fn tiles_are_copied_by_vectors_where_both_sides_allow_it() {
    use Kernel::*;
    for (shape, strides, beyond, kernel) in [
        (&[64, 64][..], &[1, 64][..], 0, Vectors4),
        (&[64, 64], &[1, 65], 0, Tile4),
        (&[64, 64], &[2, 128], 0, Tile4),
        (&[2, 64, 64], &[4161, 1, 65], 0, Tile4),
        (&[64, 64], &[-1, 64], 12, Vectors4),
        (&[64, 64], &[-1, 64], 4, Tile4),
    ] {
        let from = layout(DType::FLOAT32, shape, Some(strides));
        let to = layout(DType::FLOAT32, shape, None);
        by(kernel, &from, &to, (beyond, 0));
        let launches = candidates(Walk::new(&from, &to).unwrap(), (beyond, 0), 0).unwrap();
        let has_vectors = launches.iter().any(|launch| launch.kernel == Vectors4);
        assert_eq!(has_vectors, kernel == Vectors4, "{strides:?} {beyond}");
    }
}

#[test]
fn tiles_of_many_short_dimensions_are_copied() {
    use Kernel::*;
    for ndim in [9, 10, 14] {
        let reversed: Vec<_> = (0..ndim).rev().collect();
        for (dtype, kernel) in [(DType::FLOAT16, Tile2), (DType::FLOAT32, Tile4), (DType::FLOAT64, Tile8)] {
            permuted_by(kernel, dtype, &vec![2; ndim], &reversed);
        }
    }
}

#[test]
fn a_launch_has_less_than_two_to_the_31_units() {
    let launches = |numel: i64| {
        let (from, to) = (layout(DType::UINT8, &[numel], Some(&[2])), layout(DType::UINT8, &[numel], None));
        choose(Walk::new(&from, &to).unwrap(), (0, 0), 0).unwrap().len()
    };
    assert_eq!((launches((1 << 31) - 1), launches(1 << 31)), (1, 2));
}

#[test]
fn signs_are_flipped_in_aligned_elements_only() {
    let one = layout(DType::FLOAT32, &[100], None);
    let flips = |beyond| choose(Walk::new(&one, &one).unwrap(), beyond, 1 << 31);
    let Parameters::Flat(flat) = &flips((4, 0)).unwrap()[0].parameters else { panic!("rows") };
    assert_eq!(flat.sides.flips, 0x80000000_80000000_80000000_80000000);
    assert_eq!(flips((1, 0)), None);
}

#[test]
fn a_plan_is_of_the_distance_beyond_a_multiple_of_16_on_each_side() {
    let line = layout(DType::INT32, &[64], None);
    let every_second = layout(DType::INT32, &[64], Some(&[2]));
    for (from, to) in [(&line, &every_second), (&every_second, &line), (&line, &line)] {
        for beyond in [(0, 0), (4, 4), (8, 0), (0, 12), (1, 2)] {
            let side = |data, layout| Strided { device: Device::cuda(0), data, layout };
            let chosen = choose(Walk::new(from, to).unwrap(), beyond, 0).unwrap();
            for base in [16, 1 << 12, (1 << 12) + 16, 0x7f12_3456_7890] {
                let planned = planned(&side(base + beyond.0, from), &side(base + beyond.1, to), 0).unwrap();
                assert_eq!(*planned, *chosen, "{beyond:?} beyond {base}");
            }
        }
    }
}

#[test]
fn an_error_after_a_launch_says_that_the_target_is_undefined() {
    let error = || Error::new(ErrorKind::Driver, "planned failure");
    assert_eq!(halfway(0, error()).to_string(), error().to_string());
    let later = halfway(1, error());
    assert!(later.kind() == ErrorKind::Driver && later.to_string().contains("undefined"), "{later}");
}

#[test]
fn the_driver_copies_what_is_one_run_in_the_same_order_on_both_sides() {
    let bytes = |shape: &[i64], strides: &[i64]| layout(DType::UINT8, shape, Some(strides));
    let same = |shape: &[i64], strides: &[i64]| in_one_run(&bytes(shape, strides), &bytes(shape, strides));
    assert_eq!(same(&[4, 6], &[6, 1]), Some(0));
    assert_eq!(same(&[4, 6], &[1, 4]), Some(0), "in another order than the dimensions");
    assert_eq!(same(&[4, 6], &[1, -4]), Some(20), "backwards");
    assert_eq!(same(&[4, 6], &[7, 1]), None, "gaps");
    // As many bytes as elements, but some of them twice and others not at all.
    assert_eq!(same(&[2, 2], &[0, 3]), None);
    assert_eq!(in_one_run(&bytes(&[4, 4], &[1, 4]), &bytes(&[4, 4], &[4, 1])), None, "two orders");
}
