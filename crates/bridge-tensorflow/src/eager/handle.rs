//! Handles and operations of the eager runtime.

use crate::eager::functions::{EagerRuntime, TFE_Context, TFE_TensorHandle};
use crate::runtime::release::handed_over;
use crate::runtime::status::Status;
use crate::runtime::tensor::{RuntimeTensor, no_tensor};
use bridge_core::Result;
use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;
use std::ptr::NonNull;

/// An owned handle of the eager runtime.
pub(crate) struct Handle {
    eager: &'static EagerRuntime,
    raw: NonNull<TFE_TensorHandle>,
}

// SAFETY: the reference is counted atomically, and the handle is only deleted here.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// Takes a reference over; `None` for null.
    ///
    /// # Safety
    ///
    /// `raw` is null or a reference of the caller's.
    pub(crate) unsafe fn from_raw(eager: &'static EagerRuntime, raw: *mut TFE_TensorHandle) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self { eager, raw })
    }

    /// Returns a handle to the memory of a tensor.
    pub(crate) fn of(eager: &'static EagerRuntime, tensor: &RuntimeTensor) -> Result<Self> {
        let status = Status::new(&eager.runtime.core);
        // SAFETY: the tensor is alive, and the handle takes its own reference; the result is ours.
        let handle =
            unsafe { Self::from_raw(eager, (eager.functions.TFE_NewTensorHandle)(tensor.raw(), status.raw())) };
        status.check()?;
        handle.ok_or_else(no_tensor)
    }

    /// Returns a handle over compact memory on the device `place`. TensorFlow drops the owner when the last use of the
    /// memory has been submitted to its stream, and also on errors.
    ///
    /// # Safety
    ///
    /// - `context` is alive.
    /// - `owner` keeps the bytes, which are on that device, aligned as the profile says, and as many as shape and dtype
    ///   need.
    pub(crate) unsafe fn over(
        eager: &'static EagerRuntime,
        context: *mut TFE_Context,
        place: &CStr,
        (code, shape): (c_int, &[i64]),
        bytes: Range<usize>,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        let status = Status::new(&eager.runtime.core);
        // TensorFlow checks the alignment of empty memory, too.
        let (release, argument) = handed_over(owner);
        let address = if bytes.is_empty() { eager.runtime.profile.alignment } else { bytes.start };
        // SAFETY: the caller's obligation; the name and the shape are alive. TensorFlow calls the deleter once, also
        // where it makes no handle.
        unsafe {
            let raw = (eager.functions.TFE_NewTensorHandleFromDeviceMemory)(
                context,
                place.as_ptr(),
                code,
                shape.as_ptr(),
                shape.len() as c_int,
                address as *mut c_void,
                bytes.len(),
                release,
                argument,
                status.raw(),
            );
            status.check()?;
            Self::from_raw(eager, raw).ok_or_else(no_tensor)
        }
    }

    pub(crate) fn eager(&self) -> &'static EagerRuntime {
        self.eager
    }

    pub(crate) fn raw(&self) -> *mut TFE_TensorHandle {
        self.raw.as_ptr()
    }

    /// Hands the reference over to the caller.
    #[cfg(feature = "python")]
    pub(crate) fn into_raw(self) -> *mut TFE_TensorHandle {
        std::mem::ManuallyDrop::new(self).raw()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the reference is ours.
        unsafe { (self.eager.functions.TFE_DeleteTensorHandle)(self.raw()) };
    }
}

/// A pointer that code without the GIL may use on another thread.
#[cfg(feature = "python")]
pub(crate) struct Shared<T>(pub(crate) *mut T);

#[cfg(feature = "python")]
// SAFETY: TensorFlow's contexts, handles and statuses may be used on any thread; the pointer is only passed to
// TensorFlow.
unsafe impl<T> Send for Shared<T> {}

#[cfg(feature = "python")]
impl<T> Shared<T> {
    pub(crate) fn get(self) -> *mut T {
        self.0
    }
}

/// The operation that copies a tensor on any device.
pub(crate) const COPY: &CStr = c"DeepCopy";

/// Runs an operation with one input and one output on a device.
///
/// # Safety
///
/// `context` is alive.
pub(crate) unsafe fn execute(
    eager: &'static EagerRuntime,
    context: *mut TFE_Context,
    operation: &CStr,
    device: &CStr,
    input: &Handle,
    types: &[(&CStr, c_int)],
) -> Result<Handle> {
    let (functions, status) = (&eager.functions, Status::new(&eager.runtime.core));
    // SAFETY: context and input are alive, the operation is ours and deleted; the returned handle is ours.
    unsafe {
        let op = (functions.TFE_NewOp)(context, operation.as_ptr(), status.raw());
        status.check()?;
        let run = || -> Result<_> {
            (functions.TFE_OpSetDevice)(op, device.as_ptr(), status.raw());
            status.check()?;
            (functions.TFE_OpAddInput)(op, input.raw(), status.raw());
            status.check()?;
            types.iter().for_each(|(name, code)| (functions.TFE_OpSetAttrType)(op, name.as_ptr(), *code));
            let (mut result, mut count) = (std::ptr::null_mut(), 1);
            (functions.TFE_Execute)(op, &mut result, &mut count, status.raw());
            status.check()?;
            Handle::from_raw(eager, result).ok_or_else(no_tensor)
        };
        let result = run();
        (functions.TFE_DeleteOp)(op);
        result
    }
}
