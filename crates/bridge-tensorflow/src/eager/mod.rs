//! Eager tensors of TensorFlow 2, through the C functions of the eager runtime.
//!
//! | module | contents |
//! |---|---|
//! | [`functions`] | the functions of the eager runtime |
//! | [`handle`] | handles of tensors, and operations on them |
//! | [`devices`] | the devices of an eager context, and the stream of each |
//! | [`seen`] | what TensorFlow says of a handle |
//! | [`copy`] | copies in memory of TensorFlow's |
//! | [`native`] | its own context, without Python |
//! | `process` | the TensorFlow of this Python process: its classes, its context |
//! | `export`, `import` | Python objects out of TensorFlow, and into it |
//! | `python` | the adapter for them |
//!
//! Each imports only those above it; `export` also imports `import`, for its copies. The last four need the feature
//! `python`.

mod copy;
mod devices;
#[cfg(feature = "python")]
mod export;
mod functions;
mod handle;
#[cfg(feature = "python")]
mod import;
pub(crate) mod native;
#[cfg(feature = "python")]
mod process;
#[cfg(feature = "python")]
pub(crate) mod python;
mod seen;
