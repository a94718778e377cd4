//! The kernel, on a device on the host, against an independent walk over the elements.

use super::*;
use crate::copy::floats::tests::exact;
use crate::copy::kernels::on_host::OnHost;
use crate::copy::kernels::parameters::{Casts, Pieces};
use bridge_core::{Cast as Named, DType, Device, Layout, Strided};
use proptest::prelude::*;

fn layout(dtype: DType, dims: &[(i64, i64)]) -> Layout {
    let (shape, strides): (Vec<_>, Vec<_>) = dims.iter().copied().unzip();
    Layout::new(dtype, &shape, Some(&strides), 0).unwrap()
}

/// The addresses of all elements.
fn elements(from: (usize, &Layout), to: (usize, &Layout)) -> Vec<(usize, usize)> {
    let mut at = vec![(from.0 as i64, to.0 as i64)];
    let sizes = (from.1.itemsize() as i64, to.1.itemsize() as i64);
    for (&length, (from, to)) in from.1.shape().iter().zip(from.1.strides().iter().zip(to.1.strides())) {
        let steps = |&at: &(i64, i64)| (0..length).map(move |i| (at.0 + i * from * sizes.0, at.1 + i * to * sizes.1));
        at = at.iter().flat_map(steps).collect();
    }
    at.into_iter().map(|(from, to)| (from as usize, to as usize)).collect()
}

fn piece<'a>(from: (usize, &'a Layout), to: (usize, &'a Layout), flips: u128) -> Piece<'a> {
    let side = |(data, layout)| Strided { device: Device::cuda(0), data, layout };
    Piece { from: side(from), to: side(to), flips, cast: None }
}

/// Lengths with and without whole vectors.
const LENGTHS: &[i64] = &[0, 1, 2, 3, 8, 15, 16, 17, 64, 700];

proptest! {
    /// Many casts in one table: each element is cast to its place, by its dtypes, and no other byte is written.
    #[test]
    fn every_element_is_cast_to_its_place(
        pieces in prop::collection::vec(
            (
                prop::collection::vec((prop::sample::select(LENGTHS), 0i64..3, 0i64..9), 0..4),
                (0usize..6, 1usize..6),
                (0usize..33, 0usize..33),
                any::<bool>(),
                any::<u64>(),
            ),
            1..4,
        ),
    ) {
        let mut scene = Scene::default();
        for (dims, (number, other), shifts, is_turned, flips) in pieces {
            if dims.iter().map(|dim| dim.0).product::<i64>() > 40_000 {
                continue;
            }
            let strides = |gap: fn(&(i64, i64, i64)) -> i64| {
                let mut step = 1;
                let mut strides: Vec<_> = dims.iter().rev().map(|dim| {
                    let stride = step;
                    step = step * dim.0.max(1) + gap(dim);
                    stride
                }).collect();
                strides.reverse();
                strides
            };
            let (mut read, written) = (strides(|dim| dim.1), strides(|dim| dim.2));
            if is_turned {
                read.iter_mut().take(1).for_each(|stride| *stride = -*stride);
                read.iter_mut().skip(1).take(1).for_each(|stride| *stride = 0);
            }
            let dims: Vec<_> = dims.iter().zip(read.into_iter().zip(written)).map(|(dim, (a, b))| (dim.0, a, b)).collect();
            let dtypes = (Named::DTYPES[number], Named::DTYPES[(number + other) % 6]);
            // Multiples of 16 are drawn more often.
            let shift = |shift: usize| if shift > 16 { 0 } else { shift };
            let bits = flips & (u64::MAX >> (64 - u32::from(dtypes.0.bits)));
            scene.enter(dtypes, &dims, (shift(shifts.0), shift(shifts.1)), bits);
        }
        scene.check();
    }

    /// The parts of a walk are the walk, each element once, and no part is too long.
    #[test]
    fn parts_are_the_walk(lengths in prop::collection::vec(1i64..200, 1..4), most in 1usize..300) {
        prop_assume!(lengths.iter().product::<i64>() < 100_000);
        let dims: Vec<_> = lengths.iter().enumerate().map(|(d, length)| (*length, 1_000i64.pow(d as u32))).collect();
        let (read, written) = (layout(DType::FLOAT32, &dims), layout(DType::FLOAT16, &dims));
        let visited = |walk: &Walk| {
            let mut at = vec![(walk.from, walk.to)];
            for dim in &walk.dims {
                let steps =
                    |&(a, b): &(i64, i64)| (0..dim.length as i64).map(move |i| (a + i * dim.from, b + i * dim.to));
                at = at.iter().flat_map(steps).collect();
            }
            at
        };
        let walk = Walk::new(&read, &written).unwrap();
        let (mut whole, mut parts) = (visited(&walk), Vec::new());
        cut(walk, most, &mut |part| {
            let visited = visited(&part);
            assert!(visited.len() <= most && part.dims.iter().all(|dim| dim.length > 1));
            parts.extend(visited);
        });
        whole.sort_unstable();
        parts.sort_unstable();
        prop_assert_eq!(parts, whole);
    }
}

#[test]
fn rows_are_cast_in_vectors_and_their_ends_one_by_one() {
    let modes = |from: usize, to: usize, dims: &[(i64, i64)]| {
        let (read, written) = (layout(DType::FLOAT32, dims), layout(DType::BFLOAT16, dims));
        let cast = Named::new(DType::FLOAT32, DType::BFLOAT16).unwrap();
        let all = walked(&piece((from, &read), (to, &written), 0), cast);
        all.into_iter().map(|walked| (walked.cast.mode, walked.cast.items, walked.blocks)).collect::<Vec<_>>()
    };
    let (a, b) = (1 << 20, 1 << 30);
    assert_eq!(modes(a, b, &[(1 << 20, 1)]), [(2, 1 << 17, 64)], "vectors of eight");
    assert_eq!(modes(a, b, &[(1003, 1)]), [(2, 125, 1), (1, 3, 1)]);
    assert_eq!(modes(a + 4, b, &[(1000, 1)]), [(1, 1000, 1)], "a source in between");
    assert_eq!(modes(a, b + 2, &[(1000, 1)]), [(1, 1000, 1)], "a target in between");
    assert_eq!(modes(a + 1, b, &[(1000, 1)]), [(0, 1000, 1)], "no whole element");
    assert_eq!(modes(a, b, &[(3, 1008), (1000, 1)]), [(2, 375, 1)], "rows at vectors");
    assert_eq!(modes(a, b, &[(3, 1001), (1000, 1)]), [(1, 3000, 1)], "rows in between");
    assert_eq!(modes(a, b, &[(1000, 2)]), [(1, 1000, 1)]);
    assert_eq!(modes(a, b, &[]), [(1, 1, 1)]);
    assert_eq!(modes(a, b, &[(0, 1)]), []);
}

#[test]
fn giants_are_cut() {
    let giant = [(1i64 << 33, 1)];
    let (read, written) = (layout(DType::FLOAT8_E5M2, &giant), layout(DType::FLOAT64, &giant));
    let cast = Named::new(DType::FLOAT8_E5M2, DType::FLOAT64).unwrap();
    let all = walked(&piece((1 << 40, &read), (1 << 41, &written), 0), cast);
    assert!(all.iter().all(|walked| walked.cast.mode == 2), "parts are aligned as the whole");
    assert_eq!(all.iter().map(|walked| u64::from(walked.cast.items) * 8).sum::<u64>(), 1 << 33);
}

/// Casts that the kernel makes on a device on the host.
#[derive(Default)]
struct Scene {
    host: OnHost,
    /// Whether each cast is a launch, and not one of a table.
    is_each_alone: bool,
    table: Table,
    targets: Vec<Target>,
}

/// What a cast is to write.
struct Target {
    /// Its memory, and the bytes in it before.
    at: usize,
    bytes: Vec<u8>,
    /// Where each element is in these bytes, and its bits before the cast.
    elements: Vec<(usize, u64)>,
    dtypes: (DType, DType),
}

impl Scene {
    /// Enters a cast of so many numbers to try, in a view with these lengths and strides. Both sides begin so many
    /// bytes beyond an aligned address.
    fn enter(&mut self, dtypes: (DType, DType), dims: &[(i64, i64, i64)], shifts: (usize, usize), flips: u64) {
        let side = |dtype, stride: fn(&(i64, i64, i64)) -> i64| {
            layout(dtype, &dims.iter().map(|dim| (dim.0, stride(dim))).collect::<Vec<_>>())
        };
        let (read, written) = (side(dtypes.0, |dim| dim.1), side(dtypes.1, |dim| dim.2));
        let (size, tried) = (read.itemsize(), exact::tried(dtypes.0));
        // Of the many every seventh: borders are in threes.
        let step = if tried.len() > 1 << 16 { 7 } else { 1 };
        let mut source = vec![0; read.byte_extent().0 + read.byte_extent().1];
        for (index, place) in source.chunks_exact_mut(size).enumerate() {
            place.copy_from_slice(&tried[index * step % tried.len()].to_le_bytes()[..size]);
        }
        let bytes = vec![0xa5; written.byte_extent().0 + written.byte_extent().1];
        let (from, at) = (self.host.memory(&source, shifts.0), self.host.memory(&bytes, shifts.1));
        let (first, into) = (from + read.byte_extent().0, at + written.byte_extent().0);
        let piece = piece((first, &read), (into, &written), flips.into());
        let walks = walked(&piece, Named::new(dtypes.0, dtypes.1).unwrap());
        if self.is_each_alone {
            for Walked { cast, dims, blocks } in walks {
                self.host.launch(Kernel::Cast, blocks, 0, &Casts::only(cast, &dims));
            }
        } else {
            assert!(self.table.enter(walks));
        }
        let element = |(read, written): (usize, usize)| {
            let mut bits = [0; 8];
            bits[..size].copy_from_slice(&source[read - from..][..size]);
            (written - at, u64::from_le_bytes(bits) ^ flips)
        };
        let elements = elements((first, &read), (into, &written)).into_iter().map(element).collect();
        self.targets.push(Target { at, bytes, elements, dtypes });
    }

    /// Makes the casts, and compares every element and every byte between them.
    fn check(mut self) {
        let table = self.host.memory(&self.table.bytes(), 0);
        let table = Pieces { pieces: table as u64, owners: (table + self.table.owners_at()) as u64 };
        self.host.launch(Kernel::Cast, self.table.owners.len() as u32, 0, &Casts::of(table));
        for Target { at, bytes: mut between, elements, dtypes: (from, to) } in self.targets {
            let (size, written) = (to.itemsize().unwrap(), self.host.read(at, between.len()));
            for (at, bits) in elements {
                let mut found = [0; 8];
                found[..size].copy_from_slice(&written[at..at + size]);
                let found = u64::from_le_bytes(found);
                match exact::cast(from, to, bits) {
                    Some(expected) => assert_eq!(found, expected, "{from} {bits:#x} to {to} at {at}: {found:#x}"),
                    None => assert!(exact::is_nan(to, found), "{from} {bits:#x} to {to} at {at}: {found:#x}, not NaN"),
                }
                between[at..at + size].copy_from_slice(&written[at..at + size]);
            }
            assert!(between == written, "bytes between elements");
        }
    }
}

/// The kernel itself: every number of the small dtypes and many of the others, in vectors, one by one and at any
/// address, and views of all kinds.
#[test]
fn the_kernel_casts_to_the_nearest_number() {
    let mut scenes = [false, true].map(|is_each_alone| Scene { is_each_alone, ..Scene::default() });
    for from in Named::DTYPES {
        let count = exact::tried(from).len().min(120_000) as i64;
        let sign = 1u64 << (from.bits - 1);
        for to in Named::DTYPES.into_iter().filter(|to| *to != from) {
            let (size, out) = (from.itemsize().unwrap(), to.itemsize().unwrap());
            scenes[0].enter((from, to), &[(count, 1, 1)], (0, 0), 0);
            for scene in &mut scenes {
                scene.enter((from, to), &[(999, 1, 1)], (size, 0), sign);
                scene.enter((from, to), &[(999, 1, 1)], (1, out + 1), sign);
                scene.enter((from, to), &[(3, 100, 64), (5, 20, 320), (19, 1, 1)], (0, 0), 0);
                scene.enter((from, to), &[(3, -100, 50), (7, 0, 7), (5, 1, 1)], (0, 0), 0);
                scene.enter((from, to), &[(33, 1, 17), (17, 33, 1)], (0, out), sign);
                scene.enter((from, to), &[], (0, 0), 0);
            }
        }
    }
    scenes.into_iter().for_each(Scene::check);
}
