//! The rows, and the facts that are generated from them.

use crate::{BOTH, CUDA, HOST, Source};
use bridge_core::DeviceKind;

/// Calls a macro with the rows.
macro_rules! rows {
    ($with:ident) => {
        $with! {
        // adapters: begin
        Torch {
            name: "torch",
            aliases: &["pytorch"],
            module: "torch",
            source: Source::Distributions(&["torch"]),
            devices: BOTH,
            adapter: bridge_torch::Torch if "torch",
        }
        CuPy {
            name: "cupy",
            aliases: &["cp"],
            module: "cupy",
            source: Source::Distributions(&["cupy-cuda13x", "cupy-cuda12x", "cupy"]),
            devices: CUDA,
            adapter: bridge_cupy::CuPy if "cupy",
        }
        NumPy {
            name: "numpy",
            aliases: &["np"],
            module: "numpy",
            source: Source::Distributions(&["numpy"]),
            devices: HOST,
            adapter: bridge_numpy::NumPy if "numpy",
        }
        JAX {
            name: "jax",
            aliases: &["jnp"],
            module: "jax",
            source: Source::Distributions(&["jax"]),
            devices: BOTH,
            adapter: bridge_jax::JAX if "jax",
        }
        Paddle {
            name: "paddle",
            aliases: &[],
            module: "paddle",
            source: Source::Distributions(&["paddlepaddle"]),
            devices: HOST,
            adapter: bridge_paddle::Paddle if "paddle",
        }
        // adapters: end
        TensorFlow {
            name: "tensorflow",
            aliases: &["tf", "tf2", "tensorflow2"],
            module: "tensorflow",
            source: Source::Distributions(&["tensorflow", "tensorflow-cpu"]),
            devices: BOTH,
            adapter: bridge_tensorflow::TensorFlow2 if "tensorflow",
        }
        TensorFlow1 {
            name: "tensorflow1",
            aliases: &["tf1"],
            module: "truebridge.tensorflow.v1",
            source: Source::Folder("TRUEBRIDGE_TENSORFLOW1"),
            devices: BOTH,
            adapter: bridge_tensorflow::TensorFlow1 if "tensorflow",
        }
        }
    };
}
#[cfg(feature = "python")]
pub(crate) use rows;

macro_rules! facts {
    ($($variant:ident {
        name: $name:literal,
        aliases: $aliases:expr,
        module: $module:literal,
        source: $source:expr,
        devices: $devices:expr,
        adapter: $package:ident::$adapter:ident if $feature:literal,
    })*) => {
        /// A framework that truebridge has an adapter for. More may come.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Framework {
            $(#[doc = concat!("`", $name, "`.")] $variant,)*
        }

        impl Framework {
            /// Every framework, in the order in which objects are offered to the adapters. A process can import them in
            /// this order: TensorFlow hides CUDA's libraries from what is loaded after it.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name that users pass.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// Other names that people use for it, in lower case.
            pub const fn aliases(self) -> &'static [&'static str] {
                match self {
                    $(Self::$variant => $aliases,)*
                }
            }

            /// The Python module that defines the types of its tensors, itself or in a submodule.
            pub const fn module(self) -> &'static str {
                match self {
                    $(Self::$variant => $module,)*
                }
            }

            /// Where a process finds it.
            pub const fn source(self) -> Source {
                match self {
                    $(Self::$variant => $source,)*
                }
            }

            /// The kinds of device that its tensors can be on.
            pub const fn devices(self) -> &'static [DeviceKind] {
                match self {
                    $(Self::$variant => $devices,)*
                }
            }
        }
    };
}

rows!(facts);

impl Framework {
    /// Returns the framework of this name or alias, in letters of either case.
    pub fn named(name: &str) -> Option<Self> {
        let is_named = |known: &&str| known.eq_ignore_ascii_case(name);
        let of_name = |framework: &Self| is_named(&framework.name()) || framework.aliases().iter().any(is_named);
        Self::ALL.iter().copied().find(of_name)
    }
}
