//! What the adapter asks the CUDA driver. Without the feature `cuda` it has no devices.

use bridge_core::{Device, Result};
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
}

#[cfg(not(feature = "cuda"))]
mod found {
    use super::*;
    use bridge_core::{Error, ErrorKind};

    /// Returns an error: only the driver knows what is at an address.
    pub(crate) fn locate(_: usize) -> Result<Option<(Device, Range<usize>)>> {
        let text =
            "this build does not know memory of CUDA devices: enable the feature cuda, or pass an array of the host";
        Err(Error::new(ErrorKind::Missing, text))
    }

    /// Returns whether the driver has devices.
    pub(crate) fn has_devices() -> bool {
        false
    }
}

pub(crate) use found::{has_devices, locate};
