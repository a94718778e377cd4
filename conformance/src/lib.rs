//! The conformance suite of tensor-bridge.
//!
//! It judges whether two adapters pass tensors to each other rightly: the same bits, the same memory where the plan says
//! so, at the right time and for the right time. What it knows of a framework beside its adapter is a [`Subject`], so
//! that an adapter outside this repository can be certified as well.
//!
//! # How to certify an adapter
//!
//! Implement [`Subject`] beside [`Adapter`](bridge_core::Adapter), through your framework's own interface, and pass it
//! to [`certify`] together with a framework that is known to be right, as source and as target. Here both are simulated:
//!
//! ```
//! use bridge_conformance::sim::{Habits, SimDevice, SimFramework};
//! use bridge_conformance::{Config, certify};
//!
//! let device = SimDevice::new(1);
//! let known = SimFramework::new(&device, Habits::Generous);
//! let yours = SimFramework::new(&device, Habits::Strict);
//! let config = Config { cases: 100, seed: 1, time_budget: None, properties: None, native: false };
//! for report in [
//!     certify(&known, &yours, &device.ordering(), &config, &[], &mut ()),
//!     certify(&yours, &known, &device.ordering(), &config, &[], &mut ()),
//! ] {
//!     assert!(report.passed(), "{report:#?}");
//! }
//! ```
//!
//! A failure comes with the smallest case that still fails, as data: write it down as a [`Regression`], and it is run
//! first from then on. What a framework cannot do is written down as an [`Expectation`], with its reason.
//!
//! # What judges the suite
//!
//! The properties ([`PROPERTIES`]) are judged in turn by planted faults ([`fault`]): each must be found, by the property
//! that is meant to find it, on the simulated device ([`sim`]).

mod case;
mod engine;
pub mod expect;
pub mod fault;
pub mod model;
#[cfg(feature = "python")]
mod pluggable;
mod properties;
#[cfg(feature = "python")]
pub mod python;
pub mod report;
pub mod runner;
pub mod sim;
mod subject;

pub use case::{Caps, Case, Op, Picks, Route, Side};
pub use engine::{
    Config, Native, Observer, PairReport, PropertyReport, REPLAYED, Verdict, caps, certify, certify_pair, replay,
    shrink, tree,
};
pub use expect::{Expectation, Regression};
pub use properties::{Failure, NativeWay, PROPERTIES, Pair, Property, property};
pub use subject::{Observed, Spec, Subject};
