//! The CUDA driver's side of the contract: orders streams with events, releases memory in stream order, looks up the
//! device of an address, and copies strided tensors on a device, on the host, and between the two ([`Copier`]).
//!
//! The crate builds and runs without CUDA, and looks for a driver at the first call. It loads `libcuda.so.1`, and never
//! uses the global scope, which may hold another library's stubs.
//!
//! # What it promises
//!
//! - No call waits for the device, except [`Ordering::synchronize`] and [`Link::wait`]. Events are polled.
//! - Every call leaves the calling thread's current context unchanged, also after an error.
//! - Work is done in each device's primary context, which all frameworks share. It is retained for the rest of the
//!   process.
//! - Where the driver refuses, as during a stream capture or at shutdown, memory is leaked ([`leaked`]) rather than
//!   returned too early.
//!
//! # Forks
//!
//! The first call initialises CUDA in this process, and CUDA does not survive a fork: call no function of this crate
//! before there is a tensor on a device. In a forked child of a process that uses CUDA, ordering and queries return
//! errors, memory whose release is pending is leaked, and nothing blocks.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod after_capture;
mod context;
mod copy;
mod driver;
#[cfg(test)]
mod fake;
mod flushes;
mod launch;
mod library;
mod memory;
#[cfg(all(test, shuttle))]
mod models;
mod ordering;
mod pointer;
mod queue;
mod releases;
mod sharing;
mod sync;
mod unordered;
mod words;

pub use copy::Copier;
#[doc(hidden)]
pub use copy::{Cut, Cuts, Tick, Trial, ticking};
pub use driver::{HANDLE, Handle};
pub use launch::{Kernels, Launch};
pub use memory::{Event, Link};
pub use ordering::ordering_with;
pub use pointer::Located;
pub use sharing::{Opened, Outlet, Sharing, Signal, Transport};
pub use words::Words;

use bridge_core::{Device, Ordering, Result, Stream};
use driver::Driver as _;
use ordering::{cuda, used};
use std::sync::{Arc, LazyLock};

/// Checks that there is a driver and a device.
///
/// # Errors
///
/// [`ErrorKind::Missing`](bridge_core::ErrorKind::Missing) without the driver library, with one that is too old, and
/// without a device; [`ErrorKind::Driver`](bridge_core::ErrorKind::Driver) when the driver cannot be initialised.
pub fn available() -> Result<()> {
    cuda().map(|_| ())
}

/// Returns the number of CUDA devices in this process: 0 where CUDA is not [`available`].
pub fn device_count() -> usize {
    cuda().map_or(0, |cuda| cuda.devices().count())
}

/// Returns the ordering of this process: over CUDA events, with the copies of [`Copier`]. The first call of one of its
/// methods loads CUDA; the methods fail where CUDA is not [`available`], except copies on the host.
pub fn ordering() -> &'static Arc<dyn Ordering> {
    static ORDERING: LazyLock<Arc<dyn Ordering>> = LazyLock::new(|| ordering_with(&Copier));
    &ORDERING
}

/// Returns the device and the allocation of an address; `None` for host memory that CUDA does not know.
///
/// # Errors
///
/// Those of [`available`], and [`ErrorKind::Driver`](bridge_core::ErrorKind::Driver) when the query fails.
pub fn locate(address: usize) -> Result<Option<Located>> {
    pointer::locate(cuda()?.devices(), address)
}

/// Returns the driver's copies between the host and devices.
///
/// # Errors
///
/// Those of [`available`].
pub fn link() -> Result<&'static dyn Link> {
    Ok(cuda()?.devices())
}

/// Returns how the driver shares memory with other processes.
///
/// # Errors
///
/// Those of [`available`].
pub fn sharing() -> Result<&'static dyn Sharing> {
    Ok(cuda()?.devices())
}

/// Returns the driver's operations on words of host memory in streams.
///
/// # Errors
///
/// Those of [`available`].
pub fn words() -> Result<&'static dyn Words> {
    Ok(cuda()?.devices())
}

/// Returns the device that the calling thread's CUDA calls act on, or `None` where the thread has no current context.
///
/// # Errors
///
/// Those of [`available`].
pub fn current_device() -> Result<Option<Device>> {
    Ok(cuda()?.devices().current())
}

/// Calls `body`. The device that the calling thread's CUDA calls act on is afterwards that of before: a framework that
/// works on another one may leave that as the current one, and later work of the user would go there.
pub fn keeping_current_device<R>(body: impl FnOnce() -> R) -> R {
    let several = cuda().ok().filter(|cuda| cuda.devices().count() > 1);
    let _kept = several.and_then(|cuda| cuda.devices().keep_current());
    body()
}

/// Calls `body` in the relaxed mode of captures, in which the driver calls of this thread invalidate none (CUDA driver
/// API, `cuThreadExchangeStreamCaptureMode`). Calls it in the thread's mode where this process has not used CUDA.
pub fn in_relaxed_mode(body: &mut dyn FnMut()) {
    match used() {
        Some(cuda) => releases::relaxed(cuda.devices().driver(), body),
        None => body(),
    }
}

/// Returns whether `stream` belongs to `device`. The default streams belong to every device.
///
/// # Errors
///
/// Those of [`available`], [`ErrorKind::Device`](bridge_core::ErrorKind::Device) for a device that is not CUDA's, and
/// [`ErrorKind::Driver`](bridge_core::ErrorKind::Driver) when the query fails.
///
/// # Safety
///
/// `stream` is a default stream, or has not been destroyed.
pub unsafe fn has_stream(device: Device, stream: Stream) -> Result<bool> {
    cuda()?.devices().has_stream(device, stream)
}

/// Returns those of `others` that have work pending which new work in `stream` does not wait for. The host waits for up
/// to two milliseconds where `stream` is busy: the driver does not say what a busy stream waits for, and then nothing
/// is returned. Only for [`debug`](bridge_core::poison): it orders nothing.
///
/// # Errors
///
/// Those of [`available`], and [`ErrorKind::Device`](bridge_core::ErrorKind::Device) for a device that is not CUDA's.
///
/// # Safety
///
/// Each stream belongs to `device`, and is a default stream or has not been destroyed.
pub unsafe fn unordered(device: Device, stream: Stream, others: &[Stream]) -> Result<Vec<Stream>> {
    cuda()?.devices().unordered(device, stream, others)
}

/// Returns whether the device's context is current on this thread, as it is in a kernel's, and `stream` is a blocking
/// stream: work in it and earlier work in the legacy default stream wait for each other (`CU_STREAM_DEFAULT`).
///
/// # Errors
///
/// Those of [`available`], [`ErrorKind::Device`](bridge_core::ErrorKind::Device) for a device that is not CUDA's, and
/// [`ErrorKind::Driver`](bridge_core::ErrorKind::Driver) when the query fails.
///
/// # Safety
///
/// `stream` is a default stream, or has not been destroyed.
pub unsafe fn works_after_legacy(device: Device, stream: Stream) -> Result<bool> {
    cuda()?.devices().enter(device)?.is_own_after_legacy(stream)
}

/// Returns whether the driver can tell when all work of a device has run, as
/// [`Ordering::release_after_all_work`] needs: since CUDA 12.5. Without it that memory is leaked.
pub fn can_record_devices() -> bool {
    cuda().is_ok_and(|cuda| cuda.devices().driver().can_record_contexts())
}

/// Returns the number of buffers that [`Ordering::release_later`] has neither dropped nor leaked yet, and of those that
/// wait for the end of a capture.
pub fn pending_releases() -> usize {
    used().map_or(0, |cuda| cuda.releases().pending() + cuda.after_capture().deferred())
}

/// Returns the number of buffers that [`Ordering::release_later`] will never drop, because the driver could not tell
/// when.
pub fn leaked() -> usize {
    used().map_or(0, |cuda| cuda.releases().leaked())
}

#[cfg(test)]
mod tests {
    use super::*;
    use bridge_core::ErrorKind;

    /// On any machine, with CUDA and without.
    #[test]
    fn the_probe_and_the_rest_agree() {
        let byte = 0u8;
        let address = (&raw const byte).addr();
        // SAFETY: no driver sees this stream.
        let (a, b) = (unsafe { Stream::from_handle(0xa0) }, Stream::LEGACY);
        // SAFETY: without a device there is no driver, and another kind is refused before it is asked.
        let order = |device| unsafe { ordering().order(device, a, b) };
        match available() {
            Ok(()) => {
                assert!(device_count() > 0);
                assert_eq!(locate(address).unwrap(), None);
                assert_eq!(order(Device::CPU).unwrap_err().kind(), ErrorKind::Device);
            }
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::Missing | ErrorKind::Driver), "{error}");
                assert_eq!(device_count(), 0);
                assert_eq!(locate(address).unwrap_err().to_string(), error.to_string());
                assert_eq!(order(Device::cuda(0)).unwrap_err().kind(), ErrorKind::Missing);
            }
        }
        assert_eq!((pending_releases(), leaked()), (0, 0));
    }
}
