//! DLPack capsules: who holds the name holds the tensor.

use crate::gil::report_unraisable;
use bridge_core::dlpack::ffi::{DLManagedTensor, DLManagedTensorVersioned};
use bridge_core::dlpack::{ManagedTensorBase, Origin, adopt, lend, versioned};
use bridge_core::{Device, Error, ErrorKind, Lent, Result};
use pyo3::IntoPyObject;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi::{PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName};
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use std::ffi::CStr;

const VERSIONED: (&CStr, &CStr) = (c"dltensor_versioned", c"used_dltensor_versioned");
const LEGACY: (&CStr, &CStr) = (c"dltensor", c"used_dltensor");

/// Lends the tensor in a DLPack capsule, versioned or legacy. The capsule is used up, also on most errors: then the
/// tensor has been given back.
///
/// # Errors
///
/// [`ErrorKind::NotATensor`] for anything but a DLPack capsule, [`ErrorKind::Consumed`] for one that was used up
/// before, and those of [`lend`].
///
/// # Safety
///
/// As for [`lend`]: the producer of the capsule keeps DLPack's promises, and what `origin` gives is true.
pub unsafe fn take_capsule(
    capsule: &Bound<'_, PyAny>,
    origin: &dyn Fn(Device, usize) -> Result<Origin>,
) -> Result<Lent> {
    // SAFETY: the obligations are handed on; the names tell which ABI the pointer has.
    unsafe {
        match take::<DLManagedTensorVersioned>(capsule, VERSIONED, origin)? {
            Some(lent) => Ok(lent),
            None => take::<DLManagedTensor>(capsule, LEGACY, origin)?.ok_or_else(|| {
                let text = "this is no DLPack capsule (named \"dltensor\" or \"dltensor_versioned\")";
                Error::new(ErrorKind::NotATensor, text)
            }),
        }
    }
}

/// `None` for a capsule of another name.
///
/// # Safety
///
/// As for [`take_capsule`], and a capsule of these names points to an `M`.
unsafe fn take<M: ManagedTensorBase>(
    capsule: &Bound<'_, PyAny>,
    (name, used): (&CStr, &CStr),
    origin: &dyn Fn(Device, usize) -> Result<Origin>,
) -> Result<Option<Lent>> {
    let object = capsule.as_ptr();
    // The look and the renaming are one step for other threads, which without the GIL takes the capsule's lock.
    let managed = with_critical_section(capsule, || {
        // SAFETY: the object is alive and the GIL is held; IsValid takes any object and sets no exception.
        if unsafe { PyCapsule_IsValid(object, used.as_ptr()) } == 1 {
            let text = "the DLPack capsule was used up before: ask its producer for a new one";
            return Err(Error::new(ErrorKind::Consumed, text));
        }
        // SAFETY: as above.
        if unsafe { PyCapsule_IsValid(object, name.as_ptr()) } != 1 {
            return Ok(None);
        }
        // SAFETY: the object is a capsule of this name. Renaming it takes the tensor over from its destructor, by DLPack's
        // rule for Python, and nothing between the two calls can fail.
        unsafe {
            let managed = PyCapsule_GetPointer(object, name.as_ptr()).cast::<M>();
            PyCapsule_SetName(object, used.as_ptr());
            Ok(Some(managed))
        }
    })?;
    let Some(managed) = managed else { return Ok(None) };
    // SAFETY: we own the tensor now; the rest are the caller's obligations.
    let lent = unsafe { adopt(managed).and_then(|managed| lend(managed, origin)) };
    // Of a tensor that is refused the deleter has run.
    report_unraisable(capsule.py());
    lent.map(Some)
}

/// A capsule that holds the managed tensor, and gives it back if nobody takes it.
///
/// # Errors
///
/// What Python reports.
pub fn capsule<'py>(py: Python<'py>, managed: versioned::Dlpack) -> PyResult<Bound<'py, PyAny>> {
    managed.into_pyobject(py).map_err(|error| PyBufferError::new_err(error.to_string()))
}
