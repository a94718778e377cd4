//! Out of NumPy.

use crate::interface::{PyArrayInterface, WRITEABLE};
use crate::runtime::{Runtime, raised};
use bridge_core::{
    Access, Allocation, COPY_ALIGNMENT, DType, Dims, Error, ErrorKind, Layout, Lent, MAX_NDIM, Memory, Result,
};
use bridge_pyo3::{Owner, PyTensor, not_a_tensor};
use pyo3::ffi::PyCapsule_GetPointer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ptr;
use std::slice;

pub(crate) fn lend(runtime: &Runtime, array: &PyTensor<'_>) -> Result<Lent> {
    let py = array.py();
    if !runtime.is_array(array) {
        return Err(not_a_tensor("numpy", array));
    }
    if runtime.is_masked(array) {
        let text = "other frameworks have no masks: call .filled(value) first, or pass .data and .mask apart";
        return Err(Error::new(ErrorKind::NotATensor, text));
    }
    let look_up = || {
        let plain = runtime.plain(array)?;
        Ok((plain.getattr(intern!(py, "dtype"))?, plain.getattr(intern!(py, "__array_struct__"))?))
    };
    let (dtype, capsule) = look_up().map_err(|error| raised(py, error))?;
    let dtype = runtime.dtypes.read(&dtype)?;
    // SAFETY: the object is alive and the GIL held; anything but a nameless capsule returns null.
    let interface = unsafe { PyCapsule_GetPointer(capsule.as_ptr(), ptr::null()) }.cast::<PyArrayInterface>();
    // SAFETY: NumPy puts this struct behind the nameless capsule, which lives until the end of this function.
    let interface = unsafe { interface.as_ref() }.filter(|interface| is_sound(interface, dtype)).ok_or_else(|| {
        drop(PyErr::take(py));
        Error::new(ErrorKind::Framework, "numpy's __array_struct__ is not as documented: please report this")
    })?;
    let nd = interface.nd as usize;
    let (shape, strides) = match nd {
        0 => (&[][..], &[][..]),
        // SAFETY: both arrays have `nd` entries and live as long as the struct.
        _ => unsafe { (slice::from_raw_parts(interface.shape, nd), slice::from_raw_parts(interface.strides, nd)) },
    };
    let layout = layout(dtype, shape, strides)?;
    let (below, above) = layout.reach();
    let data = interface.data as usize;
    // Strides of `as_strided` may be any, and so may the address of an array interface that NumPy was given.
    let bytes = data.checked_sub(below).zip(data.checked_add(above)).filter(|_| data != 0 || layout.numel() == 0);
    let (start, end) = bytes.ok_or_else(|| {
        let text = format!("a view of address {data:#x} with {layout} leaves the address space: check its strides");
        Error::new(ErrorKind::Layout, text)
    })?;
    let access = if interface.flags & WRITEABLE == 0 { Access::ReadOnly } else { Access::ReadWrite };
    let owner = Owner::new(array);
    // SAFETY: the array keeps its memory for as long as it lives, and NumPy vouches for its strides; host memory is
    // ready at any time and has no stream.
    let memory = unsafe { Memory::new(Allocation::host(start..end, access), owner) };
    Lent::new(dtype, layout, Box::new(memory))
}

/// Whether the struct can be read, and describes elements of this dtype.
fn is_sound(interface: &PyArrayInterface, dtype: DType) -> bool {
    interface.two == 2
        && usize::try_from(interface.nd).is_ok_and(|nd| nd <= MAX_NDIM)
        && dtype.itemsize() == usize::try_from(interface.itemsize).ok()
}

fn layout(dtype: DType, shape: &[isize], strides: &[isize]) -> Result<Layout> {
    let shape: Dims = shape.iter().map(|length| *length as i64).collect();
    let itemsize = dtype.itemsize().expect("NumPy's dtypes are whole bytes") as isize;
    let elements = shape.iter().zip(strides).map(|(length, bytes)| match bytes % itemsize {
        0 => Ok((bytes / itemsize) as i64),
        _ if *length <= 1 => Ok(0),
        _ => {
            let text = format!("strides {strides:?} (bytes) are not whole elements of {itemsize} bytes: call numpy.ascontiguousarray first");
            Err(Error::new(ErrorKind::Layout, text))
        }
    });
    let elements = elements.collect::<Result<Dims>>()?;
    Ok(Layout::new(dtype, &shape, Some(&elements), 0)?.in_smallest_buffer())
}

pub(crate) fn compact<'py>(runtime: &Runtime, array: &PyTensor<'py>) -> Result<PyTensor<'py>> {
    runtime.plain(array).and_then(|plain| aligned_copy(&plain)).map_err(|error| raised(array.py(), error))
}

/// NumPy's own `copy` aligns to 16 bytes only.
fn aligned_copy<'py>(array: &PyTensor<'py>) -> PyResult<PyTensor<'py>> {
    let py = array.py();
    let numpy = py.import(intern!(py, "numpy"))?;
    let nbytes: usize = array.getattr(intern!(py, "nbytes"))?.extract()?;
    let memory = numpy.call_method1(intern!(py, "empty"), (nbytes + COPY_ALIGNMENT, intern!(py, "uint8")))?;
    let address: usize = memory.getattr(intern!(py, "ctypes"))?.getattr(intern!(py, "data"))?.extract()?;
    let start = address.next_multiple_of(COPY_ALIGNMENT) - address;
    let kwargs = PyDict::new(py);
    kwargs.set_item(intern!(py, "dtype"), array.getattr(intern!(py, "dtype"))?)?;
    kwargs.set_item(intern!(py, "buffer"), memory)?;
    kwargs.set_item(intern!(py, "offset"), start)?;
    let copy = numpy.call_method(intern!(py, "ndarray"), (array.getattr(intern!(py, "shape"))?,), Some(&kwargs))?;
    numpy.call_method1(intern!(py, "copyto"), (&copy, array))?;
    Ok(copy)
}
