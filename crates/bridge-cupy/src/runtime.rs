//! The CuPy of this process, looked up once: its types, its current streams, and the arenas of its memory pools.

use crate::native::Fields;
use crate::raised;
use bridge_core::{
    Consumer, DType, Device, DeviceKind, Error, ErrorKind, Keep, Profile, Result, Stream, Strides, Views,
};
use bridge_pyo3::{
    ArrayDTypes, NUMPY_DTYPES, PyOwner, PyTensor, brief_str, call, installed, is_instance, once, probe, with_gil,
};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi::PyCapsule_GetPointer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// The address of memory that is never read.
const NOWHERE: usize = 0x7a57_e000;

pub(crate) struct Runtime {
    pub(crate) profile: Profile,
    pub(crate) consumer: Arc<CuPyConsumer>,
    pub(crate) dtypes: ArrayDTypes,
    pub(crate) arenas: Arenas,
    /// Whether there is one device only, which every array is then on.
    pub(crate) one_device: bool,
    pub(crate) array: Py<PyType>,
    /// `__new__` of the class that `cupy.ndarray` extends: half the time of a call of `cupy.ndarray`.
    new_array: Option<Py<PyAny>>,
    pub(crate) memory_pointer: Py<PyType>,
    /// Where the fields of arrays are, if that was found.
    pub(crate) fields: Option<Fields>,
    pub(crate) pooled_memory: Py<PyAny>,
    pub(crate) unowned_memory: Py<PyAny>,
}

impl Runtime {
    pub(crate) fn get(py: Python<'_>) -> Result<&'static Self> {
        static RUNTIME: PyOnceLock<Runtime> = PyOnceLock::new();
        once(py, &RUNTIME, || {
            let cupy = installed(py, "cupy", "cupy-cuda13x")?;
            let count = || cupy.getattr("cuda")?.getattr("runtime")?.call_method0("getDeviceCount")?.extract();
            let devices = count().map_err(|error: PyErr| {
                let text = format!(
                    "cupy finds no CUDA device ({}): check nvidia-smi and the driver",
                    brief_str(error.value(py))
                );
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
            let dtype = dtypes.write(py, *dtype).map_err(|error| PyTypeError::new_err(error.to_string()))?;
            array.call1((0, dtype, nothing))
        };
        let mut taken = Vec::new();
        for dtype in dtypes.all() {
            taken.extend(probe(py, takes(&dtype))?.map(|_| dtype));
        }
        let make = |shape: &[i64], strides: &[i64], dtype: &str| {
            // No array is read, so the memory need not exist.
            let nowhere = pointer.call1((unowned.call1((NOWHERE, 1 << 20, py.None(), 0))?, 64))?;
            array.call1((PyTuple::new(py, shape)?, dtype, nowhere, PyTuple::new(py, strides)?))
        };
        let fields = Fields::find(py, make)?;
        let profile = Profile::export_only("cupy")
            .with_dtypes(taken)
            .with_strides(Strides::Any)
            .with_alignment(1)
            .with_devices(vec![DeviceKind::CUDA])
            .with_keeps_read_only(false)
            .with_private_functions(fields.is_some());
        Ok(Self {
            profile,
            consumer: Arc::new(CuPyConsumer::new(py)?),
            dtypes,
            arenas: Arenas::new(),
            one_device: devices == 1,
            new_array: probe(py, new_array(&array))?,
            array: array.cast_into::<PyType>()?.unbind(),
            fields,
            memory_pointer: pointer.cast_into::<PyType>()?.unbind(),
            pooled_memory: memory.getattr("PooledMemory")?.unbind(),
            unowned_memory: unowned.unbind(),
        })
    }

    /// Calls `cupy.ndarray(shape, dtype, pointer, strides)`, with strides in bytes.
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
        let arguments = [shape.as_any(), dtype, &pointer, strides.as_ref().map_or(dtype, |strides| strides.as_any())];
        call(&array, intern!(py, "_init"), if strides.is_some() { &arguments } else { &arguments[..3] })?;
        Ok(array)
    }

    /// Calls `body` while the device, a `cupy.cuda.Device`, is CuPy's current one.
    pub(crate) fn on_device<'py>(
        &self,
        device: impl FnOnce() -> PyResult<Bound<'py, PyAny>>,
        body: impl FnOnce() -> PyResult<PyTensor<'py>>,
    ) -> PyResult<PyTensor<'py>> {
        if self.one_device {
            return body();
        }
        let device = device()?;
        let py = device.py();
        device.call_method0(intern!(py, "__enter__"))?;
        let made = body();
        let none = py.None();
        device.call_method1(intern!(py, "__exit__"), (&none, &none, &none))?;
        made
    }

    pub(crate) fn is_array(&self, object: &PyTensor<'_>) -> bool {
        object.get_type_ptr().cast() == self.array.as_ptr() || is_instance(object, self.array.bind(object.py()))
    }
}

/// Returns `__new__` of the class that `cupy.ndarray` extends, if the two classes fit together as in CuPy 12 and later.
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

/// CuPy's C function for the current stream of a device, which it exports to other Cython modules.
type StreamOf = unsafe extern "C" fn(c_int) -> isize;

pub(crate) struct CuPyConsumer {
    stream_of: Option<StreamOf>,
    /// `cupy.cuda.get_current_stream`, and the class of streams that own their handles, looked up once.
    current: Py<PyAny>,
    owning: Py<PyType>,
    views: Views,
}

thread_local! {
    /// The stream that was kept last, because the next view is probably made under it. It owns its handle, so the
    /// handle names no other stream while it is kept here.
    static KEPT: RefCell<Option<((i32, Stream), Keep)>> = const { RefCell::new(None) };
}

impl CuPyConsumer {
    pub(crate) fn new(py: Python<'_>) -> PyResult<Self> {
        let cuda = py.import("cupy.cuda")?;
        let owning = cuda.getattr("Stream")?.cast_into::<PyType>()?.unbind();
        let current = cuda.getattr("get_current_stream")?.unbind();
        Ok(Self { stream_of: stream_of(py), current, owning, views: Views::default() })
    }

    /// Returns the stream that CuPy would use for this device now, on this thread.
    pub(crate) fn stream(&self, py: Python<'_>, device: i32) -> PyResult<Stream> {
        let Some(stream_of) = self.stream_of else {
            return handle(&self.current.bind(py).call1((device,))?);
        };
        // SAFETY: the signature was checked when the function was looked up, and the GIL is held.
        let handle = unsafe { stream_of(device) };
        // Cython's return value when the function raises.
        let error = if handle == -1 { PyErr::take(py) } else { None };
        // SAFETY: CuPy's current stream exists, and its maker keeps it.
        error.map_or_else(|| Ok(unsafe { Stream::from_handle(handle as u64) }), Err)
    }

    /// Returns a hold on the object of `stream`, the current stream, because CuPy destroys a stream with its object.
    /// `None` for the default streams, which live forever, and for an `ExternalStream`, which keeps nothing alive.
    pub(crate) fn keep_current(&self, py: Python<'_>, device: i32, stream: Stream) -> PyResult<Option<Keep>> {
        if lives_for_ever(stream) {
            return Ok(None);
        }
        if let Some((_, keep)) = KEPT.with_borrow(|kept| kept.clone().filter(|(known, _)| *known == (device, stream))) {
            return Ok(Some(keep));
        }
        let object = self.current.bind(py).call1((device,))?;
        if !is_instance(&object, self.owning.bind(py)) || handle(&object)? != stream {
            return Ok(None);
        }
        let keep: Keep = Arc::new(PyOwner::new(&object));
        // The previous one is dropped outside the cell, because that runs code of CuPy.
        drop(KEPT.replace(Some(((device, stream), keep.clone()))));
        Ok(Some(keep))
    }
}

// SAFETY: CuPy uses an array in its current stream, and in those that `record_stream` notes.
unsafe impl Consumer for CuPyConsumer {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        if device.kind != DeviceKind::CUDA {
            return Ok(None);
        }
        let stream = with_gil(|py| self.stream(py, device.index).map_err(|error| raised(py, error)));
        stream.transpose()
    }

    fn keep(&self, device: Device, stream: Stream) -> Option<Keep> {
        if lives_for_ever(stream) {
            return None;
        }
        with_gil(|py| self.keep_current(py, device.index, stream).ok()).flatten().flatten()
    }

    fn exports_in_current_stream(&self) -> bool {
        true
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

fn lives_for_ever(stream: Stream) -> bool {
    [Stream::LEGACY, Stream::PER_THREAD].contains(&stream)
}

fn handle(stream: &PyTensor<'_>) -> PyResult<Stream> {
    // SAFETY: CuPy's current stream exists, and its maker keeps it.
    Ok(unsafe { Stream::from_handle(stream.getattr(intern!(stream.py(), "ptr"))?.extract()?) })
}

/// Returns the C function of `get_current_stream`, at a tenth of its cost. Cython names a capsule by the signature.
fn stream_of(py: Python<'_>) -> Option<StreamOf> {
    let module = py.import("cupy_backends.cuda.stream").ok()?;
    let table = module.getattr("__pyx_capi__").ok()?.cast_into::<PyDict>().ok()?;
    let capsule = table.get_item("get_stream_ptr").ok()??;
    // SAFETY: the object is alive and the GIL is held; a capsule of another signature returns null and sets an
    // exception.
    let function = unsafe { PyCapsule_GetPointer(capsule.as_ptr(), c"intptr_t (int)".as_ptr()) };
    if function.is_null() {
        drop(PyErr::take(py));
        return None;
    }
    // SAFETY: by its name, the capsule points to a function from int to intptr_t.
    Some(unsafe { std::mem::transmute::<*mut c_void, StreamOf>(function) })
}

/// Each pool's dictionary of arenas by stream, found once per pool. There is one pool per device, unless the user makes
/// more; the dictionaries of further pools are searched every time.
pub(crate) struct Arenas([PyOnceLock<Pool>; 16]);

/// The weak reference to the pool that its blocks hold, and the dictionary, if it was found.
type Pool = (Py<PyAny>, Option<Py<PyDict>>);

impl Arenas {
    pub(crate) const fn new() -> Self {
        Self([const { PyOnceLock::new() }; 16])
    }

    /// Returns whether a block of a pool belongs to the arena of the stream with this handle; `false` where CuPy's
    /// internals differ from those of CuPy 14.
    pub(crate) fn holds(&self, memory: &Bound<'_, PyAny>, handle: u64) -> PyResult<bool> {
        let pool = memory.getattr(intern!(memory.py(), "pool"))?;
        let Some(arenas) = self.of_pool(&pool)? else { return Ok(false) };
        let Some(expected) = arenas.get_item(handle)? else { return Ok(false) };
        // A pool with a single arena has allocated all its blocks there.
        Ok(arenas.len() == 1 || expected.call0()?.is(&arena_of(memory)?))
    }

    fn of_pool<'py>(&self, pool: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let py = pool.py();
        let known = self.0.iter().map_while(|slot| slot.get(py));
        if let Some((_, arenas)) = known.into_iter().find(|(seen, _)| seen.as_ptr() == pool.as_ptr()) {
            return Ok(arenas.as_ref().map(|arenas| arenas.bind(py).clone()));
        }
        let found = find(&pool.call0()?)?;
        if let Some(free) = self.0.iter().find(|slot| slot.get(py).is_none()) {
            // If another thread was faster, the next call searches again.
            let _ = free.set(py, (pool.clone().unbind(), found.clone().map(Bound::unbind)));
        }
        Ok(found)
    }
}

/// Returns the arena of a pooled block: an attribute of its chunk, which only the pickling state exposes to Python.
fn arena_of<'py>(memory: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let reduced = call(memory, intern!(memory.py(), "__reduce__"), &[])?.cast_into::<PyTuple>()?;
    let chunk = reduced.get_borrowed_item(2)?.cast::<PyTuple>()?.get_item(0)?;
    chunk.getattr(intern!(memory.py(), "arena"))
}

/// Finds, among the objects that the pool refers to, the dictionary of weak references to arenas, as in CuPy 14. A pool
/// with a block in use has at least one arena.
fn find<'py>(pool: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyDict>>> {
    let py = pool.py();
    let arena = py.import("cupy.cuda.memory")?.getattr("_Arena")?;
    for object in py.import("gc")?.call_method1("get_referents", (pool,))?.try_iter()? {
        let Ok(candidate) = object?.cast_into::<PyDict>() else { continue };
        let of_arenas = |value: Bound<'py, PyAny>| value.call0().and_then(|value| value.is_instance(&arena));
        for value in candidate.values() {
            if probe(py, of_arenas(value))? == Some(true) {
                return Ok(Some(candidate));
            }
        }
    }
    Ok(None)
}
