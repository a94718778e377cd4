//! Streams of any framework.

use crate::errors::argument;
use bridge_core::{Keep, Result, Stream};
use bridge_pyo3::{PyOwner, framework_error, probe, type_name};
use pyo3::prelude::*;
use pyo3::types::PyInt;
use std::sync::Arc;

/// Attributes in which the frameworks' stream objects keep their handle.
const ATTRIBUTES: &[&str] = &["cuda_stream", "ptr", "handle"];

/// Returns the handle of a stream: an `int`, an object with `__cuda_stream__` (CUDA Python's protocol: version and
/// handle), or one of the frameworks' own objects.
///
/// # Errors
///
/// [`ErrorKind::Argument`](bridge_core::ErrorKind::Argument) for anything else.
pub(crate) fn handle(stream: &Bound<'_, PyAny>) -> Result<Stream> {
    let py = stream.py();
    let found = find(stream).map_err(|error| framework_error(py, "the stream", error))?;
    found.map(Stream::from_handle).ok_or_else(|| argument(format!("{} is no CUDA stream", type_name(stream))))
}

/// Returns what keeps a stream alive: its object, where the object owns the stream. An integer and an `ExternalStream`
/// do not.
pub(crate) fn keep(stream: &Bound<'_, PyAny>) -> Option<Keep> {
    let external = stream.get_type().name().is_ok_and(|name| name.to_string_lossy().starts_with("External"));
    let owns = !external && !stream.is_instance_of::<PyInt>();
    owns.then(|| Arc::new(PyOwner::new(stream)) as Keep)
}

fn find(stream: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    let py = stream.py();
    // Only a real `int`: arrays and tensors of one element convert to integers as well.
    if stream.is_instance_of::<PyInt>() {
        return probe(py, stream.extract());
    }
    let protocol = || stream.call_method0("__cuda_stream__")?.extract::<(u32, u64)>();
    if let Some((_, handle)) = probe(py, protocol())? {
        return Ok(Some(handle));
    }
    // Events and allocations have a `ptr` as well.
    if !stream.get_type().name()?.to_string_lossy().ends_with("Stream") {
        return Ok(None);
    }
    for name in ATTRIBUTES {
        if let Some(handle) = probe(py, stream.getattr(*name).and_then(|handle| handle.extract()))? {
            return Ok(Some(handle));
        }
    }
    Ok(None)
}
