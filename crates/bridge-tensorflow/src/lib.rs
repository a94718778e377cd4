//! The TensorFlow adapter: of 1.15, of 2.12 or later, or of both at once in one process.
//!
//! TensorFlow's functions are looked up by name in the libraries of its Python package, loaded by Python or without it;
//! no headers and no C++ ABI are needed. 1.15.5 and 2.21 are tested on a GPU.
//!
//! | folder | contents |
//! |---|---|
//! | `runtime` | [`Runtime`]: a TensorFlow of either series, its libraries, dtypes, tensors, kernels and streams |
//! | `graph` | [`GraphEdges`] imports tensors to be fed to graphs and exports fetched ones, under handles and through two operations that it registers; [`Session`] runs a frozen graph or a [`SavedModel`] without Python |
//! | `eager` | eager tensors of 2.x: [`Eager`], without Python, and with the feature `python` `TensorFlow2`, for Python objects |
//!
//! `graph` and `eager` import from `runtime`, and nothing from each other. Within a folder, the module documentation
//! lists the modules in the order of their imports.
//!
//! TensorFlow computes in one stream per GPU, and no function changes or returns it. A kernel of our own reports the
//! stream once; handoff and release are ordered in it. The host does not wait.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod eager;
mod graph;
mod runtime;

pub use eager::native::{Attribute, Eager, EagerTensor};
#[cfg(feature = "python")]
pub use eager::python::TensorFlow2;
pub use graph::config::SessionOptions;
pub use graph::edges::GraphEdges;
pub use graph::external::External;
pub use graph::input::Input;
#[cfg(feature = "python")]
pub use graph::python::{PyExternal, PyGraphEdges, TensorFlow1};
pub use graph::saved::{Endpoint, SavedModel, Signature};
pub use graph::session::Session;
pub use runtime::Runtime;
pub use runtime::library::Series;

#[cfg(test)]
#[path = "../tests/installed/mod.rs"]
mod installed;
