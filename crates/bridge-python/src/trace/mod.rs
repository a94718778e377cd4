//! Records of the process's transfers, for `truebridge.trace`. It observes and transfers nothing.
//!
//! Every function that takes tensors across runs its body in [`call`], and `crate::conversions` notes in it what
//! becomes of each tensor. While no trace is open that costs one relaxed load.

mod table;

use crate::nvtx;
use bridge_core::{Error, ErrorKind, Result};
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use table::{About, Converted, Table};
pub(crate) use table::{Facts, Outcome, enter};

/// Why transfers are looked at: some of [`TRACING`], [`DEBUGGING`] and [`OPENED`].
static ON: AtomicU8 = AtomicU8::new(0);

/// A trace is open.
pub(crate) const TRACING: u8 = 1;
/// `truebridge.debug` is on.
pub(crate) const DEBUGGING: u8 = 2;
/// A tensor of another process has become one of this process: its memory may be gone later.
const OPENED: u8 = 4;

/// Notes that a tensor of another process becomes one of this process.
pub(crate) fn opened() {
    set(OPENED, true);
}

/// Returns whether a tensor of another process has become one of this process.
#[inline(always)]
pub(crate) fn has_opened() -> bool {
    ON.load(Relaxed) & OPENED != 0
}

/// Turns one of the flags on or off.
pub(crate) fn set(flag: u8, on: bool) {
    if on {
        ON.fetch_or(flag, Relaxed)
    } else {
        ON.fetch_and(!flag, Relaxed)
    };
}

/// Returns whether `truebridge.debug` is on.
pub(crate) fn is_debugging() -> bool {
    ON.load(Relaxed) & DEBUGGING != 0
}

/// Returns whether anything watches. Off, watching costs this one relaxed load.
#[inline(always)]
pub(crate) fn is_on() -> bool {
    ON.load(Relaxed) & (TRACING | DEBUGGING) != 0
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
    tensors: RefCell<Vec<Converted>>,
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

    /// Enters what was noted into the table. `error` is that of the call.
    #[cold]
    fn end(self, error: Option<ErrorKind>) {
        let duration = now() - self.start;
        drop(self.range);
        let mut tensors = self.tensors.into_inner();
        let failed = |converted: &Converted| matches!(converted.outcome, Outcome::Failed(_));
        if let Some(kind) = error
            && !tensors.iter().any(failed)
        {
            tensors = vec![Converted { from: None, to: self.to.take(), facts: None, outcome: Outcome::Failed(kind) }];
        }
        let about = About {
            number: 0,
            operation: self.operation,
            tensors: self.count.get(),
            start: self.start,
            duration,
            pid: std::process::id(),
            thread: rustix::thread::gettid().as_raw_nonzero().get(),
        };
        Table::lock().push(about, tensors);
    }

    /// Names the target of what is noted from now on.
    pub(crate) fn to(&self, name: &str) {
        *self.to.borrow_mut() = name.into();
    }

    /// Says how many tensors it is to take across.
    pub(crate) fn expect(&self, count: usize) {
        self.count.set(count);
    }

    /// Notes what became of a tensor of the framework `from`.
    pub(crate) fn note(&self, from: &str, facts: Option<Facts>, outcome: Outcome) {
        let to = self.to.borrow().clone();
        self.tensors.borrow_mut().push(Converted { from: Some(from.into()), to, facts, outcome });
    }
}

/// Runs a call of the package, and records what it notes while a trace is open. Fails as `body` does.
#[inline(always)]
pub(crate) fn call<R>(
    operation: &'static str,
    to: impl FnOnce() -> &'static str,
    body: impl FnOnce(Option<&Call>) -> Result<R>,
) -> Result<R> {
    let call = if is_on() { Some(Call::begin(operation, to())) } else { None };
    // One place calls `body`, so that it is inlined.
    let done = body(call.as_deref());
    if let Some(call) = call {
        (*call).end(done.as_ref().err().map(Error::kind));
    }
    done
}
