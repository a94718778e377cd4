//! The PyTorch of this process, looked up once.

use crate::allocator::Allocator;
use crate::capsule::Capsules;
use crate::exchange::{Borrow, Exchange, ExchangeApi};
use crate::fresh::Fresh;
use crate::native::{BYTES, Native};
use crate::raised;
use crate::refusal::NO_REAL_TENSORS;
use bridge_core::planted::is_planted;
use bridge_core::{Consumer, DType, Device, DeviceKind, Error, ErrorKind, Profile, Result, Stream, Strides, Views};
use bridge_pyo3::{PyTensor, brief_str, installed, is_instance, once, probe};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{IntoPyDict, PyType};
use std::sync::{Arc, OnceLock};

pub(crate) struct Runtime {
    pub(crate) profile: Profile,
    pub(crate) consumer: Arc<TorchConsumer>,
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    /// `torch.Tensor.__torch_dispatch__`: a subclass that overrides it may have no memory.
    dispatch: Py<PyAny>,
    /// Parameters and buffers of lazy modules, which have no shape yet.
    uninitialized: Py<PyAny>,
    /// PyTorch's objects for [`BYTES`].
    bytes: [Py<PyAny>; 2],
    cuda: OnceLock<()>,
    pub(crate) allocator: Allocator,
    /// Answers without Python, where this version has them.
    pub(crate) native: Option<Native>,
    /// New tensors likewise.
    pub(crate) fresh: Option<Fresh>,
    /// `torch._C._is_tracing`
    pub(crate) is_tracing: Py<PyAny>,
}

pub(crate) struct TorchConsumer {
    pub(crate) exchange: Box<dyn Exchange>,
    views: Views,
}

// SAFETY: PyTorch uses a tensor in its current stream, and in those that `record_stream` notes.
unsafe impl Consumer for TorchConsumer {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        match device.kind {
            DeviceKind::CUDA => self.exchange.current_stream(device),
            _ => Ok(None),
        }
    }

    fn exports_in_current_stream(&self) -> bool {
        true
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

impl Runtime {
    /// Returns PyTorch through the exchange API, or through capsules where it has none.
    pub(crate) fn fast(py: Python<'_>) -> Result<&'static Self> {
        static RUNTIME: PyOnceLock<Runtime> = PyOnceLock::new();
        once(py, &RUNTIME, || {
            let tensor = installed(py, "torch", "torch")?.getattr("Tensor").map_err(|e| raised(py, e))?;
            match ExchangeApi::of_type(&tensor).map_err(|e| raised(py, e))? {
                Some(api) => {
                    let borrow = api.borrow;
                    Self::new(py, Box::new(api), borrow)
                }
                None => Self::new(py, Box::new(Capsules), None),
            }
        })
    }

    /// Returns PyTorch through capsules.
    pub(crate) fn with_capsules(py: Python<'_>) -> Result<&'static Self> {
        static RUNTIME: PyOnceLock<Runtime> = PyOnceLock::new();
        once(py, &RUNTIME, || Self::new(py, Box::new(Capsules), None))
    }

    fn new(py: Python<'_>, exchange: Box<dyn Exchange>, borrow: Option<Borrow>) -> Result<Self> {
        let torch = installed(py, "torch", "torch")?;
        let look_up = || -> PyResult<_> {
            let tensor: Bound<'_, PyType> = torch.getattr("Tensor")?.cast_into()?;
            let nn = torch.getattr("nn")?;
            let parameter: Bound<'_, PyType> = nn.getattr("Parameter")?.cast_into()?;
            let uninitialized = nn.getattr("parameter")?.getattr("UninitializedTensorMixin")?.unbind();
            let dispatch = tensor.getattr("__torch_dispatch__")?.unbind();
            let cuda = torch.getattr("cuda")?;
            // Not `is_available`, which starts the driver: a child that is forked then could not use CUDA. Where the
            // driver has been started, there is a device, and counting devices takes milliseconds.
            let has_gpus = cuda.call_method0("is_initialized")?.is_truthy()?
                || cuda.call_method0("device_count")?.extract::<usize>()? > 0;
            let [int8, uint8] = BYTES.map(|byte| torch.getattr(byte.to_string().as_str()));
            let bytes = [int8?.unbind(), uint8?.unbind()];
            Ok((tensor.unbind(), parameter.unbind(), dispatch, uninitialized, bytes, has_gpus))
        };
        let (tensor, parameter, dispatch, uninitialized, bytes, cuda) = look_up().map_err(|e| raised(py, e))?;
        let mut devices = vec![DeviceKind::CPU];
        devices.extend(cuda.then_some(DeviceKind::CUDA));
        let allocator = Allocator::new(&torch).map_err(|e| raised(py, e))?;
        let dtypes = dtypes(&torch, &*exchange).map_err(|e| raised(py, e))?;
        // Under a mode that replaces every new tensor, as FakeTensorMode does, no dtype is converted. That must not be
        // kept.
        if dtypes.is_empty() {
            return Err(Error::new(ErrorKind::NotATensor, NO_REAL_TENSORS));
        }
        let native = Native::find(&torch, borrow).map_err(|e| raised(py, e))?;
        let look_up = || -> PyResult<_> {
            let fresh = probe(py, Fresh::find(&torch))?.flatten().filter(|_| native.is_some());
            Ok((fresh, torch.getattr("_C")?.getattr("_is_tracing")?.unbind()))
        };
        let (fresh, is_tracing) = look_up().map_err(|e| raised(py, e))?;
        let profile = Profile::export_only("torch")
            .with_dtypes(dtypes)
            .with_strides(Strides::NonNegative)
            .with_alignment(if is_planted("torch_alignment_overstated") { 64 } else { 1 })
            .with_devices(devices)
            .with_keeps_read_only(false)
            .with_private_functions(native.is_some() || allocator.calls_cxx());
        let consumer = Arc::new(TorchConsumer { exchange, views: Views::default() });
        let cuda = OnceLock::new();
        Ok(Self {
            profile,
            consumer,
            tensor,
            parameter,
            dispatch,
            uninitialized,
            bytes,
            cuda,
            allocator,
            native,
            fresh,
            is_tracing,
        })
    }

    pub(crate) fn is_tensor(&self, object: &PyTensor<'_>) -> bool {
        self.is_plain(object) || is_instance(object, self.tensor.bind(object.py()))
    }

    /// Returns whether the type is `Tensor` or `Parameter` itself.
    pub(crate) fn is_plain(&self, object: &PyTensor<'_>) -> bool {
        let kind = object.get_type_ptr().cast();
        kind == self.tensor.as_ptr() || kind == self.parameter.as_ptr()
    }

    /// Returns whether the object is of a subclass with its own dispatch, such as fake and distributed tensors.
    pub(crate) fn has_own_dispatch(&self, object: &PyTensor<'_>) -> PyResult<bool> {
        if self.is_plain(object) {
            return Ok(false);
        }
        let dispatch = object.get_type().getattr(intern!(object.py(), "__torch_dispatch__"))?;
        Ok(!dispatch.is(&self.dispatch))
    }

    /// Returns whether the object is a parameter or a buffer of a lazy module that has seen no input yet.
    pub(crate) fn is_uninitialized(&self, object: &PyTensor<'_>) -> PyResult<bool> {
        if self.is_plain(object) { Ok(false) } else { object.is_instance(self.uninitialized.bind(object.py())) }
    }

    /// Refuses dtypes of less than a byte, such as `torch.int4`, which PyTorch exports as the `dtype` of a byte.
    pub(crate) fn refuse_narrower(&self, tensor: &PyTensor<'_>, dtype: DType) -> Result<()> {
        let Some(byte) = BYTES.iter().position(|byte| *byte == dtype) else { return Ok(()) };
        if self.native.as_ref().is_some_and(|native| native.is_byte(tensor, dtype)) {
            return Ok(());
        }
        let py = tensor.py();
        let own = tensor.getattr(intern!(py, "dtype")).map_err(|error| raised(py, error))?;
        if own.is(&self.bytes[byte]) {
            return Ok(());
        }
        let text = format!(
            "{} has no counterpart in other frameworks: pass .view(torch.{dtype}), which takes the bytes across",
            brief_str(&own)
        );
        Err(Error::new(ErrorKind::Dtype, text))
    }

    /// Makes PyTorch initialise CUDA, once: its streams are invalid before.
    pub(crate) fn start_cuda(&self, py: Python<'_>) -> Result<()> {
        if self.cuda.get().is_none() {
            let init = || py.import("torch")?.getattr("cuda")?.call_method0("init");
            init().map_err(|e| raised(py, e))?;
            let _ = self.cuda.set(());
        }
        Ok(())
    }
}

/// Returns the dtypes that the installed version has, under the names of the field, and both exports and imports.
fn dtypes(torch: &Bound<'_, PyModule>, exchange: &dyn Exchange) -> PyResult<Vec<DType>> {
    let mut dtypes = Vec::new();
    for (dtype, _) in DType::NAMED {
        let converts = probe(torch.py(), converts(torch, exchange, *dtype))?;
        dtypes.extend((converts == Some(true)).then_some(*dtype));
    }
    Ok(dtypes)
}

fn converts(torch: &Bound<'_, PyModule>, exchange: &dyn Exchange, dtype: DType) -> PyResult<bool> {
    // To judge an exception takes as long as all other answers together.
    let Some(dtype) = torch.getattr_opt(dtype.to_string().as_str())? else { return Ok(false) };
    // The user may have set another default device.
    let on_the_host = [("dtype", torch.getattr("uint8")?), ("device", "cpu".into_pyobject(torch.py())?.into_any())];
    let bytes = torch.call_method("empty", (16,), Some(&on_the_host.into_py_dict(torch.py())?))?;
    // PyTorch warns of new tensors of some dtypes, not of views. Filters of warnings are those of all threads.
    let tensor = bytes.call_method1("view", (&dtype,))?;
    Ok(exchange.round_trip(&tensor)?.getattr("dtype")?.is(&dtype))
}
