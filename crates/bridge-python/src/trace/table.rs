//! The events of the process, and who reads them.

use super::{TRACING, set};
use crate::nvtx;
use bridge_core::{CopiedBy, DType, Device, ErrorKind, Result, Stream, Transfer};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The events of the process, and its open traces.
///
/// Every thread that locks it holds the GIL, and runs no Python until it has unlocked it: so a fork never copies it
/// locked.
static TABLE: Mutex<Table> =
    Mutex::new(Table { events: VecDeque::new(), first: 0, calls: 0, traces: Vec::new(), next: 0 });

/// What an export says about its tensor.
pub(crate) struct Facts {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<i64>,
    pub(crate) nbytes: usize,
    pub(crate) device: Device,
}

/// What became of a tensor.
pub(crate) enum Outcome {
    /// It was converted. The reason of a copy into a tensor that exists is in no plan.
    Converted {
        copied: Option<(CopiedBy, String)>,
        ordered: Option<(u64, u64)>,
    },
    Failed(ErrorKind),
}

impl Outcome {
    /// Returns what a transfer did.
    pub(crate) fn of(done: Result<&Transfer, ErrorKind>) -> Self {
        match done {
            Ok(done) => {
                let reason = done.plan.reason().map(|reason| reason.to_string()).unwrap_or_default();
                Self::converted(done.copied_by.map(|by| (by, reason)), done.ordered)
            }
            Err(kind) => Self::Failed(kind),
        }
    }

    pub(crate) fn converted(copied: Option<(CopiedBy, String)>, ordered: Option<(Stream, Stream)>) -> Self {
        let ordered = ordered.map(|(owner, reader)| (owner.handle(), reader.handle()));
        Self::Converted { copied, ordered }
    }
}

/// A tensor of a call.
pub(super) struct Converted {
    /// `None` where the call failed before it knew.
    pub(super) from: Option<String>,
    pub(super) to: String,
    pub(super) facts: Option<Facts>,
    pub(super) outcome: Outcome,
}

/// What the events of one call share.
pub(super) struct About {
    pub(super) number: u64,
    pub(super) operation: &'static str,
    pub(super) tensors: usize,
    /// Nanoseconds of the monotonic clock.
    pub(super) start: u64,
    pub(super) duration: u64,
    pub(super) pid: u32,
    pub(super) thread: i32,
}

struct Event {
    about: Arc<About>,
    converted: Converted,
}

/// An open trace.
struct Trace {
    id: u64,
    /// Number of its first event.
    start: u64,
    /// The most events that it keeps.
    limit: usize,
}

pub(super) struct Table {
    events: VecDeque<Arc<Event>>,
    /// Number of the first of `events`, among all of the process.
    first: u64,
    calls: u64,
    traces: Vec<Trace>,
    next: u64,
}

impl Table {
    pub(super) fn lock() -> MutexGuard<'static, Self> {
        TABLE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&mut self, limit: usize) -> u64 {
        let (id, start) = (self.next, self.first + self.events.len() as u64);
        self.next += 1;
        self.traces.push(Trace { id, start, limit });
        set(TRACING, true);
        id
    }

    /// Returns how many events of a trace were dropped, and the others.
    fn read(&self, id: u64) -> (u64, Vec<Arc<Event>>) {
        let Some(trace) = self.traces.iter().find(|trace| trace.id == id) else { return (0, Vec::new()) };
        let end = self.first + self.events.len() as u64;
        let from = trace.start.max(self.first).max(end.saturating_sub(trace.limit as u64));
        // A process that was forked has its parent's events as well.
        let own = |event: &&Arc<Event>| event.about.pid == std::process::id();
        let events = self.events.iter().skip((from - self.first) as usize).filter(own).map(Arc::clone);
        (from - trace.start, events.collect())
    }

    fn close(&mut self, id: u64) {
        self.traces.retain(|trace| trace.id != id);
        set(TRACING, !self.traces.is_empty());
        self.trim();
    }

    pub(super) fn push(&mut self, mut about: About, converted: Vec<Converted>) {
        about.number = self.calls;
        self.calls += 1;
        let about = Arc::new(about);
        let events = converted.into_iter().map(|converted| Arc::new(Event { about: Arc::clone(&about), converted }));
        self.events.extend(events);
        self.trim();
    }

    /// Drops the oldest events, which no open trace keeps.
    fn trim(&mut self) {
        let end = self.first + self.events.len() as u64;
        let kept = self.traces.iter().map(|trace| trace.start.max(end.saturating_sub(trace.limit as u64)));
        let dropped = kept.min().unwrap_or(end).saturating_sub(self.first);
        self.events.drain(..dropped as usize);
        self.first += dropped;
    }
}

/// Returns an event as the keywords of the class in Python.
fn keywords<'py>(py: Python<'py>, event: &Event) -> PyResult<Bound<'py, PyDict>> {
    let (about, converted) = (&*event.about, &event.converted);
    let facts = converted.facts.as_ref();
    let (copied, ordered, error) = match &converted.outcome {
        Outcome::Converted { copied, ordered } => (copied.as_ref(), *ordered, None),
        Outcome::Failed(kind) => (None, None, Some(kind)),
    };
    let path = match (copied, error) {
        (_, Some(_)) => "failed",
        (Some(_), _) => "copy",
        _ => "in place",
    };
    let kind = error.map(|kind| serde_json::to_value(kind).expect("a kind is a word"));
    let shape = facts.map(|facts| PyTuple::new(py, &facts.shape)).transpose()?;
    let keywords = PyDict::new(py);
    keywords.set_item("call", about.number)?;
    keywords.set_item("operation", about.operation)?;
    keywords.set_item("source", &converted.from)?;
    keywords.set_item("target", &converted.to)?;
    keywords.set_item("path", path)?;
    keywords.set_item("copied_by", copied.map(|(by, _)| by.to_string()))?;
    keywords.set_item("reason", copied.map(|(_, reason)| reason))?;
    keywords.set_item("error", kind.as_ref().and_then(|kind| kind.as_str()))?;
    keywords.set_item("device", facts.map(|facts| facts.device.to_string()))?;
    keywords.set_item("dtype", facts.map(|facts| facts.dtype.to_string()))?;
    keywords.set_item("shape", shape)?;
    keywords.set_item("nbytes", facts.map_or(0, |facts| facts.nbytes))?;
    keywords.set_item("streams", ordered)?;
    keywords.set_item("start", about.start)?;
    keywords.set_item("duration", about.duration)?;
    keywords.set_item("tensors", about.tensors)?;
    keywords.set_item("pid", about.pid)?;
    keywords.set_item("thread", about.thread)?;
    Ok(keywords)
}

/// Opens a trace that keeps the newest ``limit`` events, and returns its number.
#[pyfunction]
fn trace_open(limit: usize) -> u64 {
    Table::lock().open(limit)
}

/// Returns how many events of a trace were dropped, and the others.
#[pyfunction]
fn trace_read(py: Python<'_>, id: u64) -> PyResult<(u64, Bound<'_, PyList>)> {
    let (dropped, events) = Table::lock().read(id);
    let events = events.iter().map(|event| keywords(py, event)).collect::<PyResult<Vec<_>>>()?;
    Ok((dropped, PyList::new(py, events)?))
}

/// Ends a trace, and forgets its events.
#[pyfunction]
fn trace_close(id: u64) {
    Table::lock().close(id);
}

/// Marks the calls that are recorded as ranges of NVTX, by the first of these libraries that can. Returns its path.
#[pyfunction]
fn trace_nvtx(libraries: Vec<String>) -> Option<String> {
    nvtx::load(&libraries)
}

/// Enters the functions into the module.
pub(crate) fn enter(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(trace_open, module)?)?;
    module.add_function(wrap_pyfunction!(trace_read, module)?)?;
    module.add_function(wrap_pyfunction!(trace_close, module)?)?;
    module.add_function(wrap_pyfunction!(trace_nvtx, module)?)
}
