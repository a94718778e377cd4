//! Versions of tensors under a name: publications, and copies of their newest version.

use crate::errors::{argument, into_python, text};
use crate::frameworks::{AnyAdapter, not_a_capsule, source};
use crate::names::Client;
use crate::processes::{number, seconds};
use crate::{conversions, options, trace};
use bridge_core::{Adapter, DType, Device, DeviceKind, Error, ErrorKind, Export, Misfit, Pair, Result};
use bridge_ipc::{Draft, Ipc, IpcTensor, Opened, Spec, StaysMapped, process};
use bridge_pyo3::{PyAdapter, PyTensor};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The adapter for both ends of a version.
fn shared() -> Ipc {
    // SAFETY: Python has no references to elements. A slot is written while no process has it open, and a version that
    // is open is not written.
    unsafe { Ipc::of_opened() }
}

/// Returns the adapters of tensors.
fn adapters<'py>(tensors: &[PyTensor<'py>], paths: &[String]) -> Result<Vec<AnyAdapter<'py>>> {
    let adapter = |(index, tensor)| {
        let found = not_a_capsule(tensor).and_then(|()| source(tensor));
        found.map_err(|error| at(error, paths, index))
    };
    tensors.iter().enumerate().map(adapter).collect()
}

/// Returns the error with the path to the tensor that it is about.
fn at(error: Error, paths: &[String], index: usize) -> Error {
    match paths.get(index) {
        Some(path) => error.at(path),
        None => error,
    }
}

fn misfit(misfit: Misfit, paths: &[String]) -> Error {
    let Misfit { index, beside, error, .. } = misfit;
    match beside.and_then(|other| Some((paths.get(index)?, paths.get(other)?))) {
        Some((path, other)) => error.at(&format!("{path} and {other}")),
        None => at(error, paths, index),
    }
}

/// Returns the device on which a version of a tensor lies.
fn published_on(device: Device) -> Device {
    match device.kind {
        DeviceKind::CPU | DeviceKind::CUDA_HOST => Device::CPU,
        DeviceKind::CUDA_MANAGED => Device::cuda(device.index),
        _ => device,
    }
}

/// Versions of the same tensors under a name.
#[pyclass(frozen, module = "truebridge")]
pub(crate) struct Publication {
    publication: bridge_ipc::Publication,
    paths: Vec<String>,
}

#[pymethods]
impl Publication {
    #[new]
    fn new<'py>(
        py: Python<'py>,
        client: &Client,
        name: &Bound<'py, PyAny>,
        tensors: Vec<PyTensor<'py>>,
        paths: Vec<String>,
        slots: &Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        let publish = || {
            let (client, name, slots) = (client.client()?, text(name, "a name")?, number(slots, "slots", 2usize)?);
            let (mut specs, mut places): (Vec<Spec>, Vec<usize>) = Default::default();
            let mut met = HashMap::new();
            for (index, (adapter, tensor)) in adapters(&tensors, &paths)?.iter().zip(&tensors).enumerate() {
                let exported = adapter.export(tensor).map_err(|error| at(error, &paths, index))?;
                let spec = (exported.dtype(), exported.layout().shape().to_vec(), published_on(exported.device()));
                let strides = exported.layout().strides().to_vec();
                // Tied weights are one tensor at two places.
                let place = *met.entry((exported.data(), spec.clone(), strides)).or_insert(specs.len());
                if place == specs.len() {
                    specs.push(spec);
                }
                places.push(place);
            }
            py.detach(|| {
                let exporter = process::exporter()?;
                bridge_ipc::Publication::new(&client, &exporter, &name, (&specs, &places), slots)
            })
        };
        let publication = publish().map_err(|error| into_python(py, error))?;
        Ok(Self { publication, paths })
    }

    /// Copies tensors into memory that no process reads, and announces them when the device has finished. `tree` is the
    /// text that describes them.
    fn update<'py>(
        &self,
        py: Python<'py>,
        tensors: Vec<PyTensor<'py>>,
        tree: Option<String>,
        time: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let update = |call: Option<&trace::Call>| {
            let time = seconds(time)?;
            let adapters = adapters(&tensors, &self.paths)?;
            let draft = py.detach(|| self.publication.draft(time))?;
            self.fill(call, &adapters, &tensors, &draft)?;
            py.detach(|| self.publication.announce(draft, tree)).map(drop)
        };
        trace::call("copy", || "ipc", update).map_err(|error| into_python(py, error))
    }

    /// Waits until no version is pending. Returns the newest; `None` after `time` seconds.
    fn settled(&self, time: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        let py = time.py();
        let settled = seconds(time).and_then(|time| py.detach(|| self.publication.settled(time)));
        settled.map_err(|error| into_python(py, error))
    }

    #[getter]
    fn version(&self) -> u64 {
        self.publication.version()
    }

    /// Ends it. A call that waits for it ends with an error.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.publication.close());
    }
}

impl Publication {
    fn fill<'py>(
        &self,
        call: Option<&trace::Call>,
        adapters: &[AnyAdapter<'py>],
        tensors: &[PyTensor<'py>],
        draft: &Draft,
    ) -> Result<()> {
        let ipc = shared();
        let to: &dyn Adapter<Tensor = IpcTensor> = &ipc;
        for (index, ((from, tensor), out)) in adapters.iter().zip(tensors).zip(draft.tensors()).enumerate() {
            same_shape(from, tensor, out).map_err(|error| at(error, &self.paths, index))?;
        }
        let sides = adapters.iter().zip(tensors).zip(draft.tensors());
        let pairs: Vec<_> = sides.map(|((from, tensor), out)| Pair::new(&**from as _, tensor, to, out)).collect();
        conversions::copy_all(call, &pairs, None).map_err(|failed| misfit(failed, &self.paths))
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tensors that receive the newest version of a name.
#[pyclass(frozen, module = "truebridge")]
pub(crate) struct Subscription {
    /// Weak: the program closes the connection, which ends what was put by it.
    client: Weak<bridge_ipc::Client>,
    name: String,
    out: Vec<Py<PyAny>>,
    tree: Option<String>,
    paths: Vec<String>,
    /// One tensor for each framework and device: its current stream is that of the copies.
    streams: Vec<usize>,
    /// Returns, for the text about another tree, the tensor of that tree for each of `out`.
    matched: Py<PyAny>,
    /// The dtype that elements are cast to.
    dtype: Option<DType>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// 0 before the first.
    version: u64,
    /// The last tree with another text than that of `out`, and the tensor of it for each of `out`.
    seen: Option<(Option<String>, Vec<usize>)>,
    mapped: StaysMapped,
}

#[pymethods]
impl Subscription {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "what describes the tree, and the keywords")]
    fn new<'py>(
        py: Python<'py>,
        client: &Client,
        name: &Bound<'py, PyAny>,
        out: Vec<PyTensor<'py>>,
        tree: Option<String>,
        paths: Vec<String>,
        matched: Py<PyAny>,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Self> {
        let subscribe = || {
            let (client, name) = (client.client()?, text(name, "a name")?);
            let dtype = dtype.map(options::dtype).transpose()?;
            bridge_ipc::check_name(&name)?;
            let (mut met, mut streams) = (Vec::new(), Vec::new());
            for (index, (adapter, out)) in adapters(&out, &paths)?.iter().zip(&out).enumerate() {
                let exported = adapter.export(out).map_err(|error| at(error, &paths, index))?;
                let place = (adapter.profile().name.clone(), exported.device());
                if exported.buffer().stream().is_some() && !met.contains(&place) {
                    met.push(place);
                    streams.push(index);
                }
            }
            Ok((client, name, dtype, streams))
        };
        let (client, name, dtype, streams) = subscribe().map_err(|error| into_python(py, error))?;
        let (client, out) = (Arc::downgrade(&client), out.into_iter().map(Bound::unbind).collect());
        Ok(Self { client, name, out, tree, paths, streams, matched, dtype, state: Mutex::default() })
    }

    /// Copies the newest version into the tensors. Returns its number; `None` where there is none that is newer.
    fn refresh(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let refresh = |call: Option<&trace::Call>| {
            let Some((version, opened)) = py.detach(|| self.newest())? else { return Ok(None) };
            locked(&self.state).mapped.keep(&opened);
            self.copy(py, call, opened)?;
            locked(&self.state).version = version;
            Ok(Some(version))
        };
        trace::call("copy", || "", refresh).map_err(|error| into_python(py, error))
    }

    /// The version that was copied last; 0 before the first.
    #[getter]
    fn version(&self) -> u64 {
        locked(&self.state).version
    }

    /// Shows the garbage collector what is kept: a model may keep its subscription.
    fn __traverse__(&self, visit: PyVisit<'_>) -> std::result::Result<(), PyTraverseError> {
        self.out.iter().try_for_each(|out| visit.call(out))?;
        visit.call(&self.matched)
    }
}

impl Subscription {
    /// Opens the newest version, if there is one that was not copied yet and whose process still lives.
    fn newest(&self) -> Result<Option<(u64, Opened)>> {
        let closed = || Error::new(ErrorKind::Gone, "the connection is closed: connect and subscribe again");
        let client = self.client.upgrade().ok_or_else(closed)?;
        let mut missed = None;
        loop {
            let Some((version, ticket)) = client.newest(&self.name)? else {
                // The trainer has ended.
                locked(&self.state).mapped = StaysMapped::default();
                return Ok(None);
            };
            if version == locked(&self.state).version || missed == Some(version) {
                return Ok(None);
            }
            match bridge_ipc::open(&ticket) {
                Ok(opened) => return Ok(Some((version, opened))),
                // A newer version may have displaced it meanwhile, or its process has ended.
                Err(error) if error.kind() == ErrorKind::Gone => missed = Some(version),
                Err(error) => return Err(error),
            }
        }
    }

    fn copy(&self, py: Python<'_>, call: Option<&trace::Call>, opened: Opened) -> Result<()> {
        let out: Vec<PyTensor<'_>> = self.out.iter().map(|out| out.bind(py).clone()).collect();
        let adapters = adapters(&out, &self.paths)?;
        let order = self.order(py, opened.tree.as_deref())?;
        let source =
            |index: usize| opened.tensors.get(order.as_ref().map_or(Some(index), |order| order.get(index).copied())?);
        let sources: Option<Vec<&IpcTensor>> = (0..out.len()).map(source).collect();
        let Some(sources) = sources.filter(|sources| sources.len() == opened.tensors.len()) else {
            return Err(differ(opened.tensors.len(), out.len()));
        };
        for (index, (source, (to, out))) in sources.iter().zip(adapters.iter().zip(&out)).enumerate() {
            same_shape(to, out, source).map_err(|error| at(error, &self.paths, index))?;
        }
        let ipc = shared();
        let from: &dyn Adapter<Tensor = IpcTensor> = &ipc;
        let sides = sources.into_iter().zip(adapters.iter().zip(&out));
        let pairs: Vec<_> =
            sides.map(|(tensor, (to, out))| Pair::new(from, tensor, &**to as _, out).with_dtype(self.dtype)).collect();
        let copied = conversions::copy_all(call, &pairs, None).map_err(|failed| misfit(failed, &self.paths));
        // Also after an error: some copies may run.
        let written: Result<Vec<Export>> =
            self.streams.iter().map(|index| adapters[*index].export(&out[*index])).collect();
        let written = written?;
        let stream =
            |exported: &Export| Some((exported.buffer().device(), exported.buffer().stream()?.on_any_thread()));
        let streams: Vec<_> = written.iter().filter_map(stream).collect();
        drop(pairs);
        // SAFETY: the exports are alive, and by the contract of `DeviceBuffer` so are their streams.
        unsafe { opened.keep_for(&streams) };
        copied
    }

    /// Returns the tensor of the published tree for each of `out`; `None`: they have one order.
    fn order(&self, py: Python<'_>, tree: Option<&str>) -> Result<Option<Vec<usize>>> {
        if tree == self.tree.as_deref() {
            return Ok(None);
        }
        if let Some((seen, order)) = &locked(&self.state).seen
            && seen.as_deref() == tree
        {
            return Ok(Some(order.clone()));
        }
        let raised = |error| bridge_pyo3::framework_error(py, "Python", error);
        let order =
            self.matched.call1(py, (tree,)).and_then(|order| order.extract::<Vec<usize>>(py)).map_err(raised)?;
        locked(&self.state).seen = Some((tree.map(Into::into), order.clone()));
        Ok(Some(order))
    }
}

/// Refuses to broadcast: a version is what was published, element by element.
fn same_shape<'py>(adapter: &AnyAdapter<'py>, tensor: &PyTensor<'py>, version: &IpcTensor) -> Result<()> {
    // A borrow costs less than an export, which says what is wrong where there is none.
    let Ok(borrowed) = adapter.borrow(tensor) else { return adapter.export(tensor).map(drop) };
    match (borrowed.layout().shape(), version.layout().shape()) {
        (shape, other) if shape == other => Ok(()),
        (shape, other) => {
            let text = format!("the tensor has shape {shape:?} and the version {other:?}: pass tensors of one shape");
            Err(Error::new(ErrorKind::Layout, text))
        }
    }
}

fn differ(published: usize, expected: usize) -> Error {
    argument(format!(
        "{published} tensors are published and {expected} are to receive them: pass trees of the same structure"
    ))
}

/// Enters the classes into the module.
pub(crate) fn enter(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Publication>()?;
    module.add_class::<Subscription>()
}
