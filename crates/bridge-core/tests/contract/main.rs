//! The contract without a framework: planning, the protocol in time, the DLPack codec.

mod common;
mod copies;
mod dlpack;
mod planning;
mod protocol;
