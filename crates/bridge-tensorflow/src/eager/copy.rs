//! Copies in memory of TensorFlow's.

use crate::eager::functions::{EagerRuntime, TFE_Context, TFE_TensorHandle};
use crate::eager::handle::{COPY, Handle, execute};
use crate::eager::seen::read;
use crate::runtime::dtypes::{self, UINT8};
use crate::runtime::status::Status;
use crate::runtime::tensor::RuntimeTensor;
use bridge_core::{Error, ErrorKind, Export, Result};
use std::ffi::CStr;
use std::ops::Range;

/// Returns a copy of an exported tensor, on the host.
pub(crate) fn copied_on_host(eager: &'static EagerRuntime, exported: &Export) -> Result<Handle> {
    let (code, layout, bytes) = (dtypes::required(exported.dtype())?, exported.layout(), exported.as_ptr());
    // SAFETY: the exported tensor is compact host memory of that many bytes, and ready.
    let copy = unsafe { RuntimeTensor::copied(&eager.runtime.core, code, layout.shape(), bytes, layout.nbytes()) }?;
    Handle::of(eager, &copy)
}

/// Returns a copy of the bytes of an exported tensor on the GPU `place`, and their address. Bytes, because few
/// operations support every dtype. `wait` waits until the copy has been made. Without bytes nothing is copied.
///
/// # Safety
///
/// `context` is alive.
pub(crate) unsafe fn copied_on_device(
    eager: &'static EagerRuntime,
    context: *mut TFE_Context,
    place: &CStr,
    exported: Export,
    wait: impl FnOnce(*mut TFE_TensorHandle, &Status<'_>) -> Result<()>,
) -> Result<(Option<Handle>, Range<usize>)> {
    let (start, nbytes) = (exported.data(), exported.layout().nbytes());
    if nbytes == 0 {
        return Ok((None, 0..0));
    }
    if !start.is_multiple_of(eager.runtime.profile.alignment) {
        let text = "tensorflow aborts the process when it copies a tensor at an unaligned address: copy it with the framework that made it";
        return Err(Error::new(ErrorKind::Layout, text));
    }
    let status = Status::new(&eager.runtime.core);
    // SAFETY: the caller's obligation; the exported tensor keeps its compact memory, which is on this GPU. The copy is
    // ours, and on a device of this process.
    unsafe {
        let bytes = Handle::over(eager, context, place, (UINT8, &[nbytes as i64]), start..start + nbytes, exported)?;
        let copy = execute(eager, context, COPY, place, &bytes, &[(c"T", UINT8)])?;
        wait(copy.raw(), &status)?;
        let (_, start) = read(eager, copy.raw(), &status)?;
        Ok((Some(copy), start..start + nbytes))
    }
}
