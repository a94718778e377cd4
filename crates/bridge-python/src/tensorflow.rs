//! The Rust side of the Python module `truebridge.tensorflow`: tensors at the edges of TensorFlow's graphs.

use crate::errors::into_python;
use crate::frameworks::{Framework, named, source};
use crate::{conversions, trace};
use bridge_core::{Options, Result};
use bridge_pyo3::PyTensor;
use bridge_tensorflow::{External, PyGraphEdges, TensorFlow2};
use pyo3::prelude::*;

/// A tensor that can be fed to graphs as long as this object lives.
#[pyclass(frozen, module = "truebridge")]
pub(crate) struct Feed(External);

#[pymethods]
impl Feed {
    /// The handle that stands for it in a graph: two numbers.
    #[getter]
    fn handle(&self) -> [i32; 2] {
        self.0.handle()
    }
}

/// The adapter for the edges of this process's graphs. Registers its operations, the first time.
fn edges(py: Python<'_>) -> Result<PyGraphEdges<'_>> {
    PyGraphEdges::new(py, TensorFlow2::new(py)?.runtime())
}

/// Registers the operations for graphs.
#[pyfunction]
pub(crate) fn tensorflow_operations(py: Python<'_>) -> PyResult<()> {
    edges(py).map(drop).map_err(|error| into_python(py, error))
}

/// Imports ``x`` as a tensor to be fed.
#[pyfunction]
pub(crate) fn tensorflow_feed(
    x: &PyTensor<'_>,
    #[pyo3(from_py_with = crate::options::copy)] copy: Option<bool>,
) -> PyResult<Feed> {
    let py = x.py();
    let convert = |call: Option<&trace::Call>| {
        let (from, edges) = (source(x)?, edges(py)?);
        conversions::transfer(call, &*from, &edges, x, &Options::default().with_copy(copy))
    };
    trace::call("feed", || Framework::TensorFlow.name(), convert).map(Feed).map_err(|error| into_python(py, error))
}

/// Takes the fetched tensor of a handle, as one of ``target``.
#[pyfunction]
pub(crate) fn tensorflow_take<'py>(
    py: Python<'py>,
    handle: [i32; 2],
    target: &PyTensor<'py>,
) -> PyResult<PyTensor<'py>> {
    let convert = |call: Option<&trace::Call>| {
        let target = named(target)?;
        call.iter().for_each(|call| call.to(target.name()));
        let (edges, to) = (edges(py)?, target.open(py)?);
        // Without the GIL: on a GPU a copy runs a session.
        let fetched = py.detach(|| External::take(handle))?;
        conversions::transfer(call, &edges, &*to, &fetched, &Options::default()).inspect_err(|_| fetched.put_back())
    };
    trace::call("take", || "", convert).map_err(|error| into_python(py, error))
}
