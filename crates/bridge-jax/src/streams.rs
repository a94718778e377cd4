//! The streams that JAX names for work of others.

use crate::devices::{device_of, raised};
use crate::driver::on;
use bridge_core::{Consumer, Device, DeviceKind, Result, Stream, Views};
use bridge_pyo3::with_gil;
use pyo3::Python;
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};

/// JAX hides the stream that it computes in. For each device it names streams that an imported array waits for; one of
/// them is enough, and stays.
#[derive(Default)]
pub(crate) struct JAXConsumer {
    views: Views,
    streams: Mutex<Vec<(Device, Stream)>>,
}

// SAFETY: XLA uses an array in the streams of its device, all of which are waited for.
unsafe impl Consumer for JAXConsumer {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        if device.kind == DeviceKind::CPU {
            return Ok(None);
        }
        let known = || self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, stream)) = known().iter().find(|(known, _)| *known == device) {
            return Ok(Some(*stream));
        }
        let query = || with_gil(|py| external_stream(py, device)).transpose();
        let Some(found) = on(device.kind, query)? else { return Ok(None) };
        let mut known = known();
        if let Some((_, stream)) = known.iter().find(|(known, _)| *known == device) {
            return Ok(Some(*stream));
        }
        known.push((device, found));
        Ok(Some(found))
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

/// Returns a stream of the device that JAX waits for before it reads imported arrays.
fn external_stream(py: Python<'_>, device: Device) -> Result<Stream> {
    let of_jax = device_of(py, device)?;
    let handle = of_jax.call_method0("get_stream_for_external_ready_events").and_then(|handle| handle.extract::<u64>());
    // SAFETY: the stream is JAX's, which keeps it until the process ends.
    handle.map(|handle| unsafe { Stream::from_handle(handle) }).map_err(|error| raised(py, error))
}
