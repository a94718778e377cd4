//! Frameworks whose tensors are Python objects.

mod borrow;
mod extension;
mod floor;
mod package;
mod peer;
mod pluggable;
mod remote;
mod users;

use crate::runner::{Known, Library, NUMPY_INTERFACE, TORCH_CAPSULES};
use crate::{Capabilities, Observed, Raised, Replay, Spec, Subject, Threads, Usage, Usual, model};
use bridge_core::{Adapter, Device, Error, ErrorKind, Ordering, Pending, Result, Stream};
use bridge_frameworks::{AnyAdapter, Framework};
use bridge_pyo3::{PyAdapter, PyTensor, framework_error, together};
#[doc(hidden)]
pub use extension::fill;
use peer::Peer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;

/// A value that holds an adapter for Python objects, such as [`AnyAdapter`] or a box.
type HeldAdapter<'py> = Box<dyn Deref<Target = dyn PyAdapter<'py> + 'py> + 'py>;

/// A framework in this interpreter: its adapter, and the Python object that makes tensors with it.
pub struct PySubject<'py> {
    name: String,
    adapter: HeldAdapter<'py>,
    /// A `Subject` of `truebridge_conformance.subjects`.
    harness: Bound<'py, PyAny>,
    /// The class `Spec` next to it.
    spec: Bound<'py, PyAny>,
    device: Device,
    capabilities: Capabilities,
    streams: Vec<Stream>,
    /// Each `Usual` of the harness, and each `Raising`.
    usual: Vec<Bound<'py, PyAny>>,
    raising: Vec<Bound<'py, PyAny>>,
}

bridge_core::debug_fields!(impl[] PySubject<'_>: name, device);

/// Opens the framework of the adapter with this name, on this device.
///
/// # Errors
///
/// Those of the adapter and of the framework; `ValueError` for an unknown name.
pub fn subject<'py>(py: Python<'py>, name: &str, device: Device) -> PyResult<PySubject<'py>> {
    let known = Known::named(name).ok_or_else(|| PyValueError::new_err(format!("there is no adapter {name:?}")))?;
    let module = py.import(format!("truebridge_conformance.subjects.{}", known.library.name()))?;
    // Before the adapter: it may set how the framework allocates.
    if let Some(prepare) = module.getattr_opt("prepare")? {
        prepare.call0()?;
    }
    // Another path into a library that no adapter knows is a separate subject.
    let made = match (known.library, name.split_once('-')) {
        (Library::Peer(_), Some((_, way))) => way,
        _ => "subject",
    };
    let make = || module.call_method1(made, (device.to_string(),));
    let subject = match known.library {
        Library::Framework(framework) => {
            let adapter = open(py, known, framework).map_err(|error| {
                PyRuntimeError::new_err(format!("{name} cannot be tested ({:?}): {error}", error.kind()))
            })?;
            PySubject::new(name, adapter, make()?, device)?
        }
        Library::Peer(_) => {
            let harness = make()?;
            let can = capabilities(&harness)?;
            PySubject::new(name, Peer::new(name, &harness, can.dtypes)?, harness, device)?
        }
    };
    subject.warm_up().map_err(refused)?;
    Ok(subject)
}

fn open(py: Python<'_>, known: Known, framework: Framework) -> Result<AnyAdapter<'_>> {
    match known {
        TORCH_CAPSULES => bridge_torch::Torch::with_capsules(py).map(AnyAdapter::Torch),
        NUMPY_INTERFACE => bridge_numpy::NumPy::with_interface(py).map(AnyAdapter::NumPy),
        _ => framework.open(py),
    }
}

/// Loads TensorFlow 1.x. Returns its version, the folder of its libraries, and whether it was built for CUDA.
#[pyfunction]
pub(crate) fn tensorflow1(py: Python<'_>) -> PyResult<(String, PathBuf, bool)> {
    let runtime = bridge_tensorflow::TensorFlow1::new(py).map_err(refused)?.runtime();
    Ok((runtime.version().into(), runtime.folder().into(), runtime.has_cuda()))
}

/// Takes the tensor of a handle that a run of TensorFlow 1.x returned: only the bridge can do that.
#[pyfunction]
pub(crate) fn tensorflow1_take(py: Python<'_>, handle: [i32; 2]) -> PyResult<PyTensor<'_>> {
    let taken =
        bridge_tensorflow::External::take(handle).and_then(|taken| bridge_tensorflow::PyExternal::wrap(py, taken));
    taken.map_err(refused)
}

/// Returns the bytes that PyTorch has in use from the pool of `CUDAPluggableAllocator`.
#[pyfunction]
pub(crate) fn plugged_in_use() -> i64 {
    pluggable::in_use()
}

fn refused(error: Error) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> PyResult<T> {
    text.parse().map_err(|error: T::Err| PyValueError::new_err(error.to_string()))
}

impl<'py> PySubject<'py> {
    /// Joins an adapter and an object with the methods of the Python protocol `Subject`. `name` is that of a
    /// [known](crate::runner::known) adapter or of a variant.
    ///
    /// # Errors
    ///
    /// What the object raises when its capabilities are queried.
    pub fn new(
        name: &str,
        adapter: impl Deref<Target = dyn PyAdapter<'py> + 'py> + 'py,
        harness: Bound<'py, PyAny>,
        device: Device,
    ) -> PyResult<Self> {
        let handles: Vec<u64> = harness.call_method0("streams")?.extract()?;
        let common = harness.py().import("truebridge_conformance.subjects.common")?;
        let (usual, raising): (Vec<Bound<'py, PyAny>>, Vec<_>) =
            (common.call_method1("usual", (&harness,))?.extract()?, harness.call_method0("raising")?.extract()?);
        // Another way into a framework, next to its adapter, is by what the framework offers to all.
        let is_public = package::is_chosen() || Known::named(name).is_some_and(|known| known.on_request);
        let usual = users::of(usual, is_public)?;
        let can = capabilities(&harness)?;
        Ok(Self {
            name: name.into(),
            adapter: Box::new(adapter),
            spec: harness.py().import("truebridge_conformance.subjects")?.getattr("Spec")?,
            device,
            capabilities: Capabilities { usual: !usual.is_empty(), raises: !raising.is_empty(), ..can },
            // SAFETY: the subjects keep their streams.
            streams: handles.into_iter().map(|handle| unsafe { Stream::from_handle(handle) }).collect(),
            harness,
            usual,
            raising,
        })
    }

    /// Makes a copy, where the framework can: what an adapter allocates once for all copies exists before memory is
    /// counted.
    fn warm_up(&self) -> Result<()> {
        let dtype = self.capabilities.dtypes[0];
        let spec = Spec::row(dtype, 1, &self.profile().rank);
        let tensor = self.create(&spec, &vec![0; model::itemsize(dtype)])?;
        if self.capabilities.copies { self.compact(&tensor).map(drop) } else { Ok(()) }
    }

    fn py(&self) -> Python<'py> {
        self.harness.py()
    }

    /// Returns the framework's name.
    fn profile_name(&self) -> &str {
        &self.adapter.profile().name
    }

    /// Returns the `Spec` of `truebridge_conformance.subjects`.
    fn described(&self, spec: &Spec) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py();
        let Spec { dtype, shape, strides, offset, base, align, read_only, pending } = spec;
        let pending = pending.map(|pending| match pending {
            Pending::Conjugation => intern!(py, "conjugation"),
            Pending::Negation => intern!(py, "negation"),
            Pending::NegatedConjugation => intern!(py, "negated_conjugation"),
            _ => intern!(py, "packing"),
        });
        let dtype = PyString::new(py, &dtype.to_string());
        self.spec.call1((dtype, shape, strides, offset, base, align, read_only, pending))
    }

    fn raised<R>(&self, result: PyResult<R>) -> Result<R> {
        result.map_err(|error| framework_error(self.py(), &self.adapter.profile().name, error))
    }
}

/// Reads a `Capabilities` of `truebridge_conformance.subjects`.
fn capabilities(harness: &Bound<'_, PyAny>) -> PyResult<Capabilities> {
    let fields =
        harness.py().import("dataclasses")?.call_method1("asdict", (harness.call_method0("capabilities")?,))?;
    let text: String = harness.py().import("json")?.call_method1("dumps", (fields,))?.extract()?;
    serde_json::from_str(&text).map_err(|error| PyValueError::new_err(format!("capabilities: {error}")))
}

/// Returns the deferred operation with this name.
fn pending(name: &str) -> PyResult<Pending> {
    serde_json::from_value(name.into()).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Replaces the tensor by what a method returned; `None` means that it has changed the tensor itself.
fn replace<'py>(tensor: &mut PyTensor<'py>, made: Bound<'py, PyAny>) {
    if !made.is_none() {
        *tensor = made;
    }
}

#[deny(clippy::missing_trait_methods)]
// SAFETY: it does what the inner adapter does.
unsafe impl<'py> Adapter for PySubject<'py> {
    type Tensor = PyTensor<'py>;

    forward_adapter!(PyTensor<'py>, adapter);
}

impl<'py> Subject for PySubject<'py> {
    fn name(&self) -> &str {
        &self.name
    }

    fn device(&self) -> Device {
        self.device
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities.clone()
    }

    fn ordering(&self) -> Arc<dyn Ordering> {
        Arc::clone(bridge_cuda::ordering())
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<PyTensor<'py>> {
        let py = self.py();
        let create = |spec| self.harness.call_method1(intern!(py, "create"), (spec, PyBytes::new(py, bytes)));
        self.raised(self.described(spec).and_then(create))
    }

    fn create_unwritten(&self, spec: &Spec) -> Option<Result<PyTensor<'py>>> {
        let name = intern!(self.py(), "create_unwritten");
        let create = || self.raised(self.described(spec).and_then(|spec| self.harness.call_method1(name, (spec,))));
        self.capabilities.gigabytes.then(create)
    }

    fn observe(&self, tensor: &PyTensor<'py>) -> Result<Observed> {
        type Seen = (String, Vec<i64>, Vec<i64>, usize, bool, String);
        let query = || {
            let seen: Seen = self.harness.call_method1(intern!(self.py(), "observe"), (tensor,))?.extract()?;
            let (dtype, shape, strides, address, read_only, device) = seen;
            Ok(Observed { dtype: parsed(&dtype)?, shape, strides, address, read_only, device: parsed(&device)? })
        };
        self.raised(query())
    }

    fn read(&self, tensor: &PyTensor<'py>) -> Result<Vec<u8>> {
        let bytes = self.harness.call_method1(intern!(self.py(), "read"), (tensor,));
        self.raised(bytes.and_then(|bytes| Ok(bytes.cast::<PyBytes>()?.as_bytes().to_vec())))
    }

    fn write(&self, tensor: &PyTensor<'py>, bytes: &[u8]) -> Result<()> {
        let arguments = (tensor, PyBytes::new(self.py(), bytes));
        self.raised(self.harness.call_method1(intern!(self.py(), "write"), arguments).map(drop))
    }

    fn fill(&self, tensor: &mut PyTensor<'py>, byte: u8) -> Result<()> {
        let made = self.harness.call_method1(intern!(self.py(), "fill"), (&*tensor, byte));
        self.raised(made.map(|made| replace(tensor, made)))
    }

    fn allocate(&self, nbytes: usize) -> Result<PyTensor<'py>> {
        self.raised(self.harness.call_method1(intern!(self.py(), "allocate"), (nbytes,)))
    }

    fn snapshot(&self, from: &PyTensor<'py>, into: &mut PyTensor<'py>) -> Result<()> {
        let made = self.harness.call_method1(intern!(self.py(), "snapshot"), (from, &*into));
        self.raised(made.map(|made| replace(into, made)))
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

    fn part(&self, tensor: &PyTensor<'py>, start: usize) -> Option<Result<PyTensor<'py>>> {
        let part = || self.raised(self.harness.call_method1(intern!(self.py(), "part"), (tensor, start)));
        self.capabilities.parts.then(part)
    }

    fn version(&self, tensor: &PyTensor<'py>) -> Result<Option<u64>> {
        let version = self.harness.call_method1(intern!(self.py(), "version"), (tensor,));
        self.raised(version.and_then(|version| version.extract()))
    }

    fn usual(&self, number: usize, seed: u64) -> Option<Result<Usual<'_, PyTensor<'py>>>> {
        self.usual.get(number).map(|usual| self.raised(users::usual(self, usual, seed)))
    }

    fn raising(&self, number: usize, body: &mut dyn FnMut()) -> Option<Result<Raised>> {
        self.raising.get(number).map(|raising| self.raised(users::raising(raising, body)))
    }

    fn drop_amid_exception(&self, tensor: PyTensor<'py>) -> Result<()> {
        users::drop_amid_exception(tensor)
    }

    fn together(&self, body: &mut dyn FnMut()) {
        together(body);
    }

    fn threads(&self) -> Option<Threads> {
        /// What a closure holds of this interpreter is used while its thread is attached to it.
        struct Attached<'a>(&'a mut dyn FnMut());

        // SAFETY: `detach` wants values that need no attached thread. This one is called on the same thread, and
        // attaches its threads itself, inside.
        unsafe impl Send for Attached<'_> {}

        fn outside(body: &mut dyn FnMut()) {
            let body = Attached(body);
            Python::attach(|py| {
                py.detach(move || {
                    let Attached(body) = { body };
                    body();
                });
            });
        }

        // SAFETY: a thread that is attached to the interpreter may use its objects, and the interpreter runs one
        // attached thread at a time; the adapters are made for that.
        Some(unsafe { Threads::new(outside, |body| Python::attach(|_| body())) })
    }

    fn elsewhere(&self, body: &mut dyn FnMut() -> Result<()>) -> Option<Result<()>> {
        let switch = |to: i32| -> Result<i32> {
            let before = self.harness.call_method1(intern!(self.py(), "use_device"), (to,));
            self.raised(before.and_then(|before| before.extract()))
        };
        let other = i32::from(self.device.index == 0);
        let run = || {
            let before = switch(other)?;
            let result = body();
            let after = switch(before)?;
            if after != other {
                return Err(Error::new(ErrorKind::Framework, format!("the current device changed to {after}")));
            }
            result
        };
        self.capabilities.devices.then(run)
    }

    fn captured<'a>(&'a self, body: &mut dyn FnMut() -> Result<()>) -> Option<Result<Replay<'a>>> {
        if !self.capabilities.graphs {
            return None;
        }
        let call = |name: &str, graph: &PyTensor<'py>| self.raised(self.harness.call_method1(name, (graph,)).map(drop));
        let mut capture = || {
            let graph = self.raised(self.harness.call_method0(intern!(self.py(), "begin_capture")))?;
            let result = body();
            // What the body reports says more than that its capture cannot end as it should.
            let ended = call("end_capture", &graph);
            result.and(ended)?;
            Ok(Box::new(move || call("replay", &graph)) as Replay<'a>)
        };
        Some(capture())
    }

    fn streams(&self) -> Vec<Stream> {
        self.streams.clone()
    }

    unsafe fn on_stream(&self, stream: Stream, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let switch = |handle: u64| -> Result<u64> {
            let before = self.harness.call_method1(intern!(self.py(), "use"), (handle,));
            self.raised(before.and_then(|before| before.extract()))
        };
        let before = switch(stream.handle())?;
        let result = body();
        switch(before)?;
        result
    }

    unsafe fn join(&self, earlier: Stream, later: Stream) -> Result<()> {
        let joined = self.harness.call_method1(intern!(self.py(), "join"), (earlier.handle(), later.handle()));
        self.raised(joined.map(drop))
    }

    fn on_fresh_stream(&self, external: bool, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let made = self.harness.call_method1(intern!(self.py(), "fresh"), (external,));
        let made: Option<u64> = self.raised(made.and_then(|made| made.extract()))?;
        let Some(handle) = made else { return body() };
        // SAFETY: the subjects keep their streams.
        let result = unsafe { self.on_stream(Stream::from_handle(handle), body) };
        let ended = self.harness.call_method1(intern!(self.py(), "end"), (handle,));
        self.raised(ended.map(drop)).and(result)
    }

    fn note(&self, view: &PyTensor<'py>) -> Result<()> {
        let (device, consumer) = (self.device, self.consumer());
        let Some(stream) = consumer.current_stream(device)? else { return Ok(()) };
        if package::is_chosen() {
            self.raised(package::note(view, stream))?;
        }
        let address = self.observe(view)?.address;
        // SAFETY: by the contract of `Consumer` the stream is alive as long as its `keep`, or as the process.
        unsafe { consumer.views().used(device, address, stream, || consumer.keep(device, stream)) };
        Ok(())
    }

    fn delay(&self) -> Result<()> {
        self.raised(self.harness.call_method0(intern!(self.py(), "delay")).map(drop))
    }

    fn settle(&self) -> Result<Option<usize>> {
        self.raised(self.harness.call_method0(intern!(self.py(), "settle")).and_then(|used| used.extract()))
    }

    fn usage(&self) -> Result<Usage> {
        let py = self.py();
        let count = || {
            py.import(intern!(py, "gc"))?.call_method0(intern!(py, "collect"))?;
            py.import(intern!(py, "sys"))?.call_method0(intern!(py, "getallocatedblocks"))?.extract()
        };
        Ok(Usage { objects: Some(self.raised(count())?), resident: Usage::resident() })
    }

    fn import_natively(&self, other: &PyTensor<'py>) -> Option<Result<PyTensor<'py>>> {
        let made = self.raised(self.harness.call_method1(intern!(self.py(), "import_natively"), (other,)));
        if made.as_ref().is_ok_and(|made| made.is_none()) { None } else { Some(made) }
    }
}
