//! TensorFlow 1.x beside other frameworks in one Python process, which need not be the Python that it was made for.

use crate::PyGraph;
use crate::graph::external::External;
use crate::runtime::Runtime;
use crate::runtime::library::Series;
use bridge_core::{Access, Adapter, Consumer, Error, ErrorKind, Lease, Lent, Profile, Result};
use bridge_pyo3::{PyAdapter, PyTensor, framework_error};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::path::Path;
use std::sync::Arc;

/// Names the folder of the package where nobody has opened one.
const FOLDER: &str = "TENSOR_BRIDGE_TENSORFLOW1";

/// A tensor of TensorFlow 1.x, as a Python object: one that can be fed to sessions, or one that a session has given.
#[pyclass(frozen, module = "tensor_bridge.tensorflow1")]
pub struct Tensor(External);

impl Tensor {
    /// The object for a tensor.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Framework`] with what Python reports.
    pub fn wrap(py: Python<'_>, external: External) -> Result<PyTensor<'_>> {
        let object = Bound::new(py, Self(external)).map_err(|error| framework_error(py, "python", error))?;
        Ok(object.into_any())
    }

    /// The tensor.
    pub fn external(&self) -> &External {
        &self.0
    }
}

#[pymethods]
impl Tensor {
    /// The two numbers that stand for it in a graph.
    #[getter]
    fn handle(&self) -> [i32; 2] {
        self.0.handle()
    }

    /// The name of the element type.
    #[getter]
    fn dtype(&self) -> String {
        self.0.dtype().to_string()
    }

    /// Lengths, in elements.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.shape())
    }

    /// Where it is, as ``cpu`` or ``cuda:0``.
    #[getter]
    fn device(&self) -> String {
        self.0.device().to_string()
    }

    /// Address of the first element. The memory is compact.
    #[getter]
    fn address(&self) -> usize {
        self.0.address()
    }

    /// Whether the memory is another framework's, who lets nobody write to it.
    #[getter]
    fn read_only(&self) -> bool {
        self.0.access() == Access::ReadOnly
    }

    fn __repr__(&self) -> String {
        format!("<Tensor: {} {:?} on {}>", self.0.dtype(), self.0.shape(), self.0.device())
    }
}

/// TensorFlow 1.x in this process.
#[derive(Clone, Copy)]
pub struct TensorFlow1<'py> {
    py: Python<'py>,
    graph: PyGraph<'py>,
}

impl<'py> TensorFlow1<'py> {
    /// The TensorFlow 1.x that was opened, or the one in the folder that `TENSOR_BRIDGE_TENSORFLOW1` names.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] if there is none, and those of [`Runtime::open_as`] and [`Graph::new`](crate::Graph::new).
    pub fn new(py: Python<'py>) -> Result<Self> {
        let runtime = match Runtime::in_slot(Series::One as usize) {
            Some(runtime) => runtime,
            // Loading takes its time, and initialisers of libraries may wait for others.
            None => py.detach(open)?,
        };
        Ok(Self { py, graph: PyGraph::new(py, runtime)? })
    }

    /// Whether one is open: before that there is no tensor of it.
    pub fn is_open() -> bool {
        Runtime::in_slot(Series::One as usize).is_some()
    }

    /// The runtime.
    pub fn runtime(&self) -> &'static Runtime {
        self.graph.runtime()
    }
}

fn open() -> Result<&'static Runtime> {
    match (Runtime::loaded(Series::One), std::env::var_os(FOLDER)) {
        (Err(error), Some(folder)) if error.kind() == ErrorKind::Missing => {
            Runtime::open_as(Series::One, Path::new(&folder))
        }
        (Err(error), None) if error.kind() == ErrorKind::Missing => {
            let text =
                format!("no TensorFlow 1.x is open: call tensor_bridge.tensorflow1.open(folder), or set {FOLDER}");
            Err(Error::new(ErrorKind::Missing, text))
        }
        (loaded, _) => loaded,
    }
}

fn external<'a>(tensor: &'a PyTensor<'_>) -> Result<&'a Bound<'a, Tensor>> {
    tensor.cast::<Tensor>().map_err(|_| {
        Error::new(ErrorKind::NotATensor, "this is no tensor of TensorFlow 1.x: convert it to \"tensorflow1\" first")
    })
}

impl<'py> Adapter for TensorFlow1<'py> {
    type Tensor = PyTensor<'py>;

    fn profile(&self) -> &Profile {
        &self.graph.runtime().profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.graph.consumer()
    }

    fn export(&self, tensor: &PyTensor<'py>) -> Result<Lent> {
        self.graph.export(external(tensor)?.get().external())
    }

    fn import(&self, lease: Lease) -> Result<PyTensor<'py>> {
        Tensor::wrap(self.py, self.graph.import(lease)?)
    }

    fn compact(&self, tensor: &PyTensor<'py>) -> Result<PyTensor<'py>> {
        Tensor::wrap(self.py, self.graph.compact(external(tensor)?.get().external())?)
    }
}

impl<'py> PyAdapter<'py> for TensorFlow1<'py> {
    fn owns(&self, object: &PyTensor<'py>) -> bool {
        object.is_instance_of::<Tensor>()
    }
}
