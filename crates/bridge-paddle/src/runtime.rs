//! The Paddle of this process, looked up once.

use crate::raised;
use bridge_core::{DType, DeviceKind, Error, ErrorKind, Profile, Result, Strides, Views};
use bridge_pyo3::{PyTensor, installed, is_instance, once};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use std::sync::Arc;

/// The dtypes for which Paddle has kernels. It has the names `uint16`, `uint32` and `uint64` too, but it takes the first
/// for bfloat16, and copies no tensor of the others.
const DTYPES: &[DType] = &[
    DType::BOOL,
    DType::INT8,
    DType::INT16,
    DType::INT32,
    DType::INT64,
    DType::UINT8,
    DType::FLOAT16,
    DType::BFLOAT16,
    DType::FLOAT32,
    DType::FLOAT64,
    DType::COMPLEX64,
    DType::COMPLEX128,
    DType::FLOAT8_E4M3FN,
    DType::FLOAT8_E5M2,
];

/// The most dimensions that a tensor of Paddle can have (`phi::DDim::kMaxRank`).
const MOST_DIMENSIONS: usize = 9;

pub(crate) struct Runtime {
    pub(crate) profile: Profile,
    /// Host memory has no streams.
    pub(crate) consumer: Arc<Views>,
    tensor: Py<PyType>,
    /// What stands for a tensor while a program is built: of the graphs of Paddle 3 and of those before.
    symbols: [Py<PyType>; 2],
    /// Paddle's objects for the dtypes of the profile, in their order.
    dtypes: Vec<Py<PyAny>>,
    /// `CPUPlace()`
    pub(crate) host: Py<PyAny>,
    /// The class of tensors without autograd, `DenseTensor`.
    pub(crate) dense: Py<PyAny>,
    /// `paddle.in_dynamic_mode`
    is_dynamic: Py<PyAny>,
    /// `numpy.asarray`
    pub(crate) asarray: Py<PyAny>,
}

impl Runtime {
    pub(crate) fn get(py: Python<'_>) -> Result<&'static Self> {
        static RUNTIME: PyOnceLock<Runtime> = PyOnceLock::new();
        once(py, &RUNTIME, || {
            refuse_late_import(py)?;
            let paddle = installed(py, "paddle", "paddlepaddle")?;
            Self::look_up(&paddle).map_err(|error| {
                let text = "this version of Paddle is not known, or its import was interrupted: install one of 3.3, or \
                            start the process again";
                Error::new(ErrorKind::Version, text).caused_by(error)
            })
        })
    }

    fn look_up(paddle: &Bound<'_, PyModule>) -> PyResult<Self> {
        let py = paddle.py();
        let class = |object: Bound<'_, PyAny>| Ok::<_, PyErr>(object.cast_into::<PyType>()?.unbind());
        let of_graphs = paddle.getattr("pir")?.getattr("Value")?;
        let of_older = paddle.getattr("base")?.getattr("framework")?.getattr("Variable")?;
        let dtypes = DTYPES.iter().map(|dtype| Ok(paddle.getattr(dtype.to_string().as_str())?.unbind()));
        let profile = Profile::export_only("paddle")
            .with_dtypes(DTYPES.to_vec())
            .with_rank(0..=MOST_DIMENSIONS)
            .with_strides(Strides::Any)
            .with_alignment(1)
            .with_devices(vec![DeviceKind::CPU])
            .with_keeps_read_only(false)
            .with_private_functions(true);
        Ok(Self {
            profile,
            consumer: Arc::default(),
            tensor: class(paddle.getattr("Tensor")?)?,
            symbols: [class(of_graphs)?, class(of_older)?],
            dtypes: dtypes.collect::<PyResult<_>>()?,
            host: paddle.call_method0("CPUPlace")?.unbind(),
            dense: paddle.getattr("base")?.getattr("core")?.getattr("DenseTensor")?.unbind(),
            is_dynamic: paddle.getattr("in_dynamic_mode")?.unbind(),
            asarray: py.import("numpy")?.getattr("asarray")?.unbind(),
        })
    }

    pub(crate) fn is_tensor(&self, object: &PyTensor<'_>) -> bool {
        is_instance(object, self.tensor.bind(object.py()))
    }

    /// Returns whether an object stands for a tensor of a program that is built and not run.
    pub(crate) fn is_symbol(&self, object: &PyTensor<'_>) -> bool {
        self.symbols.iter().any(|symbol| is_instance(object, symbol.bind(object.py())))
    }

    pub(crate) fn is_of_paddle(&self, object: &PyTensor<'_>) -> bool {
        self.is_tensor(object) || self.is_symbol(object)
    }

    /// Returns Paddle's object for a dtype.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Dtype`] for one that Paddle lacks.
    pub(crate) fn dtype<'py>(&self, py: Python<'py>, dtype: DType) -> Result<&Bound<'py, PyAny>> {
        let known = DTYPES.iter().zip(&self.dtypes).find(|(known, _)| **known == dtype);
        let missing = || Error::new(ErrorKind::Dtype, format!("paddle has no dtype {dtype}: cast the tensor first"));
        known.map(|(_, object)| object.bind(py)).ok_or_else(missing)
    }

    /// Refuses Paddle's mode in which functions build a program: to make a tensor there ends the process.
    pub(crate) fn refuse_static_mode(&self, py: Python<'_>) -> Result<()> {
        let is_dynamic = self.is_dynamic.bind(py).call0().and_then(|answer| answer.is_truthy());
        match is_dynamic.map_err(|error| raised(py, error))? {
            true => Ok(()),
            false => {
                let text = "Paddle is in static mode, where it makes no tensors: call paddle.disable_static() first";
                Err(Error::new(ErrorKind::Refused, text))
            }
        }
    }
}

/// A module that TensorFlow imports to open its libraries for the whole process, unless a program prevents it.
const OPENS_GLOBALLY: &str = "tensorflow.python.pywrap_dlopen_global_flags";

/// Refuses to import Paddle where its libraries would find TensorFlow's protobuf instead of theirs, and crash.
fn refuse_late_import(py: Python<'_>) -> Result<()> {
    let look = || -> PyResult<bool> {
        let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
        let opener = modules.call_method1(intern!(py, "get"), (OPENS_GLOBALLY,))?;
        Ok(!opener.is_none() && !modules.contains("paddle")?)
    };
    match look().map_err(|error| raised(py, error))? {
        false => Ok(()),
        true => {
            let text = "paddle cannot be imported after tensorflow, because Paddle's libraries would find the protobuf \
                        of TensorFlow and end the process: import paddle before tensorflow";
            Err(Error::new(ErrorKind::Missing, text))
        }
    }
}
