//! Variants of a framework: the allocators that it documents and its modes, each chosen by the environment of a worker.
//!
//! A variant is named by the adapter's name and its own, such as `torch+uncached`, in options, reports, expectations
//! and kept cases. So a kept case is replayed under the allocator with which it failed.
//!
//! A framework in another process is named likewise: `torch+remote`.

use crate::names::{MARK, adapter_of, in_other_process};
use bridge_core::{Device, DeviceKind};
use bridge_frameworks::Framework;

/// One variant of a framework's adapter. All but `EXTRA` concern memory of CUDA devices.
#[derive(Debug, Clone, Copy)]
pub struct Variant {
    /// The framework.
    pub framework: Framework,
    /// Its name.
    pub name: &'static str,
    /// Variables of a worker's environment. Those that begin with `CONFORMANCE_` are read by the suite's own Python
    /// package, for allocators that a framework takes by a call.
    pub environment: &'static [(&'static str, &'static str)],
    /// Whether another process can open its memory in place. Of pools that are not made to be shared, and of managed
    /// memory, it gets a copy.
    pub is_shared: bool,
}

macro_rules! variants {
    ($($framework:ident, $name:literal, $shared:ident: $($variable:literal = $value:literal),+;)*) => {
        /// Every variant.
        pub const VARIANTS: &[Variant] = &[$(Variant {
            framework: Framework::$framework,
            name: $name,
            environment: &[$(($variable, $value)),+],
            is_shared: $shared,
        },)*];
    };
}

const SHARED: bool = true;
const COPIED: bool = false;

// PyTorch 2.9 and later read `PYTORCH_ALLOC_CONF`, those before it the other.
variants! {
    Torch, "expandable", SHARED: "PYTORCH_ALLOC_CONF" = "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF" = "expandable_segments:True";
    Torch, "async", COPIED: "PYTORCH_ALLOC_CONF" = "backend:cudaMallocAsync",
        "PYTORCH_CUDA_ALLOC_CONF" = "backend:cudaMallocAsync";
    Torch, "uncached", SHARED: "PYTORCH_NO_CUDA_MEMORY_CACHING" = "1";
    Torch, "pluggable", SHARED: "CONFORMANCE_TORCH_ALLOCATOR" = "pluggable";
    CuPy, "uncached", SHARED: "CONFORMANCE_CUPY_ALLOCATOR" = "uncached";
    CuPy, "async", COPIED: "CONFORMANCE_CUPY_ALLOCATOR" = "async";
    CuPy, "managed", COPIED: "CONFORMANCE_CUPY_ALLOCATOR" = "managed";
    CuPy, "shared", SHARED: "CONFORMANCE_CUPY_ALLOCATOR" = "shared";
    TensorFlow, "async", COPIED: "TF_GPU_ALLOCATOR" = "cuda_malloc_async";
    JAX, "x32", SHARED: "JAX_ENABLE_X64" = "0";
    Torch, "package", SHARED: "CONFORMANCE_PACKAGE" = "1";
}

/// What every run has next to the plain adapters, each paired with one of them: the path into PyTorch before version
/// 2.10, JAX without elements of 64 bits, as it is by default, PyTorch by the calls of the Python package, and capsules
/// without a version.
pub const EXTRA: [&str; 4] = ["torch-capsules", "jax+x32", "torch+package", "dlpack-legacy"];

/// Returns the plain adapter that [`EXTRA`] are paired with.
pub fn beside(device: Device) -> &'static str {
    if device.kind == DeviceKind::CPU { Framework::NumPy.name() } else { Framework::CuPy.name() }
}

/// Returns whether another process can open memory of this adapter in place.
pub fn is_shared(name: &str) -> bool {
    Variant::named(name).is_none_or(|variant| variant.is_shared)
}

impl Variant {
    /// Returns the name of the adapter.
    pub fn adapter(&self) -> &'static str {
        self.framework.name()
    }

    /// Returns the adapter's name and its own.
    pub fn full_name(&self) -> String {
        format!("{}{MARK}{}", self.adapter(), self.name)
    }

    /// Returns the variant with this full name.
    pub fn named(name: &str) -> Option<&'static Self> {
        let (adapter, variant) = name.split_once(MARK)?;
        VARIANTS.iter().find(|known| (known.adapter(), known.name) == (adapter, variant))
    }
}

/// Returns the variables of a worker's environment for these adapters.
pub fn environment<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<(&'static str, &'static str)> {
    names.into_iter().filter_map(Variant::named).flat_map(|variant| variant.environment.iter().copied()).collect()
}

/// Returns whether one process can have both: a framework has one allocator in it.
pub fn agree(from: &str, to: &str) -> bool {
    let elsewhere = [from, to].iter().any(|name| in_other_process(name).is_some());
    elsewhere || adapter_of(from) != adapter_of(to) || from == to
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::remote;
    use std::collections::BTreeSet;

    #[test]
    fn every_variant_is_one_of_a_framework_on_cuda_devices() {
        for variant in VARIANTS {
            assert!(variant.framework.devices().contains(&DeviceKind::CUDA), "{variant:?}");
            assert!(!variant.environment.is_empty(), "{variant:?}");
            assert_eq!(Variant::named(&variant.full_name()).map(Variant::full_name), Some(variant.full_name()));
        }
        let names: BTreeSet<_> = VARIANTS.iter().map(Variant::full_name).collect();
        assert_eq!(names.len(), VARIANTS.len());
        assert!(is_shared("cupy") && is_shared("cupy+shared") && !is_shared("cupy+async"));
    }

    #[test]
    fn names_are_taken_apart() {
        assert_eq!((adapter_of("torch+async"), adapter_of("torch-capsules")), ("torch", "torch-capsules"));
        assert!(Variant::named("torch").is_none() && Variant::named("torch+bfc").is_none());
        assert_eq!(environment(["cupy+managed", "torch"]), [("CONFORMANCE_CUPY_ALLOCATOR", "managed")]);
        assert!(agree("torch+async", "cupy") && agree("torch+async", "torch+async") && agree("torch", "torch"));
        assert!(!agree("torch+async", "torch") && !agree("torch+async", "torch+uncached"));
    }

    #[test]
    fn a_name_says_whether_the_framework_is_in_another_process() {
        assert_eq!((in_other_process(&remote("torch")), adapter_of(&remote("torch"))), (Some("torch"), "torch"));
        assert!(in_other_process("torch").is_none() && in_other_process("torch+async").is_none());
        assert!(agree("torch", "torch+remote") && environment(["torch+remote"]).is_empty());
    }
}
