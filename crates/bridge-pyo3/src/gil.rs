//! Into Python from wherever a deleter is called.

use pyo3::ffi::{
    Py_IsInitialized, PyErr_Fetch, PyErr_Occurred, PyErr_Restore, PyErr_WriteUnraisable, PyGILState_Ensure,
    PyGILState_GetThisThreadState, PyGILState_Release, PyGILState_STATE, PyObject,
};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyCFunction};
use std::mem::ManuallyDrop;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// Set when the interpreter begins to shut down.
static CLOSED: AtomicBool = AtomicBool::new(false);
/// Calls of [`with_gil`] that may be waiting for the GIL.
static ENTERED: AtomicUsize = AtomicUsize::new(0);
/// How often, a millisecond apart, the shutdown looks for them before it goes on regardless.
const LOOKS: u32 = 1000;

struct Entered(Option<PyGILState_STATE>);

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(state) = self.0 {
            // SAFETY: the state is that of the matching Ensure, on this thread.
            unsafe { PyGILState_Release(state) };
        }
        // A child that was forked in here counts from 0.
        let _ = ENTERED.fetch_update(SeqCst, SeqCst, |entered| entered.checked_sub(1));
    }
}

/// The exception that is on its way through this thread, put back when this is dropped.
struct InFlight([*mut PyObject; 3]);

impl InFlight {
    /// Takes the exception out of the way.
    ///
    /// # Safety
    ///
    /// This thread holds the GIL, now and when the value is dropped.
    unsafe fn set_aside() -> Self {
        let [mut kind, mut value, mut traceback] = [std::ptr::null_mut(); 3];
        // SAFETY: the GIL is held; the outputs are writable.
        unsafe { PyErr_Fetch(&mut kind, &mut value, &mut traceback) };
        Self([kind, value, traceback])
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let [kind, value, traceback] = self.0;
        // SAFETY: these are the references that Fetch gave, and the GIL is held.
        unsafe { PyErr_Restore(kind, value, traceback) };
    }
}

/// Runs `body` with the GIL, whether this thread holds it or not. Returns `None` once the interpreter shuts down. A pending
/// exception, as is often there when something is dropped, is saved before `body` and restored after it.
///
/// `Python::try_attach` will not do in a deleter: it takes the GIL for granted on a thread that has attached before, and
/// PyTorch releases it, without pyo3's knowledge, around the drop of a tensor. And at finalisation CPython kills threads
/// that block on the GIL, inside Rust frames; so `close` admits threads that already wait, and rejects later ones.
pub fn with_gil<R>(body: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    entered(|py| {
        // SAFETY: this thread holds the GIL until `entered` returns.
        let _in_flight = unsafe { InFlight::set_aside() };
        body(py)
    })
}

/// Takes the exception that a C function has just set on this thread, whether the thread holds the GIL or not.
pub fn take_raised() -> Option<PyErr> {
    entered(PyErr::take).flatten()
}

/// Runs `body` with the GIL, a pending exception in place.
fn entered<R>(body: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    ENTERED.fetch_add(1, SeqCst);
    let mut entered = Entered(None);
    // SAFETY: the call is allowed at any time.
    if CLOSED.load(SeqCst) || unsafe { Py_IsInitialized() } == 0 {
        return None;
    }
    // SAFETY: the interpreter is initialised, and `close` waits for threads that came here before it.
    entered.0 = Some(unsafe { PyGILState_Ensure() });
    // SAFETY: this thread holds the GIL until `entered` is dropped.
    Some(body(unsafe { Python::assume_attached() }))
}

/// Drops an owner whose deleter needs the GIL, or takes it without looking whether the interpreter shuts down, as
/// PyTorch's tensors do: CPython then kills the thread inside C++ that cannot be unwound, and the process with it. So the
/// GIL is taken here. Once the interpreter shuts down, threads that Python does not know leave the owner to the end of the
/// process.
///
/// A pending exception is saved before the drop and restored after it. One that the deleter leaves behind is reported to
/// `sys.unraisablehook`.
pub fn drop_guarded(owner: Box<dyn Send + Sync>) {
    let mut owner = ManuallyDrop::new(owner);
    // SAFETY: the owner is dropped once: either here or below.
    let mut drop = || unsafe { ManuallyDrop::drop(&mut owner) };
    let entered = with_gil(|py| {
        drop();
        report_unraisable(py);
    });
    // SAFETY: the function may be called on any thread at any time.
    let is_known = || !unsafe { PyGILState_GetThisThreadState() }.is_null();
    // Otherwise there is no interpreter, or it shuts down on this very thread.
    if entered.is_none() && (!CLOSED.load(SeqCst) || is_known()) {
        drop();
    }
}

/// Reports an exception that foreign code has left set, which no caller of ours may take for its own.
pub(crate) fn report_unraisable(_: Python<'_>) {
    // SAFETY: the GIL is held; WriteUnraisable wants an exception to be set, and takes null for no object.
    unsafe {
        if !PyErr_Occurred().is_null() {
            PyErr_WriteUnraisable(std::ptr::null_mut());
        }
    }
}

/// Makes the interpreter close the way in before it shuts down, and a forked child forget the threads that only its parent
/// has. Repeated calls do nothing.
pub fn watch_for_exit(py: Python<'_>) {
    static ONCE: Once = Once::new();
    if !ONCE.is_completed() {
        let register = || -> PyResult<()> {
            let close = PyCFunction::new_closure(py, None, None, |arguments, _| close(arguments.py()))?;
            py.import("atexit")?.call_method1("register", (close,))?;
            let forget = PyCFunction::new_closure(py, None, None, |_, _| ENTERED.store(0, SeqCst))?;
            let kwargs = [("after_in_child", forget)].into_py_dict(py)?;
            py.import("os")?.call_method("register_at_fork", (), Some(&kwargs)).map(drop)
        };
        let registered = register();
        // Without `atexit` there is only the check of `Py_IsInitialized`.
        ONCE.call_once(|| drop(registered));
    }
}

/// Lets nobody in any more, and those in who wait already.
fn close(py: Python<'_>) {
    CLOSED.store(true, SeqCst);
    py.detach(|| {
        let mut looks = 0;
        while ENTERED.load(SeqCst) > 0 && looks < LOOKS {
            std::thread::sleep(Duration::from_millis(1));
            looks += 1;
        }
    });
}
