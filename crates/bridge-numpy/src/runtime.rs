//! The NumPy of this process, looked up once.

use crate::native::Native;
use crate::raised;
use bridge_core::planted::is_planted;
use bridge_core::{DType, DeviceKind, MAX_NDIM, Profile, Result, Strides, Views};
use bridge_pyo3::{ArrayDTypes, EXTENSION_DTYPES, NUMPY_DTYPES, PyTensor, installed, is_instance, once};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use std::sync::Arc;

pub(crate) struct Runtime {
    pub(crate) profile: Profile,
    /// Host memory has no streams.
    pub(crate) consumer: Arc<Views>,
    pub(crate) dtypes: ArrayDTypes,
    pub(crate) asarray: Py<PyAny>,
    array: Py<PyType>,
    /// `ndarray.__dlpack__`
    dlpack: Py<PyAny>,
    /// `ndarray.view`, whatever a subclass overrides.
    view: Py<PyAny>,
    /// Arrays without Python, where this NumPy has them.
    pub(crate) native: Option<Native>,
}

type FindNative = fn(&Bound<'_, PyModule>) -> PyResult<Option<Native>>;

/// Returns how many dimensions arrays have at most. NumPy before 2 names it, where they are fewer than tensors can have.
fn most_dimensions(numpy: &Bound<'_, PyAny>) -> PyResult<usize> {
    numpy.getattr_opt("MAXDIMS")?.map_or(Ok(MAX_NDIM), |most| most.extract())
}

impl Runtime {
    /// Returns NumPy through its C API where that is as expected, and through the array interface elsewhere.
    pub(crate) fn fast(py: Python<'_>) -> Result<&'static Self> {
        static RUNTIME: PyOnceLock<Runtime> = PyOnceLock::new();
        once(py, &RUNTIME, || Self::new(py, Native::find))
    }

    /// Returns NumPy through the array interface.
    pub(crate) fn with_interface(py: Python<'_>) -> Result<&'static Self> {
        static RUNTIME: PyOnceLock<Runtime> = PyOnceLock::new();
        once(py, &RUNTIME, || Self::new(py, |_| Ok(None)))
    }

    fn new(py: Python<'_>, native: FindNative) -> Result<Self> {
        let numpy = installed(py, "numpy", "numpy")?;
        Self::look_up(&numpy, native).map_err(|error| raised(py, error))
    }

    fn look_up(numpy: &Bound<'_, PyModule>, native: FindNative) -> PyResult<Self> {
        let wanted: Vec<DType> = NUMPY_DTYPES.iter().chain(EXTENSION_DTYPES).copied().collect();
        let dtypes = ArrayDTypes::new(numpy.py(), "numpy", &wanted)?;
        let array = numpy.getattr("ndarray")?.cast_into::<PyType>()?;
        let profile = Profile::export_only("numpy")
            .with_dtypes(dtypes.all())
            .with_rank(0..=most_dimensions(numpy.as_any())?)
            .with_strides(Strides::Any)
            .with_alignment(if is_planted("numpy_alignment_overstated") { 64 } else { 0 })
            .with_devices(vec![DeviceKind::CPU]);
        Ok(Self {
            profile,
            consumer: Arc::default(),
            dtypes,
            asarray: numpy.getattr("asarray")?.unbind(),
            native: native(numpy)?,
            dlpack: array.getattr("__dlpack__")?.unbind(),
            view: array.getattr("view")?.unbind(),
            array: array.unbind(),
        })
    }

    pub(crate) fn is_array(&self, object: &PyTensor<'_>) -> bool {
        self.is_plain(object) || is_instance(object, self.array.bind(object.py()))
    }

    /// Returns whether the array is of a subclass with its own `__dlpack__`, and so its own producer.
    pub(crate) fn exports_itself(&self, array: &PyTensor<'_>) -> bool {
        let own = || array.get_type().getattr(intern!(array.py(), "__dlpack__"));
        !self.is_plain(array) && own().is_ok_and(|own| !own.is(&self.dlpack))
    }

    fn is_plain(&self, object: &PyTensor<'_>) -> bool {
        object.get_type_ptr().cast() == self.array.as_ptr()
    }

    /// Returns the array itself, or for a subclass, which may override any attribute, a view of the class `ndarray`.
    pub(crate) fn plain<'py>(&self, array: &PyTensor<'py>) -> PyResult<PyTensor<'py>> {
        let py = array.py();
        match self.is_plain(array) {
            true => Ok(array.clone()),
            false => self.view.bind(py).call1((array, self.array.bind(py))),
        }
    }

    /// Returns whether the array is a masked one. NumPy imports their module at its first use, which takes longer than all
    /// that this adapter looks up: before that no array is masked.
    pub(crate) fn is_masked(&self, array: &PyTensor<'_>) -> PyResult<bool> {
        let py = array.py();
        if self.is_plain(array) {
            return Ok(false);
        }
        let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
        let Some(module) = modules.cast::<PyDict>()?.get_item(intern!(py, "numpy.ma"))? else { return Ok(false) };
        let masked = module.getattr_opt(intern!(py, "MaskedArray"))?;
        Ok(masked.is_some_and(|masked| masked.cast().is_ok_and(|masked| is_instance(array, masked))))
    }
}
