//! The TensorFlow 2 of this Python process, looked up once.

use crate::eager::devices::Devices;
use crate::eager::functions::{EagerRuntime, TFE_Context, TFE_TensorHandle};
use crate::eager::handle::Shared;
use crate::runtime::Runtime;
use crate::runtime::gpus::Gpus;
use crate::runtime::library::Series;
use bridge_core::{Device, DeviceKind, Error, ErrorKind, Profile, Result, Stream};
use bridge_pyo3::{PyOwner, PyTensor, brief_str, framework_error, installed, is_instance, once, probe, with_gil};
use pyo3::exceptions::PyRuntimeWarning;
use pyo3::ffi::{PyCapsule_GetPointer, PyObject};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use std::error::Error as _;
use std::sync::{Arc, PoisonError, RwLock};

/// The TensorFlow 2 that Python has imported: its functions, its profile and its classes.
pub(crate) struct Process {
    pub(crate) eager: EagerRuntime,
    pub(crate) objects: Objects,
    pub(crate) profile: Profile,
    /// The module that holds the eager context.
    context: Py<PyModule>,
    eager_tensor: Py<PyType>,
    variable: Py<PyType>,
    /// Types of tensors that cannot be exported, with advice.
    refused: Vec<(Py<PyType>, &'static str)>,
}

/// The devices of the context that was queried last, and its address. They keep the context: another one at the same
/// address would have other devices.
static CURRENT: RwLock<Option<(usize, Arc<Devices>)>> = RwLock::new(None);

fn current() -> Option<(usize, Arc<Devices>)> {
    CURRENT.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The functions of the Python module.
pub(crate) struct Objects {
    /// `TFE_TensorHandle* EagerTensor_Handle(const PyObject*)`: the handle of an eager tensor, which the object keeps.
    pub(crate) handle_of: unsafe extern "C" fn(*const PyObject) -> *mut TFE_TensorHandle,
    /// `PyObject* EagerTensorFromHandle(TFE_TensorHandle*, bool)`: a new eager tensor. Unless it is null, it takes the
    /// handle over.
    pub(crate) from_handle: unsafe extern "C" fn(*mut TFE_TensorHandle, bool) -> *mut PyObject,
}

impl Objects {
    /// Looks the functions up.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Version`] if one of them is missing.
    fn find(runtime: &'static Runtime) -> Result<Self> {
        let (libraries, _) = runtime.libraries();
        // SAFETY: the signatures are what the mangled names say.
        unsafe {
            Ok(Self {
                handle_of: libraries.required("_Z18EagerTensor_HandlePK7_object")?,
                from_handle: libraries.required("_Z21EagerTensorFromHandleP16TFE_TensorHandleb")?,
            })
        }
    }
}

/// The types of `Process::refused`, with advice. The order matters: the last is a base class of others.
const REFUSED: &[(&str, &str)] = &[
    ("RaggedTensor", "a ragged tensor has no single memory: call .to_tensor() first"),
    ("SparseTensor", "a sparse tensor has no single memory: call tf.sparse.to_dense first"),
    ("IndexedSlices", "indexed slices have no single memory: call tf.convert_to_tensor first"),
    ("TensorArray", "a tensor array has no single memory: call .stack() first"),
    ("Tensor", SYMBOLIC),
];

/// Advice for the symbolic tensors of a graph.
pub(crate) const SYMBOLIC: &str = "a symbolic tensor has no memory until its graph runs: return it from the tf.function \
    and convert the result, or use external_input and external_output of truebridge.tensorflow inside the graph";

impl Process {
    /// Returns the TensorFlow of this process. Imports it, the first time.
    pub(crate) fn get(py: Python<'_>) -> Result<&'static Self> {
        static PROCESS: PyOnceLock<Process> = PyOnceLock::new();
        once(py, &PROCESS, || {
            let tensorflow = import(py)?;
            let version = probe(py, tensorflow.getattr("__version__")).map_err(|error| raised(py, error))?;
            let find = |runtime| Ok((EagerRuntime::find(runtime)?, Objects::find(runtime)?));
            let (eager, objects) = Runtime::loaded(Series::Two).and_then(find).map_err(|error| {
                let version = version.map_or("without a version".into(), |version| brief_str(&version));
                Error::new(ErrorKind::Version, format!("tensorflow {version} is not supported: {error}"))
                    .caused_by(error)
            })?;
            Self::new(&tensorflow, eager, objects).map_err(|error| raised(py, error))
        })
    }

    fn new(tensorflow: &Bound<'_, PyModule>, eager: EagerRuntime, objects: Objects) -> PyResult<Self> {
        let py = tensorflow.py();
        let class = |module: &Bound<'_, PyModule>, name: &str| -> PyResult<Py<PyType>> {
            Ok(module.getattr(name)?.cast_into()?.unbind())
        };
        let refused = REFUSED.iter().map(|(name, advice)| Ok((class(tensorflow, name)?, *advice)));
        let mut devices = vec![DeviceKind::CPU];
        if eager.runtime.has_cuda() {
            let gpus = tensorflow.getattr("config")?.call_method1("list_physical_devices", ("GPU",))?;
            devices.extend((gpus.len()? > 0).then_some(DeviceKind::CUDA));
        }
        let profile =
            eager.runtime.profile.clone().with_devices(devices).with_waits_on_export(eager.handles.tensor.is_none());
        eager.runtime.consumer.eager.get_or_init(|| stream);
        Ok(Self {
            eager,
            objects,
            profile,
            context: py.import("tensorflow.python.eager.context")?.unbind(),
            eager_tensor: class(&py.import("tensorflow.python.framework.ops")?, "EagerTensor")?,
            variable: class(tensorflow, "Variable")?,
            refused: refused.collect::<PyResult<_>>()?,
        })
    }

    /// Returns whether an object is an eager tensor.
    pub(crate) fn is_eager(&self, object: &PyTensor<'_>) -> bool {
        object.get_type_ptr().cast() == self.eager_tensor.as_ptr()
    }

    /// Returns whether an object is a variable.
    pub(crate) fn is_variable(&self, object: &PyTensor<'_>) -> bool {
        is_instance(object, self.variable.bind(object.py()))
    }

    /// Returns whether operations on this thread run at once, and not later in a graph.
    pub(crate) fn executes_eagerly(&self, py: Python<'_>) -> Result<bool> {
        let context = self.context.bind(py).call_method0(intern!(py, "context"));
        let eagerly = context.and_then(|context| context.call_method0(intern!(py, "executing_eagerly")));
        eagerly.and_then(|eagerly| eagerly.is_truthy()).map_err(|error| raised(py, error))
    }

    /// Returns why an object of TensorFlow's that is not an eager tensor cannot be exported; `None` for other objects.
    pub(crate) fn refusal(&self, object: &PyTensor<'_>) -> Option<&'static str> {
        let kind = self.refused.iter().find(|(kind, _)| is_instance(object, kind.bind(object.py())));
        kind.map(|(_, advice)| *advice)
    }

    /// Returns the eager context, which Python's own object keeps alive, and its devices. TensorFlow sets the devices
    /// up, the first time.
    pub(crate) fn devices(&'static self, py: Python<'_>) -> Result<(*mut TFE_Context, Arc<Devices>)> {
        let (context, _) = self.context(py).map_err(|error| raised(py, error))?;
        if let Some((_, devices)) = current().filter(|(known, _)| *known == context.addr()) {
            return Ok((context, devices));
        }
        Ok((context, self.query_devices(py)?))
    }

    /// Queries the devices of the eager context.
    pub(crate) fn query_devices(&'static self, py: Python<'_>) -> Result<Arc<Devices>> {
        let (context, capsule) = self.context(py).map_err(|error| raised(py, error))?;
        let (shared, kept) = (Shared(context), Arc::new(PyOwner::new(&capsule)));
        // Without the GIL: a thread that waits for it may hold what the query needs.
        // SAFETY: the capsule keeps the context alive.
        let devices = Arc::new(py.detach(|| unsafe { Devices::query(&self.eager, shared.get(), kept) })?);
        let known = (context.addr(), devices.clone());
        let before = CURRENT.write().unwrap_or_else(PoisonError::into_inner).replace(known);
        if before.is_none() && !devices.gpus.is_empty() {
            warn_of_growth(py).map_err(|error| raised(py, error))?;
        }
        Ok(devices)
    }

    fn context<'py>(&self, py: Python<'py>) -> PyResult<(*mut TFE_Context, PyTensor<'py>)> {
        let module = self.context.bind(py);
        // Without the module's own look-up, which first searches its type.
        let context = || module.dict().get_item(intern!(py, "_context"));
        let handle = || context()?.map(|context| context.getattr(intern!(py, "_context_handle"))).transpose();
        let handle = match probe(py, handle())?.flatten() {
            Some(handle) if !handle.is_none() => handle,
            _ => {
                let context = module.call_method0("context")?;
                context.call_method0("ensure_initialized")?;
                context.getattr("_context_handle")?
            }
        };
        // SAFETY: the object is alive and the GIL held. TensorFlow's capsule has no name.
        let context = unsafe { PyCapsule_GetPointer(handle.as_ptr(), std::ptr::null()) };
        if context.is_null() { Err(PyErr::fetch(py)) } else { Ok((context.cast(), handle)) }
    }
}

/// Returns the stream of a GPU in the eager context; `None` while the interpreter shuts down. Python is entered only
/// where neither the context nor a kernel has reported the stream: a thread of TensorFlow that drops a lease must not
/// wait for the GIL.
fn stream(device: Device, reported: &Gpus) -> Result<Option<Stream>> {
    if let Some((_, devices)) = current() {
        return Ok(Some(devices.gpu(device)?.stream));
    }
    if let Some(stream) = reported.stream_of(device) {
        return Ok(Some(stream));
    }
    let queried = with_gil(|py| Process::get(py)?.devices(py)?.1.gpu(device).map(|gpu| gpu.stream));
    queried.transpose()
}

/// Imports TensorFlow. The first import is kept from adding its symbols to the global scope, where libraries that are
/// loaded later would take its stubs for CUDA.
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
        // The program may have removed it.
        probe(py, modules.del_item(SHOWS)).map_err(|error| raised(py, error))?;
    }
    tensorflow
}

/// Warns if TensorFlow has taken nearly all memory of a GPU, as it does unless the program says otherwise in time.
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

/// Adds TensorFlow's own exception as the source of an error of its C functions that means that memory is full:
/// programs catch it by its class.
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

/// Returns the error for an exception that TensorFlow has raised.
pub(crate) fn raised(py: Python<'_>, error: PyErr) -> Error {
    match error.is_instance_of::<pyo3::exceptions::PyImportError>(py) {
        true => Error::new(
            ErrorKind::Version,
            format!("this build of tensorflow is not supported ({})", brief_str(error.value(py))),
        )
        .caused_by(error),
        false => framework_error(py, "tensorflow", error),
    }
}
