//! The CUDA driver's side of the contract: streams ordered by events, memory released in stream order, and the driver's
//! knowledge of addresses.
//!
//! The crate builds and runs without CUDA; whether there is any is found out at the first call. It takes the driver from
//! `libcuda.so.1`, never from the global scope, where another library's stubs may stand.
//!
//! # What it promises
//!
//! - The host never waits for the device. Only a thread of this crate asks events whether they have fired.
//! - The calling thread's current context is afterwards what it was before, also after an error.
//! - It works in each device's primary context, which all frameworks share, and keeps it for the rest of the process.
//! - Where the driver refuses, as during a stream capture or at shutdown, memory is leaked ([`leaked`]) rather than given
//!   back too early.
//!
//! # Forks
//!
//! The first call initialises CUDA in this process, and CUDA does not survive a fork: call nothing here before a tensor
//! on a device is seen. In a forked child of a process that uses CUDA, ordering and queries give errors, memory that is
//! retired is leaked, and nothing blocks.

mod context;
mod driver;
#[cfg(test)]
mod fake;
mod later;
mod library;
mod ordering;
mod pointer;
mod reaper;

pub use pointer::Located;

use bridge_core::{Deferred, Device, DeviceBuffer, Error, HostOnly, Ordering, Result, Stream};
use library::Cuda;
use ordering::CudaOrdering;
use std::sync::{Arc, LazyLock, OnceLock};

static CUDA: OnceLock<Result<Arc<CudaOrdering<Cuda>>>> = OnceLock::new();

fn cuda() -> Result<&'static Arc<CudaOrdering<Cuda>>> {
    let load = || Cuda::load(library::NAME).map(|(driver, count)| Arc::new(CudaOrdering::new(driver, count)));
    CUDA.get_or_init(load).as_ref().map_err(|error| Error::new(error.kind(), error.to_string()))
}

/// Whether there is a driver and a device.
///
/// # Errors
///
/// [`ErrorKind::Missing`](bridge_core::ErrorKind::Missing) without the driver library, with one that is too old, and
/// without a device; [`ErrorKind::Driver`](bridge_core::ErrorKind::Driver) when the driver cannot be initialised.
pub fn available() -> Result<()> {
    cuda().map(|_| ())
}

/// How many CUDA devices this process sees: 0 where CUDA is not [`available`].
pub fn device_count() -> usize {
    cuda().map_or(0, |cuda| cuda.devices().count())
}

/// The ordering of this process: CUDA events. CUDA is loaded at the first call of one of its methods, which fail where it
/// is not [`available`].
pub fn ordering() -> &'static Arc<dyn Ordering> {
    static ORDERING: LazyLock<Arc<dyn Ordering>> = LazyLock::new(|| Arc::new(Lazy));
    &ORDERING
}

struct Lazy;

impl Ordering for Lazy {
    fn order(&self, device: Device, earlier: Stream, later: Stream) -> Result<()> {
        cuda()?.order(device, earlier, later)
    }

    fn retire(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        match cuda() {
            Ok(cuda) => cuda.retire(device, stream, buffer),
            Err(_) => HostOnly.retire(device, stream, buffer),
        }
    }

    fn synchronize(&self, device: Device, stream: Stream) -> Result<()> {
        cuda()?.synchronize(device, stream)
    }

    fn defer(&self, device: Device, stream: Stream, attempt: Deferred) {
        if let Ok(cuda) = cuda() {
            cuda.defer(device, stream, attempt);
        }
    }
}

/// The device and the allocation that an address belongs to; `None` for host memory that CUDA does not know.
///
/// # Errors
///
/// Those of [`available`], and [`ErrorKind::Driver`](bridge_core::ErrorKind::Driver) when the driver refuses to answer.
pub fn locate(address: usize) -> Result<Option<Located>> {
    pointer::locate(cuda()?.devices(), address)
}

/// Returns the device that the calling thread's CUDA calls act on, or `None` where it has no current context.
///
/// # Errors
///
/// Those of [`available`].
pub fn current_device() -> Result<Option<Device>> {
    Ok(cuda()?.devices().current())
}

/// Whether `stream` is one of the device's. The default streams are streams of every device.
///
/// # Errors
///
/// Those of [`available`], [`ErrorKind::Device`](bridge_core::ErrorKind::Device) for a device that is not CUDA's, and
/// [`ErrorKind::Driver`](bridge_core::ErrorKind::Driver) when the driver refuses to answer.
///
/// # Safety
///
/// `stream` is a default stream, or has not been destroyed.
pub unsafe fn has_stream(device: Device, stream: Stream) -> Result<bool> {
    cuda()?.devices().has_stream(device, stream)
}

/// Whether this thread works on the device now, as a kernel's does, and in `stream` work waits for what was put into the
/// legacy default stream before, and the other way round (`CU_STREAM_DEFAULT` of the driver's streams).
///
/// # Errors
///
/// Those of [`available`], [`ErrorKind::Device`](bridge_core::ErrorKind::Device) for a device that is not CUDA's, and
/// [`ErrorKind::Driver`](bridge_core::ErrorKind::Driver) when the driver refuses to answer.
pub fn works_behind_legacy(device: Device, stream: Stream) -> Result<bool> {
    cuda()?.devices().enter(device)?.is_own_behind_legacy(stream)
}

/// Buffers that [`Ordering::retire`] was given and that are neither dropped nor leaked yet, and those that wait for the end
/// of a capture.
pub fn retired() -> usize {
    used().map_or(0, |cuda| cuda.reaper().retired() + cuda.later().deferred())
}

/// Buffers that [`Ordering::retire`] was given and that will never be dropped, because the driver could not tell when.
pub fn leaked() -> usize {
    used().map_or(0, |cuda| cuda.reaper().leaked())
}

/// Does not initialise CUDA: what has never been used has nothing to count.
fn used() -> Option<&'static CudaOrdering<Cuda>> {
    CUDA.get()?.as_ref().ok().map(|cuda| &**cuda)
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
        let (a, b) = (Stream::from_handle(0xa0), Stream::LEGACY);
        match available() {
            Ok(()) => {
                assert!(device_count() > 0);
                assert_eq!(locate(address).unwrap(), None);
                assert_eq!(ordering().order(Device::CPU, a, b).unwrap_err().kind(), ErrorKind::Device);
            }
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::Missing | ErrorKind::Driver), "{error}");
                assert_eq!(device_count(), 0);
                assert_eq!(locate(address).unwrap_err().to_string(), error.to_string());
                assert_eq!(ordering().order(Device::cuda(0), a, b).unwrap_err().kind(), ErrorKind::Missing);
            }
        }
        assert_eq!((retired(), leaked()), (0, 0));
    }
}
