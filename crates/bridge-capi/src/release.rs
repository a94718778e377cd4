//! Where the owners of foreign memory are dropped: anywhere, or, in a Python process, only with the GIL.
//!
//! What TensorFlow gives back comes on any thread, also on threads of its own, which somebody who holds the GIL may be
//! waiting for. Such an owner waits until Python drops something here, and no longer than a moment: then a thread of
//! this library enters the interpreter for it. To do so at once would take the GIL from a thread that is about to come
//! here anyway.

use crate::python::{self, Python};
use crate::status::quietly;
use std::cell::Cell;
use std::mem;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

type Value = Box<dyn Send + Sync>;

/// A value that is dropped where that is allowed.
pub(crate) struct Owner(Option<Value>);

impl Owner {
    pub(crate) fn new(value: impl Send + Sync + 'static) -> Self {
        Self(Some(Box::new(value)))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(value) = self.0.take() else { return };
        match python::get() {
            None => drop(value),
            // What is dropped may run Python code, which may have given the GIL away for a while.
            Some(python) if AT_ONCE.try_with(Cell::get) == Ok(true) && python.has_gil() => drop(value),
            Some(python) => wait(python, value),
        }
    }
}

thread_local! {
    /// Whether owners may be dropped on this thread now, if it has the GIL.
    static AT_ONCE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body`, which drops something on behalf of whoever has called this library: if that is Python, owners are
/// dropped at once, and so is what waits.
pub(crate) fn dropping<R>(body: impl FnOnce() -> R) -> R {
    let before = AT_ONCE.try_with(|at_once| at_once.replace(true));
    let result = body();
    if python::get().is_some_and(Python::has_gil) {
        drop(waiting());
    }
    let _ = AT_ONCE.try_with(|at_once| at_once.set(before == Ok(true)));
    result
}

/// What nobody could drop yet.
static WAITING: Mutex<Vec<Value>> = Mutex::new(Vec::new());
static ARRIVED: Condvar = Condvar::new();

/// How long it waits for a thread that has the GIL already.
const MOMENT: Duration = Duration::from_millis(1);

fn waiting() -> Vec<Value> {
    mem::take(&mut *WAITING.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Leaves the value to whoever has the GIL next.
fn wait(python: &'static Python, value: Value) {
    static THREAD: OnceLock<()> = OnceLock::new();
    THREAD.get_or_init(|| {
        let name = "tensor-bridge-release".into();
        // Without the thread it waits for the next call.
        drop(thread::Builder::new().name(name).spawn(|| release(python)));
    });
    WAITING.lock().unwrap_or_else(PoisonError::into_inner).push(value);
    ARRIVED.notify_one();
}

/// Drops what waits, for ever. Once the interpreter shuts down, that is left to the end of the process.
fn release(python: &Python) {
    loop {
        let values = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
        drop(ARRIVED.wait_while(values, |values| values.is_empty()));
        thread::sleep(MOMENT);
        let mut values = waiting();
        if !values.is_empty() {
            python.with_gil(|| quietly(|| dropping(|| values.clear())));
            mem::forget(values);
        }
    }
}
