//! The TensorFlow adapter.
//!
//! It takes TensorFlow as the Python package brings it: no headers, no C++ ABI. Functions are looked up by name in the
//! libraries that are loaded ([`Runtime`]), which are those of 1.15, of 2.12 or later, or both at once; 1.15.5 and 2.21
//! are what is tested on a GPU. They are those that Python has loaded, or are opened without Python.
//!
//! With the feature `python`, [`TensorFlow2`] lends and wraps eager tensors through the C interface of the eager runtime.
//! TensorFlow computes in one stream per GPU and never asks for another. The adapter learns that stream once, from a
//! kernel of its own, and orders handoff and release in it. Neither makes the host wait.
//!
//! [`Graph`] is the same for graphs, where tensors have no memory yet: it feeds a tensor under a handle and takes one that
//! a run has fetched, through two operations that the adapter registers. A [`Session`] loads a graph that was saved, and
//! runs it.

#![cfg_attr(not(feature = "python"), allow(dead_code, reason = "so far the eager runtime is used from Python alone"))]

mod eager;
mod graph;
mod runtime;

pub use graph::config::SessionOptions;
pub use graph::edges::Graph;
pub use graph::external::External;
#[cfg(feature = "python")]
pub use graph::python::{Tensor, TensorFlow1};
pub use graph::session::{Input, Session};
#[cfg(feature = "python")]
pub use python::{PyGraph, TensorFlow2};
pub use runtime::library::Series;
pub use runtime::{Capabilities, Runtime};

#[cfg(feature = "python")]
mod python {
    use crate::eager::process::{Process, exhausted};
    use crate::eager::{export, import};
    use crate::graph::edges::Graph;
    use crate::graph::external::External;
    use crate::runtime::Runtime;
    use bridge_core::{Adapter, Consumer, Lease, Lent, Profile, Result};
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
            self.process.runtime.consumer.clone()
        }

        fn export(&self, tensor: &PyTensor<'py>) -> Result<Lent> {
            export::lend(self.process, tensor).map_err(|error| exhausted(self.py, error))
        }

        fn import(&self, lease: Lease) -> Result<PyTensor<'py>> {
            import::wrap(self.py, self.process, lease).map_err(|error| exhausted(self.py, error))
        }

        fn compact(&self, tensor: &PyTensor<'py>) -> Result<PyTensor<'py>> {
            export::compact(self.process, tensor).map_err(|error| exhausted(self.py, error))
        }
    }

    impl<'py> PyAdapter<'py> for TensorFlow2<'py> {
        fn owns(&self, object: &PyTensor<'py>) -> bool {
            let process = self.process;
            process.is_eager(object) || process.is_variable(object) || process.refusal(object).is_some()
        }
    }

    /// The edges of graphs, on a thread that holds the GIL: it is released while a copy is made, for which a session
    /// runs on a GPU.
    #[derive(Clone, Copy)]
    pub struct PyGraph<'py> {
        py: Python<'py>,
        graph: Graph,
    }

    impl<'py> PyGraph<'py> {
        /// The edges of the graphs of a runtime.
        ///
        /// # Errors
        ///
        /// As for [`Graph::new`].
        pub fn new(py: Python<'py>, runtime: &'static Runtime) -> Result<Self> {
            Ok(Self { py, graph: Graph::new(runtime)? })
        }

        /// The edges of the graphs of the TensorFlow 2 in this Python process.
        ///
        /// # Errors
        ///
        /// As for [`TensorFlow2::new`] and [`Graph::new`].
        pub fn of_process(py: Python<'py>) -> Result<Self> {
            Self::new(py, Process::get(py)?.runtime)
        }

        /// The runtime.
        pub fn runtime(&self) -> &'static Runtime {
            self.graph.runtime()
        }
    }

    impl Adapter for PyGraph<'_> {
        type Tensor = External;

        fn profile(&self) -> &Profile {
            self.graph.profile()
        }

        fn consumer(&self) -> Arc<dyn Consumer> {
            self.graph.consumer()
        }

        fn export(&self, tensor: &External) -> Result<Lent> {
            self.graph.export(tensor)
        }

        fn import(&self, lease: Lease) -> Result<External> {
            self.graph.import(lease)
        }

        fn compact(&self, tensor: &External) -> Result<External> {
            let graph = self.graph;
            self.py.detach(|| graph.compact(tensor))
        }
    }
}
