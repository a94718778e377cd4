//! A model of the kernel, which knows only the bytes of the table, and the kernel itself, compiled for the host,
//! against an independent walk over the elements.

use super::*;
use crate::floats::tests::exact;
use bridge_core::{Cast as Named, DType, Device, Layout, Strided};
use proptest::prelude::*;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{env, fs, thread};

/// A cast of an element: its addresses in the source and in the target, the numbers of its dtypes, and the bits to
/// flip.
type Made = ((usize, usize), (u8, u8), u64);

/// What the kernel does.
fn carried_out(table: &Table) -> Vec<Made> {
    let (bytes, at) = (table.bytes(), table.owners_at());
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let mut all = Vec::new();
    for block in 0..(bytes.len() - at) / 4 {
        let cast = half(at + 4 * block) as usize * 16;
        let (items, first, ndim, mode) = (half(cast + 24), half(cast + 28), half(cast + 32), bytes[cast + 36]);
        let floats = (bytes[cast + 37], bytes[cast + 38]);
        let sizes = [floats.0, floats.1].map(|float| Named::DTYPES[usize::from(float)].itemsize().unwrap());
        let per = if mode == 2 { 8 } else { 1 };
        let begin = (block as u32 - first) * (16384 / per);
        assert!(begin < items, "a block without work");
        for n in begin..items.min(begin + 16384 / per) {
            let (mut rest, mut here) = (n, (word(cast) as i64, word(cast + 8) as i64));
            for d in 0..ndim {
                let dim = cast + 48 + 32 * d as usize;
                let (length, magic, shift) = (half(dim + 16), half(dim + 20), half(dim + 24));
                let high = ((u64::from(rest) * u64::from(magic)) >> 32) as u32;
                let next = if d + 1 < ndim { (high + rest) >> shift } else { 0 };
                let index = i64::from(rest - next * length);
                here = (here.0 + index * word(dim) as i64, here.1 + index * word(dim + 8) as i64);
                rest = next;
            }
            let alignment = |size: usize| match mode {
                0 => 1,
                1 => size,
                _ => 16.min(8 * size),
            };
            assert!((here.0 as usize).is_multiple_of(alignment(sizes[0])), "mode {mode} at {:#x}", here.0);
            assert!((here.1 as usize).is_multiple_of(alignment(sizes[1])), "mode {mode} at {:#x}", here.1);
            for j in 0..per as usize {
                all.push(((here.0 as usize + j * sizes[0], here.1 as usize + j * sizes[1]), floats, word(cast + 16)));
            }
        }
    }
    all
}

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
    /// Many casts in one table: each element is cast once, to its place, with its dtypes.
    #[test]
    fn every_element_is_cast_once_to_its_place(
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
        let (mut table, mut expected) = (Table::default(), Vec::new());
        for (index, (dims, (number, other), shifts, is_turned, flips)) in pieces.into_iter().enumerate() {
            let dtypes = (Named::DTYPES[number], Named::DTYPES[(number + other) % 6]);
            let side = |gap: fn(&(i64, i64, i64)) -> i64, is_turned: bool| {
                let mut step = 1;
                let mut side: Vec<_> = dims.iter().rev().map(|dim| {
                    let stride = step;
                    step = step * dim.0.max(1) + gap(dim);
                    (dim.0, stride)
                }).collect();
                side.reverse();
                let turned = |dim: &mut (i64, i64)| dim.1 = -dim.1;
                if is_turned { side.iter_mut().take(1).for_each(turned) }
                side
            };
            if dims.iter().map(|dim| dim.0).product::<i64>() > 40_000 {
                continue;
            }
            let mut read = side(|dim| dim.1, is_turned);
            if is_turned {
                read.iter_mut().skip(1).take(1).for_each(|dim| dim.1 = 0);
            }
            let (read, written) = (layout(dtypes.0, &read), layout(dtypes.1, &side(|dim| dim.2, false)));
            let place = (index + 1) << 32;
            // Multiples of 16 are drawn more often.
            let shift = |shift: usize| if shift > 16 { 0 } else { shift };
            let (from, to) = ((place + shift(shifts.0), &read), (place + (1 << 31) + shift(shifts.1), &written));
            prop_assert!(table.enter(walked(&piece(from, to, flips.into()), Named::new(dtypes.0, dtypes.1).unwrap())));
            let numbers = (number as u8, ((number + other) % 6) as u8);
            expected.extend(elements(from, to).into_iter().map(|at| (at, numbers, flips)));
        }
        let mut found = carried_out(&table);
        found.sort_unstable();
        expected.sort_unstable();
        prop_assert!(found == expected, "{} elements of {}", found.len(), expected.len());
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

/// Memory of casts that the kernel makes on the host, by offsets.
#[derive(Default)]
struct Scene {
    source: Vec<u8>,
    target: Vec<u8>,
    table: Table,
    /// Where each element is in the target, its bits before and its dtypes.
    expected: Vec<(usize, u64, (DType, DType))>,
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
        let lowest = self.source.len().next_multiple_of(64) + shifts.0;
        self.source.resize(lowest + read.reach().0 + read.reach().1, 0);
        // Of the many every seventh: borders are in threes.
        let step = if tried.len() > 1 << 16 { 7 } else { 1 };
        for (index, place) in self.source[lowest..].chunks_exact_mut(size).enumerate() {
            place.copy_from_slice(&tried[index * step % tried.len()].to_le_bytes()[..size]);
        }
        let into = self.target.len().next_multiple_of(64) + shifts.1 + written.reach().0;
        self.target.resize(into + written.reach().1, 0xa5);
        let (from, to) = ((lowest + read.reach().0, &read), (into, &written));
        assert!(self.table.enter(walked(&piece(from, to, flips.into()), Named::new(dtypes.0, dtypes.1).unwrap())));
        for (from, to) in elements(from, to) {
            let mut bits = [0; 8];
            bits[..size].copy_from_slice(&self.source[from..from + size]);
            self.expected.push((to, u64::from_le_bytes(bits) ^ flips, dtypes));
        }
    }

    /// Compares every element, and every byte between them.
    fn check(&self, program: &Path) {
        let lengths = [self.source.len(), self.target.len(), self.table.casts.len(), self.table.owners.len()];
        let mut input: Vec<u8> = lengths.iter().flat_map(|length| (*length as u64).to_le_bytes()).collect();
        [&self.source, &self.target, &self.table.bytes()].into_iter().for_each(|bytes| input.extend_from_slice(bytes));
        let mut run = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut stdin = run.stdin.take().unwrap();
        let fed = thread::spawn(move || stdin.write_all(&input).unwrap());
        let output = run.wait_with_output().unwrap();
        fed.join().unwrap();
        assert!(output.status.success() && output.stdout.len() == self.target.len(), "{:?}", output.status);
        let mut between = self.target.clone();
        for &(at, bits, (from, to)) in &self.expected {
            let size = to.itemsize().unwrap();
            let mut found = [0; 8];
            found[..size].copy_from_slice(&output.stdout[at..at + size]);
            let found = u64::from_le_bytes(found);
            match exact::cast(from, to, bits) {
                Some(expected) => assert_eq!(found, expected, "{from} {bits:#x} to {to} at {at}: {found:#x}"),
                None => assert!(exact::is_nan(to, found), "{from} {bits:#x} to {to} at {at}: {found:#x}, not NaN"),
            }
            between[at..at + size].copy_from_slice(&output.stdout[at..at + size]);
        }
        assert!(between == output.stdout, "bytes between elements");
    }
}

/// The kernel itself, compiled for the host: every number of the small dtypes and many of the others, in vectors, one
/// by one and at any address, and views of all kinds.
#[test]
fn the_kernel_casts_to_the_nearest_number() {
    let folder = env::temp_dir().join(format!("truebridge-casts-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (source, program) = (folder.join("kernel.cpp"), folder.join("kernel"));
    fs::write(&source, include_str!("kernel.cpp")).unwrap();
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".into());
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let mut compile = Command::new(&compiler);
    compile.args(["-std=c++17", "-O1", "-fno-strict-aliasing", "-I"]).arg(kernels).arg(&source).arg("-o").arg(&program);
    let compiled = compile.stderr(Stdio::null()).status();
    assert!(compiled.is_ok_and(|status| status.success()), "{compiler} compiles the kernel");
    let mut scene = Scene::default();
    for from in Named::DTYPES {
        let count = exact::tried(from).len().min(120_000) as i64;
        let sign = 1u64 << (from.bits - 1);
        for to in Named::DTYPES.into_iter().filter(|to| *to != from) {
            let (size, out) = (from.itemsize().unwrap(), to.itemsize().unwrap());
            scene.enter((from, to), &[(count, 1, 1)], (0, 0), 0);
            scene.enter((from, to), &[(999, 1, 1)], (size, 0), sign);
            scene.enter((from, to), &[(999, 1, 1)], (1, out + 1), sign);
            scene.enter((from, to), &[(3, 100, 64), (5, 20, 320), (19, 1, 1)], (0, 0), 0);
            scene.enter((from, to), &[(3, -100, 50), (7, 0, 7), (5, 1, 1)], (0, 0), 0);
            scene.enter((from, to), &[(33, 1, 17), (17, 33, 1)], (0, out), sign);
            scene.enter((from, to), &[], (0, 0), 0);
        }
    }
    scene.check(&program);
    fs::remove_dir_all(folder).unwrap();
}
