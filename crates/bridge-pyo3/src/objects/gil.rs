//! The path into Python ([`interpreter`](crate::interpreter)) in the terms of pyo3: the GIL from any thread, owners that
//! are dropped with it, and values that are made once with it.

use crate::interpreter::{Functions, Guarded, Object};
use bridge_core::Lease;
use pyo3::exceptions::PyImportError;
use pyo3::ffi::{self, Py_DecRef, PyObject};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyCFunction;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;
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
            "truebridge works in the main interpreter only: import it there, or use a process instead of the \
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

/// A reference to a Python object that may be dropped on any thread, with or without the GIL ([`Guarded`]). Once the
/// interpreter shuts down, the reference is leaked.
///
/// pyo3 defers the drop of a bare `Py` without the GIL until some thread enters Python through pyo3, which may be
/// never.
pub struct PyOwner {
    object: Guarded<Reference>,
}

bridge_core::debug_fields!(impl[] PyOwner);

impl PyOwner {
    /// Takes another reference to `object`.
    pub fn new(object: &Bound<'_, PyAny>) -> Self {
        watch_for_exit(object.py());
        let object = NonNull::new(object.clone().into_ptr()).expect("a bound object is not null");
        Self { object: Guarded::new(Reference(object)) }
    }

    /// Returns another reference to the object.
    pub fn bind<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        let Reference(object) = self.object.get();
        // SAFETY: the reference is counted, and alive as long as this value.
        unsafe { Bound::from_borrowed_ptr(py, object.as_ptr()) }
    }
}

/// A counted reference. Its drop needs the GIL.
struct Reference(NonNull<PyObject>);

// SAFETY: the pointer is a counted reference, and it is used only with the GIL: `PyOwner` guards it.
unsafe impl Send for Reference {}
// SAFETY: as above; `PyOwner::bind` uses a shared `Reference` with the GIL.
unsafe impl Sync for Reference {}

impl Drop for Reference {
    fn drop(&mut self) {
        // SAFETY: the reference was taken in `PyOwner::new` and is released only here. The guard holds the GIL,
        // because `new` has checked that the interpreter runs.
        unsafe { Py_DecRef(self.0.as_ptr()) };
    }
}

/// A lease as a Python object, for frameworks that keep the owner of imported memory as one.
#[pyclass(frozen, module = "truebridge", name = "Lease")]
#[derive(Debug)]
pub struct LeaseOwner(Lease);

impl LeaseOwner {
    /// Wraps the lease.
    pub fn new(lease: Lease) -> Self {
        Self(lease)
    }
}

#[pymethods]
impl LeaseOwner {
    fn __repr__(&self) -> String {
        format!("<{:?}>", self.0)
    }
}

/// Returns what a cell holds. The first call makes it.
///
/// Threads that come meanwhile make it as well, and the first one is kept. Waiting for another thread would never end in
/// a child that is forked before that thread is done: the child does not have it.
///
/// # Errors
///
/// Those of `make`. The next call makes it again.
#[inline]
pub fn once<'a, T, E>(
    py: Python<'_>,
    cell: &'a PyOnceLock<T>,
    make: impl FnOnce() -> Result<T, E>,
) -> Result<&'a T, E> {
    if let Some(known) = cell.get(py) {
        return Ok(known);
    }
    let made = make()?;
    // It may hold another by now. The GIL is held from here on, so no process is forked between the two calls.
    let _ = cell.set(py, made);
    Ok(cell.get(py).expect("one of the threads has set it"))
}
