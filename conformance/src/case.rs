//! One case: everything random that a property needs, as data that can be written down, replayed and shrunk.

use crate::{Spec, Subject, model};
use bridge_core::{DType, Device, Pending, Profile, Strides};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde::{Deserialize, Serialize};

/// One case of one property.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// The tensor that the source makes.
    pub spec: Spec,
    /// Seed of every byte that is written.
    pub seed: u64,
    /// The streams chosen.
    #[serde(default)]
    pub streams: Picks,
    /// The `copy` that is asked for.
    #[serde(default)]
    pub copy: Option<bool>,
    /// How the view is used.
    #[serde(default)]
    pub route: Route,
    /// What the property `life` does.
    #[serde(default)]
    pub ops: Vec<Op>,
}

/// Streams of the two frameworks, by number: 0 is the default one, 1 the first of [`Subject::streams`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Picks {
    /// Of the source: where the memory is allocated.
    pub allocate: usize,
    /// Of the source: where the tensor is written and lent.
    pub write: usize,
    /// Of the target: where the tensor is taken in.
    pub read: usize,
    /// Of the target: where the view is used as well, or lent on.
    pub onward: usize,
    /// Of the source: where the view of the view is taken in.
    pub back: usize,
    /// Of both: current where everything is dropped.
    pub drop: usize,
}

/// What happens to a view before it is dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Route {
    /// It is read in the stream in which it was taken in.
    #[default]
    Direct,
    /// It is read in another stream, which is noted (`record_stream`).
    Noted,
    /// It is lent back to the source in another stream, and read there.
    Onward,
    /// It is copied back to the source in another stream, by a copy that runs late.
    CopyOn,
    /// It is read, without a note, in the stream that is current where it is dropped.
    Late,
    /// A second view of the tensor is taken. The stream is noted; one view is dropped, and the other is read there.
    Twice,
    /// The target's framework takes the tensor by itself as well. That view is lent back to the source and outlives ours.
    Beside,
    /// It is read in a stream that is destroyed before the view is dropped, and whose handle another stream had before.
    Fresh,
}

/// One step of the state machine of `life`. The numbers choose among the tensors that are alive, modulo their count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// The source makes one more tensor.
    Create(u64),
    /// A tensor is taken into the other framework.
    Convert(usize, Option<bool>),
    /// A tensor is overwritten, or read where nothing writes to it.
    Write(usize, u64),
    /// A tensor is read.
    Read(usize),
    /// A tensor is dropped.
    Drop(usize),
    /// A tensor is dropped on another thread.
    DropElsewhere(usize),
    /// Garbage is collected, and caches are emptied.
    Collect,
    /// Both frameworks allocate blocks, fill them with garbage and drop them.
    Pressure,
}

/// What is known of one framework of a pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// Its [name](Subject::name) in reports and regressions.
    pub name: String,
    /// What it accepts and emits.
    pub profile: Profile,
    /// The dtypes that it can make.
    pub dtypes: Vec<DType>,
    /// Whether it makes negative strides.
    pub negative: bool,
    /// Whether it makes read-only tensors.
    pub read_only: bool,
    /// Whether elements of its tensors may lie at addresses that are no multiples of their size.
    #[serde(default)]
    pub unaligned: bool,
    /// The operations that it puts off.
    pub puts_off: Vec<Pending>,
    /// Whether its tensors can be written to.
    #[serde(default = "yes")]
    pub writes: bool,
    /// Number of streams beside the default one.
    pub streams: usize,
}

fn yes() -> bool {
    true
}

/// All that the strategies know of a pair, so that a case can be made again where its frameworks are not loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caps {
    /// The source.
    pub from: Side,
    /// The target.
    pub to: Side,
    /// The device on which the source makes tensors.
    pub device: Device,
}

impl Side {
    /// Asks a subject.
    pub fn of<T>(subject: &dyn Subject<Tensor = T>) -> Self {
        Self {
            name: subject.name().into(),
            profile: subject.profile().clone(),
            dtypes: subject.dtypes(),
            negative: subject.makes_negative_strides(),
            read_only: subject.makes_read_only(),
            unaligned: subject.unaligned(),
            puts_off: subject.puts_off(),
            writes: subject.writes(),
            streams: subject.streams().len(),
        }
    }
}

impl Caps {
    /// Whether both sides are the same framework, and so share its current stream.
    pub fn same_framework(&self) -> bool {
        self.from.profile.name == self.to.profile.name
    }

    /// Those of [`common_dtypes`](Self::common_dtypes) that the target makes, too, and so has kernels for.
    pub fn computed_dtypes(&self) -> Vec<DType> {
        self.common_dtypes().into_iter().filter(|dtype| self.to.dtypes.contains(dtype)).collect()
    }

    /// The dtypes that the source makes and that both profiles list.
    pub fn common_dtypes(&self) -> Vec<DType> {
        let listed = |dtype: &DType| [&self.from, &self.to].iter().all(|side| side.profile.dtypes.contains(dtype));
        self.from.dtypes.iter().copied().filter(listed).collect()
    }
}

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

/// More elements than this tell nothing new.
const MAX_ELEMENTS: usize = 4096;

impl View {
    /// The next step, among those that the source can do; `overlap`: also to views that hold an element twice.
    fn any(caps: &Caps, overlap: bool) -> BoxedStrategy<View> {
        let dim = || 0usize..12;
        let lowest = if caps.from.negative { -9i64 } else { 0 };
        let mut steps = vec![
            (dim(), 0i64..4, 1i64..4).prop_map(|(dim, start, step)| View::Slice { dim, start, step }).boxed(),
            (dim(), dim()).prop_map(|(one, other)| View::Swap { one, other }).boxed(),
            (dim(), 0i64..4).prop_map(|(dim, index)| View::Select { dim, index }).boxed(),
            (dim(), lowest..100).prop_map(|(dim, stride)| View::Unit { dim, stride }).boxed(),
        ];
        if caps.from.negative {
            steps.push(dim().prop_map(|dim| View::Reverse { dim }).boxed());
        }
        if overlap {
            steps.push((dim(), 1i64..4).prop_map(|(dim, length)| View::Broadcast { dim, length }).boxed());
            steps.push((dim(), 2i64..4).prop_map(|(dim, length)| View::Window { dim, length }).boxed());
        }
        proptest::strategy::Union::new(steps).boxed()
    }

    /// Takes the step where it has a meaning, and does nothing where it has none.
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
    /// So many bytes behind a multiple of [`Spec::GRAIN`].
    Bytes(usize),
    /// One element behind it.
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

/// Starts of base buffers. A framework whose tensors are all compact chooses the addresses itself.
fn alignments(caps: &Caps) -> BoxedStrategy<Alignment> {
    let mut known = vec![Alignment::Bytes(0)];
    if caps.from.profile.strides != Strides::Compact {
        known.extend([Alignment::Element, Alignment::Bytes(16), Alignment::Bytes(32), Alignment::Bytes(64)]);
    }
    if caps.from.unaligned {
        known.push(Alignment::Bytes(1));
    }
    select(known).boxed()
}

/// Tensors that the source can make, with one of these dtypes; `overlap`: also views that hold an element twice.
pub(crate) fn tensors(caps: &Caps, dtypes: Vec<DType>, overlap: bool) -> BoxedStrategy<Spec> {
    let strided = caps.from.profile.strides != Strides::Compact;
    let length = prop_oneof![1 => Just(0i64), 3 => Just(1), 12 => 2i64..6];
    let most = if strided { 4 } else { 0 };
    let steps = vec(View::any(caps, overlap), 0..=most);
    let around = (steps, 0..=most, 0..=most, alignments(caps));
    // A target that takes little in place shall get as much of that as of the rest.
    let plain = (caps.to.profile.strides == Strides::Compact) as u32;
    let around = prop_oneof![plain => Just((Vec::new(), 0, 0, Alignment::Bytes(0))), 1 => around];
    // More dimensions than fit where small lists of them are kept in place.
    let shape = prop_oneof![7 => vec(length, 0..4), 1 => vec(1i64..3, 9..12)];
    (select(dtypes), shape, around)
        .prop_map(|(dtype, shape, (steps, lead, tail, align))| {
            let base = lead + model::numel(&shape) + tail;
            let align = align.bytes(model::itemsize(dtype));
            let plain = Spec { offset: lead, base, align, ..Spec::compact(dtype, &shape) };
            let mut spec = steps.iter().fold(plain, |spec, step| {
                let mut next = spec.clone();
                step.apply(&mut next);
                if model::numel(&next.shape) > MAX_ELEMENTS { spec } else { next }
            });
            if model::numel(&spec.shape) == 0 {
                spec.offset = lead;
            }
            spec
        })
        .boxed()
}

/// Compact tensors of `sizes` bytes.
pub(crate) fn blocks(dtypes: Vec<DType>, sizes: Vec<usize>) -> BoxedStrategy<Spec> {
    (select(dtypes), select(sizes))
        .prop_map(|(dtype, bytes)| {
            let count = bytes / model::itemsize(dtype);
            Spec::compact(dtype, &[count as i64])
        })
        .boxed()
}

/// Streams for every role. Where both sides are the same framework, it has one current stream: what is taken in is
/// taken in where it was lent.
pub(crate) fn picks(caps: &Caps) -> BoxedStrategy<Picks> {
    let same = caps.same_framework();
    let (from, to) = (0..=caps.from.streams, 0..=caps.to.streams);
    let both = 0..=caps.from.streams.max(caps.to.streams);
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

/// Cases of these tensors, with one of these wishes for a copy, on the default streams.
pub(crate) fn cases(specs: BoxedStrategy<Spec>, copies: &'static [Option<bool>]) -> BoxedStrategy<Case> {
    (specs, any::<u64>(), select(copies))
        .prop_map(|(spec, seed, copy)| Case {
            spec,
            seed,
            streams: Picks::default(),
            copy,
            route: Route::Direct,
            ops: Vec::new(),
        })
        .boxed()
}

/// A sequence of steps for `life`.
pub(crate) fn lives() -> BoxedStrategy<Vec<Op>> {
    let which = || 0usize..8;
    let copy = select(&[None, None, Some(true), Some(false)][..]);
    let op = prop_oneof![
        2 => any::<u64>().prop_map(Op::Create),
        5 => (which(), copy).prop_map(|(which, copy)| Op::Convert(which, copy)),
        3 => (which(), any::<u64>()).prop_map(|(which, seed)| Op::Write(which, seed)),
        3 => which().prop_map(Op::Read),
        3 => which().prop_map(Op::Drop),
        1 => which().prop_map(Op::DropElsewhere),
        1 => Just(Op::Collect),
        1 => Just(Op::Pressure),
    ];
    vec(op, 1..16).boxed()
}
