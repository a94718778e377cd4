//! The table of frameworks: one row for each adapter for Python objects.
//!
//! The Python package and the conformance suite read this table (`table.rs`). A new adapter also has entries elsewhere:
//! `cargo xtask new-adapter` writes them all. Each crate of adapters is a feature. `Framework::open` returns the adapter,
//! or reports [`ErrorKind::Missing`](bridge_core::ErrorKind::Missing) where its feature is off. Without any feature the
//! crate is plain data and depends on neither Python nor a framework.
//!
//! Objects of other frameworks are known by a protocol: DLPack and the array interfaces. Their adapter is `Protocol`.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(feature = "python")]
mod adapters;
#[cfg(feature = "python")]
mod borrower;
#[cfg(feature = "python")]
mod deferred;
#[cfg(feature = "python")]
mod driver;
#[cfg(feature = "python")]
mod interfaces;
#[cfg(feature = "python")]
mod lending;
#[cfg(feature = "python")]
mod loan;
#[cfg(feature = "python")]
mod origin;
#[cfg(feature = "python")]
mod protocol;
#[cfg(feature = "python")]
mod stated;
mod table;
#[cfg(feature = "python")]
mod tensor;
#[cfg(feature = "python")]
mod unsupported;

#[cfg(feature = "python")]
pub use adapters::{AnyAdapter, adapter_of, borrow, seen, source_of};
#[cfg(feature = "python")]
pub use borrower::Named;
#[cfg(feature = "python")]
pub use lending::Lending;
#[cfg(feature = "python")]
pub use loan::Loan;
#[cfg(feature = "python")]
pub use protocol::{Protocol, is_bridge_error};
pub use table::Framework;
#[cfg(feature = "python")]
pub use tensor::Tensor;
#[cfg(feature = "python")]
pub use unsupported::{advice_for_holder, advice_for_target};

use bridge_core::DeviceKind;

/// Where a process finds a framework.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// An installed Python package: the distributions that contain it. The first is the one to install.
    Distributions(&'static [&'static str]),
    /// A folder that this environment variable names.
    Folder(&'static str),
}

/// Host memory, and the memory of CUDA devices.
const BOTH: &[DeviceKind] = &[DeviceKind::CPU, DeviceKind::CUDA];
const HOST: &[DeviceKind] = &[DeviceKind::CPU];
const CUDA: &[DeviceKind] = &[DeviceKind::CUDA];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_and_differ() {
        for framework in Framework::ALL {
            assert_eq!(Framework::named(framework.name()), Some(*framework));
            assert!(!framework.devices().is_empty());
        }
        assert_eq!(Framework::named("mxnet"), None);
    }

    #[test]
    fn aliases_are_found_in_either_case_and_differ() {
        for (alias, framework) in
            [("PyTorch", Framework::Torch), ("tf", Framework::TensorFlow), ("JAX", Framework::JAX)]
        {
            assert_eq!(Framework::named(alias), Some(framework));
        }
        let mut names: Vec<_> = Framework::ALL.iter().map(|framework| framework.name()).collect();
        names.extend(Framework::ALL.iter().flat_map(|framework| framework.aliases()));
        let different: std::collections::HashSet<_> = names.iter().collect();
        assert_eq!(names.len(), different.len());
    }
}
