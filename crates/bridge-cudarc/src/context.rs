//! Contexts and streams of `cudarc`, as core knows them.

use bridge_core::{Device, Error, ErrorKind, Result, Stream};
use cudarc::driver::{CudaStream, DriverError, result, sys};

/// Returns the device of a stream.
pub(crate) fn device_of(stream: &CudaStream) -> Device {
    Device::cuda(stream.context().ordinal() as i32)
}

/// Returns the handle of a stream.
pub(crate) fn handle_of(stream: &CudaStream) -> Stream {
    // SAFETY: the adapter and its tensors keep the stream.
    unsafe { Stream::from_handle(stream.cu_stream().addr() as u64) }
}

/// Any of the two errors that meet here.
pub(crate) enum Failure {
    Driver(DriverError),
    Ours(Error),
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Ours(error)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Ours(error) => error,
            Failure::Driver(error) => {
                let kind = match error.0 {
                    sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => ErrorKind::OutOfMemory,
                    _ => ErrorKind::Driver,
                };
                Error::new(kind, format!("cudarc: {error:?}"))
            }
        }
    }
}

/// Runs `body`, after which the thread has the current context that it had before: `cudarc` makes its own current, and
/// leaves it so.
pub fn keeping_context<R>(body: impl FnOnce() -> R) -> R {
    let before = result::ctx::get_current();
    let done = body();
    if let Ok(before) = before {
        // SAFETY: the context was current a moment ago; null takes away any. An error leaves the thread with the
        // context of `cudarc`, the primary one of its device, which is alive.
        let _ = unsafe { result::ctx::set_current(before.unwrap_or(std::ptr::null_mut())) };
    }
    done
}

/// As [`keeping_context`], for what may fail.
pub(crate) fn restored<R>(body: impl FnOnce() -> Result<R, Failure>) -> Result<R> {
    Ok(keeping_context(body)?)
}
