//! Variants of a framework: the allocators that it documents, each chosen by the environment of a worker.
//!
//! A variant goes by the adapter's name and its own, such as `torch+uncached`: in options, reports, expectations and
//! kept cases alike. So a kept case is replayed under the allocator that it failed under.

/// One variant of an adapter. All of them are about memory of CUDA devices.
#[derive(Debug, Clone, Copy)]
pub struct Variant {
    /// The adapter.
    pub adapter: &'static str,
    /// Its name.
    pub name: &'static str,
    /// What is set in the environment of a worker. Variables that begin with `CONFORMANCE_` are read by the suite's own
    /// Python package, for allocators that a framework takes by a call.
    pub environment: &'static [(&'static str, &'static str)],
}

/// Stands between the name of an adapter and that of a variant.
const MARK: char = '+';

macro_rules! variants {
    ($($adapter:literal, $name:literal: $($variable:literal = $value:literal),+;)*) => {
        /// Every variant.
        pub const VARIANTS: &[Variant] = &[$(Variant {
            adapter: $adapter,
            name: $name,
            environment: &[$(($variable, $value)),+],
        },)*];
    };
}

// PyTorch 2.9 and later read `PYTORCH_ALLOC_CONF`, those before it the other.
variants! {
    "torch", "expandable": "PYTORCH_ALLOC_CONF" = "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF" = "expandable_segments:True";
    "torch", "async": "PYTORCH_ALLOC_CONF" = "backend:cudaMallocAsync",
        "PYTORCH_CUDA_ALLOC_CONF" = "backend:cudaMallocAsync";
    "torch", "uncached": "PYTORCH_NO_CUDA_MEMORY_CACHING" = "1";
    "torch", "pluggable": "CONFORMANCE_TORCH_ALLOCATOR" = "pluggable";
    "cupy", "uncached": "CONFORMANCE_CUPY_ALLOCATOR" = "uncached";
    "cupy", "async": "CONFORMANCE_CUPY_ALLOCATOR" = "async";
    "cupy", "managed": "CONFORMANCE_CUPY_ALLOCATOR" = "managed";
    "tensorflow", "async": "TF_GPU_ALLOCATOR" = "cuda_malloc_async";
}

impl Variant {
    /// The adapter's name and its own.
    pub fn full_name(&self) -> String {
        format!("{}{MARK}{}", self.adapter, self.name)
    }

    /// The variant that a full name means.
    pub fn named(name: &str) -> Option<&'static Self> {
        let (adapter, variant) = name.split_once(MARK)?;
        VARIANTS.iter().find(|known| (known.adapter, known.name) == (adapter, variant))
    }
}

/// The adapter's name, without that of a variant.
pub fn adapter_of(name: &str) -> &str {
    name.split_once(MARK).map_or(name, |(adapter, _)| adapter)
}

/// What is set in the environment of a worker for these adapters.
pub fn environment<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<(&'static str, &'static str)> {
    names.into_iter().filter_map(Variant::named).flat_map(|variant| variant.environment.iter().copied()).collect()
}

/// Whether a process can have both: a framework in it has one allocator.
pub fn agree(from: &str, to: &str) -> bool {
    adapter_of(from) != adapter_of(to) || from == to
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::KNOWN;
    use bridge_core::DeviceKind;
    use std::collections::BTreeSet;

    #[test]
    fn every_variant_is_one_of_a_known_adapter_on_cuda_devices() {
        for variant in VARIANTS {
            let known = KNOWN.iter().find(|known| known.name == variant.adapter).expect("it is known");
            assert!(known.devices.contains(&DeviceKind::CUDA), "{variant:?}");
            assert!(!variant.environment.is_empty(), "{variant:?}");
            assert_eq!(Variant::named(&variant.full_name()).map(Variant::full_name), Some(variant.full_name()));
        }
        let names: BTreeSet<_> = VARIANTS.iter().map(Variant::full_name).collect();
        assert_eq!(names.len(), VARIANTS.len());
    }

    #[test]
    fn names_are_taken_apart() {
        assert_eq!((adapter_of("torch+async"), adapter_of("torch-capsules")), ("torch", "torch-capsules"));
        assert!(Variant::named("torch").is_none() && Variant::named("torch+bfc").is_none());
        assert_eq!(environment(["cupy+managed", "torch"]), [("CONFORMANCE_CUPY_ALLOCATOR", "managed")]);
        assert!(agree("torch+async", "cupy") && agree("torch+async", "torch+async") && agree("torch", "torch"));
        assert!(!agree("torch+async", "torch") && !agree("torch+async", "torch+uncached"));
    }
}
