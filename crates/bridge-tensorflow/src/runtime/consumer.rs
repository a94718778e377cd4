//! The part of a runtime that its leases keep.

use crate::runtime::gpus::Gpus;
use crate::runtime::library::Series;
use bridge_core::{Consumer, Device, DeviceKind, Error, ErrorKind, Protected, Result, Stream, Views};
use std::sync::OnceLock;

/// Returns the stream of a GPU in the eager context, or else the stream that a kernel has reported for it; `None` while
/// the interpreter shuts down.
pub(crate) type EagerStream = fn(Device, &Gpus) -> Result<Option<Stream>>;

/// The consumer of one runtime. A process has one stream of TensorFlow per GPU, which sessions and the eager runtime
/// share.
pub(crate) struct RuntimeConsumer {
    series: Series,
    views: Views,
    pub(crate) protected: Protected,
    pub(crate) gpus: Gpus,
    /// Set as soon as Python has the eager runtime.
    pub(crate) eager: OnceLock<EagerStream>,
}

impl RuntimeConsumer {
    pub(crate) fn new(series: Series) -> Self {
        Self {
            series,
            views: Views::default(),
            protected: Protected::default(),
            gpus: Gpus::default(),
            eager: OnceLock::new(),
        }
    }
}

// SAFETY: TensorFlow uses a tensor in the compute stream of its device, which lives as long as the process.
unsafe impl Consumer for RuntimeConsumer {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        if device.kind != DeviceKind::CUDA {
            return Ok(None);
        }
        if let Some(stream) = self.eager.get() {
            return stream(device, &self.gpus);
        }
        match (self.gpus.stream_of(device), self.series) {
            (Some(stream), _) => Ok(Some(stream)),
            // The streams of 1.x wait for the legacy stream, and it for them, as the kernels check. To query the stream
            // would set the GPU up, which the program does, with its own options.
            (None, Series::One) => Ok(Some(Stream::LEGACY)),
            (None, Series::Two) => {
                let text =
                    format!("tensorflow's stream on {device} is not known yet: open a session that uses it first");
                Err(Error::new(ErrorKind::Device, text))
            }
        }
    }

    fn views(&self) -> &Views {
        &self.views
    }
}
