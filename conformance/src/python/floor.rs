//! What no conversion can avoid: the producer's own export, the consumer's own import, and the events that order them.
//! The bench compares a transfer with their sum.

use bridge_core::dlpack::ffi::{
    DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensorVersioned, DLPACK_MAJOR_VERSION,
    DLPACK_MINOR_VERSION, DLPackExchangeAPI, DLPackVersion, DLTensor,
};
use bridge_core::dlpack::{DlpackFlags, describe_as};
use bridge_core::{DType, Device, DeviceKind, Layout, Stream};
use bridge_pyo3::legacy_capsule;
use libloading::os::unix::{Library, RTLD_NOW};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi::PyCapsule_GetPointer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

/// Float32 memory that the imports wrap. Its owner outlives the floor, so nothing is released.
#[derive(Clone)]
struct Memory {
    address: usize,
    shape: [i64; 2],
    /// The number of the CUDA device, or -1 for the host.
    device: i32,
}

impl Memory {
    fn nbytes(&self) -> usize {
        (self.shape[0] * self.shape[1]) as usize * size_of::<f32>()
    }

    fn place(&self) -> Device {
        match self.device {
            -1 => Device::CPU,
            index => Device { kind: DeviceKind::CUDA, index },
        }
    }
}

/// The calls of one path, without the bridge.
#[pyclass(frozen, module = "truebridge_conformance")]
pub(crate) struct Floor {
    export: Export,
    import: Import,
    events: Option<Events>,
    memory: Memory,
}

#[pymethods]
impl Floor {
    /// Returns the calls from `source` to `target`, over float32 `memory`: its address, its shape and its device, -1 for
    /// the host. `pairs` are streams of which the second waits for the first, and `records` streams in which one more
    /// event is recorded.
    #[new]
    fn new(
        py: Python<'_>,
        source: &str,
        target: &str,
        memory: (usize, [i64; 2], i32),
        pairs: Vec<(u64, u64)>,
        records: Vec<u64>,
    ) -> PyResult<Self> {
        let (address, shape, device) = memory;
        let memory = Memory { address, shape, device };
        let needs_events = !(pairs.is_empty() && records.is_empty());
        Ok(Self {
            export: Export::new(py, source, &memory)?,
            import: Import::new(py, target, &memory)?,
            events: if needs_events { Some(Events::new(pairs, records)?) } else { None },
            memory,
        })
    }

    /// Makes the calls for `tensor`, and returns the consumer's object, whose drop belongs to the floor.
    fn convert<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.export.call(tensor)?;
        if let Some(events) = &self.events {
            events.submit()?;
        }
        self.import.call(tensor.py(), &self.memory)
    }
}

fn failed(what: &str) -> PyErr {
    PyRuntimeError::new_err(format!("the floor cannot be measured: {what}"))
}

/// Looks a function up in a library that the process has loaded, or loads a library of the driver.
///
/// # Safety
///
/// `F` is the type of the function with this name.
unsafe fn function<F: Copy>(library: &str, name: &str) -> PyResult<F> {
    // SAFETY: the libraries are those of the frameworks and of the driver, whose initialisers every program runs. They
    // stay loaded, because the handle is forgotten.
    unsafe {
        let library = Library::open(Some(library), RTLD_NOW).map_err(|error| failed(&error.to_string()))?;
        let found = library.get::<F>(name.as_bytes()).map(|function| *function);
        std::mem::forget(library);
        found.map_err(|error| failed(&error.to_string()))
    }
}

/// The exchange table of `torch.Tensor`.
fn exchange(py: Python<'_>) -> PyResult<&'static DLPackExchangeAPI> {
    let capsule = py.import("torch")?.getattr("Tensor")?.getattr("__dlpack_c_exchange_api__")?;
    // SAFETY: the object is alive and the GIL held; the table lives as long as the process (`dlpack.h`).
    let table = unsafe { PyCapsule_GetPointer(capsule.as_ptr(), c"dlpack_exchange_api".as_ptr()) };
    // SAFETY: as above, or null.
    unsafe { table.cast::<DLPackExchangeAPI>().as_ref() }.ok_or_else(|| PyErr::fetch(py))
}

/// The producer's export, and its release.
enum Export {
    Torch(unsafe extern "C" fn(*mut c_void, *mut *mut DLManagedTensorVersioned) -> c_int),
    /// The attributes that say where the memory is and what it holds: the quickest public path.
    CuPy,
    /// The C struct of the array interface.
    NumPy,
    TensorFlow(TensorFlowExport),
    /// The function of jaxlib, over its own array, and the stream that waits for the array.
    Jax {
        export: Py<PyAny>,
        stream: Option<u64>,
    },
}

struct TensorFlowExport {
    handle_of: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    share: unsafe extern "C" fn(*mut c_void, *mut c_void) -> *mut c_void,
    delete: unsafe extern "C" fn(*mut c_void),
    dtype: unsafe extern "C" fn(*mut c_void) -> c_int,
    dim: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> i64,
    status: Status,
}

/// A status of TensorFlow's that is used again and again.
struct Status(*mut c_void);

// SAFETY: the floor is called only with the GIL, by one thread at a time.
unsafe impl Send for Status {}
// SAFETY: as above.
unsafe impl Sync for Status {}

const FRAMEWORK: &str = "libtensorflow_framework.so.2";
const TENSORFLOW: &str = "libtensorflow_cc.so.2";
const PYWRAP: &str = "lib_pywrap_tensorflow_common.so";

fn status() -> PyResult<Status> {
    // SAFETY: the signature is that of `tensorflow/c/tf_status.h`; the function has no obligations.
    Ok(Status(unsafe { function::<unsafe extern "C" fn() -> *mut c_void>(FRAMEWORK, "TF_NewStatus")?() }))
}

impl Export {
    fn new(py: Python<'_>, source: &str, memory: &Memory) -> PyResult<Self> {
        Ok(match source {
            "torch" => {
                let export = exchange(py)?.managed_tensor_from_py_object_no_sync;
                Self::Torch(export.ok_or_else(|| failed("torch has no export"))?)
            }
            "cupy" => Self::CuPy,
            "numpy" => Self::NumPy,
            // SAFETY: the signatures are those of `tensorflow/c/eager/c_api.h`, and what the mangled name says.
            "tensorflow" => unsafe {
                Self::TensorFlow(TensorFlowExport {
                    handle_of: function(PYWRAP, "_Z18EagerTensor_HandlePK7_object")?,
                    share: function(TENSORFLOW, "TFE_TensorHandleCopySharingTensor")?,
                    delete: function(TENSORFLOW, "TFE_DeleteTensorHandle")?,
                    dtype: function(TENSORFLOW, "TFE_TensorHandleDataType")?,
                    dim: function(TENSORFLOW, "TFE_TensorHandleDim")?,
                    status: status()?,
                })
            },
            "jax" => Self::Jax {
                export: py.import("jaxlib._jax")?.getattr("buffer_to_dlpack_managed_tensor")?.unbind(),
                stream: (memory.device >= 0).then_some(Stream::LEGACY.handle()),
            },
            _ => return Err(PyValueError::new_err(format!("there is no floor from {source}"))),
        })
    }

    fn call(&self, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = tensor.py();
        match self {
            Self::Torch(export) => {
                let mut managed = ptr::null_mut();
                // SAFETY: the object is a tensor, the GIL is held; the managed tensor is ours, and deleted once.
                unsafe {
                    if export(tensor.as_ptr().cast(), &mut managed) != 0 {
                        return Err(PyErr::fetch(py));
                    }
                    if let Some(delete) = (*managed).deleter {
                        delete(managed);
                    }
                }
            }
            Self::CuPy => {
                let pointer = tensor.getattr(intern!(py, "data"))?;
                pointer.getattr(intern!(py, "ptr"))?.extract::<usize>()?;
                tensor.getattr(intern!(py, "shape"))?;
                tensor.getattr(intern!(py, "strides"))?;
                tensor.getattr(intern!(py, "dtype"))?;
            }
            Self::NumPy => drop(tensor.getattr(intern!(py, "__array_struct__"))?),
            Self::TensorFlow(calls) => {
                // SAFETY: the object is an eager tensor, which keeps its handle; the copy is ours, and deleted once.
                unsafe {
                    let handle = (calls.handle_of)(tensor.as_ptr().cast());
                    (calls.dtype)(handle);
                    for dim in 0..2 {
                        (calls.dim)(handle, dim, calls.status.0);
                    }
                    (calls.delete)((calls.share)(handle, calls.status.0));
                }
            }
            Self::Jax { export, stream } => {
                let shard = tensor.call_method0(intern!(py, "_fully_replicated_shard"))?;
                export.bind(py).call1((shard, *stream))?;
            }
        }
        Ok(())
    }
}

/// The consumer's object over memory that needs no release.
enum Import {
    Torch(unsafe extern "C" fn(*mut DLManagedTensorVersioned, *mut *mut c_void) -> c_int),
    CuPy {
        unowned: Py<PyAny>,
        pointer: Py<PyAny>,
        array: Py<PyAny>,
        dtype: Py<PyAny>,
    },
    NumPy {
        new: PyArrayNew,
        array: Py<PyAny>,
    },
    TensorFlow(TensorFlowImport),
    /// The function of jaxlib, and the device and the stream that it takes.
    Jax {
        import: Py<PyAny>,
        device: Py<PyAny>,
        stream: Option<u64>,
    },
}

/// `PyArray_New`, at place 93 of NumPy's table since 1.0: type, dimensions, number of the dtype, strides, address, size
/// of an element, flags, object.
type PyArrayNew = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *const i64,
    c_int,
    *const i64,
    *mut c_void,
    c_int,
    c_int,
    *mut c_void,
) -> *mut c_void;
const PYARRAY_NEW: usize = 93;
/// `NPY_FLOAT`
const NPY_FLOAT: c_int = 11;
/// `NPY_ARRAY_CARRAY`
const CARRAY: c_int = 0x0001 | 0x0100 | 0x0400;

struct TensorFlowImport {
    new: unsafe extern "C" fn(
        *mut c_void,
        *const c_char,
        c_int,
        *const i64,
        c_int,
        *mut c_void,
        usize,
        unsafe extern "C" fn(*mut c_void, usize, *mut c_void),
        *mut c_void,
        *mut c_void,
    ) -> *mut c_void,
    from_handle: unsafe extern "C" fn(*mut c_void, bool) -> *mut c_void,
    context: usize,
    device: CString,
    status: Status,
}

/// `TF_FLOAT`
const TF_FLOAT: c_int = 1;

unsafe extern "C" fn keep(_: *mut c_void, _: usize, _: *mut c_void) {}

/// A managed tensor with its shape and strides.
struct Managed {
    managed: DLManagedTensorVersioned,
    shape: [i64; 2],
    strides: [i64; 2],
}

unsafe extern "C" fn delete(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: the context is the box that `Import::call` made, and the consumer calls the deleter once.
    drop(unsafe { Box::from_raw((*managed).manager_ctx.cast::<Managed>()) });
}

impl Import {
    fn new(py: Python<'_>, target: &str, memory: &Memory) -> PyResult<Self> {
        Ok(match target {
            "torch" => {
                let import = exchange(py)?.managed_tensor_to_py_object_no_sync;
                Self::Torch(import.ok_or_else(|| failed("torch has no import"))?)
            }
            "cupy" => {
                let (cupy, memory) = (py.import("cupy")?, py.import("cupy.cuda.memory")?);
                Self::CuPy {
                    unowned: memory.getattr("UnownedMemory")?.unbind(),
                    pointer: memory.getattr("MemoryPointer")?.unbind(),
                    array: cupy.getattr("ndarray")?.unbind(),
                    dtype: py.import("numpy")?.call_method1("dtype", ("float32",))?.unbind(),
                }
            }
            "numpy" => {
                let capsule = py.import("numpy._core._multiarray_umath")?.getattr("_ARRAY_API")?;
                // SAFETY: the nameless capsule holds NumPy's table of functions, whose places do not change.
                let new = unsafe {
                    let table = PyCapsule_GetPointer(capsule.as_ptr(), ptr::null()).cast::<*const c_void>();
                    std::mem::transmute::<*const c_void, PyArrayNew>(*table.add(PYARRAY_NEW))
                };
                Self::NumPy { new, array: py.import("numpy")?.getattr("ndarray")?.unbind() }
            }
            "tensorflow" => {
                let context = py.import("tensorflow.python.eager.context")?.call_method0("context")?;
                context.call_method0("ensure_initialized")?;
                let handle = context.getattr("_context_handle")?;
                // SAFETY: the object is alive and the GIL held; TensorFlow's capsule has no name. The signatures are as
                // in `Export::new`.
                unsafe {
                    Self::TensorFlow(TensorFlowImport {
                        new: function(TENSORFLOW, "TFE_NewTensorHandleFromDeviceMemory")?,
                        from_handle: function(PYWRAP, "_Z21EagerTensorFromHandleP16TFE_TensorHandleb")?,
                        context: PyCapsule_GetPointer(handle.as_ptr(), ptr::null()).addr(),
                        device: match memory.device {
                            -1 => c"/device:CPU:0".into(),
                            gpu => CString::new(format!("/device:GPU:{gpu}"))?,
                        },
                        status: status()?,
                    })
                }
            }
            "jax" => {
                let backend = if memory.device < 0 { "cpu" } else { "cuda" };
                let keywords = [("backend", backend)].into_py_dict(py)?;
                let devices = py.import("jax")?.call_method("local_devices", (), Some(&keywords))?;
                let device = devices.get_item(memory.device.max(0))?;
                let stream = || device.call_method0("get_stream_for_external_ready_events")?.extract();
                Self::Jax {
                    import: py.import("jaxlib._jax")?.getattr("dlpack_managed_tensor_to_buffer")?.unbind(),
                    stream: if memory.device < 0 { None } else { Some(stream()?) },
                    device: device.unbind(),
                }
            }
            _ => return Err(PyValueError::new_err(format!("there is no floor to {target}"))),
        })
    }

    fn call<'py>(&self, py: Python<'py>, memory: &Memory) -> PyResult<Bound<'py, PyAny>> {
        let (shape, data) = (&memory.shape, memory.address as *mut c_void);
        let object = match self {
            Self::Torch(import) => {
                let mut object = ptr::null_mut();
                // SAFETY: the managed tensor is whole, and taken over; the GIL is held.
                match unsafe { import(managed(memory), &mut object) } {
                    0 => object,
                    _ => ptr::null_mut(),
                }
            }
            Self::CuPy { unowned, pointer, array, dtype } => {
                let owned = unowned.bind(py).call1((memory.address, memory.nbytes(), py.None(), memory.device))?;
                return array.bind(py).call1((shape.as_slice(), dtype.bind(py), pointer.bind(py).call1((owned, 0))?));
            }
            Self::Jax { import, device, stream } => {
                let layout = Layout::new(DType::FLOAT32, shape, None, 0).map_err(|error| failed(&error.to_string()))?;
                // SAFETY: the memory outlives the floor, and is what the arguments say.
                let managed = unsafe {
                    describe_as(DType::FLOAT32, &layout, memory.place(), memory.address, false, Arc::new(()))
                };
                return import.bind(py).call1((legacy_capsule(py, managed)?, device, *stream, false));
            }
            // SAFETY: the memory outlives the floor, and the arguments describe it; the GIL is held.
            Self::NumPy { new, array } => unsafe {
                new(array.as_ptr().cast(), 2, shape.as_ptr(), NPY_FLOAT, ptr::null(), data, 0, CARRAY, ptr::null_mut())
            },
            // SAFETY: as above; Python keeps the context. The handle is handed over.
            Self::TensorFlow(calls) => unsafe {
                let context = calls.context as *mut c_void;
                let (name, status) = (calls.device.as_ptr(), calls.status.0);
                let len = memory.nbytes();
                let handle =
                    (calls.new)(context, name, TF_FLOAT, shape.as_ptr(), 2, data, len, keep, ptr::null_mut(), status);
                if handle.is_null() { ptr::null_mut() } else { (calls.from_handle)(handle, false) }
            },
        };
        // SAFETY: a new reference, or null.
        unsafe { Bound::from_owned_ptr_or_opt(py, object.cast()) }
            .ok_or_else(|| PyErr::take(py).unwrap_or_else(|| failed("no object was made")))
    }
}

/// Returns a managed tensor over the memory, as every consumer of DLPack needs one.
fn managed(memory: &Memory) -> *mut DLManagedTensorVersioned {
    let (kind, number) = if memory.device < 0 { (DLDeviceType::CPU, 0) } else { (DLDeviceType::CUDA, memory.device) };
    let made = Box::into_raw(Box::new(Managed {
        managed: DLManagedTensorVersioned {
            version: DLPackVersion { major: DLPACK_MAJOR_VERSION, minor: DLPACK_MINOR_VERSION },
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete),
            flags: DlpackFlags::empty(),
            dl_tensor: DLTensor {
                data: memory.address as *mut c_void,
                device: DLDevice { device_type: kind, device_id: number },
                ndim: 2,
                dtype: DLDataType { code: DLDataTypeCode(2), bits: 32, lanes: 1 },
                shape: ptr::null_mut(),
                strides: ptr::null_mut(),
                byte_offset: 0,
            },
        },
        shape: memory.shape,
        strides: [memory.shape[1], 1],
    }));
    // SAFETY: the box is ours, and does not move until `delete` drops it.
    unsafe {
        (*made).managed.manager_ctx = made.cast();
        (*made).managed.dl_tensor.shape = (&raw mut (*made).shape).cast();
        (*made).managed.dl_tensor.strides = (&raw mut (*made).strides).cast();
        &raw mut (*made).managed
    }
}

/// Events of the driver, made once.
struct Events {
    record: unsafe extern "C" fn(usize, u64) -> u32,
    wait: unsafe extern "C" fn(u64, usize, c_uint) -> u32,
    event: usize,
    pairs: Vec<(u64, u64)>,
    records: Vec<u64>,
}

/// `CU_EVENT_DISABLE_TIMING`
const WITHOUT_TIMING: c_uint = 2;
const DRIVER: &str = "libcuda.so.1";

impl Events {
    fn new(pairs: Vec<(u64, u64)>, records: Vec<u64>) -> PyResult<Self> {
        let mut event = 0;
        // SAFETY: the signatures are those of `cuda.h`, with handles as numbers; the output is writable.
        unsafe {
            let create: unsafe extern "C" fn(*mut usize, c_uint) -> u32 = function(DRIVER, "cuEventCreate")?;
            if create(&mut event, WITHOUT_TIMING) != 0 {
                return Err(failed("cuEventCreate failed: make the device's context current first"));
            }
            let (record, wait) = (function(DRIVER, "cuEventRecord")?, function(DRIVER, "cuStreamWaitEvent")?);
            Ok(Self { record, wait, event, pairs, records })
        }
    }

    fn submit(&self) -> PyResult<()> {
        // SAFETY: the event is alive, and the caller keeps the streams.
        let failure = unsafe {
            let pair = |(earlier, later): &(u64, u64)| {
                (self.record)(self.event, *earlier) | (self.wait)(*later, self.event, 0)
            };
            self.pairs
                .iter()
                .map(pair)
                .chain(self.records.iter().map(|stream| (self.record)(self.event, *stream)))
                .max()
        };
        if failure.unwrap_or(0) == 0 { Ok(()) } else { Err(failed("the driver refused an event")) }
    }
}
