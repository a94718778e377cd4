//! Objects known only by an array interface: NumPy's `__array_interface__`, and `__cuda_array_interface__` (versions 0
//! to 3, specified by Numba), which Numba, RMM and PyArrow have.

use crate::driver;
use crate::origin::origin;
use bridge_core::dlpack::{describe, export};
use bridge_core::{DType, Device, DeviceKind, Dims, Error, ErrorKind, Export, Layout, Result, Stream};
use bridge_pyo3::{NUMPY_DTYPES, PyOwner, PyTensor, brief, framework_error, type_name};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyMemoryView, PyTuple};
use std::sync::Arc;

fn broken(text: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Protocol, format!("the array interface is malformed: {text}"))
}

fn raised(py: Python<'_>, error: PyErr) -> Error {
    framework_error(py, "the array interface", error)
}

/// Returns an entry of an interface; `None` also where it is Python's `None`.
fn entry<'py, T>(interface: &Bound<'py, PyDict>, name: &str) -> Result<Option<T>>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let read = || match interface.get_item(name)? {
        Some(value) if !value.is_none() => value.extract().map(Some).map_err(Into::into),
        _ => Ok(None),
    };
    read().map_err(|error| raised(interface.py(), error))
}

/// Returns an entry that is a tuple of integers.
fn dims(interface: &Bound<'_, PyDict>, name: &str) -> Result<Option<Dims>> {
    let Some(tuple) = entry::<Bound<'_, PyTuple>>(interface, name)? else { return Ok(None) };
    let dims = tuple.iter_borrowed().map(|item| item.extract()).collect::<PyResult<Dims>>();
    dims.map(Some).map_err(|error| raised(interface.py(), error))
}

fn dict<'a, 'py>(interface: &'a PyTensor<'py>) -> Result<&'a Bound<'py, PyDict>> {
    let dict = interface.cast::<PyDict>().map_err(|_| broken("it is not a dict"))?;
    match entry::<PyTensor<'_>>(dict, "mask")? {
        Some(_) => Err(Error::new(ErrorKind::NotATensor, "other frameworks have no masks: fill the array first")),
        None => Ok(dict),
    }
}

/// Returns a NumPy array over the memory of an object with `__array_interface__`. NumPy checks the interface, but not
/// that a buffer is as large as it says. The array keeps the object alive.
///
/// # Errors
///
/// [`ErrorKind::Protocol`] for anything but a dict, and for elements beyond the buffer; NumPy's own errors.
pub(crate) fn array<'py>(object: &PyTensor<'py>, interface: &PyTensor<'py>) -> Result<PyTensor<'py>> {
    let py = object.py();
    let interface = with_data(object, dict(interface)?)?;
    let make = || {
        // NumPy receives only the interface: the object may have a buffer as well, or return another interface each
        // time.
        let fields = [("__array_interface__", interface.as_any()), ("object", object)].into_py_dict(py)?;
        let holder = py.import("types")?.getattr("SimpleNamespace")?.call((), Some(&fields))?;
        let array = py.import("numpy")?.call_method1("asarray", (holder,))?;
        Ok((is_within(&interface, &array)?, array))
    };
    match make().map_err(|error| raised(py, error))? {
        (true, array) => Ok(array),
        _ => Err(broken("it reaches beyond its buffer: state a shape, strides and an offset that lie in it")),
    }
}

/// Exports an array of NumPy.
///
/// # Errors
///
/// Those of NumPy's adapter; [`ErrorKind::Missing`] where its feature is off.
pub(crate) fn export_numpy(array: &PyTensor<'_>) -> Result<Export> {
    #[cfg(feature = "numpy")]
    return bridge_core::Adapter::export(&bridge_numpy::NumPy::new(array.py())?, array);
    #[cfg(not(feature = "numpy"))]
    Err(Error::new(ErrorKind::Missing, format!("no adapter takes {}: enable the feature numpy", type_name(array))))
}

/// Returns the interface with its buffer. Without `data`, that is the buffer of the object itself (NumPy, "The array
/// interface protocol").
fn with_data<'py>(object: &PyTensor<'py>, interface: &Bound<'py, PyDict>) -> Result<Bound<'py, PyDict>> {
    let py = object.py();
    if entry::<PyTensor<'_>>(interface, "data")?.is_some() {
        return Ok(interface.clone());
    }
    let buffer = PyMemoryView::from(object).map_err(|error| {
        broken(format_args!("it has no data, and {} has no buffer", type_name(object))).caused_by(error)
    })?;
    let complete = || {
        let interface = interface.copy()?;
        interface.set_item("data", buffer)?;
        Ok(interface)
    };
    complete().map_err(|error| raised(py, error))
}

/// Returns whether all elements of an array lie in the buffer that its interface has instead of an address.
fn is_within(interface: &Bound<'_, PyDict>, array: &PyTensor<'_>) -> PyResult<bool> {
    let data = match interface.get_item("data")? {
        Some(data) if !data.is_instance_of::<PyTuple>() && !data.is_none() => data,
        _ => return Ok(true),
    };
    let nbytes: i128 = PyMemoryView::from(&data)?.getattr("nbytes")?.extract()?;
    let offset: i128 = match interface.get_item("offset")? {
        Some(offset) if !offset.is_none() => offset.extract()?,
        _ => 0,
    };
    let (shape, strides): (Vec<i64>, Vec<i64>) =
        (array.getattr("shape")?.extract()?, array.getattr("strides")?.extract()?);
    let itemsize: i128 = array.getattr("itemsize")?.extract()?;
    if shape.contains(&0) {
        return Ok(true);
    }
    let (mut lowest, mut end) = (offset, offset + itemsize);
    for (length, stride) in shape.into_iter().zip(strides) {
        let reach = i128::from(length - 1) * i128::from(stride);
        (lowest, end) = (lowest + reach.min(0), end + reach.max(0));
    }
    Ok(0 <= lowest && end <= nbytes)
}

const NATIVE: char = if cfg!(target_endian = "big") { '>' } else { '<' };

/// Kind characters, each with a dtype of that kind.
const KINDS: &[(char, DType)] =
    &[('b', DType::BOOL), ('i', DType::INT8), ('u', DType::UINT8), ('f', DType::FLOAT32), ('c', DType::COMPLEX64)];

/// Returns the `typestr` of a dtype; `None` for one that NumPy lacks.
pub(crate) fn typestr(dtype: DType) -> Option<String> {
    let (kind, _) = KINDS.iter().find(|(_, of_kind)| of_kind.code == dtype.code)?;
    let order = if dtype.bits == 8 { '|' } else { NATIVE };
    NUMPY_DTYPES.contains(&dtype).then(|| format!("{order}{kind}{}", dtype.bits / 8))
}

/// Returns the dtype of a `typestr` such as `<f4`: byte order, kind and bytes.
fn dtype(typestr: &str) -> Option<DType> {
    let mut chars = typestr.chars();
    let (order, kind) = (chars.next()?, chars.next()?);
    let bytes: u8 = chars.as_str().parse().ok()?;
    let (_, of_kind) = KINDS.iter().find(|(known, _)| *known == kind)?;
    let dtype = DType { bits: bytes.checked_mul(8)?, ..*of_kind };
    let ordered = order == NATIVE || order == '=' || bytes == 1;
    (ordered && NUMPY_DTYPES.contains(&dtype)).then_some(dtype)
}

/// The memory that a `__cuda_array_interface__` describes.
struct Described {
    dtype: DType,
    layout: Layout,
    address: usize,
    read_only: bool,
    /// The stream that the producer's work is in.
    stream: Option<Stream>,
}

impl Described {
    fn by(object: &PyTensor<'_>, interface: &Bound<'_, PyDict>) -> Result<Self> {
        let missing = |name| move || broken(format_args!("it has no {name}"));
        let typestr: String = entry(interface, "typestr")?.ok_or_else(missing("typestr"))?;
        let dtype = dtype(&typestr).ok_or_else(|| {
            let text = format!("typestr {:?} has no counterpart in other frameworks: cast the array", brief(&typestr));
            Error::new(ErrorKind::Dtype, text)
        })?;
        let shape = dims(interface, "shape")?.ok_or_else(missing("shape"))?;
        let layout = match dims(interface, "strides")? {
            Some(strides) => Layout::from_byte_strides(dtype, &shape, &strides)?,
            None if is_broadcast(object, &shape) => {
                let text = "the array interface leaves out strides, and the array has some of 0 (Numba does so with broadcast arrays): pass a copy of the array without them";
                return Err(Error::new(ErrorKind::Layout, text));
            }
            None => Layout::new(dtype, &shape, None, 0)?,
        };
        let (address, read_only) = match entry::<(Option<usize>, PyTensor<'_>)>(interface, "data")? {
            Some((address, read_only)) => {
                (address, read_only.is_truthy().map_err(|error| raised(interface.py(), error))?)
            }
            None => (None, false),
        };
        // The address of an array without elements is not used, and some producers leave it out.
        let nowhere = (layout.numel() == 0).then_some(0);
        let address = address.or(nowhere).ok_or_else(missing("data"))?;
        let stream = entry::<u64>(interface, "stream")?;
        if stream == Some(0) {
            return Err(broken("stream 0 is ambiguous: the producer must write 1 or 2 for the default streams"));
        }
        // SAFETY: the producer names a stream that exists (CUDA Array Interface, version 3).
        let stream = stream.map(|handle| unsafe { Stream::from_handle(handle) });
        Ok(Self { dtype, layout, address, read_only, stream })
    }
}

/// Returns whether the object's own `strides` are 0 in a dimension of several elements. An interface that leaves out the
/// strides would make a consumer read beyond such an array.
fn is_broadcast(object: &PyTensor<'_>, shape: &[i64]) -> bool {
    let strides = object.getattr("strides").and_then(|strides| strides.extract::<Vec<i64>>());
    strides.is_ok_and(|strides| strides.iter().zip(shape).any(|(stride, length)| *stride == 0 && *length > 1))
}

/// Exports the memory of an object with `__cuda_array_interface__`, screened like a capsule. The object does not keep
/// its stream alive, so the legacy default stream waits for it here.
///
/// # Errors
///
/// [`ErrorKind::Protocol`] for an interface that breaks its rules and for memory that the driver does not know,
/// [`ErrorKind::Dtype`], [`ErrorKind::Layout`], [`ErrorKind::NotATensor`] for a mask, and those of the driver.
pub(crate) fn export_cuda(object: &PyTensor<'_>, interface: &PyTensor<'_>) -> Result<Export> {
    let Described { dtype, layout, address, read_only, stream } = Described::by(object, dict(interface)?)?;
    let located = if address == 0 { None } else { driver::locate(address)? };
    let device = match located {
        Some((device, _)) => device,
        None if layout.numel() == 0 => Device::cuda(0),
        None => return Err(broken(format_args!("the driver has no memory at address {address:#x}"))),
    };
    if let Some(stream) = stream.filter(|_| layout.numel() > 0) {
        let device = Device { kind: DeviceKind::CUDA, ..device };
        // SAFETY: the interface names the stream that the object is ready in; the other one is a default stream.
        unsafe { driver::ordering().order(device, stream, Stream::LEGACY) }?;
    }
    // SAFETY: the object keeps the promises of its interface, as the producer of a capsule does; `origin` asks the
    // driver for the rest. The object keeps the memory alive.
    unsafe { export(describe(dtype, &layout, device, address, read_only, Arc::new(PyOwner::new(object))), origin) }
}
