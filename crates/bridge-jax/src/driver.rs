//! What the adapter asks the CUDA driver. Without the feature `cuda` it has no devices.

use bridge_core::{Device, DeviceKind, Result};
use std::ops::Range;

#[cfg(feature = "cuda")]
mod found {
    use super::*;

    /// Returns the device and the allocation of an address; `None` for host memory that CUDA does not know.
    ///
    /// # Errors
    ///
    /// Those of the driver.
    pub(crate) fn locate(address: usize) -> Result<Option<(Device, Range<usize>)>> {
        Ok(bridge_cuda::locate(address)?.map(|located| (located.device, located.range)))
    }

    /// Returns whether the driver has devices.
    pub(crate) fn has_devices() -> bool {
        bridge_cuda::device_count() > 0
    }

    /// Calls a function of JAX about an array on this device. XLA makes its device the current one of the thread, which
    /// is the user's: afterwards it is the one of before.
    pub(crate) fn on<R>(device: DeviceKind, body: impl FnOnce() -> R) -> R {
        if device == DeviceKind::CPU { body() } else { bridge_cuda::keeping_current_device(body) }
    }
}

#[cfg(not(feature = "cuda"))]
mod found {
    use super::*;
    use bridge_core::{Error, ErrorKind};

    /// Returns an error: only the driver knows what is at an address.
    pub(crate) fn locate(_: usize) -> Result<Option<(Device, Range<usize>)>> {
        let text = "this build does not support CUDA memory: enable the feature cuda, or pass an array of the host";
        Err(Error::new(ErrorKind::Missing, text))
    }

    /// Returns whether the driver has devices.
    pub(crate) fn has_devices() -> bool {
        false
    }

    /// Calls a function of JAX.
    pub(crate) fn on<R>(_: DeviceKind, body: impl FnOnce() -> R) -> R {
        body()
    }
}

pub(crate) use found::{has_devices, locate, on};
