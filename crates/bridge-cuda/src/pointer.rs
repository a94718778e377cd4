//! The device and the allocation of an address.

use crate::context::Devices;
use crate::driver::{Driver, error};
use bridge_core::{Device, DeviceKind, Result};
use cudarc::driver::sys::CUmemorytype;
use std::ops::Range;

/// The device and the allocation of an address.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Located {
    /// [`DeviceKind::CUDA`], [`DeviceKind::CUDA_HOST`] (pinned) or [`DeviceKind::CUDA_MANAGED`], with the ordinal of
    /// the device that the memory was allocated for. (DLPack writes ordinal 0 for pinned and managed memory.)
    pub device: Device,
    /// The addresses of the whole allocation that holds the address.
    pub range: Range<usize>,
}

pub(crate) fn locate<D: Driver>(devices: &Devices<D>, address: usize) -> Result<Option<Located>> {
    let pointer = devices.driver().pointer(address).map_err(|failure| error(devices.driver(), failure))?;
    let kind = match pointer.memory_type {
        // Plain host memory, which the driver does not know.
        0 => return Ok(None),
        _ if pointer.managed => DeviceKind::CUDA_MANAGED,
        host if host == CUmemorytype::CU_MEMORYTYPE_HOST as u32 => DeviceKind::CUDA_HOST,
        _ => DeviceKind::CUDA,
    };
    let device = Device { kind, index: pointer.ordinal };
    Ok(Some(Located { device, range: pointer.start..pointer.start.saturating_add(pointer.size) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Pointer;
    use crate::fake::Fake;
    use bridge_core::ErrorKind;

    fn located(pointer: Pointer) -> Option<Located> {
        let fake = Fake::default();
        fake.know(0x1000, pointer);
        locate(&Devices::new(fake, 2), 0x1000).unwrap()
    }

    #[test]
    fn each_kind_of_memory_is_recognised() {
        let base = Pointer { memory_type: 0, managed: false, ordinal: 1, start: 0x800, size: 0x900 };
        let cases = [
            (0, false, None),
            (1, false, Some(DeviceKind::CUDA_HOST)),
            (2, false, Some(DeviceKind::CUDA)),
            (2, true, Some(DeviceKind::CUDA_MANAGED)),
            (1, true, Some(DeviceKind::CUDA_MANAGED)),
            (4, false, Some(DeviceKind::CUDA)),
        ];
        for (memory_type, managed, kind) in cases {
            let expected = kind.map(|kind| Located { device: Device { kind, index: 1 }, range: 0x800..0x1100 });
            assert_eq!(located(Pointer { memory_type, managed, ..base }), expected, "{memory_type} {managed}");
        }
    }

    #[test]
    fn a_failed_query_is_an_error_and_not_host_memory() {
        let fake = Fake::default();
        fake.fail("cuPointerGetAttributes", 4);
        let error = locate(&Devices::new(fake, 1), 0x1000).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Driver);
        assert!(error.to_string().starts_with("cuPointerGetAttributes failed"));
    }
}
