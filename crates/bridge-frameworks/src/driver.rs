//! What the adapter for protocols needs to know of memory on CUDA devices: with the feature `cuda` from the driver.

use bridge_core::{Device, Ordering, Result};
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
        Ok(bridge_cuda::locate(address)?.map(|located| (located.device, located.range)))
    }

    /// Returns the ordering between streams.
    pub(crate) fn ordering() -> &'static Arc<dyn Ordering> {
        bridge_cuda::ordering()
    }
}

#[cfg(not(feature = "cuda"))]
mod found {
    use super::*;
    use bridge_core::{Error, ErrorKind, HostOnly};
    use std::sync::LazyLock;

    /// Returns an error: only the driver knows what is at an address.
    pub(crate) fn locate(_: usize) -> Result<Option<(Device, Range<usize>)>> {
        let text = "this build does not know memory of CUDA devices: enable the feature cuda, or pass a tensor of torch or cupy";
        Err(Error::new(ErrorKind::Missing, text))
    }

    /// Returns the ordering of the host, which has no streams.
    pub(crate) fn ordering() -> &'static Arc<dyn Ordering> {
        static ORDERING: LazyLock<Arc<dyn Ordering>> = LazyLock::new(|| Arc::new(HostOnly));
        &ORDERING
    }
}

pub(crate) use found::{locate, ordering};
