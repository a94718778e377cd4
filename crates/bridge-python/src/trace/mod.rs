//! Records of the process's transfers, for `tensor_bridge.trace`.
//!
//! Every function that takes tensors across runs its body in [`call`], and transfers by [`transfer`] and
//! [`transfer_all`]. While no trace is open that costs one relaxed load. `crate::debug` uses the same path and flag.

mod book;
mod seen;

use crate::debug::{self, Owned};
use crate::{copies, nvtx};
pub(crate) use book::enter;
use book::{About, Book, Crossed, Outcome};
use bridge_core::{Adapter, Device, Error, ErrorKind, Failed, Options, Result, Transfer};
use bridge_ipc::{Parcel, Writing};
use seen::Seen;
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// What looks at the transfers: some of [`TRACING`] and [`DEBUGGING`].
static ON: AtomicU8 = AtomicU8::new(0);

/// A trace is open.
const TRACING: u8 = 1;
/// `tensor_bridge.debug` is on.
pub(crate) const DEBUGGING: u8 = 2;

/// Turns one of the flags on or off.
pub(crate) fn set(flag: u8, on: bool) {
    if on {
        ON.fetch_or(flag, Relaxed)
    } else {
        ON.fetch_and(!flag, Relaxed)
    };
}

/// Returns whether `tensor_bridge.debug` is on.
pub(crate) fn is_debugging() -> bool {
    ON.load(Relaxed) & DEBUGGING != 0
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
    fn end(self, error: Option<ErrorKind>) {
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
                let reason = done.plan.reason().map(|reason| reason.to_string()).unwrap_or_default();
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
    fn see<'a, F>(&self, tensors: &[(&'a dyn Adapter<Tensor = F>, &F)], to: Option<&'a str>) -> Vec<Seen<'a, F>> {
        self.count.set(tensors.len());
        tensors.iter().map(|(from, _)| Seen { to, ..Seen::of(*from) }).collect()
    }
}

/// Runs a call of the package, and records what it notes while a trace is open. Fails as `body` does.
#[inline(always)]
pub(crate) fn call<R>(operation: &'static str, to: &str, body: impl FnOnce(Option<&Call>) -> Result<R>) -> Result<R> {
    let call = if ON.load(Relaxed) != 0 { Some(Call::begin(operation, to)) } else { None };
    // One place calls `body`, so that it is inlined.
    let done = body(call.as_deref());
    if let Some(call) = call {
        (*call).end(done.as_ref().err().map(Error::kind));
    }
    done
}

/// As [`bridge_core::transfer`], by the ordering of the process.
#[inline(always)]
pub(crate) fn transfer<F: Owned, T>(
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
fn transfer_seen<F: Owned, T>(
    call: &Call,
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    tensor: &F,
    options: &Options,
) -> Result<(T, Transfer)> {
    let seen = Seen { to: Some(&to.profile().name), ..Seen::of(from) };
    let crossed = bridge_core::transfer(&seen, to, tensor, copies::ordering(), options);
    saw(to, seen.device());
    call.note(&seen, crossed.as_ref().map(|(_, done)| *done).map_err(Error::kind));
    crossed
}

/// Remembers the stream that the consumer of a tensor has.
fn saw<T>(to: &dyn Adapter<Tensor = T>, device: Option<Device>) {
    if is_debugging() {
        debug::saw(&to.profile().name, &*to.consumer(), device);
    }
}

/// As [`bridge_core::transfer_all`], by the ordering of the process.
pub(crate) fn transfer_all<F: Owned, T>(
    call: Option<&Call>,
    tensors: &[(&dyn Adapter<Tensor = F>, &F)],
    to: &dyn Adapter<Tensor = T>,
    options: &Options,
) -> Result<Vec<T>, Failed> {
    let cross = |tensors: &[_]| bridge_core::transfer_all(tensors, to, copies::ordering(), options);
    let Some(call) = call else {
        return Ok(cross(tensors)?.into_iter().map(|(tensor, _)| tensor).collect());
    };
    let seen = call.see(tensors, Some(&to.profile().name));
    let crossed = cross(&through(&seen, tensors));
    seen.iter().for_each(|seen| saw(to, seen.device()));
    match crossed {
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
pub(crate) fn pack<F: Owned>(
    call: Option<&Call>,
    tensors: &[(&dyn Adapter<Tensor = F>, &F)],
    writing: Option<Writing>,
    options: &Options,
) -> Result<Parcel> {
    let pack = |tensors: &[_]| Parcel::of(tensors, writing, copies::ordering(), options);
    let Some(call) = call else { return pack(tensors) };
    let seen = call.see(tensors, None);
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
fn through<'a, F: Owned>(
    seen: &'a [Seen<'a, F>],
    tensors: &[(&dyn Adapter<Tensor = F>, &'a F)],
) -> Vec<(&'a dyn Adapter<Tensor = F>, &'a F)> {
    seen.iter().zip(tensors).map(|(seen, (_, tensor))| (seen as _, *tensor)).collect()
}

/// As [`bridge_core::copy_into`], by the ordering of the process.
pub(crate) fn copy_into<F: Owned, T: Owned>(
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
