//! The interpreter's C functions.

use crate::interpreter::gate;
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

/// A `PyObject *`.
pub type Object = *mut c_void;

/// The functions of Python's C API that are called for capsules and for memory whose release needs the GIL, all of the
/// limited API.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Functions {
    /// `Py_IsInitialized`
    pub is_initialized: unsafe extern "C" fn() -> c_int,
    /// `PyGILState_Ensure`
    pub gil_state_ensure: unsafe extern "C" fn() -> c_int,
    /// `PyGILState_Release`
    pub gil_state_release: unsafe extern "C" fn(c_int),
    /// `PyGILState_GetThisThreadState`
    pub gil_state_get_this_thread_state: unsafe extern "C" fn() -> *mut c_void,
    /// `PyErr_Fetch`
    pub err_fetch: unsafe extern "C" fn(*mut Object, *mut Object, *mut Object),
    /// `PyErr_Restore`
    pub err_restore: unsafe extern "C" fn(Object, Object, Object),
    /// `PyErr_Occurred`
    pub err_occurred: unsafe extern "C" fn() -> Object,
    /// `PyErr_WriteUnraisable`
    pub err_write_unraisable: unsafe extern "C" fn(Object),
    /// `PyCapsule_New`
    pub capsule_new: unsafe extern "C" fn(*mut c_void, *const c_char, Option<unsafe extern "C" fn(Object)>) -> Object,
    /// `PyCapsule_IsValid`
    pub capsule_is_valid: unsafe extern "C" fn(Object, *const c_char) -> c_int,
    /// `PyCapsule_GetPointer`
    pub capsule_get_pointer: unsafe extern "C" fn(Object, *const c_char) -> *mut c_void,
    /// `PyCapsule_SetName`
    pub capsule_set_name: unsafe extern "C" fn(Object, *const c_char) -> c_int,
}

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// Opens the way into the interpreter of this process. Calls after the first do nothing.
///
/// # Safety
///
/// The functions are those that the field names say, of the one interpreter of this process, and stay callable as long
/// as the process lives.
pub unsafe fn open(functions: Functions) {
    FUNCTIONS.get_or_init(|| {
        gate::watch_for_forks();
        functions
    });
}

/// Returns the functions of the interpreter, or `None` where none was opened.
pub(crate) fn functions() -> Option<&'static Functions> {
    FUNCTIONS.get()
}
