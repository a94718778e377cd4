//! A tensor as any consumer takes it: an object with `__dlpack__` and the array interfaces.

use crate::borrower::Borrower;
use crate::interfaces::typestr;
use crate::origin::READER;
use bridge_core::dlpack::Tensor;
use bridge_core::{Access, Consumer, Device, DeviceKind, Error, ErrorKind, Lease, Options, Ordering, Result, Stream};
use bridge_pyo3::{PyTensor, exception};
use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a loan needs to lend its tensor otherwise, and to order its end.
pub(crate) struct Terms {
    pub(crate) borrower: Arc<Borrower>,
    pub(crate) ordering: Arc<dyn Ordering>,
    pub(crate) options: Options,
    /// Lends the tensor once more, by other options.
    pub(crate) lend: LendAgain,
}

/// How a tensor is lent once more, as a copy or on another device.
pub(crate) type LendAgain = for<'py> fn(&PyTensor<'py>, &Terms, &Options) -> PyResult<Bound<'py, Loan>>;

/// A tensor that any consumer of a protocol takes: DLPack, ``__cuda_array_interface__`` and ``__array_interface__``.
///
/// ``lend`` makes it. Each consumer shares the memory, which is kept until the loan is closed or dropped, and every
/// consumer has dropped its view. A view by an array interface keeps the loan itself, and with it the memory.
///
/// In a ``with`` block, the tensor's framework waits at the end, in its current stream, for the streams that were named
/// to ``lend`` and by consumers, and the loan is closed.
///
/// Attributes
/// ----------
/// shape : tuple of int
///     The lengths of the dimensions.
/// dtype_name : str
///     The name of the dtype, such as ``"float32"``.
/// stream : int or None
///     The handle of the stream that the tensor is ready in, never 0; ``None`` on the host.
/// __cuda_array_interface__ : dict
///     The CUDA array interface, version 3, with that stream. On the host there is none.
/// __array_interface__ : dict
///     NumPy's array interface, version 3. On a device there is none.
#[pyclass(frozen, module = "truebridge", name = "Loan")]
pub struct Loan {
    held: Mutex<Held>,
    device: Device,
    /// The stream that the tensor is ready in; `None` on the host.
    ready: Option<Stream>,
    /// `None` for a result that the framework of another producer takes in.
    terms: Option<Terms>,
}

bridge_core::debug_fields!(impl[] Loan: device, ready);

#[derive(Default)]
struct Held {
    /// `None` once the loan is closed.
    tensor: Option<Tensor>,
    /// Whether a consumer has read an array interface. It keeps the loan alive, and nothing else of the memory.
    is_shown: bool,
    /// The tensor of a closed loan, for such consumers.
    kept: Option<Tensor>,
    /// The tensor of the framework, for copies; `None` once the loan is closed.
    source: Option<Py<PyAny>>,
    /// The streams that consumers have named.
    readers: Vec<Stream>,
}

const CLOSED: &str = "the loan is closed: use it inside its with block, or lend again";

/// `stream` of `__dlpack__`: the consumer orders its work itself (array API).
const NO_SYNC: i64 = -1;

/// `copy`, `dl_device` and `max_version` of `__dlpack__`.
struct Wanted {
    copy: Option<bool>,
    device: Option<Device>,
    versioned: bool,
}

impl Loan {
    /// Wraps the lease, which is ready in this stream. `source` is the tensor that it is of.
    pub(crate) fn new(lease: Lease, ready: Option<Stream>, source: Option<Py<PyAny>>, terms: Option<Terms>) -> Self {
        let device = lease.device();
        let held = Held { tensor: Some(lease.into()), source, ..Held::default() };
        Self { held: Mutex::new(held), device, ready, terms }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the tensor.
    ///
    /// # Errors
    ///
    /// `BufferError` once the loan is closed.
    fn tensor(&self) -> PyResult<Tensor> {
        self.lock().tensor.clone().ok_or_else(|| PyBufferError::new_err(CLOSED))
    }

    /// Returns the device and the address of the first element; `None` for a tensor without elements.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] once the loan is closed.
    pub(crate) fn locate(&self) -> Result<Option<(Device, usize)>> {
        let held = self.lock();
        let tensor = held.tensor.as_ref().ok_or_else(|| Error::new(ErrorKind::Argument, CLOSED))?;
        Ok((tensor.layout().numel() > 0).then(|| (self.device, tensor.data())))
    }

    /// Returns whether the memory never changes, by the contract of its framework.
    pub(crate) fn is_constant(&self) -> bool {
        self.lock().tensor.as_ref().is_some_and(|tensor| tensor.access() == Access::Immutable)
    }

    fn named(&self) -> Option<Stream> {
        self.terms.as_ref()?.borrower.named()
    }

    fn ordering(&self) -> &Arc<dyn Ordering> {
        self.terms.as_ref().map_or(crate::driver::ordering(), |terms| &terms.ordering)
    }

    /// Returns the stream that a consumer means by `stream` of `__dlpack__`; `None` where nothing is to be ordered.
    fn reader(&self, stream: Option<i64>) -> Result<Option<Stream>> {
        let stream = match stream {
            _ if self.ready.is_none() => return Ok(None),
            // The caller has named the stream, or the standard does: the legacy default stream.
            None => return Ok(if self.named().is_some() { None } else { Some(Stream::LEGACY) }),
            Some(NO_SYNC) => return Ok(None),
            Some(stream) => stream,
        };
        let handle = u64::try_from(stream).map_err(|_| {
            Error::new(ErrorKind::Protocol, format!("{stream} is not a stream: pass its handle, or -1"))
        })?;
        // SAFETY: the caller of the protocol names a stream that exists. Number 0 means a default stream, and each of
        // them waits for the legacy one.
        Ok(Some(unsafe { Stream::from_handle(handle) }))
    }

    /// Makes the stream that a consumer names wait for the tensor, and the return of the memory wait for what is in that
    /// stream then.
    pub(crate) fn ready_for(&self, stream: Option<i64>) -> Result<()> {
        let (Some(ready), Some(reader)) = (self.ready, self.reader(stream)?) else { return Ok(()) };
        if reader != ready {
            // SAFETY: the loan holds the lease that is ready in the one, and the consumer names the other to work in it.
            unsafe { self.ordering().order(self.device, ready, reader) }?;
        }
        let reader = reader.on_any_thread();
        match (&self.terms, self.locate()?) {
            (Some(terms), _) => terms.borrower.used_in(reader),
            // SAFETY: the framework that takes the tensor in works in the stream as long as it has the view.
            (None, Some((device, address))) => unsafe {
                READER.views().used(device, address, reader, || None);
            },
            (None, None) => (),
        }
        let readers = &mut self.lock().readers;
        if !readers.contains(&reader) {
            readers.push(reader);
        }
        Ok(())
    }

    /// Lends the tensor again, where the consumer asks for a copy or for another device.
    fn otherwise<'py>(&self, py: Python<'py>, wanted: &Wanted) -> PyResult<Option<Bound<'py, Self>>> {
        let device = wanted.device.filter(|device| *device != self.device);
        if device.is_none() && wanted.copy != Some(true) {
            return Ok(None);
        }
        let source = self.lock().source.as_ref().map(|source| source.clone_ref(py).into_bound(py));
        let (Some(terms), Some(source)) = (&self.terms, source) else {
            let text = "this tensor cannot be copied or moved: pass copy=None and no device";
            return Err(PyBufferError::new_err(text));
        };
        let options = terms.options.with_copy(wanted.copy).with_device(device.or(terms.options.device));
        (terms.lend)(&source, terms, &options).map(Some)
    }

    /// Returns a capsule of the tensor.
    fn capsule<'py>(&self, py: Python<'py>, tensor: Tensor, versioned: bool) -> PyResult<PyTensor<'py>> {
        if versioned {
            return bridge_pyo3::capsule(py, tensor.into_managed());
        }
        let promised = self.terms.as_ref().is_none_or(|terms| terms.options.is_read_only());
        if tensor.access() == Access::ReadOnly && !promised {
            let text = "the memory is read-only, which an unversioned capsule cannot say: ask for max_version=(1, 0), or pass read_only=True to lend to promise that its consumer does not write";
            return Err(exception(py, Error::new(ErrorKind::ReadOnly, text)));
        }
        // SAFETY: the lender has promised that no consumer writes. Memory that its framework never changes is lent
        // with a warning, unless that was promised.
        bridge_pyo3::legacy_capsule(py, unsafe { tensor.into_legacy_unchecked() })
    }

    /// Returns the fields that both array interfaces have.
    fn interface<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyDict>> {
        let tensor = self.tensor()?;
        let typestr = typestr(tensor.dtype()).ok_or_else(|| {
            PyAttributeError::new_err(format!("{name} cannot describe {}: use __dlpack__", tensor.dtype()))
        })?;
        let (layout, itemsize) = (tensor.layout(), tensor.dtype().itemsize().unwrap_or(1) as i64);
        let bytes = (!layout.is_compact()).then(|| layout.strides().iter().map(|stride| stride * itemsize));
        let strides = bytes.map(|bytes| PyTuple::new(py, bytes.collect::<Vec<_>>())).transpose()?;
        let data = if layout.numel() == 0 { 0 } else { tensor.data() };
        let dict = PyDict::new(py);
        dict.set_item("version", 3)?;
        dict.set_item("shape", PyTuple::new(py, layout.shape())?)?;
        dict.set_item("typestr", typestr)?;
        dict.set_item("data", (data, tensor.access().forbids_writes()))?;
        dict.set_item("strides", strides)?;
        self.lock().is_shown = true;
        Ok(dict)
    }

    /// Drops the loan's own hold on the memory. Consumers keep their views; for those by an array interface the loan
    /// keeps the memory until it is dropped.
    fn close(&self) {
        let mut held = std::mem::take(&mut *self.lock());
        if held.is_shown {
            self.lock().kept = held.kept.take().or(held.tensor.take());
        }
        // Not under the lock: this may drop the tensor of the framework.
        drop(held);
    }

    fn is_on_host(&self) -> bool {
        self.device.kind == DeviceKind::CPU
    }

    /// Makes the current stream of the tensor's framework wait for the streams that are known to use the loan.
    pub(crate) fn settle(&self) -> Result<()> {
        let Some(terms) = self.terms.as_ref().filter(|_| self.ready.is_some()) else { return Ok(()) };
        let framework = terms.borrower.framework_stream(self.device)?;
        let readers = self.lock().readers.clone();
        for reader in self.named().into_iter().chain(readers).filter(|reader| *reader != framework) {
            // SAFETY: the framework works in its current stream, and the caller of `lend` and the consumers have named the
            // others for as long as the loan is open.
            unsafe { terms.ordering.order(self.device, reader, framework) }?;
        }
        Ok(())
    }
}

/// Refuses negative strides in the CUDA array interface. Numba, which reads it most, takes them, and then cannot copy the
/// array to the host. With `copy=False` the caller insists.
pub(crate) fn check_strides(strides: &[i64], copy: Option<bool>) -> Result<()> {
    if copy == Some(false) || strides.iter().all(|stride| *stride >= 0) {
        return Ok(());
    }
    let text = format!(
        "strides {strides:?} are negative, and a consumer of the CUDA array interface such as Numba cannot copy the array to the host: pass copy=True to lend, or copy=False for a consumer that can"
    );
    Err(Error::new(ErrorKind::Layout, text))
}

#[pymethods]
impl Loan {
    fn __dlpack_device__(&self) -> (i32, i32) {
        (self.device.kind.0, self.device.index)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<PyTensor<'py>> {
        let tensor = self.tensor()?;
        let device = dl_device.map(|(kind, index)| Device::numbered(DeviceKind(kind), index));
        let wanted = Wanted { copy, device, versioned: max_version.is_some_and(|(major, _)| major > 0) };
        if let Some(other) = self.otherwise(py, &wanted)? {
            let other = other.get();
            other.ready_for(stream).map_err(|error| exception(py, error))?;
            // It was made for this call: the capsule is its only owner.
            let tensor = other.lock().tensor.take().expect("nothing has closed it");
            return other.capsule(py, tensor, wanted.versioned);
        }
        self.ready_for(stream).map_err(|error| exception(py, error))?;
        self.capsule(py, tensor, wanted.versioned)
    }

    /// The CUDA array interface, version 3. On the host there is none.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.is_on_host() {
            return Err(PyAttributeError::new_err("the loan is in host memory: use __array_interface__"));
        }
        let copy = self.terms.as_ref().map_or(Some(false), |terms| terms.options.copy);
        check_strides(self.tensor()?.layout().strides(), copy).map_err(|error| exception(py, error))?;
        let interface = self.interface(py, "__cuda_array_interface__")?;
        interface.set_item("stream", self.stream())?;
        Ok(interface)
    }

    /// NumPy's array interface, version 3. On a device there is none.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        match self.is_on_host() {
            true => self.interface(py, "__array_interface__"),
            false => {
                Err(PyAttributeError::new_err(format!("the loan is on {}: move it with device=\"cpu\"", self.device)))
            }
        }
    }

    /// The lengths of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.tensor()?.layout().shape())
    }

    /// The name of the dtype, such as ``"float32"``. There is no ``dtype``: JAX and NumPy would take it for one of NumPy's.
    #[getter]
    fn dtype_name(&self) -> PyResult<String> {
        Ok(self.tensor()?.dtype().to_string())
    }

    /// The handle of the stream that the tensor is ready in, never 0; ``None`` on the host.
    #[getter]
    pub(crate) fn stream(&self) -> Option<u64> {
        self.ready.map(Stream::handle)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        let settled = self.settle();
        self.close();
        settled.map_err(|error| exception(py, error))
    }

    fn __repr__(&self) -> String {
        let held = self.lock();
        let Some(tensor) = &held.tensor else { return "<Loan: closed>".into() };
        let (dtype, shape) = (tensor.dtype(), tensor.layout().shape());
        match self.ready {
            Some(stream) => format!("<Loan: {dtype} {shape:?} on {}, ready in {stream}>", self.device),
            None => format!("<Loan: {dtype} {shape:?} on {}>", self.device),
        }
    }
}
