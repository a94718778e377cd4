//! The TensorFlow adapter.
//!
//! It takes TensorFlow as the Python package brings it: no headers, no C++ ABI. Functions are looked up by name in the
//! libraries that are loaded ([`Runtime`]), which are those of 2.12 or later; 2.21 is what is tested on a GPU.
//!
//! With the feature `python`, [`TensorFlow2`] lends and wraps eager tensors through the C interface of the eager runtime.
//! TensorFlow computes in one stream per GPU and never asks for another. The adapter learns that stream once, from a
//! kernel of its own, and orders handoff and release in it. Neither makes the host wait.
//!
//! [`Graph`] is the same for graphs, where tensors have no memory yet: it feeds a tensor under a handle and takes one that
//! a run has fetched, through two operations that the adapter registers.

#![cfg_attr(not(feature = "python"), allow(dead_code, reason = "so far the eager runtime is used from Python alone"))]

mod api;
mod devices;
mod dtypes;
mod eager;
mod graph;
mod kernel;
mod library;
mod release;
mod runtime;

#[cfg(feature = "python")]
mod export;
#[cfg(feature = "python")]
mod import;
#[cfg(feature = "python")]
mod process;

pub use graph::External;
#[cfg(feature = "python")]
pub use python::{Graph, TensorFlow2};
pub use runtime::{Capabilities, Runtime};

#[cfg(feature = "python")]
mod python {
    use crate::graph::External;
    use crate::process::Process;
    use crate::{export, import};
    use bridge_core::{Adapter, Consumer, Error, ErrorKind, Lease, Lent, Profile, Result};
    use bridge_pyo3::{PyAdapter, PyTensor};
    use pyo3::Python;
    use std::sync::Arc;

    /// TensorFlow 2 in this process, executing eagerly.
    #[derive(Clone, Copy)]
    pub struct TensorFlow2<'py> {
        py: Python<'py>,
        process: &'static Process,
    }

    impl<'py> TensorFlow2<'py> {
        /// Imports TensorFlow, the first time, and looks at what it can do. It does not set up devices yet: TensorFlow
        /// does that when its first tensor is made or seen.
        ///
        /// # Errors
        ///
        /// [`Missing`](bridge_core::ErrorKind::Missing) if TensorFlow is not installed, and
        /// [`Version`](bridge_core::ErrorKind::Version) if it is older than 2.12.
        pub fn new(py: Python<'py>) -> Result<Self> {
            Ok(Self { py, process: Process::get(py)? })
        }
    }

    impl<'py> Adapter for TensorFlow2<'py> {
        type Tensor = PyTensor<'py>;

        fn profile(&self) -> &Profile {
            &self.process.profile
        }

        fn consumer(&self) -> Arc<dyn Consumer> {
            self.process.consumer.clone()
        }

        fn export(&self, tensor: &PyTensor<'py>) -> Result<Lent> {
            export::lend(self.process, tensor)
        }

        fn import(&self, lease: Lease) -> Result<PyTensor<'py>> {
            import::wrap(self.py, self.process, lease)
        }

        fn compact(&self, tensor: &PyTensor<'py>) -> Result<PyTensor<'py>> {
            export::compact(self.process, tensor)
        }
    }

    impl<'py> PyAdapter<'py> for TensorFlow2<'py> {
        fn owns(&self, object: &PyTensor<'py>) -> bool {
            let process = self.process;
            process.is_eager(object) || process.is_variable(object) || process.refusal(object).is_some()
        }
    }

    /// The edges of TensorFlow's graphs: importing feeds a tensor, exporting lends one that was fetched.
    #[derive(Clone, Copy)]
    pub struct Graph(&'static Process);

    impl Graph {
        /// Registers the operations, the first time.
        ///
        /// # Errors
        ///
        /// As for [`TensorFlow2::new`], and [`Argument`](ErrorKind::Argument) if another copy of this crate in the
        /// process has registered them.
        pub fn new(py: Python<'_>) -> Result<Self> {
            let process = Process::get(py)?;
            process.register_operations(py)?;
            Ok(Self(process))
        }
    }

    impl Adapter for Graph {
        type Tensor = External;

        fn profile(&self) -> &Profile {
            &self.0.profile
        }

        fn consumer(&self) -> Arc<dyn Consumer> {
            self.0.consumer.clone()
        }

        fn export(&self, fetched: &External) -> Result<Lent> {
            fetched.lend(|address| self.0.consumer.read_only.contains(address))
        }

        fn import(&self, lease: Lease) -> Result<External> {
            Ok(External::feed(import::fed(self.0, lease)?))
        }

        fn compact(&self, _: &External) -> Result<External> {
            let text = "a fetched tensor is taken in place: copy it with the framework that takes it";
            Err(Error::new(ErrorKind::Argument, text))
        }
    }
}
