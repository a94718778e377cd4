//! Faster or stricter forms of functions of pyo3.

use pyo3::ffi::{PyObject, PyObject_CallMethodObjArgs, PyType_IsSubtype};
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};
use std::ptr;

/// The most arguments that [`call`] passes.
const MOST: usize = 4;

/// Calls `object.name(*arguments)`, with up to four arguments. It makes neither a bound method nor a tuple, as pyo3
/// does for the stable ABI of Python 3.10.
///
/// # Errors
///
/// What the method raises.
pub fn call<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
    arguments: &[&Bound<'py, PyAny>],
) -> PyResult<Bound<'py, PyAny>> {
    assert!(arguments.len() <= MOST, "the list of arguments has no room for more");
    let at = |i: usize| arguments.get(i).map_or(ptr::null_mut(), |argument| argument.as_ptr());
    // SAFETY: all objects are alive and the GIL is held; the list of arguments ends with its first null.
    unsafe {
        let end = ptr::null_mut::<PyObject>();
        let result = PyObject_CallMethodObjArgs(object.as_ptr(), name.as_ptr(), at(0), at(1), at(2), at(3), end);
        Bound::from_owned_ptr_or_err(object.py(), result)
    }
}

/// Returns whether the type of the object is this type or a subclass. `isinstance` also believes `__class__`, which a
/// `weakref.proxy` copies from an object that it does not keep alive, and runs code of metaclasses.
pub fn is_instance(object: &Bound<'_, PyAny>, kind: &Bound<'_, PyType>) -> bool {
    // SAFETY: both types are alive, and the GIL is held; the function runs no Python code and cannot fail.
    unsafe { PyType_IsSubtype(object.get_type_ptr(), kind.as_type_ptr()) == 1 }
}
