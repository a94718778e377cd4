//! The path into Python ([`interpreter`](crate::interpreter)) in the terms of pyo3.

use crate::interpreter::{Functions, Object};
use bridge_core::Lease;
use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCFunction;
use std::ffi::{c_char, c_int, c_void};
use std::sync::Once;

// The same symbols as in `pyo3::ffi`, with the types of the table.
unsafe extern "C" {
    fn Py_IsInitialized() -> c_int;
    fn PyGILState_Ensure() -> c_int;
    fn PyGILState_Release(state: c_int);
    fn PyGILState_GetThisThreadState() -> *mut c_void;
    fn PyErr_Fetch(kind: *mut Object, value: *mut Object, traceback: *mut Object);
    fn PyErr_Restore(kind: Object, value: Object, traceback: Object);
    fn PyErr_Occurred() -> Object;
    fn PyErr_WriteUnraisable(object: Object);
    fn PyCapsule_New(
        pointer: *mut c_void,
        name: *const c_char,
        destructor: Option<unsafe extern "C" fn(Object)>,
    ) -> Object;
    fn PyCapsule_IsValid(capsule: Object, name: *const c_char) -> c_int;
    fn PyCapsule_GetPointer(capsule: Object, name: *const c_char) -> *mut c_void;
    fn PyCapsule_SetName(capsule: Object, name: *const c_char) -> c_int;
}

const FUNCTIONS: Functions = Functions {
    is_initialized: Py_IsInitialized,
    gil_state_ensure: PyGILState_Ensure,
    gil_state_release: PyGILState_Release,
    gil_state_get_this_thread_state: PyGILState_GetThisThreadState,
    err_fetch: PyErr_Fetch,
    err_restore: PyErr_Restore,
    err_occurred: PyErr_Occurred,
    err_write_unraisable: PyErr_WriteUnraisable,
    capsule_new: PyCapsule_New,
    capsule_is_valid: PyCapsule_IsValid,
    capsule_get_pointer: PyCapsule_GetPointer,
    capsule_set_name: PyCapsule_SetName,
};

/// Opens the way in, once.
pub(crate) fn open() {
    // SAFETY: the functions are those of the interpreter that this library is linked with, as their names say.
    unsafe { crate::interpreter::open(FUNCTIONS) };
}

/// Runs `body` with the GIL, whether this thread holds it or not. Returns `None` once the interpreter shuts down. A
/// pending exception, as is often there when something is dropped, is saved before `body` and restored after it.
///
/// `Python::try_attach` will not do in a deleter: it takes the GIL for granted on a thread that has attached before,
/// and PyTorch releases it, without pyo3's knowledge, around the drop of a tensor.
pub fn with_gil<R>(body: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    open();
    // SAFETY: this thread holds the GIL until `body` returns.
    crate::interpreter::with_gil(|| body(unsafe { Python::assume_attached() }))
}

/// Takes the exception that a C function has just set on this thread, whether the thread holds the GIL or not.
pub fn take_raised() -> Option<PyErr> {
    open();
    // SAFETY: as in `with_gil`.
    crate::interpreter::enter(|| PyErr::take(unsafe { Python::assume_attached() })).flatten()
}

/// Drops an owner whose deleter needs the GIL: see [`crate::interpreter::drop_guarded`].
pub fn drop_guarded(owner: Box<dyn Send + Sync>) {
    open();
    crate::interpreter::drop_guarded(owner);
}

/// Drops a lease with the GIL where Python knows this thread, and without it elsewhere.
///
/// PyTorch releases the GIL around the drop of a tensor. Where other threads wait for the GIL, it is cheap to take back
/// at once, and expensive after the driver calls that a lease makes: another thread has it by then.
pub fn drop_with_gil(lease: Lease) {
    open();
    crate::interpreter::drop_with_gil(lease);
}

/// Refuses every interpreter but the main one. The path into Python leads into that one: a deleter that runs on a
/// thread of a framework cannot know which interpreter an object belongs to.
///
/// # Errors
///
/// `ImportError` in a subinterpreter.
pub fn refuse_subinterpreters(py: Python<'_>) -> PyResult<()> {
    // SAFETY: this thread is attached to an interpreter, whose state is alive.
    match unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) } {
        0 => Ok(()),
        -1 => Err(PyErr::fetch(py)),
        _ => Err(PyImportError::new_err(
            "truebridge works in the main interpreter only: import it there, or use a process in the place of the \
             subinterpreter",
        )),
    }
}

/// Makes the interpreter close the way in before it shuts down. Repeated calls do nothing.
pub fn watch_for_exit(py: Python<'_>) {
    static ONCE: Once = Once::new();
    if !ONCE.is_completed() {
        open();
        let register = || -> PyResult<()> {
            let close = PyCFunction::new_closure(py, None, None, |arguments, _| {
                arguments.py().detach(crate::interpreter::close)
            })?;
            py.import("atexit")?.call_method1("register", (close,)).map(drop)
        };
        let registered = register();
        // Without `atexit` there is only the check of `Py_IsInitialized`.
        ONCE.call_once(|| drop(registered));
    }
}
