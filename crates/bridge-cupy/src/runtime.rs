//! What is known of the CuPy in this process, looked up once.

use crate::arenas::Arenas;
use bridge_core::{
    Consumer, DType, Device, DeviceKind, Error, ErrorKind, Keep, Profile, Result, Stream, Strides, Views,
};
use bridge_pyo3::{ArrayDTypes, NUMPY_DTYPES, Owner, PyTensor, framework_error, installed, is_instance, with_gil};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi::PyCapsule_GetPointer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

pub(crate) struct Runtime {
    pub(crate) version: String,
    pub(crate) profile: Profile,
    pub(crate) consumer: Arc<CuPyConsumer>,
    pub(crate) dtypes: ArrayDTypes,
    pub(crate) arenas: Arenas,
    /// Where there is just one device, every array is on it.
    pub(crate) one_device: bool,
    pub(crate) array: Py<PyType>,
    /// What `cupy.ndarray` does when it is called, less the detour through Python: half the time.
    new_array: Option<Py<PyAny>>,
    pub(crate) memory_pointer: Py<PyAny>,
    pub(crate) pooled_memory: Py<PyAny>,
    pub(crate) unowned_memory: Py<PyAny>,
}

/// CuPy's own function for the current stream of a device, as it offers it to other Cython modules.
type StreamOf = unsafe extern "C" fn(c_int) -> isize;

pub(crate) struct CuPyConsumer {
    stream_of: Option<StreamOf>,
    views: Views,
}

impl CuPyConsumer {
    /// The stream that CuPy would use for this device now, on this thread.
    pub(crate) fn stream(&self, py: Python<'_>, device: i32) -> PyResult<Stream> {
        if let Some(stream_of) = self.stream_of {
            // SAFETY: the signature was checked when the function was looked up, and the GIL is held.
            let handle = unsafe { stream_of(device) };
            // What Cython returns when it raises.
            let error = if handle == -1 { PyErr::take(py) } else { None };
            return error.map_or_else(|| Ok(Stream::from_handle(handle as u64)), Err);
        }
        let stream = py.import(intern!(py, "cupy.cuda"))?.call_method1(intern!(py, "get_current_stream"), (device,))?;
        Ok(Stream::from_handle(stream.getattr(intern!(py, "ptr"))?.extract()?))
    }

    /// The object behind the current stream, so that it is not destroyed: CuPy destroys a stream with its object. The
    /// default streams live for ever.
    pub(crate) fn keep_current(&self, py: Python<'_>, device: i32, stream: Stream) -> PyResult<Option<Keep>> {
        if [Stream::LEGACY, Stream::PER_THREAD].contains(&stream) {
            return Ok(None);
        }
        let current =
            py.import(intern!(py, "cupy.cuda"))?.call_method1(intern!(py, "get_current_stream"), (device,))?;
        let is_it = current.getattr(intern!(py, "ptr"))?.extract::<u64>()? == stream.handle();
        Ok(is_it.then(|| Arc::new(Owner::new(&current)) as Keep))
    }
}

impl Consumer for CuPyConsumer {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        if device.kind != DeviceKind::CUDA {
            return Ok(None);
        }
        let stream = with_gil(|py| self.stream(py, device.index).map_err(|error| raised(py, error)));
        stream.transpose()
    }

    fn keep(&self, device: Device, stream: Stream) -> Option<Keep> {
        with_gil(|py| self.keep_current(py, device.index, stream).ok()).flatten().flatten()
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

impl Runtime {
    pub(crate) fn get(py: Python<'_>) -> Result<&'static Self> {
        static RUNTIME: PyOnceLock<Runtime> = PyOnceLock::new();
        RUNTIME.get_or_try_init(py, || {
            let cupy = installed(py, "cupy", "cupy-cuda13x")?;
            let count = || cupy.getattr("cuda")?.getattr("runtime")?.call_method0("getDeviceCount")?.extract();
            let devices = count().map_err(|error: PyErr| {
                let text = format!("cupy finds no CUDA device ({}): check nvidia-smi and the driver", error.value(py));
                Error::new(ErrorKind::Missing, text).caused_by(error)
            })?;
            Self::new(&cupy, devices).map_err(|error| raised(py, error))
        })
    }

    fn new(cupy: &Bound<'_, PyModule>, devices: i32) -> PyResult<Self> {
        let py = cupy.py();
        let memory = cupy.getattr("cuda")?.getattr("memory")?;
        let (unowned, pointer) = (memory.getattr("UnownedMemory")?, memory.getattr("MemoryPointer")?);
        let mut wanted = NUMPY_DTYPES.to_vec();
        wanted.push(DType::BFLOAT16);
        let dtypes = ArrayDTypes::new(py, "cupy", &wanted)?;
        let array = cupy.getattr("ndarray")?;
        let takes = |dtype: &DType| {
            let nothing = pointer.call1((unowned.call1((0, 0, py.None(), 0))?, 0))?;
            let dtype = dtypes.write(py, *dtype).map_err(|_| PyErr::fetch(py))?;
            array.call1((0, dtype, nothing))
        };
        let profile = Profile {
            name: "cupy".into(),
            dtypes: dtypes.all().into_iter().filter(|dtype| takes(dtype).is_ok()).collect(),
            strides: Strides::Any,
            alignment: 1,
            devices: vec![DeviceKind::CUDA],
            keeps_read_only: false,
        };
        let views = Views::default();
        let consumer = CuPyConsumer { stream_of: stream_of(py), views };
        Ok(Self {
            version: cupy.getattr("__version__")?.extract()?,
            profile,
            consumer: Arc::new(consumer),
            dtypes,
            arenas: Arenas::new(),
            one_device: devices == 1,
            new_array: new_array(&array).ok(),
            array: array.cast_into::<PyType>()?.unbind(),
            memory_pointer: pointer.unbind(),
            pooled_memory: memory.getattr("PooledMemory")?.unbind(),
            unowned_memory: unowned.unbind(),
        })
    }

    /// `cupy.ndarray(shape, dtype, pointer, strides)`, with strides in bytes.
    pub(crate) fn make_array<'py>(
        &self,
        py: Python<'py>,
        shape: Bound<'py, PyTuple>,
        dtype: &Bound<'py, PyAny>,
        pointer: Bound<'py, PyAny>,
        strides: Option<Bound<'py, PyTuple>>,
    ) -> PyResult<PyTensor<'py>> {
        let Some(new) = &self.new_array else {
            return self.array.bind(py).call1((shape, dtype, pointer, strides));
        };
        let array = new.bind(py).call1((self.array.bind(py),))?;
        array.call_method1(intern!(py, "_init"), (shape, dtype, pointer, strides))?;
        Ok(array)
    }

    pub(crate) fn is_array(&self, object: &PyTensor<'_>) -> bool {
        object.get_type_ptr().cast() == self.array.as_ptr() || is_instance(object, self.array.bind(object.py()))
    }
}

/// `__new__` of the class that `cupy.ndarray` extends, if the two fit together as they do since CuPy 12.
fn new_array(array: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    array.getattr("_init")?;
    let base = array.getattr("__base__")?;
    let new = base.getattr("__new__")?;
    let empty = new.call1((array,))?;
    match base.getattr("__name__")?.extract::<&str>()? {
        "_ndarray_base" if empty.get_type().is(array) => Ok(new.unbind()),
        other => Err(PyTypeError::new_err(format!("cupy.ndarray extends {other}"))),
    }
}

/// The C function behind `get_current_stream`, at a tenth of its cost. Cython names a capsule by the signature.
fn stream_of(py: Python<'_>) -> Option<StreamOf> {
    let module = py.import("cupy_backends.cuda.stream").ok()?;
    let table = module.getattr("__pyx_capi__").ok()?.cast_into::<PyDict>().ok()?;
    let capsule = table.get_item("get_stream_ptr").ok()??;
    // SAFETY: the object is alive and the GIL held; a capsule of another signature gives null and sets an exception.
    let function = unsafe { PyCapsule_GetPointer(capsule.as_ptr(), c"intptr_t (int)".as_ptr()) };
    if function.is_null() {
        drop(PyErr::take(py));
        return None;
    }
    // SAFETY: the name of the capsule says that it points to a function from int to intptr_t.
    Some(unsafe { std::mem::transmute::<*mut c_void, StreamOf>(function) })
}

pub(crate) fn raised(py: Python<'_>, error: PyErr) -> Error {
    framework_error(py, "cupy", error)
}
