//! Streams of any framework, and `truebridge.record_stream`.

use crate::errors::{argument, into_python};
use crate::frameworks::{not_a_capsule, source};
use crate::trees::Tree;
use crate::{debug, trace};
use bridge_core::{DeviceKind, Error, ErrorKind, Keep, Result, Stream};
use bridge_pyo3::{PyOwner, PyTensor, brief_repr, framework_error, probe, type_name};
use pyo3::prelude::*;
use pyo3::types::PyInt;
use std::sync::Arc;

/// Record that a result of this package is used on one more stream.
///
/// The owner of the memory waits for that stream before it reuses the memory. The stream that is current at the
/// conversion, and the one that is current where the view is dropped, need no record.
///
/// Parameters
/// ----------
/// view : tensor
///     A result of this package, or a part of one. Host memory and views without elements need no record.
/// stream : stream or int
///     A ``torch.cuda.Stream``, a ``cupy.cuda.Stream`` or any object with ``__cuda_stream__``, on the device of the
///     view, which keeps it alive. Keep an ``ExternalStream``, and the stream of a handle passed as an ``int``, alive
///     yourself.
///
/// Raises
/// ------
/// BridgeTypeError
///     If ``view`` is not a tensor.
/// BridgeValueError
///     If this package has not made ``view``, if ``stream`` is not a stream, or if it is of another device.
///
/// Examples
/// --------
/// >>> import cupy
/// >>> import torch
/// >>> import truebridge as tb
/// >>> a = tb.to_cupy(torch.ones(3, device="cuda"))
/// >>> stream = cupy.cuda.Stream(non_blocking=True)
/// >>> stream.wait_event(cupy.cuda.get_current_stream().record())
/// >>> tb.record_stream(a, stream)
/// >>> with stream:
/// ...     doubled = 2 * a
/// >>> del a  # PyTorch reuses the memory after stream
#[pyfunction]
pub(crate) fn record_stream(view: &PyTensor<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = view.py();
    let record = || {
        not_a_capsule(view)?;
        let (object, stream) = (stream, handle(stream)?);
        let adapter = source(view).map_err(|error| match Tree::of(view) {
            Ok(Some(_)) => argument(format!("{} is a container: record each of its tensors", type_name(view))),
            _ => error,
        })?;
        let Some((device, address)) = adapter.locate(view)?.filter(|(device, _)| device.kind == DeviceKind::CUDA)
        else {
            return Ok(());
        };
        // SAFETY: the caller names a stream that is alive, as the documentation demands of a raw handle.
        if !unsafe { bridge_cuda::has_stream(device, stream) }? {
            let text = format!(
                "{stream} belongs to another device than the view, which is on {device}: pass a stream of {device}"
            );
            return Err(Error::new(ErrorKind::Device, text));
        }
        if trace::is_debugging() {
            debug::named(device, stream, &adapter.profile().name, keep(object));
        }
        // SAFETY: the object keeps its stream, and is kept; the caller keeps the stream of an external one and of a raw
        // handle, as the documentation demands.
        let views =
            unsafe { adapter.consumer().views().used(device, address, stream.on_any_thread(), || keep(object)) };
        match views {
            0 => {
                let text = "this tensor is not a view that truebridge has made: use its own framework's record_stream";
                Err(argument(text))
            }
            _ => Ok(()),
        }
    };
    record().map_err(|error| into_python(py, error))
}

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
    // SAFETY: the caller names a stream that exists.
    found.map(|handle| unsafe { Stream::from_handle(handle) }).ok_or_else(|| {
        let advice = "pass a stream object of a framework, or its handle as an int";
        let what = if stream.is_instance_of::<PyInt>() { brief_repr(stream) } else { type_name(stream) };
        argument(format!("{what} is not a CUDA stream: {advice}"))
    })
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
