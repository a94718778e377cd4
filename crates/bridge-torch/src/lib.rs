//! The PyTorch adapters.
//!
//! With the feature `python`, `Torch` exports and imports `torch.Tensor` objects: through the C exchange API of
//! DLPack 1.3 where the installed version has it (2.10 and later, or the package `torch-c-dlpack-ext`), and through
//! `__dlpack__` and capsules elsewhere. It supports PyTorch 2.9, the first version with the `__dlpack__` of DLPack 1.0,
//! and later, and is tested with 2.11.
//!
//! With the feature `tch`, `Tch` exports and imports the tensors of the crate `tch`, without Python, through the C
//! functions of libtorch. `Tch` lists the versions that it compiles with.
//!
//! Both do what PyTorch leaves to its callers: neither the exchange API nor the C functions check `requires_grad` and
//! the conj and neg bits, and no export records the stream that uses the memory with the caching allocator.
//!
//! | feature | what it adds |
//! |---|---|
//! | `python` (default) | `Torch`, over pyo3 |
//! | `tch` | `Tch`, over `tch` |
//! | `doc-only` | type-checks `tch` where there is no libtorch, for docs.rs and lints; a program does not build with it |

#[cfg(all(doctest, feature = "python"))]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(feature = "python")]
mod allocator;
#[cfg(feature = "python")]
mod borrow;
#[cfg(feature = "python")]
mod capsule;
#[cfg(feature = "python")]
mod counter;
#[cfg(feature = "python")]
mod describe;
#[cfg(feature = "python")]
mod exchange;
#[cfg(feature = "python")]
mod export;
#[cfg(feature = "python")]
mod fingerprint;
#[cfg(any(feature = "python", feature = "tch"))]
mod fork;
#[cfg(feature = "python")]
mod fresh;
#[cfg(feature = "python")]
mod import;
#[cfg(feature = "python")]
mod keep_alive;
#[cfg(any(feature = "python", feature = "tch"))]
mod library;
#[cfg(any(feature = "python", feature = "tch"))]
mod memory;
#[cfg(feature = "python")]
mod native;
#[cfg(feature = "python")]
mod python;
#[cfg(any(feature = "python", feature = "tch"))]
mod record;
#[cfg(feature = "python")]
mod refusal;
#[cfg(feature = "python")]
mod runtime;
#[cfg(feature = "python")]
mod settled;
#[cfg(feature = "tch")]
mod tch;
#[cfg(feature = "python")]
mod watched;

#[cfg(feature = "tch")]
pub use crate::tch::Tch;
/// The crate `tch`, in the version that this adapter takes: a program that names it by this path cannot have another.
#[doc(no_inline)]
#[cfg(feature = "tch")]
pub use ::tch as framework;
#[cfg(feature = "python")]
pub use python::Torch;

/// Wraps an exception.
#[cfg(feature = "python")]
pub(crate) fn raised(py: pyo3::Python<'_>, error: pyo3::PyErr) -> bridge_core::Error {
    bridge_pyo3::framework_error(py, "torch", error)
}
