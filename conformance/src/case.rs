//! One case: everything random that a property needs, as data that can be written down, replayed and shrunk.

use crate::{Capabilities, Spec, Subject, model};
use bridge_core::{DType, Device, Profile};
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

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
    /// The requested `copy`.
    #[serde(default)]
    pub copy: Option<bool>,
    /// How the view is used.
    #[serde(default)]
    pub route: Route,
    /// The steps of the property `life`.
    #[serde(default)]
    pub ops: Vec<Op>,
    /// What the property `torn` copies together.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<Pieces>,
    /// How it copies them.
    #[serde(default)]
    pub calls: Calls,
}

/// How pieces are copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Calls {
    /// All by one call.
    #[default]
    Together,
    /// Every second one by one call, the others by a call right after it.
    Halves,
    /// All by a copier, which is prepared once.
    Prepared,
}

/// Equal pieces of one copy: each has a source and its own target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pieces {
    /// Each source.
    pub from: Spec,
    /// Each target, to whose shape the source is broadcast. Where its dtype is another one, the source is cast.
    pub to: Spec,
    /// Number of pieces.
    pub count: usize,
    /// Whether every second piece copies all rows but the first from the source before it, into the same rows of its
    /// target, where both frameworks make such views.
    #[serde(default)]
    pub shared: bool,
    /// The side that is in memory of the host, where its framework makes such tensors next to those of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_host: Option<End>,
}

/// A side of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// What is copied.
    Source,
    /// What it is copied into.
    Target,
}

/// Streams of the two frameworks, by number: 0 is the default one, 1 the first of [`Subject::streams`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Picks {
    /// Of the source: where the memory is allocated.
    pub allocate: usize,
    /// Of the source: where the tensor is written and exported.
    pub write: usize,
    /// Of the target: where the tensor is imported.
    pub read: usize,
    /// Of the target: where the view is also used, or exported.
    pub onward: usize,
    /// Of the source: where the view of the view is imported.
    pub back: usize,
    /// Of both: current where everything is dropped.
    pub drop: usize,
}

/// What happens to a view before it is dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Route {
    /// It is read in the stream in which it was imported.
    #[default]
    Direct,
    /// It is read in another stream, which is recorded (`record_stream`).
    Noted,
    /// It is exported back to the source in another stream, and read there.
    Onward,
    /// It is copied back to the source in another stream, by a copy that runs late.
    CopyOn,
    /// It is read in the stream that is current where it is dropped, and which is not recorded.
    Late,
    /// A second view of the tensor is imported. The stream is recorded; one view is dropped, and the other is read
    /// there.
    Twice,
    /// The target's framework imports the tensor by its own means as well. That view is exported back to the source and
    /// outlives ours.
    Beside,
    /// It is read in a stream that is destroyed before the view is dropped. An earlier stream had the same handle.
    Fresh,
    /// The tensor is written and exported in a stream that is destroyed before the view is dropped.
    Exported,
    /// It is read in a recorded stream that is destroyed before the view is dropped.
    Passing,
    /// The tensor is written in one stream of a capture, and the view read in another one.
    Forked,
    /// It is last used in a capture, and dropped there.
    Captured,
    /// Another view is dropped during a capture that does not use it.
    Meanwhile,
}

/// One step of the state machine of `life`. The numbers choose among the tensors that are alive, modulo their count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// The source makes one more tensor.
    Create(u64),
    /// A tensor is imported into the other framework.
    Convert(usize, Option<bool>),
    /// A tensor is overwritten, or read where it cannot be written to.
    Write(usize, u64),
    /// A tensor is read.
    Read(usize),
    /// The framework makes a view of a tensor, which holds its rows from this one on. Many frameworks make none.
    Part(usize, usize),
    /// A tensor of the target is imported into a third framework, and back from it, where there is one.
    Through(usize),
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
    /// What its adapter accepts and emits.
    pub profile: Profile,
    /// What it can do.
    pub can: Capabilities,
    /// Number of streams besides the default one.
    pub streams: usize,
    /// Whether its adapter lets others [write](bridge_core::Adapter::overwritten) to its tensors.
    #[serde(default)]
    pub is_target: bool,
}

impl Side {
    fn of<T>(subject: &dyn Subject<Tensor = T>) -> Self {
        let (profile, can) = (subject.profile().clone(), subject.capabilities());
        let dtype = can.dtypes.first().filter(|_| can.writes).copied();
        let is_target = dtype.is_some_and(|dtype| {
            let made = subject.create(&Spec::row(dtype, 1, &profile.rank), &vec![0; model::itemsize(dtype)]);
            made.is_ok_and(|tensor| subject.overwritten(&tensor).is_ok())
        });
        Self { name: subject.name().into(), profile, can, streams: subject.streams().len(), is_target }
    }
}

/// All that the strategies know of a pair, so that a case can be made again where its frameworks are not loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sides {
    /// The source.
    pub from: Side,
    /// The target.
    pub to: Side,
    /// The device on which the source makes tensors.
    pub device: Device,
}

impl Sides {
    /// Queries both subjects.
    pub fn of<F, T>(from: &dyn Subject<Tensor = F>, to: &dyn Subject<Tensor = T>) -> Self {
        Self { from: Side::of(from), to: Side::of(to), device: from.device() }
    }

    /// Returns whether both sides are the same framework, and so share its current stream.
    pub fn same_framework(&self) -> bool {
        self.from.profile.name == self.to.profile.name
    }

    /// Returns whether the source makes the tensor of this case. A case that was kept may be older than what the source
    /// declares.
    pub(crate) fn makes(&self, case: &Case) -> bool {
        let Side { profile, can, .. } = &self.from;
        std::iter::once(&case.spec).chain(case.pieces.iter().map(|pieces| &pieces.from)).all(|spec| {
            can.dtypes.contains(&spec.dtype)
                && profile.rank.contains(&spec.shape.len())
                && (can.read_only || !spec.read_only)
                && spec.pending.is_none_or(|pending| can.defers.contains(&pending))
        })
    }

    /// Returns the numbers of dimensions that both profiles list. Empty where there is none.
    pub fn common_ranks(&self) -> RangeInclusive<usize> {
        let (from, to) = (&self.from.profile.rank, &self.to.profile.rank);
        *from.start().max(to.start())..=*from.end().min(to.end())
    }

    /// Returns those of [`common_dtypes`](Self::common_dtypes) that the target makes, too, and so has kernels for.
    pub fn computed_dtypes(&self) -> Vec<DType> {
        self.common_dtypes().into_iter().filter(|dtype| self.to.can.dtypes.contains(dtype)).collect()
    }

    /// Returns the dtypes that the source makes and that both profiles list.
    pub fn common_dtypes(&self) -> Vec<DType> {
        let listed = |dtype: &DType| [&self.from, &self.to].iter().all(|side| side.profile.dtypes.contains(dtype));
        self.from.can.dtypes.iter().copied().filter(listed).collect()
    }
}
