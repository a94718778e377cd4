//! The Rust side of the Python module `truebridge.tensorflow.v1`: TensorFlow 1.x, loaded without its Python.

use crate::errors::{argument, into_python};
use crate::frameworks::named;
use bridge_core::DType;
use bridge_pyo3::PyTensor;
use bridge_tensorflow::{Input, PyExternal, Runtime, SavedModel, Series, SessionOptions, TensorFlow1};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Opens the package in a folder. Returns its version and the folder of its libraries.
#[pyfunction]
pub(crate) fn tensorflow1_open(py: Python<'_>, folder: Option<PathBuf>) -> PyResult<(String, PathBuf)> {
    let open = || match folder {
        // SAFETY: the documentation of `tensorflow.v1.open` asks for the folder of a TensorFlow: a program of Python may
        // load any library.
        Some(folder) => py.detach(|| unsafe { Runtime::open_as(Series::One, &folder) }),
        None => Ok(TensorFlow1::new(py)?.runtime()),
    };
    let runtime = open().map_err(|error| into_python(py, error))?;
    Ok((runtime.version().into(), runtime.folder().into()))
}

/// Name, dtype, shape and device of an input.
type Declared = (String, String, Option<Vec<Option<i64>>>, Option<String>);

fn input((name, dtype, shape, device): Declared) -> bridge_core::Result<Input> {
    let dtype: DType = dtype.parse().map_err(argument)?;
    let input = match shape {
        Some(shape) => Input::new(&name, dtype, &shape),
        None => Input::of_any_shape(&name, dtype),
    }?;
    device.map_or(Ok(input.clone()), |device| input.on(&device))
}

/// A session of TensorFlow 1.x.
#[pyclass(frozen, module = "truebridge")]
pub(crate) struct Session(Mutex<Option<Arc<bridge_tensorflow::Session>>>);

impl Session {
    /// Opens a session without the GIL: the first one sets the devices up.
    fn made(
        py: Python<'_>,
        open: impl FnOnce(&'static Runtime) -> bridge_core::Result<bridge_tensorflow::Session> + Send,
    ) -> PyResult<Self> {
        let opened = TensorFlow1::new(py).and_then(|tensorflow1| {
            let runtime = tensorflow1.runtime();
            py.detach(|| open(runtime))
        });
        opened.map(|session| Self(Mutex::new(Some(Arc::new(session))))).map_err(|error| into_python(py, error))
    }

    fn open(&self) -> bridge_core::Result<Arc<bridge_tensorflow::Session>> {
        let session = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        session.ok_or_else(|| argument("the session is closed: open another one"))
    }
}

#[pymethods]
impl Session {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "they are those of the class in Python")]
    fn new(
        py: Python<'_>,
        graph_def: &[u8],
        inputs: Vec<Declared>,
        outputs: Vec<String>,
        memory_growth: Option<bool>,
        memory_fraction: Option<f64>,
        visible_devices: Option<Vec<u32>>,
        config: Option<Vec<u8>>,
    ) -> PyResult<Self> {
        let options = SessionOptions::default()
            .with_memory_growth(memory_growth)
            .with_memory_fraction(memory_fraction)
            .with_visible_devices(visible_devices)
            .with_config(config);
        Self::made(py, |runtime| {
            let inputs = inputs.into_iter().map(input).collect::<bridge_core::Result<Vec<_>>>()?;
            let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
            bridge_tensorflow::Session::open(runtime, graph_def, &inputs, &outputs, &options)
        })
    }

    /// Opens a signature of a saved model.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "they are those of the method in Python")]
    fn of_saved_model(
        py: Python<'_>,
        folder: PathBuf,
        signature: &str,
        tags: Vec<String>,
        memory_growth: Option<bool>,
        memory_fraction: Option<f64>,
        visible_devices: Option<Vec<u32>>,
        config: Option<Vec<u8>>,
    ) -> PyResult<Self> {
        let options = SessionOptions::default()
            .with_memory_growth(memory_growth)
            .with_memory_fraction(memory_fraction)
            .with_visible_devices(visible_devices)
            .with_config(config);
        Self::made(py, |runtime| {
            let tags: Vec<&str> = tags.iter().map(String::as_str).collect();
            let model = SavedModel::read(&folder, &tags)?;
            bridge_tensorflow::Session::open_signature(runtime, &model, signature, &options)
        })
    }

    /// Runs the graph once, unless there is no such target for its results.
    fn run<'py>(
        &self,
        py: Python<'py>,
        feeds: Vec<(String, Bound<'py, PyExternal>)>,
        target: Option<&PyTensor<'py>>,
    ) -> PyResult<Vec<PyTensor<'py>>> {
        let run = || -> bridge_core::Result<_> {
            if let Some(target) = target {
                named(target)?.open(py)?;
            }
            let session = self.open()?;
            let feeds: Vec<_> = feeds.iter().map(|(name, tensor)| (name.as_str(), tensor.get().external())).collect();
            let results = py.detach(|| session.run(&feeds))?;
            results.into_iter().map(|result| PyExternal::wrap(py, result)).collect()
        };
        run().map_err(|error| into_python(py, error))
    }

    /// The names of the outputs, in the order in which a run returns them.
    #[getter]
    fn outputs(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let session = self.open().map_err(|error| into_python(py, error))?;
        Ok(session.outputs().to_vec())
    }

    /// The full names of the devices that it can use.
    #[getter]
    fn devices(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let session = self.open().map_err(|error| into_python(py, error))?;
        Ok(session.devices().to_vec())
    }

    /// Closes it when pending runs are over.
    fn close(&self, py: Python<'_>) {
        let session = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(session));
    }
}
