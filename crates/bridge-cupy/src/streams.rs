//! CuPy's current stream.

use crate::raised;
use bridge_core::{Consumer, Device, DeviceKind, Keep, Result, Stream, Views};
use bridge_pyo3::{PyOwner, PyTensor, is_instance, with_gil};
use pyo3::ffi::PyCapsule_GetPointer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyType};
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// CuPy's C function for the current stream of a device, which it exports to other Cython modules.
type StreamOf = unsafe extern "C" fn(c_int) -> isize;

pub(crate) struct CuPyConsumer {
    stream_of: Option<StreamOf>,
    /// `cupy.cuda.get_current_stream`, and the class of streams that own their handles, looked up once.
    current: Py<PyAny>,
    owning: Py<PyType>,
    views: Views,
}

thread_local! {
    /// The stream that was kept last, because the next view is probably made under it. It owns its handle, so the
    /// handle names no other stream while it is kept here.
    static KEPT: RefCell<Option<((i32, Stream), Keep)>> = const { RefCell::new(None) };
}

impl CuPyConsumer {
    pub(crate) fn new(py: Python<'_>) -> PyResult<Self> {
        let cuda = py.import("cupy.cuda")?;
        let owning = cuda.getattr("Stream")?.cast_into::<PyType>()?.unbind();
        let current = cuda.getattr("get_current_stream")?.unbind();
        Ok(Self { stream_of: stream_of(py), current, owning, views: Views::default() })
    }

    /// Returns the stream that CuPy would use for this device now, on this thread.
    pub(crate) fn stream(&self, py: Python<'_>, device: i32) -> PyResult<Stream> {
        let Some(stream_of) = self.stream_of else {
            return handle(&self.current.bind(py).call1((device,))?);
        };
        // SAFETY: the signature was checked when the function was looked up, and the GIL is held.
        let handle = unsafe { stream_of(device) };
        // Cython's return value when the function raises.
        let error = if handle == -1 { PyErr::take(py) } else { None };
        // SAFETY: CuPy's current stream exists, and its maker keeps it.
        error.map_or_else(|| Ok(unsafe { Stream::from_handle(handle as u64) }), Err)
    }

    /// Returns a hold on the object of `stream`, the current stream, because CuPy destroys a stream with its object.
    /// `None` for the default streams, which live for ever, and for an `ExternalStream`, which keeps nothing alive.
    pub(crate) fn keep_current(&self, py: Python<'_>, device: i32, stream: Stream) -> PyResult<Option<Keep>> {
        if lives_for_ever(stream) {
            return Ok(None);
        }
        if let Some((_, keep)) = KEPT.with_borrow(|kept| kept.clone().filter(|(known, _)| *known == (device, stream))) {
            return Ok(Some(keep));
        }
        let object = self.current.bind(py).call1((device,))?;
        if !is_instance(&object, self.owning.bind(py)) || handle(&object)? != stream {
            return Ok(None);
        }
        let keep: Keep = Arc::new(PyOwner::new(&object));
        // The previous one is dropped outside the cell, because that runs code of CuPy.
        drop(KEPT.replace(Some(((device, stream), keep.clone()))));
        Ok(Some(keep))
    }
}

// SAFETY: CuPy uses an array in its current stream, and in those that `record_stream` notes.
unsafe impl Consumer for CuPyConsumer {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        if device.kind != DeviceKind::CUDA {
            return Ok(None);
        }
        let stream = with_gil(|py| self.stream(py, device.index).map_err(|error| raised(py, error)));
        stream.transpose()
    }

    fn keep(&self, device: Device, stream: Stream) -> Option<Keep> {
        if lives_for_ever(stream) {
            return None;
        }
        with_gil(|py| self.keep_current(py, device.index, stream).ok()).flatten().flatten()
    }

    fn exports_in_current_stream(&self) -> bool {
        true
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

fn lives_for_ever(stream: Stream) -> bool {
    [Stream::LEGACY, Stream::PER_THREAD].contains(&stream)
}

fn handle(stream: &PyTensor<'_>) -> PyResult<Stream> {
    // SAFETY: CuPy's current stream exists, and its maker keeps it.
    Ok(unsafe { Stream::from_handle(stream.getattr(intern!(stream.py(), "ptr"))?.extract()?) })
}

/// Returns the C function of `get_current_stream`, at a tenth of its cost. Cython names a capsule by the signature.
fn stream_of(py: Python<'_>) -> Option<StreamOf> {
    let module = py.import("cupy_backends.cuda.stream").ok()?;
    let table = module.getattr("__pyx_capi__").ok()?.cast_into::<PyDict>().ok()?;
    let capsule = table.get_item("get_stream_ptr").ok()??;
    // SAFETY: the object is alive and the GIL is held; a capsule of another signature returns null and sets an
    // exception.
    let function = unsafe { PyCapsule_GetPointer(capsule.as_ptr(), c"intptr_t (int)".as_ptr()) };
    if function.is_null() {
        drop(PyErr::take(py));
        return None;
    }
    // SAFETY: by its name, the capsule points to a function from int to intptr_t.
    Some(unsafe { std::mem::transmute::<*mut c_void, StreamOf>(function) })
}
