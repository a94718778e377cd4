//! The result of TensorFlow's C functions.

use crate::runtime::api::{Core, TF_Status};
use bridge_core::{Error, ErrorKind, Result};
use std::ffi::{CStr, c_int};
use std::ptr::NonNull;

/// `TF_INVALID_ARGUMENT`
pub(crate) const INVALID_ARGUMENT: c_int = 3;
/// `TF_RESOURCE_EXHAUSTED`: the host or a GPU has no memory left.
pub(crate) const RESOURCE_EXHAUSTED: c_int = 8;

/// Receives the result of the last C function that it was passed to.
pub(crate) struct Status<'a> {
    core: &'a Core,
    raw: NonNull<TF_Status>,
}

impl<'a> Status<'a> {
    pub(crate) fn new(core: &'a Core) -> Self {
        // SAFETY: the function has no obligations.
        let raw = unsafe { (core.TF_NewStatus)() };
        Self { core, raw: NonNull::new(raw).expect("TF_NewStatus returns a status") }
    }

    pub(crate) fn raw(&self) -> *mut TF_Status {
        self.raw.as_ptr()
    }

    /// Returns the error that the last function reported, if any.
    pub(crate) fn check(&self) -> Result<()> {
        // SAFETY: the status lives as long as `self`.
        match unsafe { (self.core.TF_GetCode)(self.raw()) } {
            0 => Ok(()),
            code => Err(self.error(code)),
        }
    }

    #[cold]
    fn error(&self, code: c_int) -> Error {
        // SAFETY: the message is a C string, valid until the status is written to again.
        let message = unsafe { CStr::from_ptr((self.core.TF_Message)(self.raw())) }.to_string_lossy();
        let kind = if code == RESOURCE_EXHAUSTED { ErrorKind::OutOfMemory } else { ErrorKind::Framework };
        Error::new(kind, format!("tensorflow reported: {message}"))
    }
}

impl Drop for Status<'_> {
    fn drop(&mut self) {
        // SAFETY: the status is ours, and no reference to it is left.
        unsafe { (self.core.TF_DeleteStatus)(self.raw()) };
    }
}
