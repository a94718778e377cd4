//! Tensors of other processes.

use crate::errors::{argument, into_python, text};
use crate::frameworks::{self, not_a_capsule, source};
use crate::options::Keywords;
use crate::plan::as_html;
use crate::{conversions, options, trace};
use bridge_core::{Adapter, DType, Error, ErrorKind, Failed, Options, Result};
use bridge_ipc::{Exporter, Ipc, IpcTensor, Limits, Opened, Settings, Spec, Transport, Writing, process};
use bridge_pyo3::{PyTensor, brief, brief_repr, brief_str, framework_error, with_gil};
use pyo3::prelude::*;
use pyo3::types::PyList;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
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
///     If ``text`` is not a ticket.
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> import truebridge as tb
/// >>> ticket = tb.share(np.zeros(3))
/// >>> tb.Ticket(ticket.text) == ticket
/// True
/// >>> tb.revoke(ticket)
#[pyclass(frozen, eq, module = "truebridge")]
#[derive(PartialEq, Clone)]
pub(crate) struct Ticket(pub(crate) bridge_ipc::Ticket);

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

    /// The text, for notebooks.
    fn _repr_html_(&self) -> String {
        as_html(&self.__repr__())
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
        Ok(bytes) => {
            let no_text = |_| {
                argument("this is not a ticket (it is not UTF-8): pass the whole text of one, ticket.text in Python")
            };
            parsed(std::str::from_utf8(bytes).map_err(no_text)?)
        }
        Err(_) if ticket.hasattr("__fspath__").unwrap_or(false) => Err(of_file(&brief_str(ticket))),
        Err(_) => parsed(&text(ticket, "a ticket, which share returns,")?),
    }
}

fn parsed(text: &str) -> Result<bridge_ipc::Ticket> {
    if [".npy", ".npz", ".safetensors"].iter().any(|suffix| text.ends_with(suffix)) {
        return Err(of_file(&brief(text)));
    }
    text.parse()
}

fn of_file(path: &str) -> Error {
    argument(format!("{path:?} is the path of a file, not a ticket: call truebridge.load(path, target)"))
}

/// The names of `Writing`.
const WRITING: [(&str, Writing); 3] =
    [("private", Writing::Private), ("never", Writing::Never), ("shared", Writing::Shared)];

fn writing(name: &Bound<'_, PyAny>) -> Result<Writing> {
    let name = text(name, "writing")?;
    let known = WRITING.iter().find(|(known, _)| *known == name).map(|(_, writing)| *writing);
    known.ok_or_else(|| argument(format!("writing is \"private\", \"never\" or \"shared\", not {name:?}")))
}

pub(crate) fn seconds(time: &Bound<'_, PyAny>) -> Result<Duration> {
    let wrong = |what: &str| argument(format!("{what}, not {}", brief_repr(time)));
    let number = time.extract::<f64>().map_err(|_| wrong("seconds must be a number"))?;
    Duration::try_from_secs_f64(number).map_err(|_| wrong("seconds must be ≥ 0 and below 1e19"))
}

/// Reads a whole number of at least `least`, which `what` names in the error.
pub(crate) fn number<T>(object: &Bound<'_, PyAny>, what: &str, least: T) -> Result<T>
where
    T: for<'a, 'py> FromPyObject<'a, 'py> + PartialOrd + Display,
{
    let found = object.extract::<T>().ok().filter(|number| *number >= least);
    let wrong = || {
        let bits = 8 * size_of::<T>();
        argument(format!("{what} must be a whole number from {least} to 2^{bits} - 1, not {}", brief_repr(object)))
    };
    found.ok_or_else(wrong)
}

pub(crate) fn path(object: &Bound<'_, PyAny>) -> Result<PathBuf> {
    let wrong = |_| argument(format!("the path must be a str or an os.PathLike, not {}", brief_repr(object)));
    object.extract().map_err(wrong)
}

/// Returns the error of a tensor with the path to it in the tree that the text describes.
fn at_leaf(py: Python<'_>, tree: Option<&str>, Failed { index, error, .. }: Failed) -> Error {
    let path = |text: &str| -> PyResult<String> {
        let paths = py.import("truebridge.processes.trees")?.getattr("paths")?.call1((text,))?;
        paths.get_item(index)?.extract()
    };
    match tree.map(path) {
        Some(Ok(path)) => error.at(&path),
        // The other process may describe no tree that this one knows.
        _ => error,
    }
}

/// Shares tensors for a ticket, which ``then`` takes over. If they are to outlive this process, it waits until the work
/// on them has run.
pub(crate) fn shared<'py, T>(
    py: Python<'py>,
    (tensors, tree): (Vec<PyTensor<'py>>, Option<String>),
    (time, copy): (Duration, Option<bool>),
    (writing, outlives): (Option<&Bound<'py, PyAny>>, bool),
    then: impl FnOnce(&Arc<Exporter>, bridge_ipc::Ticket) -> Result<T> + Send,
) -> Result<T>
where
    T: Send,
{
    let share = |call: Option<&trace::Call>| {
        let writing = writing.map(self::writing).transpose()?;
        let options = Options::default().with_copy(copy);
        let sources = tensors.iter().enumerate().map(|(index, tensor)| {
            let found = not_a_capsule(tensor).and_then(|()| source(tensor));
            found.map_err(|error| Failed::new(index, error))
        });
        let at_leaf = |failed| at_leaf(py, tree.as_deref(), failed);
        let sources = sources.collect::<Result<Vec<_>, _>>().map_err(at_leaf)?;
        let leaves: Vec<(&dyn Adapter<Tensor = PyTensor<'py>>, &PyTensor<'py>)> =
            sources.iter().zip(&tensors).map(|(from, tensor)| (&**from as _, tensor)).collect();
        let message = conversions::pack(call, &leaves, (writing, outlives), &options).map_err(at_leaf)?;
        py.detach(|| {
            let exporter = process::exporter()?;
            if outlives {
                message.wait()?;
            }
            then(&exporter, message.share(&exporter, time, tree)?)
        })
    };
    trace::call("share", || "ipc", share)
}

/// Shares tensors, for a ticket. ``tree`` is text for the process that opens it.
#[pyfunction]
pub(crate) fn ipc_share<'py>(
    py: Python<'py>,
    tensors: Vec<PyTensor<'py>>,
    tree: Option<String>,
    expires: &Bound<'py, PyAny>,
    writing: Option<&Bound<'py, PyAny>>,
    #[pyo3(from_py_with = options::copy)] copy: Option<bool>,
) -> PyResult<Ticket> {
    let ticket = seconds(expires)
        .and_then(|time| shared(py, (tensors, tree), (time, copy), (writing, false), |_, ticket| Ok(ticket)));
    ticket.map(Ticket).map_err(|error| into_python(py, error))
}

/// Returns the name of the transport by which a tensor's memory would leave the process.
#[pyfunction]
pub(crate) fn ipc_transport(
    py: Python<'_>,
    tensor: &PyTensor<'_>,
    writing: Option<&Bound<'_, PyAny>>,
) -> PyResult<&'static str> {
    let transport = || {
        not_a_capsule(tensor)?;
        let writing = writing.map(self::writing).transpose()?;
        Ok(match bridge_ipc::transport(&*source(tensor)?, tensor, writing)? {
            Transport::Passed => "passed",
            Transport::Handle => "handle",
            Transport::Files => "files",
            Transport::Pool => "pool",
            _ => "copy",
        })
    };
    transport().map_err(|error: Error| into_python(py, error))
}

/// Opens a ticket, for the framework named ``target``. Returns the tensors, and the text about their tree.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "the keywords of conversions")]
#[pyo3(signature = (ticket, target, copy, device, order, permute, read_only))]
pub(crate) fn ipc_open<'py>(
    py: Python<'py>,
    ticket: &Bound<'py, PyAny>,
    target: &PyTensor<'py>,
    #[pyo3(from_py_with = options::copy)] copy: Option<bool>,
    device: Option<&PyTensor<'py>>,
    order: Option<&PyTensor<'py>>,
    permute: Option<&PyTensor<'py>>,
    #[pyo3(from_py_with = options::read_only)] read_only: bool,
) -> PyResult<(Bound<'py, PyList>, Option<String>)> {
    let open = |call: Option<&trace::Call>| {
        let (ticket, target) = (read(ticket)?, frameworks::named(target)?);
        call.iter().for_each(|call| call.to(target.name()));
        let to = target.open(py)?;
        let options = Keywords { copy, device, order, permute, read_only, ..Keywords::default() }.read()?;
        // The process that answers may be this one, and then its thread needs the interpreter.
        let Opened { tensors, tree, .. } = py.detach(|| bridge_ipc::open(&ticket))?;
        // SAFETY: Python has no references to elements: programs order the uses of memory that they share.
        let ipc = unsafe { Ipc::of_opened() };
        let adapter: &dyn Adapter<Tensor = IpcTensor> = &ipc;
        let leaves: Vec<_> = tensors.iter().map(|tensor| (adapter, tensor)).collect();
        let converted = conversions::transfer_all(call, &leaves, &*to, &options);
        Ok((converted.map_err(|failed| at_leaf(py, tree.as_deref(), failed))?, tree))
    };
    let (tensors, tree) = trace::call("open", || "", open).map_err(|error| into_python(py, error))?;
    Ok((PyList::new(py, tensors)?, tree))
}

/// Makes tensors for the framework named ``target``, of these dtypes and shapes, in memory that a store can take over.
#[pyfunction]
pub(crate) fn ipc_empty<'py>(
    py: Python<'py>,
    specs: Vec<(String, Vec<i64>)>,
    target: &PyTensor<'py>,
    device: &PyTensor<'py>,
) -> PyResult<Bound<'py, PyList>> {
    let empty = |call: Option<&trace::Call>| {
        let (device, to) = (crate::device::device(device)?, frameworks::named(target)?.open(py)?);
        let spec = |(name, shape): (String, Vec<i64>)| {
            let unknown = || {
                let text = format!("{name} has no counterpart here: make tensors of another dtype");
                Error::new(ErrorKind::Dtype, text)
            };
            let dtype = name.parse::<DType>().map_err(|_| unknown())?;
            Ok((dtype, shape, device))
        };
        let specs: Vec<Spec> = specs.into_iter().map(spec).collect::<Result<_>>()?;
        // SAFETY: Python programs write to them first, as to those of `torch.empty`.
        let tensors = py.detach(|| unsafe { bridge_ipc::empty(&specs) })?;
        // SAFETY: Python has no references to elements: programs order the uses of memory that they share.
        let ipc = unsafe { Ipc::of_opened() };
        let adapter: &dyn Adapter<Tensor = IpcTensor> = &ipc;
        let leaves: Vec<_> = tensors.iter().map(|tensor| (adapter, tensor)).collect();
        let options = Options::default().with_copy(Some(false));
        conversions::transfer_all(call, &leaves, &*to, &options).map_err(|failed| failed.error)
    };
    let tensors = trace::call("empty", || "ipc", empty).map_err(|error| into_python(py, error))?;
    PyList::new(py, tensors)
}

/// Ends the share of a ticket of this process. Where ``told`` is false, the processes that have it open keep it.
#[pyfunction]
pub(crate) fn ipc_revoke(ticket: &Bound<'_, PyAny>, told: bool) -> PyResult<()> {
    let py = ticket.py();
    let revoke = || {
        let ticket = read(ticket)?;
        let none = || argument("this process has shared nothing: pass the ticket to the process that made it");
        let exporter = process::exporter_of(&ticket).ok_or_else(none)?;
        py.detach(|| if told { exporter.revoke(&ticket) } else { exporter.end(&ticket) })
    };
    revoke().map_err(|error| into_python(py, error))
}

/// Says how this process is to share, and whom it accepts, before it shares.
#[pyfunction]
pub(crate) fn ipc_configure(
    folder: Option<&Bound<'_, PyAny>>,
    users: &Bound<'_, PyAny>,
    connections: Option<&Bound<'_, PyAny>>,
    shares: Option<&Bound<'_, PyAny>>,
    leases: Option<&Bound<'_, PyAny>>,
    nbytes: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let configure = || {
        let usual = Limits::default();
        let limit = |limit: Option<&Bound<'_, PyAny>>, what, usual| {
            limit.map_or(Ok(usual), |limit| number::<usize>(limit, what, 0))
        };
        let limits = Limits::default()
            .with_connections(limit(connections, "connections", usual.connections)?)
            .with_shares(limit(shares, "shares", usual.shares)?)
            .with_leases(limit(leases, "leases", usual.leases)?)
            .with_bytes(limit(nbytes, "nbytes", usual.bytes)?);
        let several = || argument(format!("users must be several numbers, not {}", brief_repr(users)));
        let users = users.try_iter().map_err(|_| several())?;
        let users = users.map(|user| number::<u32>(&user.map_err(|_| several())?, "a user", 0));
        let users = users.collect::<Result<Vec<_>>>()?;
        let mut settings = Settings::default().with_limits(limits).with_users(users);
        settings.folder = folder.map(path).transpose()?;
        process::configure(settings)
    };
    configure().map_err(|error| into_python(users.py(), error))
}

/// Ends all shares of this process, and its socket.
#[pyfunction]
pub(crate) fn ipc_close(py: Python<'_>) {
    py.detach(process::close);
}

/// Returns what other processes hold of this one: shares, leases, connections and bytes.
#[pyfunction]
pub(crate) fn ipc_held() -> (usize, usize, usize, usize) {
    let held = process::held();
    (held.shares, held.leases, held.connections, held.bytes)
}

/// Reads a number of seconds.
#[pyfunction]
pub(crate) fn ipc_seconds(time: &Bound<'_, PyAny>) -> PyResult<f64> {
    seconds(time).map(|time| time.as_secs_f64()).map_err(|error| into_python(time.py(), error))
}

/// Refuses what is not a name, or not a number of versions.
#[pyfunction]
pub(crate) fn ipc_check_name(name: &Bound<'_, PyAny>, keep: &Bound<'_, PyAny>) -> PyResult<()> {
    let check = || bridge_ipc::check_name(&text(name, "a name")?).and_then(|()| number(keep, "keep", 1u64).map(drop));
    check().map_err(|error| into_python(name.py(), error))
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
    module.add_function(wrap_pyfunction!(ipc_share, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_transport, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_open, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_empty, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_revoke, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_configure, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_seconds, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_check_name, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_close, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_held, module)?)
}
