//! A Python object as the owner of memory, and a lease as a Python object.

use bridge_core::Lease;
use pyo3::prelude::*;
use std::mem::ManuallyDrop;

/// A reference to a Python object that may be dropped on any thread, with or without the GIL.
///
/// A bare `Py` that is dropped without the GIL is put off until somebody enters Python through pyo3, which may be never.
/// This one attaches to the interpreter for the drop. While the interpreter shuts down that is not possible any more;
/// the reference is then left to the end of the process.
pub struct Owner(ManuallyDrop<Py<PyAny>>);

impl Owner {
    /// Takes the reference over.
    pub fn new(object: Py<PyAny>) -> Self {
        Self(ManuallyDrop::new(object))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        Python::try_attach(|_| {
            // SAFETY: this is the drop of the only holder, so the value is taken once and not used afterwards.
            drop(unsafe { ManuallyDrop::take(&mut self.0) });
        });
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

    /// The lease.
    pub fn lease(&self) -> &Lease {
        &self.0
    }
}

#[pymethods]
impl LeaseOwner {
    fn __repr__(&self) -> String {
        format!("<{:?}>", self.0)
    }
}
