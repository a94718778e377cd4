//% if cuda
//! MadeUp's current stream.

use crate::unwritten;
use bridge_core::{Consumer, Device, DeviceKind, Result, Stream, Views};

#[derive(Default)]
pub(crate) struct MadeUpConsumer {
    views: Views,
}

// SAFETY: MadeUp uses a tensor in its current stream and in recorded streams: see to it that this stays true.
unsafe impl Consumer for MadeUpConsumer {
    /// Asked on any thread, with or without the GIL (`bridge_pyo3::with_gil` takes it).
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        match device.kind {
            DeviceKind::CUDA => Err(unwritten("streams.rs, current_stream", "the stream that work is submitted to now")),
            _ => Ok(None),
        }
    }

    fn views(&self) -> &Views {
        &self.views
    }
}
//% end
