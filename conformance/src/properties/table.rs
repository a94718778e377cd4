//! The properties, as a table.

use super::{
    Outcome, Pair, Take, batch, chain, contents, copies, device, elements, failure, graph, growth, huge, life, many,
    moves, options, order, place, profile, raises, subject, threads, torn, users,
};
use crate::lists::{KINDS, lists};
use crate::strategy::{apart, blocks, cases, large, lives, of_source, picks, tensors, tiled, uncountable, within};
use crate::{Calls, Case, Op, Pieces, Route, Sides, model};
use bridge_core::{DType, DeviceKind, Pending, Strides};
use proptest::collection::vec;
use proptest::option::of;
use proptest::prelude::*;
use proptest::sample::select;

/// One property.
pub struct Property {
    /// Its name in reports and expectations.
    pub name: &'static str,
    /// What it states, in one line.
    pub doc: &'static str,
    /// Its cases where [`Config::cases`](crate::Config::cases) is [`WHOLE`]. They are chosen by what a case costs, so that
    /// each property of a pair like NumPy → PyTorch takes a second at most.
    pub cases: u32,
    /// Whether the frameworks' own method can be compared with it.
    pub native: bool,
    /// Returns why it has no meaning for a pair, if it has none.
    pub left_out: fn(&Sides) -> Option<&'static str>,
    /// Returns its cases.
    pub strategy: fn(&Sides) -> BoxedStrategy<Case>,
    check: Check,
}

bridge_core::debug_fields!(impl[] Property: name);

macro_rules! checks {
    (|$pair:ident, $case:ident, $take:ident| $($check:ident => $judged:expr,)+) => {
        /// What judges a case of a property.
        #[derive(Clone, Copy)]
        enum Check { $($check),+ }

        impl Property {
            /// Judges one case with another way of importing the tensor, where the property concerns that way.
            pub(crate) fn check_with<F, T>(
                &self,
                $pair: &Pair<'_, F, T>,
                $case: &Case,
                $take: Take<'_, F, T>,
            ) -> Outcome {
                match self.check { $(Check::$check => $judged,)+ }
            }
        }
    };
}

checks! { |pair, case, take|
    Subject => subject::subject(pair, case),
    Values => contents::values(pair, case),
    Dtype => contents::dtype(pair, case),
    Shape => contents::shape(pair, case),
    Identity => place::identity(pair, case),
    Honesty => place::honesty(pair, case),
    Profile => profile::profile(pair, case),
    ReadOnly => place::read_only(pair, case),
    Aliasing => place::aliasing(pair, case),
    Order => order::order(pair, case, take),
    ReleaseOrder => order::release_order(pair, case, take),
    Batch => batch::batch(pair, case),
    Life => life::life(pair, case),
    RoundTrip => place::round_trip(pair, case),
    Options => options::options(pair, case),
    Chain => chain::chain(pair, case),
    Many => many::many(pair, case),
    Elements => elements::elements(pair, case),
    Targets => elements::targets(pair, case),
    Copy => copies::copy(pair, case),
    Far => copies::far(pair, case),
    Huge => huge::huge(pair, case),
    Staging => copies::staging(pair, case),
    Torn => torn::torn(pair, case),
    Failure => failure::failure(pair, case),
    Threads => threads::threads(pair, case),
    Devices => device::devices(pair, case),
    Graph => graph::graph(pair, case),
    Users => users::users(pair, case),
    Raises => raises::raises(pair, case),
    Growth => growth::growth(pair, case),
    Moves => moves::moves(pair, case),
}

/// Returns the property with this name.
pub fn property(name: &str) -> Option<&'static Property> {
    PROPERTIES.iter().find(|property| property.name == name)
}

/// The number of cases for which the table says how many each property has. Those that apply to every pair of frameworks
/// on the host have about as many together.
pub const WHOLE: u32 = 10_000;

/// What a pair with a framework that [compiles](crate::Capabilities::compiles) runs: one in so many cases.
const OF_COMPILED: u32 = 4;

impl Property {
    /// Returns how many cases of a pair are run where `whole` are requested. It depends on nothing else, so that two runs
    /// with the same seed have the same cases.
    pub fn planned(&self, whole: u32, sides: &Sides) -> u32 {
        let one_in = if sides.from.can.compiles || sides.to.can.compiles { OF_COMPILED } else { 1 };
        let all = u64::from(self.cases) * u64::from(whole);
        all.div_ceil(u64::from(WHOLE) * u64::from(one_in)).try_into().unwrap_or(u32::MAX)
    }

    /// Judges one case.
    pub(crate) fn check<F, T>(&self, pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
        // Half of the cases of every property are copied by kernels, half by the frameworks where both can.
        pair.copies_by(case.seed & 0x400 == 0);
        let ours: Take<'_, F, T> = &|tensor| Ok(pair.transfer(tensor, case.copy)?.0);
        self.check_with(pair, case, ours)?;
        pair.from.check()?;
        Ok(pair.to.check()?)
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

/// Bytes of the tensors of `moves`: many pieces of staging, with a ragged end.
const MOVE_SIZES: [usize; 2] = [(10 << 20) + 4112, (20 << 20) + 48];

/// Routes of `release_order`. The plain one is first: cases shrink towards it.
const ROUTES: &[Route] = &[
    Route::Direct,
    Route::Direct,
    Route::Noted,
    Route::Noted,
    Route::Onward,
    Route::CopyOn,
    Route::Late,
    Route::Twice,
    Route::Beside,
    Route::Fresh,
    Route::Exported,
    Route::Passing,
];

/// Routes of `graph`. The plain one is first: cases shrink towards it.
const GRAPH_ROUTES: &[Route] = &[Route::Direct, Route::Forked, Route::Captured, Route::Meanwhile];

/// How `torn` copies. The plain path is first: cases shrink towards it.
const CALLS: &[Calls] = &[Calls::Together, Calls::Halves, Calls::Prepared];

/// Returns a property of tensors that both sides have, by transfers in place and copies.
const fn plain(name: &'static str, doc: &'static str, cases: u32, check: Check) -> Property {
    let strategy: fn(&Sides) -> BoxedStrategy<Case> =
        |sides| self::cases(tensors(sides, sides.common_dtypes(), false), EITHER);
    Property { name, doc, cases, native: false, left_out: no_common_dtype, strategy, check }
}

impl Property {
    /// With another reason to have no meaning.
    const fn left_out(self, left_out: fn(&Sides) -> Option<&'static str>) -> Self {
        Self { left_out, ..self }
    }

    /// Of other cases.
    const fn of(self, strategy: fn(&Sides) -> BoxedStrategy<Case>) -> Self {
        Self { strategy, ..self }
    }

    /// Compared with the frameworks' own method.
    const fn native(self) -> Self {
        Self { native: true, ..self }
    }
}

/// Every property, in the order in which they run: `subject` first, because no other verdict means anything where it
/// fails, then `life`, because a view whose memory was freed may crash the process.
pub static PROPERTIES: &[Property] = &[
    plain(SUBJECT, "the subjects do what the suite relies on, and the profiles have a meaning", 20, Check::Subject)
        .left_out(no_computed_dtype)
        .of(|sides| cases(blocks(sides, SUBJECT_SIZES.into()), NONE)),
    plain("life", "every lease is released once, and not before", 800, Check::Life).left_out(no_computed_dtype).of(
        |sides| {
            let plain = cases(tensors(sides, sides.computed_dtypes(), false), NONE);
            let can = sides.from.can.read_only;
            (plain, lives(), prop::bool::weighted(0.2))
                .prop_map(move |(mut case, ops, read_only): (Case, Vec<Op>, bool)| {
                    case.spec.read_only = can && read_only;
                    Case { ops, ..case }
                })
                .boxed()
        },
    ),
    plain("values", "the elements arrive bit for bit", 1600, Check::Values).of(|sides| {
        let plain = cases(tensors(sides, sides.common_dtypes(), true), EITHER);
        with_pending(sides, plain)
    }),
    plain("dtype", "every dtype is converted as itself or is refused as the profile says", 1100, Check::Dtype)
        .left_out(|_| None)
        .of(|sides| cases(of_source(sides), EITHER)),
    plain("shape", "shape and strides arrive", 1000, Check::Shape)
        .of(|sides| cases(tensors(sides, sides.common_dtypes(), true), EITHER)),
    plain("identity", "in place means the same address, a copy means other memory", 800, Check::Identity)
        .of(|sides| cases(tensors(sides, sides.common_dtypes(), true), EITHER)),
    plain("honesty", "the plan says copy exactly when the address changes", 1400, Check::Honesty)
        .left_out(|_| None)
        .of(|sides| {
            let plain = cases(of_source(sides), ANY);
            with_pending(sides, plain)
        }),
    plain("profile", "what the target's own import takes in place, its profile takes in place", 400, Check::Profile)
        .left_out(|sides| {
            let none = sides.to.can.imports.is_none().then_some("the target has no method that imports");
            let other = sides.from.can.imports.is_none().then_some("not every import takes tensors of the source");
            none.or(other).or_else(|| one_process(sides))
        })
        .of(|sides| cases(of_source(sides), NONE)),
    plain("read_only", "read-only is kept or refused", 600, Check::ReadOnly)
        .left_out(|sides| {
            let none = (!sides.from.can.read_only).then_some("the source makes no read-only tensors");
            none.or_else(|| no_common_dtype(sides))
        })
        .of(|sides| {
            let plain = cases(tensors(sides, sides.common_dtypes(), false), ANY);
            (plain, prop::bool::weighted(0.8))
                .prop_map(|(mut case, read_only)| {
                    case.spec.read_only = read_only;
                    case
                })
                .boxed()
        }),
    plain("aliasing", "writes are seen on the other side exactly when the memory is shared", 1000, Check::Aliasing)
        .left_out(|sides| {
            let none = !sides.from.can.writes && !sides.to.can.writes;
            none.then_some("neither side writes to its tensors").or_else(|| no_common_dtype(sides))
        }),
    plain("order", "the consumer sees what the owner's stream had still to write", 1200, Check::Order)
        .left_out(no_streams)
        .of(|sides| {
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
        })
        .native(),
    plain("release_order", "memory is reused only after its last reader", 1200, Check::ReleaseOrder)
        .left_out(no_streams)
        .of(|sides| {
            let plain = cases(within(sides, blocks(sides, BLOCK_SIZES.into())), &[None, None, None, Some(true)]);
            let route = routes(sides, ROUTES);
            (plain, picks(sides), route)
                .prop_map(|(mut case, mut streams, route)| {
                    if [Route::Exported, Route::Passing].contains(&route) {
                        // The allocator that made the copy knows only the stream in which it did so.
                        case.copy = None;
                    }
                    if case.copy == Some(true) {
                        // Only the user orders the reuse of the original after the copy.
                        streams.allocate = streams.write;
                    }
                    Case { streams, route, ..case }
                })
                .boxed()
        })
        .native(),
    plain(
        "batch",
        "tensors that are converted together return their memory, each after its last reader",
        400,
        Check::Batch,
    )
    .left_out(no_streams)
    .of(|sides| {
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
    }),
    plain("round_trip", "there and back again: the same bits, the same address", 700, Check::RoundTrip)
        .of(|sides| cases(tensors(sides, sides.common_dtypes(), true), EITHER)),
    plain("options", "dimensions, order, device and read-only are as the caller asks", 800, Check::Options)
        .left_out(|sides| one_process(sides).or_else(|| no_common_dtype(sides)))
        .of(|sides| {
            let can = sides.from.can.read_only;
            (cases(tensors(sides, sides.common_dtypes(), true), ANY), prop::bool::weighted(0.3))
                .prop_map(move |(mut case, read_only)| {
                    case.spec.read_only = can && read_only;
                    case
                })
                .boxed()
        }),
    plain(
        "chain",
        "a view of a view keeps bits, address and protection, and leaves nothing at its address",
        400,
        Check::Chain,
    )
    .left_out(|sides| one_process(sides).or_else(|| no_computed_dtype(sides)))
    .of(|sides| {
        let can = sides.from.can.read_only;
        (cases(tensors(sides, sides.computed_dtypes(), false), EITHER), any::<bool>())
            .prop_map(move |(mut case, read_only)| {
                case.spec.read_only = can && read_only;
                case
            })
            .boxed()
    }),
    plain("many", "different tensors that are converted together arrive each at its place", 200, Check::Many)
        .left_out(|sides| one_process(sides).or_else(|| no_computed_dtype(sides)))
        .of(|sides| {
            (deferring(sides), cases(tensors(sides, sides.computed_dtypes(), false), ANY))
                .prop_map(|(pieces, case)| Case { pieces, ..case })
                .boxed()
        }),
    plain("copy", "the kernels copy as the frameworks do", 1000, Check::Copy).of(|sides| {
        let small = with_pending(sides, cases(tensors(sides, sides.common_dtypes(), true), ASKED));
        let tiled = cases(tiled(sides, sides.common_dtypes()), ASKED);
        prop_oneof![small, tiled].boxed()
    }),
    plain("large", "tensors of megabytes are copied as small ones are", 24, Check::Copy)
        .of(|sides| cases(large(sides), ASKED)),
    plain(
        "elements",
        "what is copied into a tensor arrives element by element, broadcast and cast, and is counted as a write",
        250,
        Check::Elements,
    )
    .left_out(no_targets)
    .of(|sides| {
        let plain = cases(blocks(sides, SUBJECT_SIZES.into()), NONE);
        (deferring(sides), plain, select(CALLS))
            .prop_map(|(pieces, case, calls)| Case { spec: pieces[0].from.clone(), pieces, calls, ..case })
            .boxed()
    }),
    plain(
        "targets",
        "what must not be copied into is refused and stays as it was, and what users make is written and counted",
        10,
        Check::Targets,
    )
    .left_out(|sides| {
        let none = !sides.common_ranks().contains(&2);
        no_targets(sides).or(none.then_some("the two have no matrices in common"))
    })
    .of(|sides| cases(blocks(sides, SUBJECT_SIZES.into()), NONE)),
    plain("far", "elements that lie gigabytes apart are copied", 20, Check::Far)
        .left_out(|sides| {
            let compact = sides.from.profile.strides == Strides::Compact;
            no_gigabytes(sides).or(compact.then_some("the source makes compact tensors only")).or((*sides
                .common_ranks()
                .end()
                < 2)
            .then_some("the two have no matrices in common"))
        })
        .of(|sides| cases(apart(sides), ASKED)),
    plain("huge", "more elements than 31 bits count cross in place, there and back", 20, Check::Huge)
        .left_out(|sides| {
            let owns = sides.to.profile.owns_memory;
            no_gigabytes(sides)
                .or((!sides.from.can.parts).then_some("the source makes no views of its tensors"))
                .or(owns.then_some("the target copies every tensor"))
                .or((!sides.common_ranks().contains(&1)).then_some("the two have no vectors in common"))
        })
        .of(|sides| cases(uncountable(sides), NONE)),
    plain("staging", "copies that run at once do not disturb each other", 300, Check::Staging).left_out(no_streams).of(
        |sides| {
            let plain = cases(tensors(sides, sides.computed_dtypes(), false), ASKED);
            (plain, picks(sides)).prop_map(|(case, streams)| Case { streams, ..case }).boxed()
        },
    ),
    plain("torn", "what is copied together is of one generation, while the sources are written", 200, Check::Torn)
        .left_out(no_targets)
        .of(|sides| {
            let plain = cases(blocks(sides, SUBJECT_SIZES.into()), NONE);
            // A copier keeps its sources, and a source that is not written to is replaced by another one.
            let calls = if sides.from.can.writes { CALLS } else { &CALLS[..2] };
            (lists(sides), plain, picks(sides), select(calls))
                .prop_map(|(pieces, case, streams, calls)| {
                    let spec = pieces[0].from.clone();
                    Case { spec, pieces, streams, calls, ..case }
                })
                .boxed()
        }),
    plain("failure", "where one call of a conversion fails, nothing is lost and nothing is kept", 400, Check::Failure)
        .of(|sides| {
            let plain = cases(tensors(sides, sides.common_dtypes(), false), EITHER);
            (plain, picks(sides))
                .prop_map(|(case, mut streams)| {
                    // Only the user orders the reuse of the original after a copy.
                    streams.allocate = streams.write;
                    Case { streams, ..case }
                })
                .boxed()
        }),
    plain(
        "users",
        "tensors as users make them convert right, or are refused as their framework says",
        200,
        Check::Users,
    )
    .left_out(|sides| {
        let none = !sides.from.can.usual;
        none.then_some("no list says how users of the source make tensors").or_else(|| no_common_dtype(sides))
    })
    .of(|sides| cases(tensors(sides, sides.common_dtypes(), false), NONE)),
    plain(
        "raises",
        "where a framework raises, the error says so, nothing is kept, and the next conversion is right",
        60,
        Check::Raises,
    )
    .left_out(|sides| {
        let none = !sides.from.can.raises && !sides.to.can.raises;
        none.then_some("no function of either framework can be made to raise").or_else(|| no_common_dtype(sides))
    })
    .of(|sides| cases(tensors(sides, sides.common_dtypes(), false), NONE)),
    plain("threads", "threads that convert at once do not disturb each other", 100, Check::Threads).left_out(|sides| {
        let both = sides.from.can.threads && sides.to.can.threads;
        (!both).then_some("one side is for a single thread").or_else(|| no_common_dtype(sides))
    }),
    plain("devices", "the current device need not be the tensor's", 400, Check::Devices)
        .left_out(|sides| {
            let none = !sides.from.can.devices && !sides.to.can.devices;
            none.then_some("neither side has another device").or_else(|| no_streams(sides))
        })
        .of(|sides| {
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
        }),
    plain("graph", "a conversion in a captured stream is captured, or refused where it cannot be", 200, Check::Graph)
        .left_out(|sides| {
            let none = !sides.to.can.graphs || sides.to.streams == 0;
            none.then_some("the target captures no graphs")
                .or((sides.from.streams == 0).then_some("the source has a single stream, which is not captured"))
                .or_else(|| no_streams(sides))
        })
        .of(|sides| {
            let captured = 1..=sides.to.streams;
            // One framework has one current stream: what is exported there is exported in the captured one.
            let (same, count) = (sides.same_framework(), sides.to.streams);
            let shared = sides.from.can.external_streams && sides.to.can.external_streams;
            // One framework has one current stream.
            let forks = !same && count > 1 && shared && sides.from.can.writes;
            let makes = |route: &Route| match route {
                Route::Forked => forks,
                Route::Captured => !same,
                Route::Meanwhile => count > 1,
                _ => true,
            };
            let route = select(GRAPH_ROUTES.iter().copied().filter(makes).collect::<Vec<_>>());
            let blocks = cases(blocks(sides, BATCH_SIZES.into()), NONE);
            (blocks, picks(sides), captured, any::<bool>(), route, 1..count.max(2))
                .prop_map(move |(case, mut streams, captured, inside, route, apart)| {
                    streams.read = captured;
                    if inside && route == Route::Direct || same {
                        streams.write = captured;
                    }
                    if [Route::Forked, Route::Meanwhile].contains(&route) {
                        // Another one than the default stream and the captured one.
                        streams.onward = 1 + (captured - 1 + apart) % count;
                    }
                    Case { streams, route, ..case }
                })
                .boxed()
        }),
    plain("moves", "moves between host and device that run at once do not disturb each other", 60, Check::Moves)
        .left_out(|sides| {
            let devices = &sides.from.profile.devices;
            let moved = sides.device.kind == DeviceKind::CUDA && devices.contains(&DeviceKind::CPU);
            let writes = sides.from.is_target && sides.to.is_target;
            let apart = !sides.from.can.external_streams || !sides.to.can.external_streams;
            (!moved)
                .then_some("the source has tensors only on a device or only on the host")
                .or((!writes).then_some("one side lets no other write to its tensors"))
                .or(apart.then_some("copies into tensors are within one process"))
                .or_else(|| no_streams(sides))
        })
        .of(|sides| {
            let plain = cases(blocks(sides, MOVE_SIZES.into()), NONE);
            (plain, picks(sides)).prop_map(|(case, streams)| Case { streams, ..case }).boxed()
        }),
    plain(
        "growth",
        "equal conversions and refusals leave no memory, no objects and no leases behind",
        24,
        Check::Growth,
    ),
];

/// Chooses a route. Those that lead back need a source that makes tensors of views.
fn routes(sides: &Sides, all: &[Route]) -> BoxedStrategy<Route> {
    let takes = sides.from.profile.devices.contains(&sides.device.kind);
    let back = [Route::Onward, Route::CopyOn, Route::Beside];
    select(all.iter().copied().filter(|route| takes || !back.contains(route)).collect::<Vec<_>>()).boxed()
}

fn no_targets(sides: &Sides) -> Option<&'static str> {
    let apart = one_process(sides).map(|_| "copies into tensors are within one process: versions are for several");
    apart
        .or((!sides.to.is_target).then_some("the target lets no other write to its tensors"))
        .or_else(|| no_computed_dtype(sides))
}

fn one_process(sides: &Sides) -> Option<&'static str> {
    let apart = !sides.from.can.external_streams || !sides.to.can.external_streams;
    apart.then_some("it judges calls within one process")
}

fn no_common_dtype(sides: &Sides) -> Option<&'static str> {
    let none = sides.common_dtypes().is_empty().then_some("the target takes no dtype that the source makes");
    none.or_else(|| no_common_rank(sides))
}

fn no_common_rank(sides: &Sides) -> Option<&'static str> {
    sides.common_ranks().is_empty().then_some("the target takes no number of dimensions that the source has")
}

fn no_gigabytes(sides: &Sides) -> Option<&'static str> {
    let fits = sides.from.can.gigabytes && sides.from.can.writes;
    let bytes = sides.common_dtypes().iter().any(|dtype| model::itemsize(*dtype) == 1);
    let none = (!fits).then_some("the source makes no tensors of gigabytes");
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

/// Returns the dtypes for which the result of a deferred operation is known bit for bit.
fn known(pending: Pending) -> &'static [DType] {
    match pending {
        Pending::Negation => &[DType::FLOAT16, DType::BFLOAT16, DType::FLOAT32, DType::FLOAT64],
        Pending::Conjugation | Pending::NegatedConjugation => &[DType::COMPLEX64, DType::COMPLEX128],
        // The strides of a case are whole elements.
        _ => &[],
    }
}

/// Chooses lists of pieces, as [`lists`] does, of which either side may have deferred an operation.
fn deferring(sides: &Sides) -> BoxedStrategy<Vec<Pieces>> {
    let all = [&sides.from.can, &sides.to.can].map(|can| can.defers.clone());
    let choices = vec(of(any::<usize>()), 2 * KINDS);
    (lists(sides), choices)
        .prop_map(move |(mut pieces, choices)| {
            for (Pieces { from, to, .. }, choices) in pieces.iter_mut().zip(choices.chunks(2)) {
                let dtypes = [from.dtype, to.dtype];
                // What is stored in a target that negates is negated before it is cast.
                let fits = |pending: &&Pending| dtypes.iter().all(|dtype| known(**pending).contains(dtype));
                for ((spec, choice), defers) in [from, to].into_iter().zip(choices).zip(&all) {
                    let some: Vec<_> = defers.iter().filter(fits).collect();
                    spec.pending = choice.filter(|_| !some.is_empty()).map(|choice| *some[choice % some.len()]);
                }
            }
            pieces
        })
        .boxed()
}

/// Adds cases in which the source defers an operation.
fn with_pending(sides: &Sides, plain: BoxedStrategy<Case>) -> BoxedStrategy<Case> {
    let pairs = sides.from.can.defers.iter().flat_map(|pending| known(*pending).iter().map(|dtype| (*pending, *dtype)));
    let common = sides.common_dtypes();
    let pairs: Vec<_> = pairs.filter(|(_, dtype)| common.contains(dtype)).collect();
    if pairs.is_empty() {
        return plain;
    }
    let with = (plain.clone(), select(pairs)).prop_map(|(mut case, (pending, dtype))| {
        (case.spec.pending, case.spec.dtype) = (Some(pending), dtype);
        case.spec.align = case.spec.align.next_multiple_of(model::itemsize(dtype));
        case
    });
    prop_oneof![3 => plain, 1 => with].boxed()
}
