//! Tensors under names: the process that serves names, and connections to it.

use crate::errors::{into_python, text};
use crate::processes::{Ticket, number, path, seconds, shared};
use bridge_core::{Error, ErrorKind, Result};
use bridge_ipc::{Exporter, LISTED, Limits, Settings, process};
use bridge_pyo3::PyTensor;
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// The process that serves names at a path.
#[pyclass(frozen, module = "truebridge")]
pub(crate) struct Names(Mutex<Option<bridge_ipc::Names>>);

#[pymethods]
impl Names {
    /// Serves names; a store keeps at most so many bytes.
    #[new]
    fn new(path: &Bound<'_, PyAny>, persistent: bool, max_bytes: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let serve = || {
            let bytes = max_bytes.map_or(Ok(usize::MAX), |bytes| number(bytes, "max_bytes", 0usize))?;
            let limits = Limits::default().with_bytes(bytes);
            let settings = Settings::default().with_users(process::users()).with_limits(limits);
            let serve = if persistent { bridge_ipc::Names::persistent } else { bridge_ipc::Names::serve };
            serve(&self::path(path)?, settings)
        };
        Ok(Self(Mutex::new(Some(serve().map_err(|error| into_python(path.py(), error))?))))
    }

    fn close(&self, py: Python<'_>) {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(names));
    }
}

/// A connection to the process that serves names.
#[pyclass(frozen, module = "truebridge")]
pub(crate) struct Client(Mutex<Option<Arc<bridge_ipc::Client>>>);

impl Client {
    pub(crate) fn client(&self) -> Result<Arc<bridge_ipc::Client>> {
        let client = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(Arc::clone);
        client.ok_or_else(|| Error::new(ErrorKind::Gone, "the connection is closed: connect again"))
    }

    /// Asks about a name, without the interpreter.
    fn ask<T: Send>(
        &self,
        name: &Bound<'_, PyAny>,
        ask: impl FnOnce(&bridge_ipc::Client, &str) -> Result<T> + Send,
    ) -> Result<T> {
        let (client, text) = (self.client()?, text(name, "a name")?);
        name.py().detach(|| ask(&client, &text))
    }
}

#[pymethods]
impl Client {
    #[new]
    fn new(path: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = path.py();
        // A store may be started again: find out while it runs whether the server is a store.
        let connect = |path: PathBuf| bridge_ipc::Client::connect(&path).and_then(|to| to.is_persistent().map(|_| to));
        let client = self::path(path).and_then(|path| py.detach(|| connect(path)));
        Ok(Self(Mutex::new(Some(Arc::new(client.map_err(|error| into_python(py, error))?)))))
    }

    /// Shares tensors under a name. The connection owns the share: a caller that is interrupted, wherever that is,
    /// loses no ticket.
    fn put<'py>(
        &self,
        name: &Bound<'py, PyAny>,
        tensors: Vec<PyTensor<'py>>,
        tree: Option<String>,
        keep: &Bound<'py, PyAny>,
        writing: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<u64> {
        let put = || {
            let (client, text, keep) = (self.client()?, text(name, "a name")?, number(keep, "keep", 1u64)?);
            let put = |exporter: &Arc<Exporter>, ticket| client.put_share(exporter, &text, &ticket, keep);
            let outlives = name.py().detach(|| client.is_persistent())?;
            shared(name.py(), (tensors, tree), (LISTED, None), (writing, outlives), put)
        };
        put().map_err(|error| into_python(name.py(), error))
    }

    fn get(&self, name: &Bound<'_, PyAny>, version: Option<&Bound<'_, PyAny>>) -> PyResult<(u64, Ticket)> {
        let get = || {
            let version = version.map(|version| number(version, "a version", 0)).transpose()?;
            self.ask(name, |client, name| client.get(name, version))
        };
        let found = get().map_err(|error| into_python(name.py(), error));
        found.map(|(version, ticket)| (version, Ticket(ticket)))
    }

    fn remove(&self, name: &Bound<'_, PyAny>) -> PyResult<()> {
        let removed = self.ask(name, bridge_ipc::Client::remove);
        removed.map_err(|error| into_python(name.py(), error))
    }

    fn list(&self, py: Python<'_>) -> PyResult<Vec<(String, u64, String)>> {
        let listed = self.client().and_then(|client| py.detach(|| client.list()));
        let listed = listed.map_err(|error| into_python(py, error))?;
        Ok(listed.into_iter().map(|listed| (listed.name, listed.version, listed.about)).collect())
    }

    /// Returns whether the process that serves names is a store, its bytes, and the most that it keeps.
    fn about(&self, py: Python<'_>) -> PyResult<(bool, usize, usize)> {
        let about = self.client().and_then(|client| py.detach(|| client.about()));
        let about = about.map_err(|error| into_python(py, error))?;
        Ok((about.persistent, about.nbytes, about.limit))
    }

    fn watch(&self, name: &Bound<'_, PyAny>, after: &Bound<'_, PyAny>) -> PyResult<Watch> {
        let watch = || {
            let after = number(after, "a version", 0)?;
            self.ask(name, |client, name| client.watch(name, after))
        };
        watch().map(Watch).map_err(|error| into_python(name.py(), error))
    }

    fn close(&self, py: Python<'_>) {
        let client = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(client));
    }
}

/// A version that is waited for.
#[pyclass(frozen, module = "truebridge")]
pub(crate) struct Watch(bridge_ipc::Watch);

#[pymethods]
impl Watch {
    /// Return the version and its ticket, or ``None`` if there is none within ``time`` seconds.
    fn wait(&self, time: &Bound<'_, PyAny>) -> PyResult<Option<(u64, Ticket)>> {
        let py = time.py();
        let found = seconds(time).and_then(|time| py.detach(|| self.0.wait(time)));
        let found = found.map_err(|error| into_python(py, error))?;
        Ok(found.map(|(version, ticket)| (version, Ticket(ticket))))
    }
}

/// Enters the classes into the module.
pub(crate) fn enter(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Names>()?;
    module.add_class::<Client>()?;
    module.add_class::<Watch>()
}
