//! The conformance suite of truebridge.
//!
//! It judges whether two adapters exchange tensors correctly: the same bits, the same memory where the plan says so,
//! ordered before and after the work of both sides, and released once. What the suite needs of a framework next to its
//! adapter is a [`Subject`], so it certifies adapters outside this repository as well.
//!
//! # How to certify an adapter
//!
//! A [`Subject`] is your [`Adapter`](bridge_core::Adapter) and what the suite does with its own tensors, through your
//! framework's own interface. For host memory that is a type of yours with the five methods of [`HostTensors`], and
//! [`HostSubject`] joins it with the adapter. For a device implement [`Subject`] for a type of yours that holds the
//! adapter. Pass it to [`certify`] with a framework that is known to be right. Here both are simulated:
//!
//! ```
//! use bridge_conformance::certify;
//! use bridge_conformance::sim::{Habits, SimDevice, SimFramework};
//!
//! let device = SimDevice::new(1);
//! let reference = SimFramework::new(&device, Habits::Generous);
//! let yours = SimFramework::new(&device, Habits::Strict);
//! for report in certify(&yours, &reference) {
//!     report.assert_passed();
//! }
//! ```
//!
//! A [`Config`] sets the number of cases, the seed and more:
//!
//! ```
//! # use bridge_conformance::sim::{Habits, SimDevice, SimFramework};
//! use bridge_conformance::Config;
//!
//! # let device = SimDevice::new(1);
//! # let reference = SimFramework::new(&device, Habits::Generous);
//! # let yours = SimFramework::new(&device, Habits::Common);
//! let quick = Config { cases: 100, seed: 7, ..Config::default() };
//! assert!(quick.certify(&yours, &reference).iter().all(|report| report.passed()));
//! ```
//!
//! In your own test call [`Config::certify_apart`]: it judges in other processes, so that an adapter which ends its
//! process is reported, too.
//!
//! A failure is reported with the smallest case that still fails, as data. Keep it as a [`Regression`] in
//! [`Config::regressions`]: the suite then runs it first. What a framework cannot do is an [`Expectation`] with its
//! reason.
//!
//! # Features
//!
//! None is on by default, and none is needed to certify an adapter. `runner` is the program that this repository uses:
//! options, one process for each pair, progress and reports. `python`, which includes it, has the adapters for Python
//! objects: the package in `extension` makes a module of it. `candle`, `cudarc`, `ndarray`, `ort`, `tch` and
//! `tensorflow` are the subjects of frameworks without Python.
//!
//! # What judges the suite
//!
//! The properties ([`PROPERTIES`]) are judged in turn by planted [faults](fault): the property that a fault names must
//! find it on the simulated device ([`sim`]).

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[macro_use]
mod forward;

#[cfg(unix)]
mod apart;
mod case;
mod coverage;
mod engine;
pub mod expect;
pub mod fault;
mod habits;
mod histogram;
mod host;
mod lists;
pub mod model;
#[cfg(feature = "runner")]
mod names;

#[cfg(feature = "processes")]
pub mod processes;
mod properties;
#[cfg(unix)]
mod protocol;
#[cfg(feature = "python")]
pub mod python;
#[cfg(feature = "runner")]
pub mod report;
#[cfg(feature = "runner")]
pub mod runner;
#[cfg(any(
    feature = "candle",
    feature = "cudarc",
    feature = "ndarray",
    feature = "ort",
    feature = "tch",
    feature = "tensorflow"
))]
pub mod rust;
pub mod sim;
mod strategy;
mod subject;
mod users;
mod verdict;
#[cfg(unix)]
mod watch;
mod words;

pub use case::{Calls, Case, End, Op, Picks, Pieces, Route, Side, Sides};
pub use coverage::Coverage;
pub use engine::{Config, Observer, REPLAYED, certify, replay, shrink, tree};
pub use expect::{Expectation, Regression};
pub use histogram::{Bar, Histogram};
pub use host::{HostSubject, HostTensors};
pub use properties::{Failure, PROPERTIES, Pair, Property, WHOLE, property};
pub use subject::{Capabilities, Observed, Replay, Spec, Subject, Threads, Usage};
pub use users::{Afterwards, Raised, Usual};
pub use verdict::{Native, PairReport, PropertyReport, Verdict};
