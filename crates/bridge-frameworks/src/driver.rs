//! What the adapter for protocols needs to know of memory on CUDA devices: with the feature `cuda` from the driver.

use bridge_core::{Device, Error, ErrorKind, Ordering, Result, Stream};
use std::ops::Range;
use std::sync::Arc;

#[cfg(feature = "cuda")]
mod found {
    use super::*;

    /// Returns the device and the allocation of an address; `None` for host memory that CUDA does not know.
    ///
    /// # Errors
    ///
    /// Those of the driver.
    pub(crate) fn locate(address: usize) -> Result<Option<(Device, Range<usize>)>> {
        let located = bridge_cuda::locate(address)?;
        // A library that is known by a protocol may free memory by the driver.
        bridge_pyo3::drop_inside(bridge_cuda::in_relaxed_mode);
        Ok(located.map(|located| (located.device, located.range)))
    }

    /// Returns the ordering between streams.
    pub(crate) fn ordering() -> &'static Arc<dyn Ordering> {
        bridge_cuda::ordering()
    }

    /// Refuses to export memory of a device in a stream of another one, and in no stream where the driver cannot tell
    /// when the device has done its work.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Device`], [`ErrorKind::Argument`], and those of the driver.
    pub(crate) fn check(device: Device, named: Option<Stream>) -> Result<()> {
        bridge_cuda::available()?;
        let Some(stream) = named else {
            return match bridge_cuda::can_record_devices() {
                true => Ok(()),
                false => {
                    let text = "this driver cannot tell when a device has done its work (CUDA 12.5 can): pass stream=, the stream that the consumer will use";
                    Err(Error::new(ErrorKind::Argument, text))
                }
            };
        };
        // SAFETY: the caller of `lend` names a stream that exists.
        if unsafe { bridge_cuda::has_stream(device, stream) }? {
            return Ok(());
        }
        let text = format!("{stream} belongs to another device than the tensor: pass a stream of {device}");
        Err(Error::new(ErrorKind::Device, text))
    }
}

#[cfg(not(feature = "cuda"))]
mod found {
    use super::*;
    use bridge_core::HostOnly;
    use std::sync::LazyLock;

    /// Returns an error: only the driver knows what is at an address.
    pub(crate) fn locate(_: usize) -> Result<Option<(Device, Range<usize>)>> {
        let text =
            "this build does not support CUDA memory: enable the feature cuda, or pass a tensor of torch or cupy";
        Err(Error::new(ErrorKind::Missing, text))
    }

    /// Accepts every stream: without the feature no memory of a device is found.
    #[expect(clippy::unnecessary_wraps, reason = "the driver refuses")]
    pub(crate) fn check(_: Device, _: Option<Stream>) -> Result<()> {
        Ok(())
    }

    /// Returns the ordering of the host, which has no streams.
    pub(crate) fn ordering() -> &'static Arc<dyn Ordering> {
        static ORDERING: LazyLock<Arc<dyn Ordering>> = LazyLock::new(|| Arc::new(HostOnly));
        &ORDERING
    }
}

pub(crate) use found::{check, locate, ordering};
