//! Graphs, of either series.

pub(crate) mod config;
pub(crate) mod definition;
pub(crate) mod edges;
pub(crate) mod external;
pub(crate) mod operations;
#[cfg(feature = "python")]
pub(crate) mod python;
pub(crate) mod session;
