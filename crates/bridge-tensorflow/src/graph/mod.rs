//! Graphs, of either series: tensors of other frameworks at their edges, and sessions without Python.
//!
//! | module | contents |
//! |---|---|
//! | [`external`] | a tensor at the edge of a graph, and the handle that stands for it |
//! | [`operations`] | the operations that read and record such tensors |
//! | [`definition`], [`config`], [`input`] | a graph, the options of a session, its inputs |
//! | [`saved`] | a saved model in its folder |
//! | [`session`] | a graph that can be run |
//! | [`results`] | what a run returns, in memory that nothing else has |
//! | [`edges`] | the adapter |
//! | [`python`] | the adapters for Python objects |
//!
//! Each imports only those above it.

pub(crate) mod config;
pub(crate) mod definition;
pub(crate) mod edges;
pub(crate) mod external;
pub(crate) mod input;
pub(crate) mod operations;
#[cfg(feature = "python")]
pub(crate) mod python;
pub(crate) mod results;
pub(crate) mod saved;
pub(crate) mod session;

use bridge_core::{Error, ErrorKind};

/// Returns the error for a wrong argument.
pub(crate) fn argument(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Argument, text)
}
