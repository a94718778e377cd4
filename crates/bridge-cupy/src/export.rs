//! Exports CuPy arrays.

use crate::native::{Fields, Values};
use crate::raised;
use crate::runtime::Runtime;
use bridge_core::planted::is_planted;
use bridge_core::{Access, Allocation, DType, Device, Dims, Export, Layout, Memory, Result, Reuse, Stream};
use bridge_pyo3::{Borrowed, LeaseOwner, PyOwner, PyTensor, not_a_tensor, probe};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyTuple};

pub(crate) fn export(runtime: &Runtime, array: &PyTensor<'_>) -> Result<Export> {
    let py = array.py();
    if !runtime.is_array(array) {
        return Err(not_a_tensor("cupy", array));
    }
    let attributes = Attributes::of(runtime, array).map_err(|error| raised(py, error))?;
    let (dtype, layout) = attributes.layout(runtime)?;
    let Attributes { address, device, memory, .. } = attributes;
    // The byte extent, because `mem.size` is wrong for memory imported by DLPack, where CuPy adds up the lengths of the
    // shape, and for the reversed views of an array interface. Reading it costs two attributes of about ten.
    let bytes = layout.extent_at(address, None)?;
    let stream = runtime.consumer.stream(py, device).map_err(|error| raised(py, error))?;
    let stream = if is_planted("cupy_stream_mistaken") { Stream::LEGACY } else { stream };
    let reuse = reuse(runtime, &memory, stream).or_else(|error| Ok(probe(py, Err(error))?.unwrap_or(Reuse::Unknown)));
    let reuse = reuse.map_err(|error| raised(py, error))?;
    let kept = runtime.consumer.keep_current(py, device, stream).map_err(|error| raised(py, error))?;
    let owner = (PyOwner::new(array), kept);
    let (device, access) = (Device::cuda(device), Access::ReadWrite);
    let allocation = Allocation::new(bytes, device, access, Some(stream), reuse);
    // SAFETY: the array keeps its memory alive; CuPy guarantees the strides and the device; its current stream, which
    // is kept, is the one that its user's work is in; `reuse` is in stream order only where the allocator was seen to
    // be.
    let memory = unsafe { Memory::new(allocation, owner) };
    Export::at(address, dtype, layout, memory)
}

/// Borrows an array.
pub(crate) fn borrow<'a>(runtime: &Runtime, array: &'a PyTensor<'_>) -> Result<Borrowed<'a>> {
    let py = array.py();
    if !runtime.is_array(array) {
        return Err(not_a_tensor("cupy", array));
    }
    let attributes = Attributes::of(runtime, array).map_err(|error| raised(py, error))?;
    let (dtype, layout) = attributes.layout(runtime)?;
    let Attributes { address, device, .. } = attributes;
    let stream = runtime.consumer.stream(py, device).map_err(|error| raised(py, error))?;
    Ok(Borrowed::new(array, address, dtype, layout, Device::cuda(device), Access::ReadWrite, Some(stream)))
}

/// The attributes of an array.
struct Attributes<'py> {
    address: usize,
    device: i32,
    memory: Bound<'py, PyAny>,
    dtype: Bound<'py, PyAny>,
    shape: Dims,
    /// In bytes; may be `None` for a compact array.
    strides: Option<Dims>,
}

impl<'py> Attributes<'py> {
    fn of(runtime: &Runtime, array: &PyTensor<'py>) -> PyResult<Self> {
        let py = array.py();
        let device_of = |pointer: &PyTensor<'py>| match runtime.one_device {
            true => Ok(0),
            false => pointer.getattr(intern!(py, "device_id"))?.extract(),
        };
        let read = |fields: &Fields| fields.read(array, runtime.memory_pointer.bind(py));
        if let Some(Values { data, address, memory, dtype, shape, strides }) = runtime.fields.as_ref().and_then(read) {
            return Ok(Self { address, device: device_of(&data)?, memory, dtype, shape, strides: Some(strides) });
        }
        let pointer = array.getattr(intern!(py, "data"))?;
        let shape = dims(array.getattr(intern!(py, "shape"))?)?;
        // Frameworks read meaning from the strides of dimensions of length 1, so those are kept.
        let compact = !shape.iter().any(|length| *length <= 1)
            && array.getattr_opt(intern!(py, "_c_contiguous"))?.map_or(Ok(false), |flag| flag.is_truthy())?;
        Ok(Self {
            address: pointer.getattr(intern!(py, "ptr"))?.extract()?,
            device: device_of(&pointer)?,
            memory: pointer.getattr(intern!(py, "mem"))?,
            dtype: array.getattr(intern!(py, "dtype"))?,
            shape,
            strides: if compact { None } else { Some(dims(array.getattr(intern!(py, "strides"))?)?) },
        })
    }
}

impl Attributes<'_> {
    fn layout(&self, runtime: &Runtime) -> Result<(DType, Layout)> {
        let dtype = runtime.dtypes.read(&self.dtype)?;
        let layout = match &self.strides {
            Some(strides) => Layout::from_byte_strides(dtype, &self.shape, strides)?,
            None => Layout::new(dtype, &self.shape, None, 0)?,
        };
        Ok((dtype, layout))
    }
}

fn dims(tuple: Bound<'_, PyAny>) -> PyResult<Dims> {
    tuple.cast::<PyTuple>()?.iter_borrowed().map(|item| item.extract()).collect()
}

/// Returns when CuPy's allocator reuses the memory.
///
/// CuPy's pool keeps free blocks in an arena per stream of allocation, whatever streams used them later. So reuse is in
/// stream order where that arena is the one of `stream`. It also is for memory of a lease, which the lease returns in
/// order. All other memory is unknown.
fn reuse(runtime: &Runtime, memory: &Bound<'_, PyAny>, stream: Stream) -> PyResult<Reuse> {
    let py = memory.py();
    let kind = memory.get_type_ptr().cast();
    let in_order = if kind == runtime.pooled_memory.as_ptr() {
        // CuPy's handle of the legacy stream is 0.
        runtime.arenas.holds(memory, if stream == Stream::LEGACY { 0 } else { stream.handle() })?
    } else if kind == runtime.unowned_memory.as_ptr() {
        memory.getattr(intern!(py, "_owner"))?.is_instance_of::<LeaseOwner>()
    } else {
        false
    };
    Ok(if in_order { Reuse::InStreamOrder } else { Reuse::Unknown })
}

pub(crate) fn compact<'py>(runtime: &Runtime, array: &PyTensor<'py>) -> Result<PyTensor<'py>> {
    let py = array.py();
    let copy = || array.call_method(intern!(py, "copy"), (), Some(&[("order", "C")].into_py_dict(py)?));
    // CuPy copies to the current device, not to the array's device.
    let copied = runtime.on_device(|| array.getattr(intern!(py, "device")), copy);
    copied.map_err(|error| raised(py, error))
}
