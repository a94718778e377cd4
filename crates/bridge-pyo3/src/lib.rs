//! What the adapters for Python objects share: an owner that may be dropped on any thread, DLPack capsules, the dtypes of
//! NumPy, and the conversion of Python's errors to core's. Without the feature `pyo3` there is only [`interpreter`],
//! which does not link Python.

#[cfg(all(doctest, feature = "pyo3"))]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod interpreter;
#[cfg(feature = "pyo3")]
mod objects;

pub use interpreter::{Guarded, drop_deferred, drop_inside};
#[cfg(feature = "pyo3")]
pub use objects::*;
