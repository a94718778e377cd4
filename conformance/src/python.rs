//! Frameworks whose tensors are Python objects.

use crate::runner::adapter_of;
use crate::{Observed, Spec, Subject, model, pluggable};
use bridge_core::{Adapter, Consumer, DType, Device, Error, ErrorKind, Lease, Lent, Pending, Profile, Result, Stream};
use bridge_pyo3::{PyTensor, framework_error};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use std::path::PathBuf;
use std::sync::Arc;

type BoxedAdapter<'py> = Box<dyn Adapter<Tensor = PyTensor<'py>> + 'py>;

/// A framework in this interpreter: its adapter, and the object of `subjects.py` that makes tensors with it.
pub struct PySubject<'py> {
    name: String,
    adapter: BoxedAdapter<'py>,
    harness: Bound<'py, PyAny>,
    device: Device,
    dtypes: Vec<DType>,
    negative: bool,
    read_only: bool,
    unaligned: bool,
    puts_off: Vec<Pending>,
    writes: bool,
    streams: Vec<Stream>,
}

/// The framework with this name, on this device.
///
/// # Errors
///
/// Those of the adapter and of the framework; `ValueError` for a name that is none.
pub fn subject<'py>(py: Python<'py>, name: &str, device: Device) -> PyResult<PySubject<'py>> {
    // Before the adapter: the package says how a framework is to be loaded.
    let package = py.import("tensor_bridge_conformance")?;
    let known = adapter_of(name);
    py.import("tensor_bridge_conformance.allocators")?.call_method1("prepare", (known,))?;
    let (adapter, module, class) = adapter(py, known).map_err(|error| {
        pyo3::exceptions::PyRuntimeError::new_err(format!("{name} cannot be tested ({:?}): {error}", error.kind()))
    })?;
    let module = py.import(format!("{}.{module}", package.name()?))?;
    let subject = PySubject::new(name, adapter, module.getattr(class)?.call1((device.to_string(),))?, device)?;
    subject.warm_up().map_err(refused)?;
    Ok(subject)
}

/// The adapter with this name, and the module and the class of the package that go with it.
fn adapter<'py>(py: Python<'py>, name: &str) -> Result<(BoxedAdapter<'py>, &'static str, &'static str)> {
    match name {
        "torch" => Ok((Box::new(bridge_torch::Torch::new(py)?), "subjects", "Torch")),
        "torch-capsules" => Ok((Box::new(bridge_torch::Torch::with_capsules(py)?), "subjects", "Torch")),
        "cupy" => Ok((Box::new(bridge_cupy::CuPy::new(py)?), "subjects", "Cupy")),
        "numpy" => Ok((Box::new(bridge_numpy::NumPy::new(py)?), "subjects", "Numpy")),
        "tensorflow" => Ok((Box::new(bridge_tensorflow::TensorFlow2::new(py)?), "tensorflow", "Tensorflow")),
        "tensorflow1" => Ok((Box::new(bridge_tensorflow::TensorFlow1::new(py)?), "tensorflow1", "Tensorflow1")),
        _ => Err(Error::new(ErrorKind::Missing, format!("there is no adapter {name:?}"))),
    }
}

/// Of the TensorFlow 1.x in this process, which is loaded: its version, the folder of its libraries, and whether it was
/// built for CUDA.
#[pyfunction]
pub(crate) fn tensorflow1(py: Python<'_>) -> PyResult<(String, PathBuf, bool)> {
    let runtime = bridge_tensorflow::TensorFlow1::new(py).map_err(refused)?.runtime();
    Ok((runtime.version().into(), runtime.folder().into(), runtime.has_cuda()))
}

/// The tensor behind a handle that a run of TensorFlow 1.x has given: nothing but the bridge can take it.
#[pyfunction]
pub(crate) fn tensorflow1_take(py: Python<'_>, handle: [i32; 2]) -> PyResult<PyTensor<'_>> {
    let taken =
        bridge_tensorflow::External::take(handle).and_then(|taken| bridge_tensorflow::PyExternal::wrap(py, taken));
    taken.map_err(refused)
}

/// Bytes that PyTorch has in use from the pool of `CUDAPluggableAllocator`.
#[pyfunction]
pub(crate) fn plugged_in_use() -> i64 {
    pluggable::in_use()
}

fn refused(error: Error) -> PyErr {
    pyo3::exceptions::PyRuntimeError::new_err(error.to_string())
}

fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> PyResult<T> {
    text.parse().map_err(|error: T::Err| pyo3::exceptions::PyValueError::new_err(error.to_string()))
}

impl<'py> PySubject<'py> {
    /// Joins an adapter and an object with the methods of the classes in `subjects.py`. `name` is the adapter's among
    /// [`KNOWN`](crate::runner::KNOWN), or that of a variant.
    ///
    /// # Errors
    ///
    /// What the object raises when it is asked what it can do.
    pub fn new(name: &str, adapter: BoxedAdapter<'py>, harness: Bound<'py, PyAny>, device: Device) -> PyResult<Self> {
        let names: Vec<String> = harness.getattr("dtypes")?.extract()?;
        let puts_off: Vec<String> = harness.getattr("puts_off")?.extract()?;
        let pending = |name: &String| match name.as_str() {
            "conjugation" => Ok(Pending::Conjugation),
            "negation" => Ok(Pending::Negation),
            _ => Err(pyo3::exceptions::PyValueError::new_err(format!("{name:?} is nothing that is put off"))),
        };
        let handles: Vec<u64> = harness.call_method0("streams")?.extract()?;
        Ok(Self {
            name: name.into(),
            dtypes: names.iter().map(|name| parsed(name)).collect::<PyResult<_>>()?,
            negative: harness.getattr("makes_negative_strides")?.extract()?,
            read_only: harness.getattr("makes_read_only")?.extract()?,
            unaligned: harness.getattr("unaligned")?.extract()?,
            writes: harness.getattr("writes")?.extract()?,
            puts_off: puts_off.iter().map(pending).collect::<PyResult<_>>()?,
            streams: handles.into_iter().map(Stream::from_handle).collect(),
            adapter,
            harness,
            device,
        })
    }

    /// Makes a copy: what an adapter keeps for all copies is there before anything is counted.
    fn warm_up(&self) -> Result<()> {
        let dtype = self.dtypes[0];
        let spec = Spec::compact(dtype, &[1]);
        let tensor = self.create(&spec, &vec![0; model::itemsize(dtype)])?;
        self.compact(&tensor).map(drop)
    }

    fn py(&self) -> Python<'py> {
        self.harness.py()
    }

    fn told<R>(&self, result: PyResult<R>) -> Result<R> {
        result.map_err(|error| framework_error(self.py(), &self.adapter.profile().name, error))
    }
}

/// Puts what a method gave in the tensor's place; `None` says that it has changed the tensor itself.
fn replace<'py>(tensor: &mut PyTensor<'py>, made: Bound<'py, PyAny>) {
    if !made.is_none() {
        *tensor = made;
    }
}

impl<'py> Adapter for PySubject<'py> {
    type Tensor = PyTensor<'py>;

    fn profile(&self) -> &Profile {
        self.adapter.profile()
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.adapter.consumer()
    }

    fn export(&self, tensor: &PyTensor<'py>) -> Result<Lent> {
        self.adapter.export(tensor)
    }

    fn import(&self, lease: Lease) -> Result<PyTensor<'py>> {
        self.adapter.import(lease)
    }

    fn compact(&self, tensor: &PyTensor<'py>) -> Result<PyTensor<'py>> {
        self.adapter.compact(tensor)
    }
}

impl<'py> Subject for PySubject<'py> {
    fn name(&self) -> &str {
        &self.name
    }

    fn device(&self) -> Device {
        self.device
    }

    fn dtypes(&self) -> Vec<DType> {
        self.dtypes.clone()
    }

    fn makes_negative_strides(&self) -> bool {
        self.negative
    }

    fn makes_read_only(&self) -> bool {
        self.read_only
    }

    fn unaligned(&self) -> bool {
        self.unaligned
    }

    fn puts_off(&self) -> Vec<Pending> {
        self.puts_off.clone()
    }

    fn writes(&self) -> bool {
        self.writes
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<PyTensor<'py>> {
        let py = self.py();
        let Spec { dtype, shape, strides, offset, base, align, read_only, pending } = spec;
        let pending = pending.map(|pending| match pending {
            Pending::Conjugation => intern!(py, "conjugation"),
            Pending::Negation => intern!(py, "negation"),
        });
        let dtype = PyString::new(py, &dtype.to_string());
        let arguments = (dtype, shape, strides, offset, base, align, read_only, pending, PyBytes::new(py, bytes));
        self.told(self.harness.call_method1(intern!(py, "create"), arguments))
    }

    fn observe(&self, tensor: &PyTensor<'py>) -> Result<Observed> {
        type Seen = (String, Vec<i64>, Vec<i64>, usize, bool, String);
        let ask = || {
            let seen: Seen = self.harness.call_method1(intern!(self.py(), "observe"), (tensor,))?.extract()?;
            let (dtype, shape, strides, address, read_only, device) = seen;
            Ok(Observed { dtype: parsed(&dtype)?, shape, strides, address, read_only, device: parsed(&device)? })
        };
        self.told(ask())
    }

    fn read(&self, tensor: &PyTensor<'py>) -> Result<Vec<u8>> {
        let bytes = self.harness.call_method1(intern!(self.py(), "read"), (tensor,));
        self.told(bytes.and_then(|bytes| Ok(bytes.cast::<PyBytes>()?.as_bytes().to_vec())))
    }

    fn write(&self, tensor: &PyTensor<'py>, bytes: &[u8]) -> Result<()> {
        let arguments = (tensor, PyBytes::new(self.py(), bytes));
        self.told(self.harness.call_method1(intern!(self.py(), "write"), arguments).map(drop))
    }

    fn fill(&self, tensor: &mut PyTensor<'py>, byte: u8) -> Result<()> {
        let made = self.harness.call_method1(intern!(self.py(), "fill"), (&*tensor, byte));
        self.told(made.map(|made| replace(tensor, made)))
    }

    fn allocate(&self, nbytes: usize) -> Result<PyTensor<'py>> {
        self.told(self.harness.call_method1(intern!(self.py(), "allocate"), (nbytes,)))
    }

    fn snapshot(&self, from: &PyTensor<'py>, into: &mut PyTensor<'py>) -> Result<()> {
        let made = self.harness.call_method1(intern!(self.py(), "snapshot"), (from, &*into));
        self.told(made.map(|made| replace(into, made)))
    }

    fn share(&self, tensor: &PyTensor<'py>) -> PyTensor<'py> {
        tensor.clone()
    }

    fn drop_on_thread(&self, tensor: PyTensor<'py>) {
        let tensor = tensor.unbind();
        self.py().detach(|| {
            std::thread::scope(|scope| {
                scope.spawn(|| Python::attach(|_| drop(tensor)));
            });
        });
    }

    fn streams(&self) -> Vec<Stream> {
        self.streams.clone()
    }

    fn on_stream(&self, stream: Stream, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let switch = |handle: u64| -> Result<u64> {
            let before = self.harness.call_method1(intern!(self.py(), "use"), (handle,));
            self.told(before.and_then(|before| before.extract()))
        };
        let before = switch(stream.handle())?;
        let result = body();
        switch(before)?;
        result
    }

    fn on_fresh_stream(&self, external: bool, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let made = self.harness.call_method1(intern!(self.py(), "fresh"), (external,));
        let made: Option<u64> = self.told(made.and_then(|made| made.extract()))?;
        let Some(handle) = made else { return body() };
        let result = self.on_stream(Stream::from_handle(handle), body);
        let ended = self.harness.call_method1(intern!(self.py(), "end"), (handle,));
        self.told(ended.map(drop)).and(result)
    }

    fn delay(&self) -> Result<()> {
        self.told(self.harness.call_method0(intern!(self.py(), "delay")).map(drop))
    }

    fn settle(&self) -> Result<Option<usize>> {
        self.told(self.harness.call_method0(intern!(self.py(), "settle")).and_then(|used| used.extract()))
    }

    fn import_natively(&self, other: &PyTensor<'py>) -> Option<Result<PyTensor<'py>>> {
        let made = self.told(self.harness.call_method1(intern!(self.py(), "import_natively"), (other,)));
        if made.as_ref().is_ok_and(|made| made.is_none()) { None } else { Some(made) }
    }
}
