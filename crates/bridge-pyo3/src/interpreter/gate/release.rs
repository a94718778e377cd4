//! Where owners are dropped that need the GIL.
//!
//! A thread that Python knows takes the GIL and drops the owner at once. On any other thread the drop is deferred: that
//! thread must not wait for the GIL, because a thread that holds it may be waiting for that one. Deferred owners are
//! dropped by the next [`drop_deferred`], or after a millisecond by a thread of this library. That thread does not
//! enter Python at once, because it would take the GIL from a thread that is about to drop them anyway.

use super::{Thread, report_unraisable, with_gil};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

type Owner = Box<dyn Send + Sync>;

/// Drops an owner whose deleter needs the GIL, or takes it without checking whether the interpreter shuts down, as
/// PyTorch's tensors do: CPython then kills the thread inside C++ that cannot be unwound, and so aborts the process.
///
/// The drop may be deferred (see the documentation of this crate). Once the interpreter shuts down, threads that Python
/// knows drop the owner without taking the GIL, and others leak it. A pending exception is saved before the drop and
/// restored after it; one that the deleter leaves is reported to `sys.unraisablehook`.
pub fn drop_guarded(owner: Owner) {
    release(owner, |owner| owner, drop);
}

/// A value that is dropped with the GIL, as by [`drop_guarded`], or leaked once the interpreter shuts down. Where no
/// interpreter was opened, it is dropped at once.
pub struct Guarded<T: Send + Sync + 'static>(Option<T>);

bridge_core::debug_fields!(impl[T: Send + Sync + 'static] Guarded<T>);

impl<T: Send + Sync + 'static> Guarded<T> {
    /// Guards the drop of `value`.
    pub fn new(value: T) -> Self {
        Self(Some(value))
    }

    /// Returns the value.
    pub fn get(&self) -> &T {
        self.0.as_ref().expect("only the drop takes it")
    }
}

impl<T: Send + Sync + 'static> Drop for Guarded<T> {
    fn drop(&mut self) {
        if let Some(value) = self.0.take() {
            release(value, |value| Box::new(value), mem::forget);
        }
    }
}

/// Drops `value` where that is allowed. Once the interpreter shuts down, a thread that Python knows passes it to
/// `closed`.
fn release<T>(value: T, defer: fn(T) -> Owner, closed: fn(T)) {
    match Thread::current() {
        Thread::Free => drop(value),
        Thread::Unknown => self::defer(defer(value)),
        Thread::Known => {
            let mut value = Some(value);
            with_gil(|| {
                drop(value.take());
                // SAFETY: the GIL is held.
                unsafe { report_unraisable() };
            });
            value.into_iter().for_each(closed);
        }
    }
}

/// Drops `value` at once: with the GIL where Python knows this thread, and without it elsewhere and once the interpreter
/// shuts down. The drop itself must not need the GIL.
pub fn drop_with_gil<T>(value: T) {
    let mut value = Some(value);
    if matches!(Thread::current(), Thread::Known) {
        with_gil(|| drop(value.take()));
    }
    drop(value);
}

type Guard = MutexGuard<'static, VecDeque<Owner>>;

static DEFERRED: Mutex<VecDeque<Owner>> = Mutex::new(VecDeque::new());
static ARRIVED: Condvar = Condvar::new();
/// Whether the thread runs that drops them.
static RUNS: AtomicBool = AtomicBool::new(false);
/// How long a deferred owner waits for [`drop_deferred`] before the thread enters Python for it.
const MOMENT: Duration = Duration::from_millis(1);

fn deferred() -> Guard {
    DEFERRED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn defer(owner: Owner) {
    deferred().push_back(owner);
    if !RUNS.swap(true, SeqCst) {
        let thread = thread::Builder::new().name("truebridge-release".into());
        // Without the thread the owner waits for `drop_deferred`.
        RUNS.store(thread.spawn(run).is_ok(), SeqCst);
    }
    ARRIVED.notify_one();
}

/// What deferred owners are dropped inside of.
static AROUND: OnceLock<fn(&mut dyn FnMut())> = OnceLock::new();

/// Makes deferred owners be dropped inside of `around`, which calls its argument once. The first call decides.
pub fn drop_inside(around: fn(&mut dyn FnMut())) {
    let _ = AROUND.set(around);
}

/// Drops deferred owners, with the GIL and one at a time: no thread with the GIL may see an owner that is neither
/// deferred nor dropped. Returns `None` once the interpreter shuts down, when they are leaked.
fn drop_all() -> Option<()> {
    let next = || deferred().pop_front();
    let mut all = || {
        while let Some(owner) = next() {
            // A panic of an external owner must neither end the thread nor meet C.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(owner)));
            // SAFETY: the GIL is held.
            unsafe { report_unraisable() };
        }
    };
    with_gil(|| match AROUND.get() {
        Some(around) => around(&mut all),
        None => all(),
    })
}

/// Drops deferred owners now if Python knows this thread, which takes the GIL if there are any.
pub fn drop_deferred() {
    if !deferred().is_empty() && matches!(Thread::current(), Thread::Known) {
        drop_all();
    }
}

fn run() {
    let mut open = Some(());
    while open.is_some() {
        drop(ARRIVED.wait_while(deferred(), |owners| owners.is_empty()));
        thread::sleep(MOMENT);
        open = drop_all();
    }
}

thread_local! {
    /// The lock, while this thread forks: a child must not begin with a lock that a thread of its parent holds.
    static FORKING: RefCell<Option<Guard>> = const { RefCell::new(None) };
}

/// Called by `fork`, in the parent.
pub(crate) fn before_fork() {
    let _ = FORKING.try_with(|guard| guard.replace(Some(deferred())));
}

/// Called by `fork` afterwards, in the parent and in the child.
pub(crate) fn after_fork() {
    let _ = FORKING.try_with(RefCell::take);
}

/// Makes a forked child start its own thread.
pub(crate) fn forget_thread() {
    RUNS.store(false, SeqCst);
}
