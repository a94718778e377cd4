//! Exports NumPy arrays.

use crate::import::{Base, aligned};
use crate::interface::{PyArrayInterface, WRITEABLE};
use crate::native::Fields;
use crate::raised;
use crate::runtime::Runtime;
use bridge_core::planted::is_planted;
use bridge_core::{
    Access, Allocation, DType, Device, Dims, Error, ErrorKind, Export, Layout, MAX_NDIM, Memory, Order, Pending, Result,
};
use bridge_pyo3::{Borrowed, PyOwner, PyTensor, not_a_tensor, without_pending};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi::PyCapsule_GetPointer;
use pyo3::intern;
use pyo3::prelude::*;
use std::ptr;
use std::slice;

pub(crate) fn export(runtime: &Runtime, array: &PyTensor<'_>) -> Result<Export> {
    let View { data, dtype, layout, pending, access } = View::of(runtime, array)?;
    // The byte extent, because NumPy does not know the allocation: `as_strided` and array interfaces may leave that of
    // the base.
    let bytes = layout.extent_at(data, None)?;
    let reversed = || layout.strides().iter().any(|stride| *stride < 0);
    let lost = (is_planted("numpy_owner_of_scalar_lost") && layout.shape().is_empty())
        || (is_planted("numpy_owner_of_reversed_lost") && reversed());
    let nothing = lost.then(|| array.py().None().into_bound(array.py()));
    let base = is_planted("numpy_base_kept").then(|| array.getattr(intern!(array.py(), "base")).ok()).flatten();
    let owner = PyOwner::new(nothing.as_ref().or(base.as_ref()).unwrap_or(array));
    let pending = pending.filter(|_| !is_planted("numpy_packing_dropped"));
    // SAFETY: the array keeps its memory alive, and NumPy guarantees its strides.
    let memory = unsafe { Memory::new(Allocation::host(bytes, access), owner) };
    Ok(Export::at(data, dtype, layout, memory)?.with_pending(pending))
}

/// Borrows an array.
pub(crate) fn borrow<'a>(runtime: &Runtime, array: &'a PyTensor<'_>) -> Result<Borrowed<'a>> {
    let View { data, dtype, layout, pending, access } = View::of(runtime, array)?;
    without_pending(pending)?;
    Ok(Borrowed::new(array, data, dtype, layout, Device::CPU, access, None))
}

/// What an array says of its memory.
struct View {
    data: usize,
    dtype: DType,
    layout: Layout,
    pending: Option<Pending>,
    access: Access,
}

impl View {
    fn of(runtime: &Runtime, array: &PyTensor<'_>) -> Result<Self> {
        if !runtime.is_array(array) {
            return Err(not_a_tensor("numpy", array));
        }
        let is_masked = runtime.is_masked(array).map_err(|error| raised(array.py(), error))?;
        if is_masked && !is_planted("numpy_mask_dropped") {
            let text = "other frameworks have no masks: call .filled(value) first, or pass .data and .mask apart";
            return Err(Error::new(ErrorKind::NotATensor, text));
        }
        let mut view = match &runtime.native {
            Some(native) => Self::of_fields(runtime, array, native.fields(array)),
            None => Self::of_interface(runtime, array),
        }?;
        if is_planted("numpy_read_only_lost") {
            view.access = Access::ReadWrite;
        }
        if view.access == Access::ReadOnly && is_of_constant(runtime, array) {
            view.access = Access::Immutable;
        }
        Ok(view)
    }

    fn of_fields(runtime: &Runtime, array: &PyTensor<'_>, fields: &Fields) -> Result<Self> {
        let dtype = runtime.dtypes.read(&fields.dtype(array)).inspect_err(|_| {
            if is_planted("numpy_exception_left") {
                PyTypeError::new_err("the dtype has no counterpart").restore(array.py());
            }
        })?;
        let (layout, pending) = Layout::from_any_byte_strides(dtype, fields.shape(), fields.strides())?;
        let access = if fields.is_writeable() { Access::ReadWrite } else { Access::ReadOnly };
        Ok(Self { data: fields.data(), dtype, layout, pending, access })
    }

    fn of_interface(runtime: &Runtime, array: &PyTensor<'_>) -> Result<Self> {
        let py = array.py();
        let look_up = || {
            let plain = runtime.plain(array)?;
            Ok((plain.getattr(intern!(py, "dtype"))?, plain.getattr(intern!(py, "__array_struct__"))?))
        };
        let (dtype, capsule) = look_up().map_err(|error| raised(py, error))?;
        let dtype = runtime.dtypes.read(&dtype)?;
        // SAFETY: the object is alive and the GIL is held; the function returns null for any object but a nameless capsule.
        let interface = unsafe { PyCapsule_GetPointer(capsule.as_ptr(), ptr::null()) }.cast::<PyArrayInterface>();
        // SAFETY: NumPy's nameless capsule holds this struct, and lives until the end of this function.
        let interface =
            unsafe { interface.as_ref() }.filter(|interface| is_sound(interface, dtype)).ok_or_else(|| {
                drop(PyErr::take(py));
                Error::new(ErrorKind::Framework, "numpy's __array_struct__ is not as documented: please report this")
            })?;
        let nd = interface.nd as usize;
        let dims = |start: *const isize| -> Dims {
            match nd {
                0 => Dims::default(),
                // SAFETY: `start` is the shape or the strides, which have `nd` entries and live as long as the struct.
                _ => unsafe { slice::from_raw_parts(start, nd) }.iter().map(|dim| *dim as i64).collect(),
            }
        };
        let (layout, pending) = Layout::from_any_byte_strides(dtype, &dims(interface.shape), &dims(interface.strides))?;
        let data = interface.data as usize;
        let access = if interface.flags & WRITEABLE == 0 { Access::ReadOnly } else { Access::ReadWrite };
        Ok(Self { data, dtype, layout, pending, access })
    }
}

/// The most views of views that are looked through.
const DEPTH: usize = 8;

/// Returns whether an array shares memory that another framework never changes, and that was imported here.
fn is_of_constant<'py>(runtime: &Runtime, array: &PyTensor<'py>) -> bool {
    let base = |array: &PyTensor<'py>| array.getattr(intern!(array.py(), "base")).ok();
    let mut bases =
        std::iter::successors(base(array), base).take(if is_planted("numpy_constant_missed") { 1 } else { DEPTH });
    let owner = bases.find(|base| !runtime.is_array(base));
    owner.and_then(|owner| owner.cast_into::<Base>().ok()).is_some_and(|base| base.get().is_constant())
}

/// Returns whether the struct can be read, and describes elements of this dtype.
fn is_sound(interface: &PyArrayInterface, dtype: DType) -> bool {
    interface.two == 2
        && usize::try_from(interface.nd).is_ok_and(|nd| nd <= MAX_NDIM)
        && dtype.itemsize() == usize::try_from(interface.itemsize).ok()
}

pub(crate) fn compact<'py>(runtime: &Runtime, array: &PyTensor<'py>) -> Result<PyTensor<'py>> {
    let py = array.py();
    let copy = || {
        let plain = runtime.plain(array)?;
        let nbytes = plain.getattr(intern!(py, "nbytes"))?.extract()?;
        let (shape, dtype) = (plain.getattr(intern!(py, "shape"))?, plain.getattr(intern!(py, "dtype"))?);
        let copy = aligned(nbytes, &shape, &dtype, Order::RowMajor)?;
        py.import(intern!(py, "numpy"))?.call_method1(intern!(py, "copyto"), (&copy, plain))?;
        Ok(copy)
    };
    copy().map_err(|error: PyErr| match is_planted("numpy_error_mistaken") {
        true => Error::new(ErrorKind::Framework, error.to_string()),
        false => raised(py, error),
    })
}
