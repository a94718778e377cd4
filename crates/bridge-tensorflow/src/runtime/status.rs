//! The result of TensorFlow's C functions.

use crate::runtime::api::{Core, TF_Status};
use bridge_core::{Error, ErrorKind, Result};
use std::cell::Cell;
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

/// A status that reports no error and has no user.
struct Spare {
    delete: Delete,
    raw: NonNull<TF_Status>,
}

/// `TF_DeleteStatus` of the library that a status is of.
type Delete = unsafe extern "C" fn(*mut TF_Status);

impl Drop for Spare {
    fn drop(&mut self) {
        // SAFETY: the status is ours, and no reference to it is left.
        unsafe { (self.delete)(self.raw.as_ptr()) };
    }
}

thread_local! {
    /// The status that this thread used last: to make one costs as much as five of the calls that it is for.
    static SPARE: Cell<Option<Spare>> = const { Cell::new(None) };
}

impl<'a> Status<'a> {
    pub(crate) fn new(core: &'a Core) -> Self {
        let spare = SPARE.try_with(Cell::take).ok().flatten();
        if let Some(spare) = spare.filter(|spare| std::ptr::fn_addr_eq(spare.delete, core.TF_DeleteStatus)) {
            return Self { core, raw: std::mem::ManuallyDrop::new(spare).raw };
        }
        // SAFETY: the function has no obligations.
        let raw = unsafe { (core.TF_NewStatus)() };
        Self { core, raw: NonNull::new(raw).expect("TF_NewStatus returns a status") }
    }

    pub(crate) fn raw(&self) -> *mut TF_Status {
        self.raw.as_ptr()
    }

    /// Returns the error that the last function reported, if any.
    pub(crate) fn check(&self) -> Result<()> {
        match self.code() {
            0 => Ok(()),
            code => Err(self.error(code)),
        }
    }

    fn code(&self) -> c_int {
        // SAFETY: the status lives as long as `self`.
        unsafe { (self.core.TF_GetCode)(self.raw()) }
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
        let spare = Spare { delete: self.core.TF_DeleteStatus, raw: self.raw };
        if self.code() == 0 {
            // A thread that ends has dropped the place: then this drops the status.
            let _ = SPARE.try_with(|place| place.set(Some(spare)));
        }
    }
}
