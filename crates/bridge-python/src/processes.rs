//! Tensors of other processes.

use crate::errors::{argument, into_python, text};
use crate::frameworks::{self, AnyAdapter, source};
use crate::not_a_capsule;
use crate::options::Keywords;
use crate::trace;
use bridge_core::{Adapter, Error, ErrorKind, Options, Result};
use bridge_ipc::{Ipc, IpcTensor, Limits, Opened, Road, Settings, Writing, process};
use bridge_pyo3::{PyTensor, framework_error, with_gil};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyList};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Leave to open what a process shares. ``share`` returns it.
///
/// Pass on its ``text``, or the ticket itself, which can be pickled. ``str`` says what it opens. Tickets with one text
/// are equal.
///
/// Parameters
/// ----------
/// text : str or bytes
///     What ``text`` or ``bytes`` returned in the process that shares.
///
/// Attributes
/// ----------
/// text : str
///     What to pass on: at most 512 bytes of JSON.
/// remaining : int
///     Seconds until the ticket expires, by this machine's clock; 0 afterwards.
///
/// Raises
/// ------
/// BridgeValueError
///     If ``text`` is no ticket.
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> import tensor_bridge as tb
/// >>> ticket = tb.share(np.zeros(3))
/// >>> tb.Ticket(ticket.text) == ticket
/// True
/// >>> tb.revoke(ticket)
#[pyclass(frozen, eq, module = "tensor_bridge")]
#[derive(PartialEq, Clone)]
pub(crate) struct Ticket(bridge_ipc::Ticket);

#[pymethods]
impl Ticket {
    #[new]
    fn new(text: &Bound<'_, PyAny>) -> PyResult<Self> {
        read(text).map(Self).map_err(|error| into_python(text.py(), error))
    }

    /// The text to pass on.
    #[getter]
    fn text(&self) -> String {
        self.0.text()
    }

    /// Seconds until the ticket expires.
    #[getter]
    fn remaining(&self) -> u64 {
        self.0.remaining().unwrap_or(0)
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<Ticket: {}>", self.0)
    }

    fn __bytes__(&self) -> Vec<u8> {
        self.0.text().into_bytes()
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        self.0.text().hash(&mut hasher);
        hasher.finish()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((slf.get_type().into_any(), (slf.get().text(),)))
    }
}

/// Reads a ticket, its text, or the bytes of its text.
fn read(ticket: &Bound<'_, PyAny>) -> Result<bridge_ipc::Ticket> {
    if let Ok(ticket) = ticket.cast::<Ticket>() {
        return Ok(ticket.get().0.clone());
    }
    match ticket.extract::<&[u8]>() {
        Ok(bytes) => std::str::from_utf8(bytes).map_err(argument)?.parse(),
        Err(_) => text(ticket, "a ticket")?.parse(),
    }
}

/// The names of `Writing`.
const WRITING: [(&str, Writing); 3] =
    [("private", Writing::Private), ("never", Writing::Never), ("shared", Writing::Shared)];

fn writing(name: &Bound<'_, PyAny>) -> Result<Writing> {
    let name = text(name, "writing")?;
    let known = WRITING.iter().find(|(known, _)| *known == name).map(|(_, writing)| *writing);
    known.ok_or_else(|| argument(format!("writing is \"private\", \"never\" or \"shared\", not {name:?}")))
}

fn seconds(time: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(time)
        .map_err(|_| argument(format!("{time} is no number of seconds: pass one from 0 on")))
}

/// Refuses a tensor in memory of another process that has ended or has revoked the share. Without such memory in this
/// process nothing is looked at.
pub(crate) fn check<'py>(from: &AnyAdapter<'py>, tensor: &PyTensor<'py>) -> Result<()> {
    match bridge_ipc::is_leasing() && !tensor.is_instance_of::<PyCapsule>() {
        true => bridge_ipc::check(&from.export(tensor)?),
        false => Ok(()),
    }
}

/// Shares tensors, for a ticket. ``tree`` is text for the process that opens it.
#[pyfunction]
pub(crate) fn ipc_share<'py>(
    py: Python<'py>,
    tensors: Vec<PyTensor<'py>>,
    tree: Option<String>,
    expires: f64,
    writing: Option<&Bound<'py, PyAny>>,
    copy: Option<bool>,
) -> PyResult<Ticket> {
    let share = |call: Option<&trace::Call>| {
        let (time, writing) = (seconds(expires)?, writing.map(self::writing).transpose()?);
        let options = Options::default().with_copy(copy);
        let sources = tensors.iter().map(|tensor| {
            not_a_capsule(tensor)?;
            source(tensor)
        });
        let sources = sources.collect::<Result<Vec<_>>>()?;
        let leaves: Vec<(&dyn Adapter<Tensor = PyTensor<'py>>, &PyTensor<'py>)> =
            sources.iter().zip(&tensors).map(|(from, tensor)| (&**from as _, tensor)).collect();
        let parcel = trace::pack(call, &leaves, writing, &options)?;
        py.detach(|| parcel.share(&*process::exporter()?, time, tree)).map(Ticket)
    };
    trace::call("share", "ipc", share).map_err(|error| into_python(py, error))
}

/// Returns the name of the way in which a tensor's memory would leave the process.
#[pyfunction]
pub(crate) fn ipc_road(py: Python<'_>, tensor: &PyTensor<'_>) -> PyResult<&'static str> {
    let road = || {
        not_a_capsule(tensor)?;
        Ok(match bridge_ipc::road(&*source(tensor)?, tensor)? {
            Road::Passed => "passed",
            Road::Handle => "handle",
            Road::Files => "files",
            Road::Pool => "pool",
            _ => "copy",
        })
    };
    road().map_err(|error: Error| into_python(py, error))
}

/// Opens a ticket, for the framework named ``target``. Returns the tensors, and the text about their tree.
#[pyfunction]
#[pyo3(signature = (ticket, target, copy, device, order, permute, layout))]
#[expect(clippy::too_many_arguments, reason = "the keywords of conversions")]
pub(crate) fn ipc_open<'py>(
    py: Python<'py>,
    ticket: &Bound<'py, PyAny>,
    target: &PyTensor<'py>,
    copy: Option<bool>,
    device: Option<&PyTensor<'py>>,
    order: Option<&PyTensor<'py>>,
    permute: Option<&PyTensor<'py>>,
    layout: Option<&PyTensor<'py>>,
) -> PyResult<(Bound<'py, PyList>, Option<String>)> {
    let open = |call: Option<&trace::Call>| {
        let (ticket, target) = (read(ticket)?, frameworks::named(target)?);
        call.iter().for_each(|call| call.to(target.name()));
        let to = target.open(py)?;
        let options = Keywords { copy, device, order, permute, layout, ..Keywords::default() }.read()?;
        // The process that answers may be this one, and then its thread needs the interpreter.
        let Opened { tensors, tree } = py.detach(|| bridge_ipc::open(&ticket))?;
        let ipc = Ipc::of_opened();
        let adapter: &dyn Adapter<Tensor = IpcTensor> = &ipc;
        let leaves: Vec<_> = tensors.iter().map(|tensor| (adapter, tensor)).collect();
        let crossed = trace::transfer_all(call, &leaves, &*to, &options);
        Ok((crossed.map_err(|failed| failed.error)?, tree))
    };
    let (tensors, tree) = trace::call("open", "", open).map_err(|error| into_python(py, error))?;
    Ok((PyList::new(py, tensors)?, tree))
}

/// Ends the share of a ticket of this process. Where ``told`` is false, the processes that have it open keep it.
#[pyfunction]
pub(crate) fn ipc_revoke(ticket: &Bound<'_, PyAny>, told: bool) -> PyResult<()> {
    let py = ticket.py();
    let revoke = || {
        let ticket = read(ticket)?;
        let none = || argument("this process shares nothing: revoke the ticket where it was made");
        let exporter = process::exporter_if_any().ok_or_else(none)?;
        py.detach(|| if told { exporter.revoke(&ticket) } else { exporter.end(&ticket) })
    };
    revoke().map_err(|error| into_python(py, error))
}

/// Says how this process is to share, before it does.
#[pyfunction]
pub(crate) fn ipc_configure(
    py: Python<'_>,
    folder: Option<PathBuf>,
    users: Vec<u32>,
    connections: Option<usize>,
    shares: Option<usize>,
    leases: Option<usize>,
    nbytes: Option<usize>,
) -> PyResult<()> {
    let usual = Limits::default();
    let limits = Limits {
        connections: connections.unwrap_or(usual.connections),
        shares: shares.unwrap_or(usual.shares),
        leases: leases.unwrap_or(usual.leases),
        bytes: nbytes.unwrap_or(usual.bytes),
    };
    process::configure(Settings { folder, limits, users }).map_err(|error| into_python(py, error))
}

/// Ends all shares of this process, and its socket.
#[pyfunction]
pub(crate) fn ipc_close(py: Python<'_>) {
    py.detach(process::close);
}

/// Returns what other processes hold of this one: shares, leases, connections and bytes.
#[pyfunction]
pub(crate) fn ipc_held() -> (usize, usize, usize, usize) {
    let held = process::exporter_if_any().map_or_else(Default::default, |exporter| exporter.held());
    (held.shares, held.leases, held.connections, held.bytes)
}

/// The process that serves names at a path.
#[pyclass(frozen, module = "tensor_bridge")]
pub(crate) struct Names(Mutex<Option<bridge_ipc::Names>>);

#[pymethods]
impl Names {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let settings = Settings { users: process::users(), ..Settings::default() };
        let names = bridge_ipc::Names::serve(&path, settings);
        Ok(Self(Mutex::new(Some(names.map_err(|error| into_python(py, error))?))))
    }

    fn close(&self, py: Python<'_>) {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(names));
    }
}

/// A connection to the process that serves names.
#[pyclass(frozen, module = "tensor_bridge")]
pub(crate) struct Client(Mutex<Option<Arc<bridge_ipc::Client>>>);

impl Client {
    fn run<T: Send>(&self, py: Python<'_>, ask: impl FnOnce(&bridge_ipc::Client) -> Result<T> + Send) -> PyResult<T> {
        let client = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(Arc::clone);
        let closed = || Error::new(ErrorKind::Gone, "the connection is closed: connect again");
        let client = client.ok_or_else(closed).map_err(|error| into_python(py, error))?;
        py.detach(|| ask(&client)).map_err(|error| into_python(py, error))
    }
}

#[pymethods]
impl Client {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let client = py.detach(|| bridge_ipc::Client::connect(&path)).map_err(|error| into_python(py, error))?;
        Ok(Self(Mutex::new(Some(Arc::new(client)))))
    }

    fn put(&self, py: Python<'_>, name: &str, ticket: &Ticket, keep: u64) -> PyResult<u64> {
        self.run(py, |client| client.put(name, &ticket.0, keep))
    }

    fn get(&self, py: Python<'_>, name: &str, version: Option<u64>) -> PyResult<(u64, Ticket)> {
        self.run(py, |client| client.get(name, version)).map(|(version, ticket)| (version, Ticket(ticket)))
    }

    fn remove(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.run(py, |client| client.remove(name))
    }

    fn list(&self, py: Python<'_>) -> PyResult<Vec<(String, u64, String)>> {
        let listed = self.run(py, bridge_ipc::Client::list)?;
        Ok(listed.into_iter().map(|listed| (listed.name, listed.version, listed.about)).collect())
    }

    fn watch(&self, py: Python<'_>, name: &str, after: u64) -> PyResult<Watch> {
        self.run(py, |client| client.watch(name, after)).map(Watch)
    }

    fn close(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// A version that is waited for.
#[pyclass(frozen, module = "tensor_bridge")]
pub(crate) struct Watch(bridge_ipc::Watch);

#[pymethods]
impl Watch {
    /// Return the version and its ticket, or ``None`` if there is none within ``time`` seconds.
    fn wait(&self, py: Python<'_>, time: f64) -> PyResult<Option<(u64, Ticket)>> {
        let time = seconds(time).map_err(|error| into_python(py, error))?;
        let found = py.detach(|| self.0.wait(time)).map_err(|error| into_python(py, error))?;
        Ok(found.map(|(version, ticket)| (version, Ticket(ticket))))
    }
}

/// Runs the handlers of signals that have arrived. An exception of one, such as `KeyboardInterrupt`, ends the wait.
fn handle_signals() -> Result<()> {
    let handled = with_gil(|py| py.check_signals().map_err(|error| framework_error(py, "Python", error)));
    handled.unwrap_or(Ok(()))
}

/// Enters the functions into the module.
pub(crate) fn enter(module: &Bound<'_, PyModule>) -> PyResult<()> {
    bridge_ipc::while_waiting(handle_signals);
    module.add_class::<Ticket>()?;
    module.add_class::<Names>()?;
    module.add_class::<Client>()?;
    module.add_class::<Watch>()?;
    module.add_function(wrap_pyfunction!(ipc_share, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_road, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_open, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_revoke, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_configure, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_close, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_held, module)?)
}
