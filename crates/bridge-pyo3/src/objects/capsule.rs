//! DLPack capsules as objects of pyo3.

use super::gil;
use crate::interpreter::{AnyManaged, report_unraisable};
use bridge_core::dlpack::{Origin, legacy, versioned};
use bridge_core::{Device, Export, Result};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;

/// Exports the tensor in a DLPack capsule, versioned or legacy. The capsule is consumed, also on most errors: then the
/// deleter has been called.
///
/// # Errors
///
/// [`ErrorKind::NotATensor`](bridge_core::ErrorKind::NotATensor) for anything but a DLPack capsule,
/// [`ErrorKind::Consumed`](bridge_core::ErrorKind::Consumed) for one that was consumed before, and those of
/// [`export`](bridge_core::dlpack::export).
///
/// # Safety
///
/// As for [`export`](bridge_core::dlpack::export): the producer of the capsule keeps DLPack's promises, and what
/// `origin` returns is true.
pub unsafe fn take_capsule(
    capsule: &Bound<'_, PyAny>,
    origin: &dyn Fn(Device, usize) -> Result<Origin>,
) -> Result<Export> {
    gil::open();
    // Checking the name and changing it are one step for other threads, which without the GIL takes the capsule's lock.
    let managed = with_critical_section(capsule, || {
        // SAFETY: the object is alive; the GIL and the capsule's lock are held.
        unsafe { crate::interpreter::take_capsule(capsule.as_ptr().cast()) }
    })?;
    // SAFETY: the tensor is ours now; the rest are the caller's obligations.
    let exported = unsafe { managed.export(origin) };
    // The deleter of a refused tensor has run. SAFETY: the GIL is held.
    unsafe { report_unraisable() };
    exported
}

/// Returns a new capsule that owns the managed tensor, and calls its deleter unless a consumer takes the tensor.
///
/// # Errors
///
/// What Python raises.
pub fn capsule<'py>(py: Python<'py>, managed: versioned::Dlpack) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the tensor is passed on.
    unsafe { new_capsule(py, AnyManaged::Versioned(managed.into_raw())) }
}

/// As [`capsule`], for a consumer that takes unversioned capsules only.
///
/// # Errors
///
/// What Python raises.
pub fn legacy_capsule<'py>(py: Python<'py>, managed: legacy::Dlpack) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the tensor is passed on.
    unsafe { new_capsule(py, AnyManaged::Legacy(managed.into_raw())) }
}

/// # Safety
///
/// The caller owns the managed tensor.
unsafe fn new_capsule(py: Python<'_>, managed: AnyManaged) -> PyResult<Bound<'_, PyAny>> {
    gil::open();
    // SAFETY: the caller's obligation, and the GIL is held; the result is a new reference, or null with an exception.
    unsafe {
        let capsule = crate::interpreter::new_capsule(managed);
        let capsule = capsule.map_err(|error| PyBufferError::new_err(error.to_string()))?;
        Bound::from_owned_ptr_or_err(py, capsule.cast())
    }
}
