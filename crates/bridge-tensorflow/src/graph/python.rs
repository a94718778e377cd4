//! The adapters for graphs whose tensors are Python objects. The Python need not be the one that TensorFlow was made
//! for.

use crate::graph::edges::GraphEdges;
use crate::graph::external::External;
use crate::runtime::Runtime;
use crate::runtime::library::Series;
use bridge_core::{Access, Adapter, Consumer, Error, ErrorKind, Export, Offer, Profile, Result};
use bridge_pyo3::{PyAdapter, PyTensor, framework_error};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::path::Path;
use std::sync::Arc;

/// [`GraphEdges`] on a thread that holds the GIL, which a copy releases: on a GPU it runs a session.
#[derive(Clone, Copy)]
pub struct PyGraphEdges<'py> {
    py: Python<'py>,
    edges: GraphEdges,
}

bridge_core::debug_fields!(impl[] PyGraphEdges<'_>: edges);

impl<'py> PyGraphEdges<'py> {
    /// Registers the operations of a runtime, the first time.
    ///
    /// # Errors
    ///
    /// As for [`GraphEdges::new`].
    pub fn new(py: Python<'py>, runtime: &'static Runtime) -> Result<Self> {
        Ok(Self { py, edges: GraphEdges::new(runtime)? })
    }

    /// The runtime.
    pub fn runtime(&self) -> &'static Runtime {
        self.edges.runtime()
    }
}

// SAFETY: it does what the inner adapter does, or TensorFlow keeps the lease with the buffer and never writes to it.
unsafe impl Adapter for PyGraphEdges<'_> {
    type Tensor = External;

    fn profile(&self) -> &Profile {
        self.edges.profile()
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.edges.consumer()
    }

    fn export(&self, tensor: &External) -> Result<Export> {
        self.edges.export(tensor)
    }

    fn import(&self, offer: Offer) -> Result<External> {
        self.edges.import(offer)
    }

    fn compact(&self, tensor: &External) -> Result<External> {
        let edges = self.edges;
        self.py.detach(|| edges.compact(tensor))
    }
}

/// The environment variable that names the folder of the package, if the program has opened none.
const FOLDER: &str = "TRUEBRIDGE_TENSORFLOW1";

/// A tensor of TensorFlow 1.x. ``tensorflow.v1.Session.run`` and ``convert(x, "tensorflow1")`` return it.
///
/// Attributes
/// ----------
/// handle : list of int
///     The two numbers that stand for it in a graph.
/// dtype : str
///     Such as ``"float32"``.
/// shape : tuple of int
///     Lengths, in elements. The memory is row-major and without gaps.
/// device : str
///     Such as ``"cpu"`` or ``"cuda:0"``.
/// address : int
///     Of the first element.
/// read_only : bool
///     Whether it is read-only memory of another framework.
#[pyclass(frozen, module = "truebridge.tensorflow.v1", name = "Tensor")]
#[derive(Debug)]
pub struct PyExternal(External);

impl PyExternal {
    /// Returns the object for a tensor.
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
impl PyExternal {
    /// The handle that stands for it in a graph: two numbers.
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

    /// The device, such as ``cpu`` or ``cuda:0``.
    #[getter]
    fn device(&self) -> String {
        self.0.device().to_string()
    }

    /// Address of the first element. The memory is compact.
    #[getter]
    fn address(&self) -> usize {
        self.0.address()
    }

    /// Whether the memory is read-only memory of another framework.
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
    edges: PyGraphEdges<'py>,
}

bridge_core::debug_fields!(impl[] TensorFlow1<'_>: edges);

impl<'py> TensorFlow1<'py> {
    /// Returns the TensorFlow 1.x that was opened. Otherwise, opens the one in the folder that
    /// `TRUEBRIDGE_TENSORFLOW1` names.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] if there is none, and those of [`Runtime::open_as`] and [`GraphEdges::new`].
    pub fn new(py: Python<'py>) -> Result<Self> {
        let runtime = match Runtime::in_slot(Series::One as usize) {
            Some(runtime) => runtime,
            // Without the GIL: loading takes seconds, and initialisers may wait for a thread that needs the GIL.
            None => py.detach(open)?,
        };
        Ok(Self { py, edges: PyGraphEdges::new(py, runtime)? })
    }

    /// Returns whether one is open: before that it has no tensors.
    pub fn is_open() -> bool {
        Runtime::in_slot(Series::One as usize).is_some()
    }

    /// The runtime.
    pub fn runtime(&self) -> &'static Runtime {
        self.edges.runtime()
    }
}

fn open() -> Result<&'static Runtime> {
    match (Runtime::loaded(Series::One), std::env::var_os(FOLDER)) {
        (Err(error), Some(folder)) if error.kind() == ErrorKind::Missing => {
            // SAFETY: the variable names the folder of a TensorFlow, as its documentation asks: a program of Python may
            // load any library.
            unsafe { Runtime::open_as(Series::One, Path::new(&folder)) }
        }
        (Err(error), None) if error.kind() == ErrorKind::Missing => {
            let text =
                format!("no TensorFlow 1.x is open: call truebridge.tensorflow.v1.open(folder), or set {FOLDER}");
            Err(Error::new(ErrorKind::Missing, text))
        }
        (loaded, _) => loaded,
    }
}

fn external<'a>(tensor: &'a PyTensor<'_>) -> Result<&'a Bound<'a, PyExternal>> {
    tensor.cast::<PyExternal>().map_err(|_| {
        Error::new(ErrorKind::NotATensor, "this is not a tensor of TensorFlow 1.x: convert it to \"tensorflow1\" first")
    })
}

// SAFETY: it does what the inner adapter does, or TensorFlow keeps the lease with the buffer and never writes to it.
unsafe impl<'py> Adapter for TensorFlow1<'py> {
    type Tensor = PyTensor<'py>;

    fn profile(&self) -> &Profile {
        &self.edges.runtime().profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.edges.consumer()
    }

    fn export(&self, tensor: &PyTensor<'py>) -> Result<Export> {
        self.edges.export(external(tensor)?.get().external())
    }

    fn import(&self, offer: Offer) -> Result<PyTensor<'py>> {
        PyExternal::wrap(self.py, self.edges.import(offer)?)
    }

    fn compact(&self, tensor: &PyTensor<'py>) -> Result<PyTensor<'py>> {
        PyExternal::wrap(self.py, self.edges.compact(external(tensor)?.get().external())?)
    }
}

impl<'py> PyAdapter<'py> for TensorFlow1<'py> {
    fn owns(&self, object: &PyTensor<'py>) -> bool {
        object.is_instance_of::<PyExternal>()
    }
}
