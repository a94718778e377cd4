//! Quick and strict forms of what pyo3 offers.

use pyo3::ffi::PyObject_CallMethodObjArgs;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};
use std::ptr;

/// `object.name(argument)`, or `object.name()`, without a bound method and a tuple on the way, which pyo3 makes for the
/// stable ABI of Python 3.10.
///
/// # Errors
///
/// What the method raises.
pub fn call<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
    argument: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let argument = argument.map_or(ptr::null_mut(), |argument| argument.as_ptr());
    // SAFETY: all objects are alive and the GIL is held; the list of arguments ends with null, early or late.
    unsafe {
        let result = PyObject_CallMethodObjArgs(
            object.as_ptr(),
            name.as_ptr(),
            argument,
            ptr::null_mut::<pyo3::ffi::PyObject>(),
        );
        Bound::from_owned_ptr_or_err(object.py(), result)
    }
}

/// Whether the object really is of this type or a subclass. `isinstance` also believes what an object says of itself in
/// `__class__`, as a `weakref.proxy` does, which keeps nothing alive.
pub fn is_instance(object: &Bound<'_, PyAny>, kind: &Bound<'_, PyType>) -> bool {
    object.get_type().is_subclass(kind).unwrap_or(false)
}
