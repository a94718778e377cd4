//! The JAX of this process, looked up once.

use crate::devices::{device_of, has_cuda, raised};
use crate::streams::JAXConsumer;
use bridge_core::{DType, Device, DeviceKind, Error, ErrorKind, Profile, Protected, Result, Strides};
use bridge_pyo3::{PyTensor, installed, is_instance, once};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use std::sync::{Arc, Mutex, PoisonError};

/// Alignment of XLA's buffers on the host, in bytes. On a GPU 16 are enough; one profile is for both.
const ALIGNMENT: usize = 64;

/// How JAX's mode with 64 bits is enabled.
const ENABLE: &str = "enable 64 bits with jax.config.update(\"jax_enable_x64\", True)";

/// The dtypes that JAX has only in its 64-bit mode: elsewhere its functions would silently convert such arrays.
const WIDE: &[DType] = &[DType::INT64, DType::UINT64, DType::FLOAT64, DType::COMPLEX128];

/// Elements that jaxlib exports and imports.
const TAKEN: &[DType] = &[
    DType::BOOL,
    DType::INT8,
    DType::INT16,
    DType::INT32,
    DType::UINT8,
    DType::UINT16,
    DType::UINT32,
    DType::FLOAT16,
    DType::BFLOAT16,
    DType::FLOAT32,
    DType::COMPLEX64,
    DType::FLOAT8_E3M4,
    DType::FLOAT8_E4M3,
    DType::FLOAT8_E4M3B11FNUZ,
    DType::FLOAT8_E4M3FN,
    DType::FLOAT8_E4M3FNUZ,
    DType::FLOAT8_E5M2,
    DType::FLOAT8_E5M2FNUZ,
    DType::FLOAT8_E8M0FNU,
];

pub(crate) struct Runtime {
    /// Without and with `jax_enable_x64`.
    profiles: [Profile; 2],
    pub(crate) consumer: Arc<JAXConsumer>,
    /// What JAX has imported of protected memory.
    pub(crate) protected: Protected,
    /// The class of arrays with memory, and those of everything that passes as an array.
    concrete: Py<PyType>,
    array: Py<PyType>,
    pub(crate) tracer: Py<PyType>,
    /// `buffer_to_dlpack_managed_tensor`
    pub(crate) export: Py<PyAny>,
    /// `dlpack_managed_tensor_to_buffer`
    pub(crate) import: Py<PyAny>,
    /// `collect_garbage`
    pub(crate) collect: Py<PyAny>,
    config: Py<PyAny>,
    /// Whether arrays have `_fully_replicated_shard`.
    pub(crate) has_shard: bool,
    /// `SingleDeviceSharding`
    pub(crate) single: Py<PyAny>,
    /// The number of the first piece of an array.
    pub(crate) zero: Py<PyAny>,
    /// JAX's objects for the devices that were used.
    devices: Mutex<Vec<(Device, Py<PyAny>)>>,
}

impl Runtime {
    pub(crate) fn get(py: Python<'_>) -> Result<&'static Self> {
        static RUNTIME: PyOnceLock<Runtime> = PyOnceLock::new();
        once(py, &RUNTIME, || {
            let jax = installed(py, "jax", "jax")?;
            Self::look_up(&jax).map_err(|error| {
                let text = "this version of JAX is not known, or its import was interrupted: install one of 0.10 to \
                            0.12, or start the process again";
                Error::new(ErrorKind::Version, text).caused_by(error)
            })
        })
    }

    fn look_up(jax: &Bound<'_, PyModule>) -> PyResult<Self> {
        let py = jax.py();
        let functions = py.import("jaxlib._jax")?;
        let class = |module: &Bound<'_, PyAny>, name: &str| Ok::<_, PyErr>(module.getattr(name)?.cast_into()?.unbind());
        // The modules themselves: an import that was interrupted leaves JAX without some of its attributes.
        let numpy = py.import("jax.numpy")?;
        let has = |dtype: &&DType| numpy.hasattr(dtype.to_string()).unwrap_or(false);
        let narrow: Vec<DType> = TAKEN.iter().filter(has).copied().collect();
        let wide = narrow.iter().chain(WIDE).copied().collect();
        let mut devices = vec![DeviceKind::CPU];
        if has_cuda(jax)? {
            devices.push(DeviceKind::CUDA);
        }
        let profile = |dtypes| {
            Profile::export_only("jax")
                .with_dtypes(dtypes)
                .with_strides(Strides::Compact)
                .with_alignment(ALIGNMENT)
                .with_devices(devices.clone())
                .with_private_functions(true)
        };
        let concrete: Py<PyType> = class(functions.as_any(), "ArrayImpl")?;
        Ok(Self {
            profiles: [profile(narrow).with_disabled(Some((WIDE.to_vec(), ENABLE.into()))), profile(wide)],
            consumer: Arc::default(),
            protected: Protected::default(),
            has_shard: concrete.bind(py).hasattr("_fully_replicated_shard")?,
            concrete,
            array: class(jax.as_any(), "Array")?,
            tracer: class(py.import("jax.core")?.as_any(), "Tracer")?,
            export: functions.getattr("buffer_to_dlpack_managed_tensor")?.unbind(),
            import: functions.getattr("dlpack_managed_tensor_to_buffer")?.unbind(),
            collect: functions.getattr("collect_garbage")?.unbind(),
            config: jax.getattr("config")?.unbind(),
            single: py.import("jax.sharding")?.getattr("SingleDeviceSharding")?.unbind(),
            zero: 0i32.into_pyobject(py)?.into_any().unbind(),
            devices: Mutex::default(),
        })
    }

    /// Returns the profile of JAX's mode on this thread.
    pub(crate) fn profile(&self, py: Python<'_>) -> Result<&Profile> {
        let wide = || self.config.bind(py).getattr(intern!(py, "jax_enable_x64"))?.is_truthy();
        wide().map(|wide| &self.profiles[usize::from(wide)]).map_err(|error| raised(py, error))
    }

    /// Returns JAX's object for a device of this process.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Device`] for one that JAX does not have.
    pub(crate) fn device<'py>(&self, py: Python<'py>, device: Device) -> Result<PyTensor<'py>> {
        let devices = || self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = devices().iter().find(|(known, _)| *known == device) {
            return Ok(known.bind(py).clone());
        }
        // Without the lock: Python may let other threads run.
        let found = device_of(py, device)?;
        devices().push((device, found.clone().unbind()));
        Ok(found)
    }

    /// Returns whether an object is an array with memory.
    pub(crate) fn is_concrete(&self, object: &PyTensor<'_>) -> bool {
        is_instance(object, self.concrete.bind(object.py()))
    }

    /// Returns whether an object is of JAX: an array, a tracer, or keys.
    pub(crate) fn is_of_jax(&self, object: &PyTensor<'_>) -> bool {
        let py = object.py();
        [&self.concrete, &self.array, &self.tracer].into_iter().any(|kind| is_instance(object, kind.bind(py)))
    }
}
