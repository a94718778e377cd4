//! The CuPy of this process, looked up once.

use crate::arenas::Arenas;
use crate::native::Fields;
use crate::raised;
use crate::streams::CuPyConsumer;
use bridge_core::{DType, DeviceKind, Error, ErrorKind, Profile, Result, Strides};
use bridge_pyo3::{ArrayDTypes, NUMPY_DTYPES, PyTensor, brief_str, call, installed, is_instance, once, probe};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};
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
