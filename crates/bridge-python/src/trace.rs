//! Records of the process's transfers, for `tensor_bridge.trace`.
//!
//! Every function that takes tensors across runs its body in [`call`], and transfers by [`transfer`] and
//! [`transfer_all`]. While no trace is open that costs one relaxed load.

use crate::copies;
use crate::nvtx;
use bridge_core::{
    Adapter, Consumer, CopiedBy, DType, Device, Error, ErrorKind, Failed, Lease, Lent, Options, Order, Plan, Profile,
    Result, Transfer,
};
use bridge_ipc::{Parcel, Writing};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Whether a trace is open.
static ON: AtomicBool = AtomicBool::new(false);

/// The events of the process, and its open traces.
///
/// Every thread that locks it holds the GIL, and runs no Python until it has unlocked it: so a fork never copies it
/// locked.
static BOOK: Mutex<Book> =
    Mutex::new(Book { events: VecDeque::new(), first: 0, calls: 0, traces: Vec::new(), next: 0 });

/// What an export says about its tensor.
struct Facts {
    dtype: DType,
    shape: Vec<i64>,
    nbytes: usize,
    device: Device,
}

/// What became of a tensor.
enum Outcome {
    /// It crossed. The reason of a copy into a tensor that exists is in no plan.
    Crossed {
        copied: Option<(CopiedBy, String)>,
        ordered: Option<(u64, u64)>,
    },
    Failed(ErrorKind),
}

/// A tensor of a call.
struct Crossed {
    /// `None` where the call failed before it knew.
    from: Option<String>,
    facts: Option<Facts>,
    outcome: Outcome,
}

/// What the events of one call share.
struct About {
    number: u64,
    operation: &'static str,
    to: String,
    tensors: usize,
    /// Nanoseconds of the monotonic clock.
    start: u64,
    duration: u64,
    pid: u32,
    thread: i32,
}

struct Event {
    about: Arc<About>,
    crossed: Crossed,
}

/// An open trace.
struct Trace {
    id: u64,
    /// Number of its first event.
    start: u64,
    /// The most events that it keeps.
    limit: usize,
}

struct Book {
    events: VecDeque<Arc<Event>>,
    /// Number of the first of `events`, among all of the process.
    first: u64,
    calls: u64,
    traces: Vec<Trace>,
    next: u64,
}

impl Book {
    fn lock() -> MutexGuard<'static, Self> {
        BOOK.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&mut self, limit: usize) -> u64 {
        let (id, start) = (self.next, self.first + self.events.len() as u64);
        self.next += 1;
        self.traces.push(Trace { id, start, limit });
        ON.store(true, Relaxed);
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
        ON.store(!self.traces.is_empty(), Relaxed);
        self.trim();
    }

    fn push(&mut self, mut about: About, crossed: Vec<Crossed>) {
        about.number = self.calls;
        self.calls += 1;
        let about = Arc::new(about);
        let events = crossed.into_iter().map(|crossed| Arc::new(Event { about: Arc::clone(&about), crossed }));
        self.events.extend(events);
        self.trim();
    }

    /// Drops the oldest events: those that no open trace keeps.
    fn trim(&mut self) {
        let end = self.first + self.events.len() as u64;
        let kept = self.traces.iter().map(|trace| trace.start.max(end.saturating_sub(trace.limit as u64)));
        let dropped = kept.min().unwrap_or(end).saturating_sub(self.first);
        self.events.drain(..dropped as usize);
        self.first += dropped;
    }
}

/// Nanoseconds of the clock of Python's `time.monotonic_ns`.
fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A call that is recorded.
pub(crate) struct Call {
    operation: &'static str,
    to: RefCell<String>,
    tensors: RefCell<Vec<Crossed>>,
    /// The number of tensors that it was to take across.
    count: Cell<usize>,
    start: u64,
    range: Option<nvtx::Range>,
}

impl Call {
    #[cold]
    fn begin(operation: &'static str, to: &str) -> Box<Self> {
        Box::new(Self {
            operation,
            to: RefCell::new(to.into()),
            tensors: RefCell::default(),
            count: Cell::new(1),
            range: nvtx::range(operation),
            start: now(),
        })
    }

    /// Enters what was noted into the book. `error` is that of the call.
    #[cold]
    fn end(self: Box<Self>, error: Option<ErrorKind>) {
        let duration = now() - self.start;
        drop(self.range);
        let mut tensors = self.tensors.into_inner();
        let failed = |crossed: &Crossed| matches!(crossed.outcome, Outcome::Failed(_));
        if let Some(kind) = error
            && !tensors.iter().any(failed)
        {
            tensors = vec![Crossed { from: None, facts: None, outcome: Outcome::Failed(kind) }];
        }
        let about = About {
            number: 0,
            operation: self.operation,
            to: self.to.into_inner(),
            tensors: self.count.get(),
            start: self.start,
            duration,
            pid: std::process::id(),
            thread: rustix::thread::gettid().as_raw_nonzero().get(),
        };
        Book::lock().push(about, tensors);
    }

    /// Names the target.
    pub(crate) fn to(&self, name: &str) {
        *self.to.borrow_mut() = name.into();
    }

    /// Notes what became of a tensor that was exported through `seen`.
    fn note<F>(&self, seen: &Seen<'_, F>, done: Result<Transfer, ErrorKind>) {
        let outcome = match done {
            Ok(done) => {
                let reason = match done.plan {
                    Plan::ZeroCopy => String::new(),
                    Plan::Copy(reason) => reason.to_string(),
                };
                let ordered = done.ordered.map(|(owner, reader)| (owner.handle(), reader.handle()));
                Outcome::Crossed { copied: done.copied_by.map(|by| (by, reason)), ordered }
            }
            Err(kind) => Outcome::Failed(kind),
        };
        self.enter(seen, outcome);
    }

    fn enter<F>(&self, seen: &Seen<'_, F>, outcome: Outcome) {
        let from = Some(seen.adapter.profile().name.clone());
        self.tensors.borrow_mut().push(Crossed { from, facts: seen.facts.take(), outcome });
    }

    /// Returns adapters that see the tensors of the call.
    fn see<'a, F>(&self, tensors: &[(&'a dyn Adapter<Tensor = F>, &F)]) -> Vec<Seen<'a, F>> {
        self.count.set(tensors.len());
        tensors.iter().map(|(from, _)| Seen::of(*from)).collect()
    }
}

/// Runs a call of the package, and records what it notes while a trace is open. Fails as `body` does.
#[inline(always)]
pub(crate) fn call<R>(operation: &'static str, to: &str, body: impl FnOnce(Option<&Call>) -> Result<R>) -> Result<R> {
    let call = if ON.load(Relaxed) { Some(Call::begin(operation, to)) } else { None };
    // One place calls `body`, so that it is inlined.
    let done = body(call.as_deref());
    if let Some(call) = call {
        call.end(done.as_ref().err().map(Error::kind));
    }
    done
}

/// As [`bridge_core::transfer`], by the ordering of the process.
#[inline(always)]
pub(crate) fn transfer<F, T>(
    call: Option<&Call>,
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    tensor: &F,
    options: &Options,
) -> Result<T> {
    let crossed = match call {
        None => bridge_core::transfer(from, to, tensor, copies::ordering(), options),
        Some(call) => transfer_seen(call, from, to, tensor, options),
    };
    Ok(crossed?.0)
}

#[cold]
fn transfer_seen<F, T>(
    call: &Call,
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    tensor: &F,
    options: &Options,
) -> Result<(T, Transfer)> {
    let seen = Seen::of(from);
    let crossed = bridge_core::transfer(&seen, to, tensor, copies::ordering(), options);
    call.note(&seen, crossed.as_ref().map(|(_, done)| *done).map_err(Error::kind));
    crossed
}

/// As [`bridge_core::transfer_all`], by the ordering of the process.
pub(crate) fn transfer_all<F, T>(
    call: Option<&Call>,
    tensors: &[(&dyn Adapter<Tensor = F>, &F)],
    to: &dyn Adapter<Tensor = T>,
    options: &Options,
) -> Result<Vec<T>, Failed> {
    let cross = |tensors: &[_]| bridge_core::transfer_all(tensors, to, copies::ordering(), options);
    let Some(call) = call else {
        return Ok(cross(tensors)?.into_iter().map(|(tensor, _)| tensor).collect());
    };
    let seen = call.see(tensors);
    match cross(&through(&seen, tensors)) {
        Ok(crossed) => {
            seen.iter().zip(&crossed).for_each(|(seen, (_, done))| call.note(seen, Ok(*done)));
            Ok(crossed.into_iter().map(|(tensor, _)| tensor).collect())
        }
        Err(failed) => {
            call.note(&seen[failed.index], Err(failed.error.kind()));
            Err(failed)
        }
    }
}

/// As [`Parcel::of`], by the ordering of the process.
pub(crate) fn pack<F>(
    call: Option<&Call>,
    tensors: &[(&dyn Adapter<Tensor = F>, &F)],
    writing: Option<Writing>,
    options: &Options,
) -> Result<Parcel> {
    let pack = |tensors: &[_]| Parcel::of(tensors, writing, copies::ordering(), options);
    let Some(call) = call else { return pack(tensors) };
    let seen = call.see(tensors);
    let packed = pack(&through(&seen, tensors));
    match (&packed, &*seen) {
        (Ok(parcel), seen) => seen.iter().zip(parcel.transfers()).for_each(|(seen, done)| call.note(seen, Ok(*done))),
        (Err(error), [seen]) => call.note(seen, Err(error.kind())),
        // The error names no tensor.
        (Err(_), _) => (),
    }
    packed
}

/// Returns tensors with the adapters that see them.
fn through<'a, F>(
    seen: &'a [Seen<'a, F>],
    tensors: &[(&dyn Adapter<Tensor = F>, &'a F)],
) -> Vec<(&'a dyn Adapter<Tensor = F>, &'a F)> {
    seen.iter().zip(tensors).map(|(seen, (_, tensor))| (seen as _, *tensor)).collect()
}

/// As [`bridge_core::copy_into`], by the ordering of the process.
pub(crate) fn copy_into<F, T>(
    call: Option<&Call>,
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    tensor: &F,
    out: &T,
) -> Result<()> {
    let Some(call) = call else {
        return bridge_core::copy_into(from, to, tensor, out, copies::ordering()).map(drop);
    };
    call.to(&to.profile().name);
    let (source, target) = (Seen::of(from), Seen::of(to));
    let done = bridge_core::copy_into(&source, &target, tensor, out, copies::ordering());
    let devices = (source.device(), target.device());
    let outcome = match (&done, devices) {
        (Ok(ordered), (Some(from), Some(to))) => Outcome::Crossed {
            copied: Some((bridge_core::copied_into_by(from, to), "a tensor that exists".into())),
            ordered: ordered.map(|(owner, reader)| (owner.handle(), reader.handle())),
        },
        (Ok(_), _) => return Ok(()),
        (Err(error), _) => Outcome::Failed(error.kind()),
    };
    call.enter(&source, outcome);
    done.map(drop)
}

/// An adapter that keeps what its first export says.
struct Seen<'a, F> {
    adapter: &'a dyn Adapter<Tensor = F>,
    facts: RefCell<Option<Facts>>,
}

impl<'a, F> Seen<'a, F> {
    fn of(adapter: &'a dyn Adapter<Tensor = F>) -> Self {
        Self { adapter, facts: RefCell::new(None) }
    }

    fn device(&self) -> Option<Device> {
        self.facts.borrow().as_ref().map(|facts| facts.device)
    }
}

impl<F> Adapter for Seen<'_, F> {
    type Tensor = F;

    fn profile(&self) -> &Profile {
        self.adapter.profile()
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.adapter.consumer()
    }

    fn export(&self, tensor: &F) -> Result<Lent> {
        let lent = self.adapter.export(tensor)?;
        self.facts.borrow_mut().get_or_insert_with(|| Facts {
            dtype: lent.dtype(),
            shape: lent.layout().shape().into(),
            nbytes: lent.layout().nbytes(),
            device: lent.device(),
        });
        Ok(lent)
    }

    fn import(&self, lease: Lease) -> Result<F> {
        self.adapter.import(lease)
    }

    fn compact(&self, tensor: &F) -> Result<F> {
        self.adapter.compact(tensor)
    }

    fn overwritten(&self, tensor: &F) -> Result<()> {
        self.adapter.overwritten(tensor)
    }

    fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<F> {
        self.adapter.empty(device, dtype, shape, order)
    }
}

/// Returns an event as the keywords of the class in Python.
fn keywords<'py>(py: Python<'py>, event: &Event) -> PyResult<Bound<'py, PyDict>> {
    let (about, crossed) = (&*event.about, &event.crossed);
    let facts = crossed.facts.as_ref();
    let (copied, ordered, error) = match &crossed.outcome {
        Outcome::Crossed { copied, ordered } => (copied.as_ref(), *ordered, None),
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
    keywords.set_item("source", &crossed.from)?;
    keywords.set_item("target", &about.to)?;
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
    Book::lock().open(limit)
}

/// Returns how many events of a trace were dropped, and the others.
#[pyfunction]
fn trace_read(py: Python<'_>, id: u64) -> PyResult<(u64, Bound<'_, PyList>)> {
    let (dropped, events) = Book::lock().read(id);
    let events = events.iter().map(|event| keywords(py, event)).collect::<PyResult<Vec<_>>>()?;
    Ok((dropped, PyList::new(py, events)?))
}

/// Ends a trace, and forgets its events.
#[pyfunction]
fn trace_close(id: u64) {
    Book::lock().close(id);
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
