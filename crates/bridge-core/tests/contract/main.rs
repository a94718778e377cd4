//! The contract without a framework: planning, transfers in time, the DLPack codec.

mod cast;
mod clocks;
mod common;
mod copies;
#[cfg(feature = "dlpack")]
mod dlpack;
#[cfg(feature = "dlpack")]
mod exchange;
mod groups;
mod held;
mod into;
mod kernels;
#[cfg(feature = "dlpack")]
mod misbehave;
mod moves;
mod output;
mod planning;
mod protocol;
