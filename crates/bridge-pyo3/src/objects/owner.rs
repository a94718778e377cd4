//! A Python object as the owner of memory, and a lease as a Python object.

use super::gil::watch_for_exit;
use crate::interpreter::Guarded;
use bridge_core::Lease;
use pyo3::ffi::{Py_DecRef, PyObject};
use pyo3::prelude::*;
use std::ptr::NonNull;

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
