//! What is known of memory that a protocol names: who reads it, and where it is.

use crate::driver;
use bridge_core::dlpack::Origin;
use bridge_core::{Consumer, Device, DeviceKind, Error, ErrorKind, Result, Reuse, Stream, Views};
use bridge_pyo3::drop_guarded;
use std::sync::{Arc, LazyLock};

/// The frameworks of the protocols as readers: in the legacy default stream, until `__dlpack__` names another.
#[derive(Default)]
pub(crate) struct Reader(Views);

pub(crate) static READER: LazyLock<Arc<Reader>> = LazyLock::new(Arc::default);

// SAFETY: it takes no memory of others.
unsafe impl Consumer for Reader {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        Ok((device.kind != DeviceKind::CPU).then_some(Stream::LEGACY))
    }

    fn views(&self) -> &Views {
        &self.0
    }
}

/// Pairs of the label that a producer may use and the kind that the driver reports for the address. CuPy labels managed
/// memory as plain memory of its device.
const LABELS: &[(DeviceKind, DeviceKind)] = &[
    (DeviceKind::CUDA, DeviceKind::CUDA),
    (DeviceKind::CUDA, DeviceKind::CUDA_MANAGED),
    (DeviceKind::CUDA_MANAGED, DeviceKind::CUDA_MANAGED),
    (DeviceKind::CUDA_HOST, DeviceKind::CUDA_HOST),
];

/// Returns the facts that a capsule does not hold. The producer's work is ordered before the legacy default stream: by
/// the call of `__dlpack__`, and for a bare capsule by the caller (see the docstring of `to_torch`). How the producer
/// reuses memory is unknown.
pub(crate) fn origin(said: Device, address: usize) -> Result<Origin> {
    let host = || Origin::host().released_by(Some(drop_guarded));
    if !LABELS.iter().any(|(label, _)| *label == said.kind) {
        return Ok(host());
    }
    let ordered = Origin::new(Some(Stream::LEGACY), Reuse::Unknown).released_by(Some(drop_guarded));
    if address == 0 {
        return Ok(ordered);
    }
    let located = match driver::locate(address) {
        // Without a driver, or where the driver does not know the address, memory labelled as pinned is plain host
        // memory.
        Ok(None) | Err(_) if said.kind == DeviceKind::CUDA_HOST => {
            return Ok(host().on(Device::CPU));
        }
        located => located?,
    };
    let fits = |known: Device| {
        // DLPack writes number 0 for pinned and managed memory.
        let numbered = said.kind != DeviceKind::CUDA || known.index == said.index;
        numbered && LABELS.contains(&(said.kind, known.kind))
    };
    let (found, range) = located.filter(|(device, _)| fits(*device)).ok_or_else(|| {
        let text = format!("the producer says that the memory is on {said}, but the driver knows no such memory there");
        Error::new(ErrorKind::Protocol, text)
    })?;
    let device = if said.kind == DeviceKind::CUDA { said } else { found };
    Ok(ordered.on(device).within(Some(range)))
}
