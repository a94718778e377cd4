//! The Rust side of the Python module `truebridge.jax`: tensors in functions that JAX has compiled.

use crate::conversions;
use crate::errors::into_python;
use crate::frameworks::{Framework, source};
use crate::trace;
use bridge_core::{Adapter, Error, Options};
use bridge_jax::{Feeds, Overwritten};
use bridge_pyo3::{PyOwner, PyTensor, with_gil};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

/// A tensor of another framework that compiled functions read or fill, as long as this object lives.
///
/// Attributes
/// ----------
/// handle : int
///     The number that stands for it in compiled functions of this process.
/// dtype : str
///     Such as ``"float32"``.
/// shape : tuple of int
///     Lengths, in elements.
/// device : str
///     Such as ``"cpu"`` or ``"cuda:0"``.
/// read_only : bool
///     Whether the memory must not be written to.
#[pyclass(frozen, module = "truebridge.jax", name = "Feed")]
struct Feed(bridge_jax::Feed);

#[pymethods]
impl Feed {
    /// The number that stands for it in compiled functions of this process.
    #[getter]
    fn handle(&self) -> i64 {
        self.0.number()
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

    /// Whether the memory must not be written to.
    #[getter]
    fn read_only(&self) -> bool {
        self.0.access().forbids_writes()
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a Feed is valid in its process only: call feed in the other process"))
    }

    fn __repr__(&self) -> String {
        format!("<Feed: {} {:?} on {}>", self.0.dtype(), self.0.shape(), self.0.device())
    }
}

/// Imports `x` as a tensor for compiled functions.
#[pyfunction]
fn jax_feed(x: &PyTensor<'_>) -> PyResult<Feed> {
    let py = x.py();
    let convert = |call: Option<&trace::Call>| {
        let (from, feeds) = (source(x)?, Feeds::new(py, overwritten(x))?);
        conversions::transfer(call, &*from, &feeds, x, &Options::in_place())
    };
    trace::call("feed", || Framework::JAX.name(), convert).map(Feed).map_err(|error| into_python(py, error))
}

/// Returns what reports writes to `x`, which it keeps.
fn overwritten(x: &PyTensor<'_>) -> Overwritten {
    let owner = PyOwner::new(x);
    Box::new(move || {
        let report = |py: Python<'_>| {
            let x = owner.bind(py);
            // Without its cause, which would be dropped without the GIL.
            let done = source(&x).and_then(|from| from.overwritten(&x));
            done.map_err(|error| Error::new(error.kind(), error.to_string()))
        };
        // While the interpreter shuts down, nothing is differentiated any more.
        with_gil(report).unwrap_or(Ok(()))
    })
}

/// Returns the name, the platform and a capsule of each function that compiled functions call. `jax.ffi.pycapsule` would
/// change how `ctypes` calls `PyCapsule_New`, for the whole program.
#[pyfunction]
fn jax_targets(py: Python<'_>) -> PyResult<Vec<(&'static str, &'static str, Bound<'_, PyCapsule>)>> {
    // Its copies never take the GIL, which the threads of XLA have not.
    let targets = bridge_jax::targets(bridge_cuda::ordering()).into_iter();
    let capsule = |handler| {
        // SAFETY: the pointer is that of a function, which is never unloaded.
        unsafe { PyCapsule::new_with_pointer(py, handler, c"truebridge.handler") }
    };
    targets.map(|target| Ok((target.name, target.platform, capsule(target.handler)?))).collect()
}

pub(crate) fn enter(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("JAXFeed", module.py().get_type::<Feed>())?;
    module.add_function(wrap_pyfunction!(jax_feed, module)?)?;
    module.add_function(wrap_pyfunction!(jax_targets, module)?)
}
