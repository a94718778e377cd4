//! The plan, carried out by the kernels on a device on the host.

use super::choose::{Launch, MOST_UNITS, Parameters, boxed, choose};
use super::on_host::OnHost;
use super::parameters::{Flat, Tile};
use super::table::{KERNELS, Kernel};
use super::{halfway, planned};
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
    fn boxes_copy_any_order((from, to, beyond) in sides(), flips in prop::sample::select(vec![0u128, 0x80])) {
        let flips = flips << (8 * (from.itemsize() - 1));
        if let Some(launch) = Walk::new(&from, &to).and_then(|walk| boxed(walk, beyond, flips)) {
            check_launches(&[launch], (&from, &to), beyond, flips)?;
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
        let kernels = check_flipped(&from, &to, beyond, flips << (8 * (size - 1)))?;
        let is_odd = (pixel * size as i64) % 4 != 0 && pixel > 2;
        prop_assert!(!is_odd || kernels == [Kernel::Box], "{kernels:?}");
    }
}

/// The kernels of one copy of a permuted, compact tensor.
fn chosen(dtype: DType, shape: &[i64], permutation: &[usize]) -> Vec<Kernel> {
    let compact = layout(dtype, shape, None);
    let shape: Vec<_> = permutation.iter().map(|d| shape[*d]).collect();
    let strides: Vec<_> = permutation.iter().map(|d| compact.strides()[*d]).collect();
    check(&layout(dtype, &shape, Some(&strides)), &layout(dtype, &shape, None), (0, 0)).unwrap()
}

#[test]
fn usual_copies_take_the_kernel_that_was_made_for_them() {
    use Kernel::*;
    for (dtype, shape, permutation, kernel) in [
        (DType::UINT8, &[1024, 1024][..], &[1, 0][..], Vectors1Wide),
        (DType::FLOAT16, &[512, 512], &[1, 0], Vectors2Wide),
        (DType::FLOAT16, &[2, 64, 7, 64], &[0, 2, 3, 1], Vectors2),
        (DType::FLOAT32, &[64, 128], &[1, 0], Vectors4),
        (DType::FLOAT32, &[65, 127], &[1, 0], Tile4),
        (DType::UINT8, &[2064, 252], &[1, 0], Box),
        (DType::UINT8, &[2065, 251], &[1, 0], Box),
        // Too small for the time that the plan of a box takes.
        (DType::UINT8, &[515, 251], &[1, 0], Shifted1),
        // Long lines of a target with odd rows.
        (DType::UINT8, &[517, 1001], &[1, 0], Shifted1),
        (DType::UINT8, &[32, 12, 20], &[2, 1, 0], Words1),
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
        assert_eq!(chosen(dtype, shape, permutation), [kernel], "{dtype} {shape:?} {permutation:?}");
    }
    let rows = layout(DType::FLOAT32, &[16, 100], Some(&[101, 1]));
    assert_eq!(check(&rows, &layout(DType::FLOAT32, &[16, 100], None), (0, 0)).unwrap(), [Gather4]);
    assert_eq!(check(&rows, &layout(DType::FLOAT32, &[16, 100], Some(&[102, 1])), (0, 0)).unwrap(), [Rows]);
    let rows = layout(DType::FLOAT64, &[16, 100], Some(&[101, 1]));
    assert_eq!(check(&rows, &layout(DType::FLOAT64, &[16, 100], None), (0, 0)).unwrap(), [Flat8]);
    let rows = layout(DType::UINT8, &[16, 98], Some(&[99, 1]));
    assert_eq!(check(&rows, &layout(DType::UINT8, &[16, 98], None), (0, 0)).unwrap(), [Rows]);
    // A row that begins in the last byte of its first vector.
    let rows = layout(DType::UINT8, &[16, 98], Some(&[99, 1]));
    assert_eq!(check(&rows, &layout(DType::UINT8, &[16, 98], None), (0, 15)).unwrap(), [Rows]);
    // Rows whose starts are not aligned, although their strides together cancel out in the bits below 16.
    for shape in [&[16, 142][..], &[3, 17, 142]] {
        let (compact, padded) = (layout(DType::UINT8, shape, None), [18 * 143, 143, 1]);
        let rows = layout(DType::UINT8, shape, Some(&padded[3 - shape.len()..]));
        assert_eq!(check(&rows, &compact, (0, 0)).unwrap(), [Rows], "{shape:?}");
    }
    // Whole vectors, also of a size that is not a power of two.
    for length in [1, 3] {
        assert_eq!(chosen(DType::COMPLEX128, &[length], &[0]), [Flat16], "{length}");
    }
    // Three of four channels, and three in reverse; rows that are not whole words.
    let planes = layout(DType::UINT8, &[3, 1000], None);
    let some = layout(DType::UINT8, &[3, 1000], Some(&[1, 4]));
    assert_eq!(check(&some, &planes, (3, 0)).unwrap(), [Split1]);
    let swapped = layout(DType::UINT8, &[3, 1000], Some(&[-1, 3]));
    assert_eq!(check(&swapped, &planes, (3, 0)).unwrap(), [Split1]);
    let reversed = layout(DType::UINT8, &[2000, 3], Some(&[3, -1]));
    assert_eq!(check(&reversed, &layout(DType::UINT8, &[2000, 3], None), (2, 0)).unwrap(), [Box]);
    assert_eq!(chosen(DType::FLOAT16, &[2, 1001], &[1, 0]), [Box]);
    let reversed = layout(DType::FLOAT32, &[16, 100], Some(&[-100, -1]));
    assert_eq!(check(&reversed, &layout(DType::FLOAT32, &[16, 100], None), (12, 0)).unwrap(), [Turn]);
    let every_second = layout(DType::FLOAT32, &[16, 100], Some(&[200, 2]));
    assert_eq!(check(&every_second, &layout(DType::FLOAT32, &[16, 100], None), (0, 0)).unwrap(), [Gather4]);
    let every_second = layout(DType::FLOAT32, &[16, 100], Some(&[201, 2]));
    assert_eq!(check(&every_second, &layout(DType::FLOAT32, &[16, 100], None), (0, 0)).unwrap(), [Gather4]);
    let every_third = layout(DType::FLOAT32, &[16, 100], Some(&[301, 3]));
    assert_eq!(check(&every_third, &layout(DType::FLOAT32, &[16, 100], None), (0, 0)).unwrap(), [Flat4]);
    // Large units: a few channels, more of them, a few in reverse; vectors that are close to each other.
    assert_eq!(chosen(DType::FLOAT64, &[200, 40], &[1, 0]), [Gather8]);
    assert_eq!(chosen(DType::FLOAT64, &[201, 40], &[1, 0]), [Tile8]);
    assert_eq!(chosen(DType::FLOAT32, &[32, 100], &[1, 0]), [Gather4]);
    assert_eq!(chosen(DType::FLOAT32, &[33, 101], &[1, 0]), [Tile4]);
    let reversed = layout(DType::FLOAT64, &[1000, 7], Some(&[1, -1000]));
    assert_eq!(check(&reversed, &layout(DType::FLOAT64, &[1000, 7], None), (0, 0)).unwrap(), [Gather8]);
    let near = layout(DType::COMPLEX128, &[40, 20, 2], Some(&[320, 4, 2]));
    assert_eq!(check(&near, &layout(DType::COMPLEX128, &[40, 20, 2], None), (0, 0)).unwrap(), [Flat16]);
    let near = layout(DType::COMPLEX128, &[40, 20], Some(&[1, 4]));
    assert_eq!(check(&near, &layout(DType::COMPLEX128, &[40, 20], None), (0, 0)).unwrap(), [Flat16]);
    // Three parts of a run are not written one by one.
    let parts = layout(DType::FLOAT16, &[3, 1000, 3], Some(&[1, 4, 8000]));
    assert_ne!(check(&parts, &layout(DType::FLOAT16, &[3, 1000, 3], None), (0, 0)).unwrap(), [Split2]);
    // Few units at each place: of rows that a block takes together, also with gaps in the source; before a change of order.
    assert_eq!(chosen(DType::UINT8, &[4, 1000, 72], &[1, 2, 0]), [Box]);
    assert_eq!(chosen(DType::UINT8, &[40, 500, 4], &[0, 2, 1]), [Split1]);
    let gaps = layout(DType::UINT8, &[40, 4, 70], Some(&[288, 1, 4]));
    assert_eq!(check(&gaps, &layout(DType::UINT8, &[40, 4, 70], None), (0, 0)).unwrap(), [Split1]);
    for (columns, kernel) in [(146, Tile4), (145, Flat4)] {
        let pairs = layout(DType::FLOAT32, &[300, columns, 2], Some(&[3, 900, 2]));
        let compact = layout(DType::FLOAT32, &[300, columns, 2], None);
        assert_eq!(check(&pairs, &compact, (0, 0)).unwrap(), [kernel], "lines over {columns} times 3,600 bytes");
    }
    let narrow = layout(DType::FLOAT16, &[3, 1000, 4], Some(&[-8, 24, 2]));
    assert_eq!(check(&narrow, &layout(DType::FLOAT16, &[3, 1000, 4], None), (0, 0)).unwrap(), [Flat2]);
    let planes = layout(DType::FLOAT32, &[2, 1000, 3], Some(&[1, 8, 2]));
    assert_eq!(check(&planes, &layout(DType::FLOAT32, &[2, 1000, 3], None), (0, 0)).unwrap(), [Flat4]);
    // Units that repeat and stay in the cache; of which each reads a sector; short pieces close to each other.
    let repeats = layout(DType::FLOAT64, &[100, 302, 5], Some(&[0, 1, 302]));
    assert_eq!(check(&repeats, &layout(DType::FLOAT64, &[100, 302, 5], None), (0, 0)).unwrap(), [Gather8]);
    let apart = layout(DType::FLOAT32, &[5, 2000], Some(&[0, 8]));
    assert_eq!(check(&apart, &layout(DType::FLOAT32, &[5, 2000], None), (0, 0)).unwrap(), [Flat4]);
    assert_eq!(chosen(DType::FLOAT32, &[4, 8, 5, 11], &[1, 0, 3, 2]), [Gather4]);
    let launches = choose(Walk::new(&apart, &layout(DType::FLOAT32, &[5, 2000], None)).unwrap(), (0, 0), 0).unwrap();
    let Parameters::Flat(flat) = &launches[0].parameters else { panic!("it is not flat") };
    assert_eq!((flat.dims[0].from, flat.dims[0].length), (0, 5), "neighbours read the same unit");
    // Rows of a target, also with gaps between them.
    let planes = layout(DType::UINT8, &[40, 72, 4], Some(&[72, 1, 2880]));
    let with_gaps = layout(DType::UINT8, &[40, 72, 4], Some(&[300, 4, 1]));
    assert_eq!(check(&planes, &with_gaps, (0, 0)).unwrap(), [Box]);
    assert_eq!(check(&planes, &layout(DType::UINT8, &[40, 72, 4], None), (0, 0)).unwrap(), [Box]);
    // A target with gaps.
    let three = layout(DType::UINT8, &[100, 3], Some(&[6, 2]));
    assert_eq!(check(&three, &layout(DType::UINT8, &[100, 3], Some(&[4, 1])), (0, 0)).unwrap(), [Flat1]);
}

/// The plan into a compact target, from lengths and the source's strides in bytes, the fastest dimension first.
fn plan(dtype: DType, dims: &[(i64, i64)]) -> Launch {
    let shape: Vec<_> = dims.iter().rev().map(|dim| dim.0).collect();
    let strides: Vec<_> = dims.iter().rev().map(|dim| dim.1 / dtype.itemsize().unwrap() as i64).collect();
    let (from, to) = (layout(dtype, &shape, Some(&strides)), layout(dtype, &shape, None));
    choose(Walk::new(&from, &to).unwrap(), (0, 0), 0).unwrap().remove(0)
}

/// Each pair is on two sides of a rule.
#[test]
fn what_was_measured_decides_who_copies() {
    use Kernel::*;
    const U8: DType = DType::UINT8;
    const F16: DType = DType::FLOAT16;
    const F32: DType = DType::FLOAT32;
    const F64: DType = DType::FLOAT64;
    const C128: DType = DType::COMPLEX128;
    for (dtype, dims, kernel) in [
        // Halves of one row, in copies of 8 and 12 MiB.
        (F16, &[(4 << 20, 4)][..], Gather2),
        (F16, &[(6 << 20, 4)], Flat2),
        // Two bytes at each place, whose lines are far from each other and near.
        (U8, &[(2, 2), (6545, 11580), (2895, 4)], Box),
        (U8, &[(2, 2), (328, 388), (97, 4), (88, 127264)], Box),
        // Four bytes, whose next ones are near.
        (U8, &[(4, 14), (7, 1), (518778, 56)], Gather1),
        // Pairs of doubles in copies of 24 and 6 MiB.
        (F64, &[(2, 16), (1256, 39680), (1240, 32)], Tile8),
        (F64, &[(2, 16), (549, 23552), (736, 32)], Flat8),
        // Items of several planes, and of one.
        (F64, &[(3, 9787152), (3, 3262384), (2291, 8), (89, 36656)], Flat8),
        (F64, &[(3, 9787152), (5, 1087464), (1374, 8), (89, 10992)], Gather8),
        (F32, &[(6, 7741440), (4, -60480), (37, 4), (13, 241920), (14, 4320), (27, 0)], Gather4),
        // Rows of 1,280 and 6,480 channels.
        (F32, &[(160, 32), (8, 4), (24, 1556480), (152, 5120)], Gather4),
        (F32, &[(432, 64), (15, 4), (768, 55296)], Split4),
        // Vectors whose neighbours follow soon; which are lines apart.
        (C128, &[(36, 960), (59, 16), (25, 898560), (13, 34560)], Flat16),
        (C128, &[(64, 400384), (135, 16), (184, -2176)], Tile16),
        (C128, &[(356, 163840), (2, 40960), (320, 128)], Flat16),
        // Runs of large units, and of seven bytes.
        (F64, &[(2, 8), (15, 1253376), (24, 52224), (7, 24), (272, 192)], Flat8),
        (F32, &[(6, 4), (656, 112), (16, 4114432), (4, 28), (56, 73472)], Gather4),
        (U8, &[(7, 1), (2156648, 16), (2, 8)], Gather1),
        // Odd rows that are near each other and far.
        (F16, &[(64, 6512), (37, 2), (64, 416768), (87, 74)], Gather2),
        (F16, &[(63, 346112), (256, 2), (338, -512)], Box),
        (U8, &[(40, 274), (134, 1), (2560, 21920)], Gather1),
        (U8, &[(49, 1008000), (1008000, 1)], Box),
        // Pieces of 7 and 14 bytes, 56 and 32 bytes from the next ones, whose lines are near and far.
        (U8, &[(7, 7), (59, 56), (7, 1), (12616, 3304)], Gather1),
        (F16, &[(7, 2999808), (93744, 32), (8, 0)], Tile2),
        // Long rows and short ones in reverse.
        (F16, &[(216, -2), (46800, 432)], Gather2),
        (F16, &[(7, -2), (2655126, 14)], Box),
    ] {
        assert_eq!(plan(dtype, dims).kernel, kernel, "{dtype} {dims:?}");
    }
    let repeats = plan(F32, &[(5000, 32), (8, 4), (3, 0)]).kernel;
    assert_ne!(repeats, Split4, "words that repeat are in the cache");
    // 72 units of two tiles of 64 are joined by the next dimension of the source; 53 of one are not.
    let Parameters::Tile(tile) = plan(F64, &[(53, 576), (72, 8), (8, 32256), (81, 0)]).parameters else {
        panic!("it is not in tiles")
    };
    assert_eq!((tile.i.total, tile.o.total), (72 * 81, 53));
}

/// A block has 4 KiB of a copy of 1 MiB, and 32 KiB of one of 64 MiB.
#[test]
fn small_joins_have_many_blocks() {
    let blocks = |batch: i64| {
        let launch = plan(DType::FLOAT16, &[(16, 16384), (8192, 2), (batch, 16 * 16384)]);
        assert_eq!(launch.kernel, Kernel::Box);
        launch.blocks
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
            assert_eq!(launch.kernel == Kernel::Rows, strides == [1], "a run is copied as one, and no other bytes");
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
        let kernels = check(&from, &layout(DType::FLOAT32, shape, None), (beyond, 0)).unwrap();
        assert_eq!(kernels, [kernel], "{strides:?} {beyond}");
    }
}

#[test]
fn tiles_of_many_short_dimensions_are_copied() {
    use Kernel::*;
    for ndim in [9, 10, 14] {
        let reversed: Vec<_> = (0..ndim).rev().collect();
        let kernels = [DType::UINT8, DType::FLOAT16, DType::FLOAT32, DType::FLOAT64]
            .map(|dtype| chosen(dtype, &vec![2; ndim], &reversed));
        assert_eq!(kernels.concat(), [Gather1, Gather2, Tile4, Tile8], "{ndim} dimensions");
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
