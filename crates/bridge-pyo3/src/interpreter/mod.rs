//! The path into the Python interpreter: the GIL for deleters, where owners are dropped, and DLPack capsules.
//!
//! Nothing of Python is linked. [`open`] receives the interpreter's C functions: this crate passes those that it
//! links with its feature `pyo3`, `bridge-capi` those that its caller passes. Each shared library that contains this crate has a gate of its
//! own.
//!
//! - [`with_gil`] runs code with the GIL, until [`close`] rejects further calls because the interpreter shuts down.
//! - [`drop_guarded`] and [`Guarded`] drop owners that need the GIL. A thread that Python knows takes the GIL for it.
//!   On any other thread the drop is deferred, because a thread that holds the GIL may be waiting for that thread, as
//!   TensorFlow does when it joins its executor.
//! - [`take_capsule`] and [`new_capsule`] move managed tensors out of capsules and into them.

mod capsule;
mod gate;

pub use capsule::{AnyManaged, new_capsule, take_capsule};
pub use gate::{
    Functions, Guarded, Object, close, drop_deferred, drop_guarded, drop_inside, drop_with_gil, enter, open,
    report_unraisable, with_gil,
};
