//! Handles and operations of TensorFlow's eager runtime.

use crate::runtime::Runtime;
use crate::runtime::api::{Eager, Status, TFE_Context, TFE_TensorHandle};
use bridge_core::{Error, ErrorKind, Result};
use std::ffi::{CStr, c_int};
use std::ptr::NonNull;

/// A handle of the eager runtime that is deleted in the end.
pub(crate) struct Handle {
    eager: &'static Eager,
    raw: NonNull<TFE_TensorHandle>,
}

// SAFETY: the reference is counted atomically, and the handle is only deleted here.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// # Safety
    ///
    /// `raw` is null or a reference that is taken over.
    pub(crate) unsafe fn from_raw(runtime: &'static Runtime, raw: *mut TFE_TensorHandle) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self { eager: runtime.eager(), raw })
    }

    pub(crate) fn raw(&self) -> *mut TFE_TensorHandle {
        self.raw.as_ptr()
    }

    /// Gives the reference away.
    #[cfg(feature = "python")]
    pub(crate) fn into_raw(self) -> *mut TFE_TensorHandle {
        std::mem::ManuallyDrop::new(self).raw()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the reference is ours.
        unsafe { (self.eager.TFE_DeleteTensorHandle)(self.raw()) };
    }
}

/// What went wrong where TensorFlow gave nothing and said nothing.
pub(crate) fn nothing() -> Error {
    Error::new(ErrorKind::Framework, "tensorflow gave no tensor")
}

/// Runs an operation with one input and one output on a device.
///
/// # Safety
///
/// `context` is alive.
pub(crate) unsafe fn execute(
    runtime: &'static Runtime,
    context: *mut TFE_Context,
    operation: &CStr,
    device: &CStr,
    input: &Handle,
    types: &[(&CStr, c_int)],
) -> Result<Handle> {
    let eager = runtime.eager();
    let status = Status::new(&runtime.core);
    // SAFETY: context and input are alive, the operation is ours and deleted; the handle that comes back is ours.
    unsafe {
        let op = (eager.TFE_NewOp)(context, operation.as_ptr(), status.raw());
        status.check()?;
        let run = || -> Result<_> {
            (eager.TFE_OpSetDevice)(op, device.as_ptr(), status.raw());
            status.check()?;
            (eager.TFE_OpAddInput)(op, input.raw(), status.raw());
            status.check()?;
            types.iter().for_each(|(name, code)| (eager.TFE_OpSetAttrType)(op, name.as_ptr(), *code));
            let (mut result, mut count) = (std::ptr::null_mut(), 1);
            (eager.TFE_Execute)(op, &mut result, &mut count, status.raw());
            status.check()?;
            Handle::from_raw(runtime, result).ok_or_else(nothing)
        };
        let result = run();
        (eager.TFE_DeleteOp)(op);
        result
    }
}
