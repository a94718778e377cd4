//! Streams of any framework.

use crate::errors::argument;
use bridge_core::{Result, Stream};
use pyo3::prelude::*;

/// Where the frameworks' stream objects keep their handle.
const ATTRIBUTES: &[&str] = &["cuda_stream", "ptr", "handle"];

/// The handle of a stream: an `int`, an object with `__cuda_stream__` (CUDA Python's protocol: version and handle), or
/// one of the frameworks' own objects.
pub(crate) fn handle(stream: &Bound<'_, PyAny>) -> Result<Stream> {
    let protocol = || -> PyResult<u64> {
        let (_, handle): (u32, u64) = stream.call_method0("__cuda_stream__")?.extract()?;
        Ok(handle)
    };
    // Events and allocations have a `ptr`, too.
    let is_stream = stream.get_type().name().is_ok_and(|name| name.to_string().ends_with("Stream"));
    let attribute = || ATTRIBUTES.iter().find_map(|name| stream.getattr(*name).ok()?.extract::<u64>().ok());
    let attribute = || if is_stream { attribute() } else { None };
    let handle = stream.extract::<u64>().or_else(|_| protocol()).ok().or_else(attribute);
    handle.map(Stream::from_handle).ok_or_else(|| argument(format!("{stream} is no CUDA stream")))
}
