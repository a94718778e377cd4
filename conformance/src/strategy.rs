//! Random cases: how each property's tensors, streams and steps are chosen.

use crate::{Calls, Case, Op, Picks, Route, Sides, Spec, model};
use bridge_core::{DType, MAX_NDIM, Strides};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use std::ops::RangeInclusive;

/// One step from a compact tensor to a strange view of it.
#[derive(Debug, Clone)]
enum View {
    Slice { dim: usize, start: i64, step: i64 },
    Reverse { dim: usize },
    Swap { one: usize, other: usize },
    Select { dim: usize, index: i64 },
    Unit { dim: usize, stride: i64 },
    Broadcast { dim: usize, length: i64 },
    Window { dim: usize, length: i64 },
}

/// The alignment, in bytes, that half of the tensors have and the others do not: the most that a framework asks for. So
/// a claim about alignment that is wrong fails in one of the first cases.
const ALIGNED: usize = 64;

/// The most elements of a tensor: larger ones test nothing new.
const MAX_ELEMENTS: usize = 4096;

impl View {
    /// Chooses a step that the source can do. `overlap`: also steps to views that contain an element twice.
    fn any(sides: &Sides, overlap: bool) -> BoxedStrategy<View> {
        let dim = || 0usize..12;
        let lowest = if sides.from.can.negative_strides { -9i64 } else { 0 };
        let mut steps = vec![
            (dim(), 0i64..4, 1i64..4).prop_map(|(dim, start, step)| View::Slice { dim, start, step }).boxed(),
            (dim(), dim()).prop_map(|(one, other)| View::Swap { one, other }).boxed(),
            (dim(), 0i64..4).prop_map(|(dim, index)| View::Select { dim, index }).boxed(),
            (dim(), lowest..100).prop_map(|(dim, stride)| View::Unit { dim, stride }).boxed(),
        ];
        if sides.from.can.negative_strides {
            steps.push(dim().prop_map(|dim| View::Reverse { dim }).boxed());
        }
        if overlap && sides.from.can.broadcasts {
            steps.push((dim(), 1i64..4).prop_map(|(dim, length)| View::Broadcast { dim, length }).boxed());
        }
        if overlap {
            steps.push((dim(), 2i64..4).prop_map(|(dim, length)| View::Window { dim, length }).boxed());
        }
        proptest::strategy::Union::new(steps).boxed()
    }

    /// Applies the step where it has a meaning.
    fn apply(&self, spec: &mut Spec) {
        let (ndim, offset) = (spec.shape.len(), &mut spec.offset);
        let (shape, strides) = (&mut spec.shape, &mut spec.strides);
        let mut go = |elements: i64| *offset = (*offset as i64 + elements) as usize;
        match *self {
            View::Unit { dim, stride } => {
                shape.insert(dim.min(ndim), 1);
                strides.insert(dim.min(ndim), stride);
            }
            View::Broadcast { dim, length } => {
                shape.insert(dim.min(ndim), length);
                strides.insert(dim.min(ndim), 0);
            }
            _ if ndim == 0 => (),
            View::Swap { one, other } => {
                shape.swap(one % ndim, other % ndim);
                strides.swap(one % ndim, other % ndim);
            }
            View::Slice { dim, .. } | View::Reverse { dim } | View::Select { dim, .. } if shape[dim % ndim] == 0 => (),
            View::Slice { dim, start, step } => {
                let dim = dim % ndim;
                let start = start % shape[dim];
                go(start * strides[dim]);
                shape[dim] = (shape[dim] - start + step - 1) / step;
                strides[dim] *= step;
            }
            View::Reverse { dim } => {
                let dim = dim % ndim;
                go((shape[dim] - 1) * strides[dim]);
                strides[dim] = -strides[dim];
            }
            View::Select { dim, index } => {
                let dim = dim % ndim;
                go(index % shape[dim] * strides[dim]);
                shape.remove(dim);
                strides.remove(dim);
            }
            View::Window { dim, length } => {
                let dim = dim % ndim;
                if shape[dim] >= length {
                    let stride = strides[dim];
                    shape[dim] -= length - 1;
                    shape.insert(dim + 1, length);
                    strides.insert(dim + 1, stride);
                }
            }
        }
    }
}

/// Where a base buffer begins.
#[derive(Debug, Clone, Copy)]
enum Alignment {
    /// This many bytes after a multiple of [`Spec::GRAIN`].
    Bytes(usize),
    /// One element after it.
    Element,
}

impl Alignment {
    fn bytes(self, itemsize: usize) -> usize {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Element => itemsize,
        }
    }
}

/// Chooses the start of a base buffer. A framework whose tensors are all compact chooses addresses itself.
fn alignments(sides: &Sides) -> BoxedStrategy<Alignment> {
    let mut known = vec![Alignment::Bytes(0)];
    if sides.from.profile.strides != Strides::Compact {
        known.extend([Alignment::Element, Alignment::Bytes(16), Alignment::Bytes(32), Alignment::Bytes(64)]);
    }
    if sides.from.can.unaligned {
        known.extend([Alignment::Bytes(1), Alignment::Bytes(8)]);
    }
    select(known).boxed()
}

/// Chooses a tensor of the source that the target has a counterpart for. `overlap`: also views that contain an element
/// twice.
pub(crate) fn tensors(sides: &Sides, dtypes: Vec<DType>, overlap: bool) -> BoxedStrategy<Spec> {
    of_ranks(sides, sides.common_ranks(), dtypes, overlap)
}

/// Chooses a tensor that the source can make, whatever the target takes.
pub(crate) fn of_source(sides: &Sides) -> BoxedStrategy<Spec> {
    of_ranks(sides, sides.from.profile.rank.clone(), sides.from.can.dtypes.clone(), true)
}

type Ranks = RangeInclusive<usize>;

/// Adds and removes dimensions until there are as many as the frameworks have. Elements stay in the base buffer.
fn fit(spec: &mut Spec, ranks: &Ranks) {
    while spec.shape.len() > *ranks.end() {
        // Without elements it stays, as no other dimension can be left out for it.
        let dim = spec.shape.iter().position(|length| *length != 0).unwrap_or(0);
        spec.shape.remove(dim);
        spec.strides.remove(dim);
    }
    while spec.shape.len() < *ranks.start() {
        let stride = spec.shape.iter().zip(&spec.strides).map(|(length, stride)| length.max(&1) * stride.abs()).max();
        spec.shape.insert(0, 1);
        spec.strides.insert(0, stride.unwrap_or(1));
    }
}

/// Moves the base buffer so that the first element is at a multiple of [`ALIGNED`] bytes, or so that it is not.
fn place(spec: &mut Spec, aligned: bool) {
    let natural = 1 << model::itemsize(spec.dtype).trailing_zeros();
    let after = spec.offset * model::itemsize(spec.dtype);
    if aligned {
        spec.align = (ALIGNED - after % ALIGNED) % ALIGNED;
    } else if (spec.align + after).is_multiple_of(ALIGNED) {
        spec.align = (spec.align + natural) % Spec::GRAIN;
    }
}

/// Chooses lengths of so many dimensions that only the frameworks' own limit is left: most are 1.
fn many_dimensions() -> impl Strategy<Value = Vec<i64>> {
    (33..=MAX_NDIM, vec((0..MAX_NDIM, 2i64..4), 0..5)).prop_map(|(ndim, long)| {
        let mut shape = vec![1; ndim];
        long.into_iter().for_each(|(dim, length)| shape[dim % ndim] = length);
        shape
    })
}

fn of_ranks(sides: &Sides, ranks: Ranks, dtypes: Vec<DType>, overlap: bool) -> BoxedStrategy<Spec> {
    let strided = sides.from.profile.strides != Strides::Compact;
    let length = prop_oneof![1 => Just(0i64), 3 => Just(1), 12 => 2i64..6];
    let most = if strided { 4 } else { 0 };
    let steps = vec(View::any(sides, overlap), 0..=most);
    let around = (steps, 0..=most, 0..=most, alignments(sides));
    // A target that imports compact tensors only: otherwise nearly all cases would be copies.
    let plain = (sides.to.profile.strides == Strides::Compact) as u32;
    let around = prop_oneof![plain => Just((Vec::new(), 0, 0, Alignment::Bytes(0))), 1 => around];
    // Some shapes have more dimensions than core keeps without an allocation.
    let shape = prop_oneof![28 => vec(length, 0..4), 4 => vec(1i64..3, 9..12), 1 => many_dimensions()];
    (select(dtypes), shape, around, any::<bool>())
        .prop_map(move |(dtype, mut shape, (steps, lead, tail, align), aligned)| {
            shape.truncate(*ranks.end());
            shape.splice(0..0, vec![1; ranks.start().saturating_sub(shape.len())]);
            let base = lead + model::numel(&shape) + tail;
            let align = align.bytes(model::itemsize(dtype));
            let plain = Spec { offset: lead, base, align, ..Spec::compact(dtype, &shape) };
            let mut spec = steps.iter().fold(plain, |spec, step| {
                let mut next = spec.clone();
                step.apply(&mut next);
                if model::numel(&next.shape) > MAX_ELEMENTS { spec } else { next }
            });
            fit(&mut spec, &ranks);
            if model::numel(&spec.shape) == 0 {
                spec.offset = lead;
            }
            if strided {
                place(&mut spec, aligned);
            }
            spec
        })
        .boxed()
}

/// Chooses a compact tensor of one of these sizes, in bytes, that both sides make.
pub(crate) fn blocks(sides: &Sides, sizes: Vec<usize>) -> BoxedStrategy<Spec> {
    let ranks = sides.common_ranks();
    (select(sides.computed_dtypes()), select(sizes))
        .prop_map(move |(dtype, bytes)| Spec::row(dtype, bytes / model::itemsize(dtype), &ranks))
        .boxed()
}

/// Puts half of these compact tensors somewhere into a longer base buffer, where the source makes such views. Their
/// alignment stays.
pub(crate) fn within(sides: &Sides, blocks: BoxedStrategy<Spec>) -> BoxedStrategy<Spec> {
    if sides.from.profile.strides == Strides::Compact {
        return blocks;
    }
    let around = prop_oneof![1 => Just((0, 0)), 1 => (select(&[ALIGNED, 4096][..]), select(&[0, 4096][..]))];
    (blocks, around)
        .prop_map(|(spec, (lead, tail))| {
            let itemsize = model::itemsize(spec.dtype);
            let (offset, base) = (lead / itemsize, spec.base + (lead + tail) / itemsize);
            Spec { offset, base, ..spec }
        })
        .boxed()
}

/// Lengths at the edges of the tiles of kernels.
const EDGES: [i64; 14] = [1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 65, 129];

/// The most elements of a tensor that takes several tiles.
const MAX_TILED: usize = 1 << 13;

/// Chooses a tensor of several tiles of a kernel, with ragged edges: its dimensions are permuted, and may have gaps
/// between them.
pub(crate) fn tiled(sides: &Sides, dtypes: Vec<DType>) -> BoxedStrategy<Spec> {
    let strided = sides.from.profile.strides != Strides::Compact;
    let reversed = strided && sides.from.can.negative_strides;
    let ranks = sides.common_ranks();
    let dims = vec((select(&EDGES[..]), any::<u32>(), 0i64..3, any::<bool>()), 1..5);
    (select(dtypes), dims)
        .prop_map(move |(dtype, mut dims)| {
            dims.truncate(*ranks.end());
            dims.resize(dims.len().max(*ranks.start()), (1, 0, 0, false));
            let mut most = MAX_TILED as i64;
            let fitting = |(length, ..): &(i64, _, _, _)| {
                let length = (*length).min(most);
                most /= length;
                length
            };
            let shape: Vec<i64> = dims.iter().map(fitting).collect();
            let mut spec = Spec::compact(dtype, &shape);
            if !strided {
                return spec;
            }
            // The dimension with the lowest number runs fastest.
            let mut inner: Vec<usize> = (0..shape.len()).collect();
            inner.sort_by_key(|d| dims[*d].1);
            let mut next = 1;
            for d in inner {
                spec.strides[d] = next;
                next *= shape[d];
                // Few tensors are larger than they have to be.
                next += if dims[d].2 == 1 && next < MAX_TILED as i64 { 1 } else { 0 };
                if reversed && dims[d].2 == 2 && dims[d].3 {
                    spec.offset += ((shape[d] - 1) * spec.strides[d]) as usize;
                    spec.strides[d] *= -1;
                }
            }
            spec.base = next as usize;
            spec
        })
        .boxed()
}

/// Bytes of the tensors of `large`: copies of the host use several threads from 2 MiB on.
const LARGE: [usize; 3] = [2 << 20, 5 << 20, 16 << 20];

/// The most elements of a tensor of `large`, without its ragged edges: each is compared with the model. No tensor of the
/// suite whose elements a subject counts has more than 2^20.
const MOST_LARGE: usize = (1 << 20) - 1024;

/// Chooses a tensor of megabytes whose edges are ragged. Its dimensions may be permuted, with gaps between them, run
/// backwards, or repeat.
pub(crate) fn large(sides: &Sides) -> BoxedStrategy<Spec> {
    let strided = sides.from.profile.strides != Strides::Compact;
    let ranks = sides.common_ranks();
    let (reversed, broadcasts) = (sides.from.can.negative_strides, sides.from.can.broadcasts);
    let kinds = match () {
        _ if ranks.contains(&2) && strided => 8,
        _ if ranks.contains(&2) => 2,
        _ => 1,
    };
    (select(sides.common_dtypes()), select(&LARGE[..]), 1i64..70, 0i64..9, 0..kinds)
        .prop_map(move |(dtype, nbytes, rows, ragged, kind)| {
            let count = (nbytes / model::itemsize(dtype)).min(MOST_LARGE) as i64;
            let length = count / rows + ragged;
            let view = |strides: [i64; 2], offset: i64, base: i64| {
                let (offset, base) = (offset as usize, base as usize);
                Spec { strides: strides.into(), offset, base, ..Spec::compact(dtype, &[rows, length]) }
            };
            let (wide, channels) = (length + 1 + ragged, 2 + ragged % 3);
            let mut spec = match kind {
                0 => Spec::compact(dtype, &[rows * length + ragged]),
                1 => Spec::compact(dtype, &[rows, length]),
                // Columns of a matrix that is a little wider.
                2 => view([1, rows + 1], 0, (rows + 1) * length),
                3 => view([wide, 1], 1, rows * wide + 1),
                4 => view([2 * length, 2], ragged, 2 * rows * length + ragged),
                5 if reversed => view([-wide, -1], rows * wide - 1, rows * wide),
                6 if broadcasts => view([0, 1], 0, length),
                // An image, of whose channels each is to be a plane.
                _ => {
                    let shape = [channels, rows, length / channels];
                    Spec { strides: vec![1, channels * shape[2], channels], ..Spec::compact(dtype, &shape) }
                }
            };
            if *ranks.end() == 0 {
                Spec::compact(dtype, &[])
            } else {
                fit(&mut spec, &ranks);
                spec
            }
        })
        .boxed()
}

/// Chooses a small tensor of elements of one byte whose rows lie gigabytes apart.
pub(crate) fn apart(sides: &Sides) -> BoxedStrategy<Spec> {
    let ranks = sides.common_ranks();
    let bytes: Vec<_> = sides.common_dtypes().into_iter().filter(|dtype| model::itemsize(*dtype) == 1).collect();
    // All have a base buffer of the same length, so that allocators reuse it.
    (select(bytes), 2i64..4, 1i64..70, any::<bool>(), 0i64..2)
        .prop_map(move |(dtype, rows, length, transposed, far)| {
            let stride = (1 << 31) + far * 4096;
            let (mut shape, mut strides) = (vec![rows, length], vec![stride, 1]);
            if transposed {
                shape.reverse();
                strides.reverse();
            }
            let base = 2 * ((1 << 31) + 4096) + 4096;
            let mut spec = Spec { strides, base, ..Spec::compact(dtype, &shape) };
            fit(&mut spec, &ranks);
            spec
        })
        .boxed()
}

/// Chooses a vector of elements of one byte of which 31 bits cannot count all.
pub(crate) fn uncountable(sides: &Sides) -> BoxedStrategy<Spec> {
    let bytes: Vec<_> = sides.common_dtypes().into_iter().filter(|dtype| model::itemsize(*dtype) == 1).collect();
    (select(bytes), 100i64..4096).prop_map(|(dtype, more)| Spec::compact(dtype, &[(1 << 31) + more])).boxed()
}

/// Chooses a stream for every role. Where both sides are the same framework, it has one current stream: a tensor is
/// imported in the stream in which it was exported.
pub(crate) fn picks(sides: &Sides) -> BoxedStrategy<Picks> {
    let same = sides.same_framework();
    let (from, to) = (0..=sides.from.streams, 0..=sides.to.streams);
    let both = 0..=sides.from.streams.max(sides.to.streams);
    (from.clone(), from.clone(), to.clone(), to, from, both)
        .prop_map(move |(allocate, write, read, onward, back, drop)| Picks {
            allocate,
            write,
            read: if same { write } else { read },
            onward,
            back: if same { onward } else { back },
            drop,
        })
        .boxed()
}

/// Chooses a case of these tensors, with one of these values of `copy`, on the default streams.
pub(crate) fn cases(specs: BoxedStrategy<Spec>, copies: &'static [Option<bool>]) -> BoxedStrategy<Case> {
    (specs, any::<u64>(), select(copies))
        .prop_map(|(spec, seed, copy)| Case {
            spec,
            seed,
            streams: Picks::default(),
            copy,
            route: Route::Direct,
            ops: Vec::new(),
            pieces: Vec::new(),
            calls: Calls::default(),
        })
        .boxed()
}

/// Chooses the steps of `life`.
pub(crate) fn lives() -> BoxedStrategy<Vec<Op>> {
    let which = || 0usize..8;
    let copy = select(&[None, None, Some(true), Some(false)][..]);
    let op = prop_oneof![
        2 => any::<u64>().prop_map(Op::Create),
        5 => (which(), copy).prop_map(|(which, copy)| Op::Convert(which, copy)),
        3 => (which(), any::<u64>()).prop_map(|(which, seed)| Op::Write(which, seed)),
        3 => which().prop_map(Op::Read),
        2 => (which(), 0usize..8).prop_map(|(which, start)| Op::Part(which, start)),
        2 => which().prop_map(Op::Through),
        3 => which().prop_map(Op::Drop),
        1 => which().prop_map(Op::DropElsewhere),
        1 => Just(Op::Collect),
        1 => Just(Op::Pressure),
    ];
    vec(op, 1..16).boxed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{Habits, SimDevice, SimFramework};
    use crate::{property, tree};

    fn sides() -> Sides {
        let device = SimDevice::new(1);
        let simulated = |habits| SimFramework::new(&device, habits);
        Sides::of(&simulated(Habits::Generous), &simulated(Habits::Common))
    }

    fn specs(sides: &Sides, name: &str) -> impl Iterator<Item = Spec> {
        (0..400).map(move |index| tree(property(name).unwrap(), sides, 3, index).current().spec)
    }

    #[test]
    fn half_of_the_tensors_are_aligned_and_half_are_not() {
        let start = |spec: &Spec| spec.align + spec.offset * model::itemsize(spec.dtype);
        let aligned = specs(&sides(), "values").filter(|spec| start(spec).is_multiple_of(ALIGNED)).count();
        assert!((160..=240).contains(&aligned), "{aligned} of 400");
    }

    #[test]
    fn some_tensors_have_as_many_dimensions_as_there_can_be() {
        let most =
            (0..4000).map(|index| tree(property("shape").unwrap(), &sides(), 3, index).current().spec.shape.len());
        let many = most.filter(|ndim| *ndim > 32).collect::<Vec<_>>();
        assert!((60..250).contains(&many.len()), "{} of 4000", many.len());
        assert!(many.contains(&MAX_NDIM) && many.iter().all(|ndim| *ndim <= MAX_NDIM));
    }

    #[test]
    fn tensors_have_the_dimensions_that_both_sides_have() {
        for ranks in [0..=0, 0..=1, 1..=1, 2..=2, 2..=3, 5..=64] {
            let mut sides = sides();
            sides.to.profile.rank = ranks.clone();
            for name in ["subject", "values", "copy", "release_order", "far"] {
                if (property(name).unwrap().left_out)(&sides).is_none() {
                    assert!(specs(&sides, name).all(|spec| ranks.contains(&spec.shape.len())), "{name}, {ranks:?}");
                }
            }
            assert!(specs(&sides, "honesty").any(|spec| !ranks.contains(&spec.shape.len())), "{ranks:?}");
            sides.from.profile.rank = ranks.clone();
            assert!(specs(&sides, "honesty").all(|spec| ranks.contains(&spec.shape.len())), "{ranks:?}");
            let inside = |spec: Spec| model::elements(&spec, &vec![0; spec.base * model::itemsize(spec.dtype)]);
            specs(&sides, "values").for_each(|spec| drop(inside(spec)));
        }
    }
}
