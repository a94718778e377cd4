//! The contract without a framework: planning, transfers in time, the DLPack codec.

mod common;
mod copies;
mod dlpack;
mod groups;
mod into;
mod kernels;
mod moves;
mod planning;
mod protocol;
