//! What is known of the TensorFlow in this Python process, looked up once.

use crate::eager::devices::Devices;
use crate::runtime::Runtime;
use crate::runtime::api::{TFE_Context, TFE_TensorHandle};
use crate::runtime::library::{Libraries, Series};
use bridge_core::{DeviceKind, Error, ErrorKind, Profile, Result};
use bridge_pyo3::{Owner, PyTensor, brief_str, framework_error, installed, is_instance, probe, with_gil};
use pyo3::exceptions::PyRuntimeWarning;
use pyo3::ffi::{PyCapsule_GetPointer, PyObject};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use std::error::Error as _;
use std::sync::Arc;

/// The handle of an eager tensor, which stays the object's.
type HandleOf = unsafe extern "C" fn(*const PyObject) -> *mut TFE_TensorHandle;
/// A new eager tensor, which takes the handle over unless it is null.
type FromHandle = unsafe extern "C" fn(*mut TFE_TensorHandle, bool) -> *mut PyObject;

pub(crate) struct Process {
    pub(crate) runtime: &'static Runtime,
    pub(crate) profile: Profile,
    pub(crate) handle_of: HandleOf,
    pub(crate) from_handle: FromHandle,
    /// The module that holds the eager context.
    context: Py<PyModule>,
    eager_tensor: Py<PyType>,
    variable: Py<PyType>,
    /// Types of tensors that cannot be lent, with what to do.
    refused: Vec<(Py<PyType>, &'static str)>,
}

/// The order matters: the last is a base of others.
const REFUSED: &[(&str, &str)] = &[
    ("RaggedTensor", "a ragged tensor has no single memory: call .to_tensor() first"),
    ("SparseTensor", "a sparse tensor has no single memory: call tf.sparse.to_dense first"),
    ("IndexedSlices", "indexed slices have no single memory: call tf.convert_to_tensor first"),
    ("TensorArray", "a tensor array has no single memory: call .stack() first"),
    ("Tensor", SYMBOLIC),
];

/// What to do with a tensor that stands for the result of a graph.
pub(crate) const SYMBOLIC: &str = "a symbolic tensor has no memory until its graph runs: return it from the tf.function \
    and convert the result, or use external_input and external_output of tensor_bridge.tensorflow inside the graph";

impl Process {
    pub(crate) fn get(py: Python<'_>) -> Result<&'static Self> {
        static PROCESS: PyOnceLock<Process> = PyOnceLock::new();
        PROCESS.get_or_try_init(py, || {
            let tensorflow = import(py)?;
            let version = probe(py, tensorflow.getattr("__version__")).map_err(|error| raised(py, error))?;
            let runtime = Runtime::loaded(Series::Two).map_err(|error| {
                let version = version.map_or("without a version".into(), |version| brief_str(&version));
                Error::new(ErrorKind::Version, format!("tensorflow {version} is not supported: {error}"))
            })?;
            // SAFETY: the signatures are what the names say.
            let (handle_of, from_handle) = unsafe {
                let libraries: &Libraries = runtime.libraries();
                (
                    libraries.required("_Z18EagerTensor_HandlePK7_object")?,
                    libraries.required("_Z21EagerTensorFromHandleP16TFE_TensorHandleb")?,
                )
            };
            Self::new(&tensorflow, runtime, handle_of, from_handle).map_err(|error| raised(py, error))
        })
    }

    fn new(
        tensorflow: &Bound<'_, PyModule>,
        runtime: &'static Runtime,
        handle_of: HandleOf,
        from_handle: FromHandle,
    ) -> PyResult<Self> {
        let py = tensorflow.py();
        let class = |module: &Bound<'_, PyModule>, name: &str| -> PyResult<Py<PyType>> {
            Ok(module.getattr(name)?.cast_into()?.unbind())
        };
        let refused = REFUSED.iter().map(|(name, advice)| Ok((class(tensorflow, name)?, *advice)));
        let mut devices = vec![DeviceKind::CPU];
        if runtime.capabilities().cuda {
            let gpus = tensorflow.getattr("config")?.call_method1("list_physical_devices", ("GPU",))?;
            devices.extend((gpus.len()? > 0).then_some(DeviceKind::CUDA));
        }
        let profile = Profile {
            devices,
            waits_on_export: !runtime.capabilities().lends_without_waiting,
            ..runtime.profile.clone()
        };
        runtime.consumer.ask.get_or_init(|| || with_gil(|py| Ok(Self::get(py)?.devices(py)?.1)));
        Ok(Self {
            runtime,
            profile,
            handle_of,
            from_handle,
            context: py.import("tensorflow.python.eager.context")?.unbind(),
            eager_tensor: class(&py.import("tensorflow.python.framework.ops")?, "EagerTensor")?,
            variable: class(tensorflow, "Variable")?,
            refused: refused.collect::<PyResult<_>>()?,
        })
    }

    pub(crate) fn is_eager(&self, object: &PyTensor<'_>) -> bool {
        object.get_type_ptr().cast() == self.eager_tensor.as_ptr()
    }

    pub(crate) fn is_variable(&self, object: &PyTensor<'_>) -> bool {
        is_instance(object, self.variable.bind(object.py()))
    }

    /// Whether operations run at once now, on this thread, and not when a graph does.
    pub(crate) fn executes_eagerly(&self, py: Python<'_>) -> Result<bool> {
        let context = self.context.bind(py).call_method0(intern!(py, "context"));
        let eagerly = context.and_then(|context| context.call_method0(intern!(py, "executing_eagerly")));
        eagerly.and_then(|eagerly| eagerly.is_truthy()).map_err(|error| raised(py, error))
    }

    /// Why an object that is no eager tensor cannot be lent, if it is TensorFlow's at all.
    pub(crate) fn refusal(&self, object: &PyTensor<'_>) -> Option<&'static str> {
        let kind = self.refused.iter().find(|(kind, _)| is_instance(object, kind.bind(object.py())));
        kind.map(|(_, advice)| *advice)
    }

    /// The eager context, which Python's own object keeps alive, and its devices. The first time, TensorFlow sets itself
    /// up.
    pub(crate) fn devices(&self, py: Python<'_>) -> Result<(*mut TFE_Context, Arc<Devices>)> {
        let (context, _) = self.context(py).map_err(|error| raised(py, error))?;
        if let Some(devices) = self.runtime.consumer.devices().filter(|devices| devices.context == context.addr()) {
            return Ok((context, devices));
        }
        Ok((context, self.learn(py)?))
    }

    /// Asks for the devices of the context.
    pub(crate) fn learn(&self, py: Python<'_>) -> Result<Arc<Devices>> {
        let (context, capsule) = self.context(py).map_err(|error| raised(py, error))?;
        let (shared, kept) = (Shared(context), Arc::new(Owner::new(&capsule)));
        // Others may hold what is needed here while they wait for the GIL.
        // SAFETY: the capsule keeps the context alive.
        let devices = Arc::new(py.detach(|| unsafe { Devices::learn(self.runtime, shared.get(), kept) })?);
        let before = self.runtime.consumer.replace(devices.clone());
        if before.is_none() && !devices.gpus.is_empty() {
            warn_of_growth(py).map_err(|error| raised(py, error))?;
        }
        Ok(devices)
    }

    fn context<'py>(&self, py: Python<'py>) -> PyResult<(*mut TFE_Context, PyTensor<'py>)> {
        let module = self.context.bind(py);
        let handle = || module.getattr(intern!(py, "_context"))?.getattr(intern!(py, "_context_handle"));
        let handle = match probe(py, handle())? {
            Some(handle) if !handle.is_none() => handle,
            _ => {
                module.call_method0("context")?.call_method0("ensure_initialized")?;
                handle()?
            }
        };
        // SAFETY: the object is alive and the GIL held. TensorFlow gives its capsule no name.
        let context = unsafe { PyCapsule_GetPointer(handle.as_ptr(), std::ptr::null()) };
        if context.is_null() { Err(PyErr::fetch(py)) } else { Ok((context.cast(), handle)) }
    }
}

/// Imports TensorFlow. Where nobody has done so before, it is kept from showing its symbols to libraries that are loaded
/// later, which would take its stubs for CUDA.
fn import(py: Python<'_>) -> Result<Bound<'_, PyModule>> {
    const SHOWS: &str = "tensorflow.python.pywrap_dlopen_global_flags";
    let modules = py.import("sys").and_then(|sys| sys.getattr("modules")).map_err(|error| raised(py, error))?;
    let hide = || -> PyResult<bool> {
        let hides = !modules.contains("tensorflow")? && !modules.contains(SHOWS)?;
        if hides {
            modules.set_item(SHOWS, py.None())?;
        }
        Ok(hides)
    };
    let hides = hide().map_err(|error| raised(py, error))?;
    let tensorflow = installed(py, "tensorflow", "tensorflow");
    if hides {
        // It may be gone already.
        probe(py, modules.del_item(SHOWS)).map_err(|error| raised(py, error))?;
    }
    tensorflow
}

/// A pointer that may go to code without the GIL.
pub(crate) struct Shared<T>(pub(crate) *mut T);

// SAFETY: TensorFlow's contexts and handles may be used on any thread; nothing is done with the pointer itself.
unsafe impl<T> Send for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) fn get(self) -> *mut T {
        self.0
    }
}

/// TensorFlow takes nearly all memory of every GPU that it shows, unless it is told not to before it sets itself up.
fn warn_of_growth(py: Python<'_>) -> PyResult<()> {
    let config = py.import("tensorflow")?.getattr("config")?;
    let forced: String = py.import("os")?.call_method1("getenv", ("TF_FORCE_GPU_ALLOW_GROWTH", ""))?.extract()?;
    for gpu in config.call_method1("get_visible_devices", ("GPU",))?.try_iter()? {
        let gpu = gpu?;
        let grows = config.getattr("experimental")?.call_method1("get_memory_growth", (&gpu,))?.is_truthy()?;
        let limited = !config.call_method1("get_logical_device_configuration", (&gpu,))?.is_none();
        if !(grows || limited || forced == "true") {
            let text = "TensorFlow has taken nearly all memory of the GPU, and other frameworks may find none: set \
                        TF_FORCE_GPU_ALLOW_GROWTH=true, or call tf.config.experimental.set_memory_growth(gpu, True), \
                        before TensorFlow first uses it";
            let warning = (text, py.get_type::<PyRuntimeWarning>());
            return py.import("warnings")?.call_method1("warn", warning).map(drop);
        }
    }
    Ok(())
}

/// Gives an error of TensorFlow's C functions that says that memory is full the exception that TensorFlow has for it as its
/// source, by which programs catch it.
#[cold]
pub(crate) fn exhausted(py: Python<'_>, error: Error) -> Error {
    if error.kind() != ErrorKind::OutOfMemory || error.source().is_some() {
        return error;
    }
    let make = || -> PyResult<PyErr> {
        let class = py.import("tensorflow")?.getattr("errors")?.getattr("ResourceExhaustedError")?;
        Ok(PyErr::from_value(class.call1((py.None(), py.None(), error.to_string()))?))
    };
    match make() {
        Ok(exception) => error.caused_by(exception),
        Err(failure) => error.caused_by(failure),
    }
}

pub(crate) fn raised(py: Python<'_>, error: PyErr) -> Error {
    match error.is_instance_of::<pyo3::exceptions::PyImportError>(py) {
        true => {
            Error::new(ErrorKind::Version, format!("tensorflow is not as expected ({})", brief_str(error.value(py))))
                .caused_by(error)
        }
        false => framework_error(py, "tensorflow", error),
    }
}
