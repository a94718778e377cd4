//! The properties, as a table.

use super::{
    Outcome, Pair, Take, batch, contents, copies, device, failure, graph, huge, life, order, place, subject, threads,
    torn,
};
use crate::lists::lists;
use crate::strategy::{apart, blocks, cases, lives, of_source, picks, tensors, tiled, uncountable};
use crate::{Calls, Case, Op, Route, Sides, model};
use bridge_core::{DType, DeviceKind, Pending, Strides};
use proptest::prelude::*;
use proptest::sample::select;

/// One property.
pub struct Property {
    /// Its name in reports and expectations.
    pub name: &'static str,
    /// What it states, in one line.
    pub doc: &'static str,
    /// Its share of the cases of a pair, in percent where every property applies.
    pub weight: u32,
    /// Whether the frameworks' own way can be compared with it.
    pub native: bool,
    /// Returns why it has no meaning for a pair, if it has none.
    pub left_out: fn(&Sides) -> Option<&'static str>,
    /// Returns its cases.
    pub strategy: fn(&Sides) -> BoxedStrategy<Case>,
    check: Check,
}

bridge_core::debug_fields!(impl[] Property: name);

#[derive(Clone, Copy)]
enum Check {
    Subject,
    Values,
    Dtype,
    Shape,
    Identity,
    Honesty,
    ReadOnly,
    Aliasing,
    Order,
    ReleaseOrder,
    Batch,
    Life,
    RoundTrip,
    Copy,
    Far,
    Huge,
    Staging,
    Torn,
    Failure,
    Threads,
    Devices,
    Graph,
}

/// Returns the property with this name.
pub fn property(name: &str) -> Option<&'static Property> {
    PROPERTIES.iter().find(|property| property.name == name)
}

impl Property {
    /// Judges one case.
    pub(crate) fn check<F, T>(&self, pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
        // Half of the cases of every property are copied by kernels, half by the frameworks where both can.
        pair.kernels.set(case.seed & 0x400 == 0 || !pair.frameworks_copy());
        let ours: Take<'_, F, T> = &|tensor| Ok(pair.transfer(tensor, case.copy)?.0);
        self.check_with(pair, case, ours)?;
        pair.from.check()?;
        Ok(pair.to.check()?)
    }

    /// Judges one case with another way of importing the tensor, where the property concerns that way.
    pub(crate) fn check_with<F, T>(&self, pair: &Pair<'_, F, T>, case: &Case, take: Take<'_, F, T>) -> Outcome {
        match self.check {
            Check::Subject => subject::subject(pair, case),
            Check::Values => contents::values(pair, case),
            Check::Dtype => contents::dtype(pair, case),
            Check::Shape => contents::shape(pair, case),
            Check::Identity => place::identity(pair, case),
            Check::Honesty => place::honesty(pair, case),
            Check::ReadOnly => place::read_only(pair, case),
            Check::Aliasing => place::aliasing(pair, case),
            Check::Order => order::order(pair, case, take),
            Check::ReleaseOrder => order::release_order(pair, case, take),
            Check::Batch => batch::batch(pair, case),
            Check::Life => life::life(pair, case),
            Check::RoundTrip => place::round_trip(pair, case),
            Check::Copy => copies::copy(pair, case),
            Check::Far => copies::far(pair, case),
            Check::Huge => huge::huge(pair, case),
            Check::Staging => copies::staging(pair, case),
            Check::Torn => torn::torn(pair, case),
            Check::Failure => failure::failure(pair, case),
            Check::Threads => threads::threads(pair, case),
            Check::Devices => device::devices(pair, case),
            Check::Graph => graph::graph(pair, case),
        }
    }
}

const EITHER: &[Option<bool>] = &[None, None, Some(true)];
const ANY: &[Option<bool>] = &[None, Some(true), Some(false)];
const NONE: &[Option<bool>] = &[None];
const ASKED: &[Option<bool>] = &[Some(true)];

/// Bytes of the blocks of `release_order`: large enough that a kernel takes some time.
const BLOCK_SIZES: [usize; 5] = [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20];

/// The property that judges the subjects and not the adapters.
pub(crate) const SUBJECT: &str = "subject";

/// Bytes of the tensors of `subject`.
const SUBJECT_SIZES: [usize; 4] = [16, 64, 1 << 10, 4 << 10];

/// Bytes of the tensors of `batch`, of which there are more.
const BATCH_SIZES: [usize; 3] = [4 << 10, 16 << 10, 64 << 10];

/// Routes of `release_order`. The plain one is first: cases shrink towards it.
const ROUTES: &[Route] = &[
    Route::Direct,
    Route::Direct,
    Route::Noted,
    Route::Onward,
    Route::CopyOn,
    Route::Late,
    Route::Twice,
    Route::Beside,
    Route::Fresh,
];

/// How `torn` copies. The plain way is first: cases shrink towards it.
const CALLS: &[Calls] = &[Calls::Together, Calls::Halves, Calls::Prepared];

/// Every property, in the order in which they run: `subject` first, because no other verdict means anything where it
/// fails, then `life`, because a view whose memory is gone may end the process.
pub static PROPERTIES: &[Property] = &[
    Property {
        name: SUBJECT,
        doc: "the subjects do what the suite relies on, and the profiles have a meaning",
        weight: 1,
        native: false,
        left_out: no_computed_dtype,
        strategy: |sides| cases(blocks(sides, SUBJECT_SIZES.into()), NONE),
        check: Check::Subject,
    },
    Property {
        name: "life",
        doc: "every lease is released once, and not before",
        weight: 7,
        native: false,
        left_out: no_computed_dtype,
        strategy: |sides| {
            let plain = cases(tensors(sides, sides.computed_dtypes(), false), NONE);
            let can = sides.from.can.read_only;
            (plain, lives(), prop::bool::weighted(0.2))
                .prop_map(move |(mut case, ops, read_only): (Case, Vec<Op>, bool)| {
                    case.spec.read_only = can && read_only;
                    Case { ops, ..case }
                })
                .boxed()
        },
        check: Check::Life,
    },
    Property {
        name: "values",
        doc: "the elements arrive bit for bit",
        weight: 11,
        native: false,
        left_out: no_common_dtype,
        strategy: |sides| {
            let plain = cases(tensors(sides, sides.common_dtypes(), true), EITHER);
            with_pending(sides, plain)
        },
        check: Check::Values,
    },
    Property {
        name: "dtype",
        doc: "every dtype crosses as itself or is refused as the profile says",
        weight: 8,
        native: false,
        left_out: |_| None,
        strategy: |sides| cases(of_source(sides), EITHER),
        check: Check::Dtype,
    },
    Property {
        name: "shape",
        doc: "shape and strides arrive",
        weight: 8,
        native: false,
        left_out: no_common_dtype,
        strategy: |sides| cases(tensors(sides, sides.common_dtypes(), true), EITHER),
        check: Check::Shape,
    },
    Property {
        name: "identity",
        doc: "in place means the same address, a copy means other memory",
        weight: 6,
        native: false,
        left_out: no_common_dtype,
        strategy: |sides| cases(tensors(sides, sides.common_dtypes(), true), EITHER),
        check: Check::Identity,
    },
    Property {
        name: "honesty",
        doc: "the plan says copy exactly when the address changes",
        weight: 10,
        native: false,
        left_out: |_| None,
        strategy: |sides| {
            let plain = cases(of_source(sides), ANY);
            with_pending(sides, plain)
        },
        check: Check::Honesty,
    },
    Property {
        name: "read_only",
        doc: "read-only is kept or refused",
        weight: 4,
        native: false,
        left_out: |sides| {
            let none = (!sides.from.can.read_only).then_some("the source makes no read-only tensors");
            none.or_else(|| no_common_dtype(sides))
        },
        strategy: |sides| {
            let plain = cases(tensors(sides, sides.common_dtypes(), false), ANY);
            (plain, prop::bool::weighted(0.8))
                .prop_map(|(mut case, read_only)| {
                    case.spec.read_only = read_only;
                    case
                })
                .boxed()
        },
        check: Check::ReadOnly,
    },
    Property {
        name: "aliasing",
        doc: "writes are seen on the other side exactly when the memory is shared",
        weight: 8,
        native: false,
        left_out: |sides| {
            let none = !sides.from.can.writes && !sides.to.can.writes;
            none.then_some("neither side writes to its tensors").or_else(|| no_common_dtype(sides))
        },
        strategy: |sides| cases(tensors(sides, sides.common_dtypes(), false), EITHER),
        check: Check::Aliasing,
    },
    Property {
        name: "order",
        doc: "the consumer sees what the owner's stream had still to write",
        weight: 13,
        native: true,
        left_out: no_streams,
        strategy: |sides| {
            let plain = cases(tensors(sides, sides.computed_dtypes(), false), &[None, None, None, Some(true)]);
            let route = routes(sides, &[Route::Direct, Route::Direct, Route::Direct, Route::Onward, Route::CopyOn]);
            let same = sides.same_framework();
            (plain, picks(sides), route)
                .prop_map(move |(case, mut streams, route)| {
                    if same {
                        // The view is exported in the stream in which it was imported.
                        streams.back = streams.read;
                    }
                    Case { streams, route, ..case }
                })
                .boxed()
        },
        check: Check::Order,
    },
    Property {
        name: "release_order",
        doc: "memory is reused only after its last reader",
        weight: 13,
        native: true,
        left_out: no_streams,
        strategy: |sides| {
            let plain = cases(blocks(sides, BLOCK_SIZES.into()), &[None, None, None, Some(true)]);
            let route = routes(sides, ROUTES);
            (plain, picks(sides), route)
                .prop_map(|(case, mut streams, route)| {
                    if case.copy == Some(true) {
                        // Only the user orders the reuse of the original after the copy.
                        streams.allocate = streams.write;
                    }
                    Case { streams, route, ..case }
                })
                .boxed()
        },
        check: Check::ReleaseOrder,
    },
    Property {
        name: "batch",
        doc: "tensors that cross together return their memory, each after its last reader",
        weight: 4,
        native: false,
        left_out: no_streams,
        strategy: |sides| {
            let plain = cases(blocks(sides, BATCH_SIZES.into()), &[None, None, None, Some(true)]);
            (plain, picks(sides), any::<bool>())
                .prop_map(|(case, mut streams, together)| {
                    if case.copy == Some(true) {
                        streams.allocate = streams.write;
                    }
                    if together {
                        // Only views that are dropped in the stream that reads them return their memory together.
                        streams.drop = streams.read;
                    }
                    Case { streams, ..case }
                })
                .boxed()
        },
        check: Check::Batch,
    },
    Property {
        name: "round_trip",
        doc: "there and back again: the same bits, the same address",
        weight: 5,
        native: false,
        left_out: no_common_dtype,
        strategy: |sides| cases(tensors(sides, sides.common_dtypes(), true), EITHER),
        check: Check::RoundTrip,
    },
    Property {
        name: "copy",
        doc: "the kernels copy as the frameworks do",
        weight: 9,
        native: false,
        left_out: no_common_dtype,
        strategy: |sides| {
            let small = with_pending(sides, cases(tensors(sides, sides.common_dtypes(), true), ASKED));
            let tiled = cases(tiled(sides, sides.common_dtypes()), ASKED);
            prop_oneof![small, tiled].boxed()
        },
        check: Check::Copy,
    },
    Property {
        name: "far",
        doc: "elements that lie gigabytes apart are copied",
        weight: 1,
        native: false,
        left_out: |sides| {
            let compact = sides.from.profile.strides == Strides::Compact;
            no_gigabytes(sides).or(compact.then_some("the source makes compact tensors only")).or((*sides
                .common_ranks()
                .end()
                < 2)
            .then_some("the two have no matrices in common"))
        },
        strategy: |sides| cases(apart(sides), ASKED),
        check: Check::Far,
    },
    Property {
        name: "huge",
        doc: "more elements than 31 bits count cross in place, there and back",
        weight: 1,
        native: false,
        left_out: |sides| {
            let owns = sides.to.profile.owns_memory;
            no_gigabytes(sides)
                .or((!sides.from.can.parts).then_some("the source makes no views of its tensors"))
                .or(owns.then_some("the target copies every tensor"))
                .or((!sides.common_ranks().contains(&1)).then_some("the two have no vectors in common"))
        },
        strategy: |sides| cases(uncountable(sides), NONE),
        check: Check::Huge,
    },
    Property {
        name: "staging",
        doc: "copies that run at once do not disturb each other",
        weight: 3,
        native: false,
        left_out: no_streams,
        strategy: |sides| {
            let plain = cases(tensors(sides, sides.computed_dtypes(), false), ASKED);
            (plain, picks(sides)).prop_map(|(case, streams)| Case { streams, ..case }).boxed()
        },
        check: Check::Staging,
    },
    Property {
        name: "torn",
        doc: "what is copied together is of one generation, while the sources are written",
        weight: 4,
        native: false,
        left_out: |sides| {
            let apart = !sides.from.can.foreign_streams || !sides.to.can.foreign_streams;
            apart
                .then_some("copies into tensors are within one process: versions are for several")
                .or((!sides.to.is_target).then_some("the target lets no other write to its tensors"))
                .or_else(|| no_computed_dtype(sides))
        },
        strategy: |sides| {
            let plain = cases(blocks(sides, SUBJECT_SIZES.into()), NONE);
            // A copier keeps its sources, and a source that is not written to is replaced by another one.
            let calls = if sides.from.can.writes { CALLS } else { &CALLS[..2] };
            (lists(sides), plain, picks(sides), select(calls))
                .prop_map(|(pieces, case, streams, calls)| {
                    let spec = pieces[0].from.clone();
                    Case { spec, pieces, streams, calls, ..case }
                })
                .boxed()
        },
        check: Check::Torn,
    },
    Property {
        name: "failure",
        doc: "where one call of a conversion fails, nothing is lost and nothing is kept",
        weight: 4,
        native: false,
        left_out: no_common_dtype,
        strategy: |sides| {
            let plain = cases(tensors(sides, sides.common_dtypes(), false), EITHER);
            (plain, picks(sides)).prop_map(|(case, streams)| Case { streams, ..case }).boxed()
        },
        check: Check::Failure,
    },
    Property {
        name: "threads",
        doc: "threads that convert at once do not disturb each other",
        weight: 2,
        native: false,
        left_out: |sides| {
            let both = sides.from.can.threads && sides.to.can.threads;
            (!both).then_some("one side is for a single thread").or_else(|| no_common_dtype(sides))
        },
        strategy: |sides| cases(tensors(sides, sides.common_dtypes(), false), EITHER),
        check: Check::Threads,
    },
    Property {
        name: "devices",
        doc: "the current device need not be the tensor's",
        weight: 4,
        native: false,
        left_out: |sides| {
            let none = !sides.from.can.devices && !sides.to.can.devices;
            none.then_some("neither side has another device").or_else(|| no_streams(sides))
        },
        strategy: |sides| {
            let plain = cases(blocks(sides, BLOCK_SIZES.into()), &[None, None, None, Some(true)]);
            (plain, picks(sides))
                .prop_map(|(case, mut streams)| {
                    // Only the user orders the reuse of the original after a copy.
                    if case.copy == Some(true) {
                        streams.allocate = streams.write;
                    }
                    Case { streams, ..case }
                })
                .boxed()
        },
        check: Check::Devices,
    },
    Property {
        name: "graph",
        doc: "a conversion in a captured stream is captured, or refused where it cannot be",
        weight: 2,
        native: false,
        left_out: |sides| {
            let none = !sides.to.can.graphs || sides.to.streams == 0;
            none.then_some("the target captures no graphs")
                .or((sides.from.streams == 0).then_some("the source has a single stream, which is not captured"))
                .or_else(|| no_streams(sides))
        },
        strategy: |sides| {
            let captured = 1..=sides.to.streams;
            // One framework has one current stream: what is exported there is exported in the captured one.
            let same = sides.same_framework();
            (cases(blocks(sides, BATCH_SIZES.into()), NONE), picks(sides), captured, any::<bool>())
                .prop_map(move |(case, mut streams, captured, inside)| {
                    streams.read = captured;
                    if inside || same {
                        streams.write = captured;
                    }
                    Case { streams, ..case }
                })
                .boxed()
        },
        check: Check::Graph,
    },
];

/// Chooses a route. Those that lead back need a source that makes tensors of views.
fn routes(sides: &Sides, all: &[Route]) -> BoxedStrategy<Route> {
    let takes = sides.from.profile.devices.contains(&sides.device.kind);
    let back = [Route::Onward, Route::CopyOn, Route::Beside];
    select(all.iter().copied().filter(|route| takes || !back.contains(route)).collect::<Vec<_>>()).boxed()
}

fn no_common_dtype(sides: &Sides) -> Option<&'static str> {
    let none = sides.common_dtypes().is_empty().then_some("the target takes no dtype that the source makes");
    none.or_else(|| no_common_rank(sides))
}

fn no_common_rank(sides: &Sides) -> Option<&'static str> {
    sides.common_ranks().is_empty().then_some("the target takes no number of dimensions that the source has")
}

fn no_gigabytes(sides: &Sides) -> Option<&'static str> {
    let room = sides.from.can.gigabytes && sides.from.can.writes;
    let bytes = sides.common_dtypes().iter().any(|dtype| model::itemsize(*dtype) == 1);
    let none = (!room).then_some("the source makes no tensors of gigabytes");
    none.or((!bytes).then_some("there is no dtype of one byte that both sides make"))
}

fn no_streams(sides: &Sides) -> Option<&'static str> {
    let host = sides.device.kind == DeviceKind::CPU;
    // Two frameworks with one stream each have two.
    let single = sides.same_framework() && sides.from.streams == 0;
    let why = host.then_some("the device has no streams");
    why.or(single.then_some("both sides have the same single stream")).or_else(|| no_computed_dtype(sides))
}

fn no_computed_dtype(sides: &Sides) -> Option<&'static str> {
    let none = sides.computed_dtypes().is_empty().then_some("there is no dtype that both sides make");
    none.or_else(|| no_common_rank(sides))
}

/// Adds cases in which the source defers an operation, on dtypes for which its result is known bit for bit.
fn with_pending(sides: &Sides, plain: BoxedStrategy<Case>) -> BoxedStrategy<Case> {
    let known = |pending| match pending {
        Pending::Negation => &[DType::FLOAT32, DType::FLOAT64][..],
        Pending::Conjugation | Pending::NegatedConjugation => &[DType::COMPLEX64, DType::COMPLEX128],
        // The strides of a case are whole elements.
        _ => &[],
    };
    let pairs = sides.from.can.defers.iter().flat_map(|pending| known(*pending).iter().map(|dtype| (*pending, *dtype)));
    let common = sides.common_dtypes();
    let pairs: Vec<_> = pairs.filter(|(_, dtype)| common.contains(dtype)).collect();
    if pairs.is_empty() {
        return plain;
    }
    let deferred = (plain.clone(), select(pairs)).prop_map(|(mut case, (pending, dtype))| {
        (case.spec.pending, case.spec.dtype) = (Some(pending), dtype);
        case.spec.align = case.spec.align.next_multiple_of(model::itemsize(dtype));
        case
    });
    prop_oneof![3 => plain, 1 => deferred].boxed()
}
