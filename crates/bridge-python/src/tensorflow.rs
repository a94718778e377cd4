//! What the Python module `tensor_bridge.tensorflow` stands on: tensors at the edges of TensorFlow's graphs.

use crate::errors::into_python;
use crate::frameworks::{Framework, source};
use crate::options;
use bridge_core::{Error, ErrorKind};
use bridge_pyo3::PyTensor;
use bridge_tensorflow::{External, PyGraph};
use pyo3::prelude::*;

/// A tensor that is fed to graphs as long as this object lives.
#[pyclass(frozen, module = "tensor_bridge")]
pub(crate) struct Feed(External);

#[pymethods]
impl Feed {
    /// The two numbers that stand for it in a graph.
    #[getter]
    fn handle(&self) -> [i32; 2] {
        self.0.handle()
    }
}

/// Registers the operations for graphs.
#[pyfunction]
pub(crate) fn tensorflow_operations(py: Python<'_>) -> PyResult<()> {
    PyGraph::of_process(py).map(drop).map_err(|error| into_python(py, error))
}

/// Feeds ``x`` to graphs.
#[pyfunction]
pub(crate) fn tensorflow_feed(x: &PyTensor<'_>, copy: Option<bool>) -> PyResult<Feed> {
    let py = x.py();
    let cross = || {
        let (from, graph) = (source(x)?, PyGraph::of_process(py)?);
        bridge_core::transfer(&*from, &graph, x, bridge_cuda::ordering(), &options(copy, None)?)
    };
    cross().map(|(external, _)| Feed(external)).map_err(|error| into_python(py, error))
}

/// The tensor that a graph has given under this handle, as one of ``target``.
#[pyfunction]
pub(crate) fn tensorflow_take<'py>(
    py: Python<'py>,
    handle: [i32; 2],
    target: &PyTensor<'py>,
) -> PyResult<PyTensor<'py>> {
    let cross = || {
        let (graph, to) = (PyGraph::of_process(py)?, Framework::named(target)?.open(py)?);
        let fetched = External::take(handle)?;
        match bridge_core::transfer(&graph, &*to, &fetched, bridge_cuda::ordering(), &options(None, None)?) {
            Ok((tensor, _)) => Ok(tensor),
            Err(error) => {
                fetched.put_back();
                Err(error)
            }
        }
    };
    cross().map_err(|error: Error| match error.kind() {
        ErrorKind::ReadOnly => {
            let text = "what was fetched is read-only memory: take it as \"numpy\" or \"tensorflow\", which keep it so";
            into_python(py, Error::new(ErrorKind::ReadOnly, text))
        }
        _ => into_python(py, error),
    })
}
