//! A Python object as the owner of memory, and a lease as a Python object.

use crate::gil::{watch_for_exit, with_gil};
use bridge_core::Lease;
use pyo3::ffi::{Py_DecRef, PyObject};
use pyo3::prelude::*;
use std::ptr::NonNull;

/// A reference to a Python object that may be dropped on any thread, with or without the GIL.
///
/// A bare `Py` that is dropped without the GIL is put off until somebody enters Python through pyo3, which may be never.
/// This one enters Python for the drop ([`with_gil`]). While the interpreter shuts down that is not possible any more;
/// the reference is then left to the end of the process.
pub struct Owner(NonNull<PyObject>);

// SAFETY: the pointer is a counted reference, and it is used with the GIL alone.
unsafe impl Send for Owner {}
// SAFETY: as above; a shared `Owner` gives nothing away.
unsafe impl Sync for Owner {}

impl Owner {
    /// Another reference to `object`.
    pub fn new(object: &Bound<'_, PyAny>) -> Self {
        watch_for_exit(object.py());
        Self(NonNull::new(object.clone().into_ptr()).expect("a bound object is not null"))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: the reference was taken over in `new` and is given back here alone, with the GIL.
        with_gil(|_| unsafe { Py_DecRef(self.0.as_ptr()) });
    }
}

/// A lease as a Python object, for frameworks that keep the owner of foreign memory as one.
#[pyclass(frozen, module = "tensor_bridge", name = "Lease")]
pub struct LeaseOwner(Lease);

impl LeaseOwner {
    /// Takes the lease over.
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
