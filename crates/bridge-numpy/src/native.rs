//! Arrays without Python: the C struct of an array, and two functions of NumPy's C API.
//!
//! The struct and the places in the table of functions are public (`ndarraytypes.h`, `__multiarray_api.h`), and the
//! same in NumPy 1 and 2. They are used only if they agree with Python about a few arrays.

use crate::interface::WRITEABLE;
use bridge_core::Dims;
use bridge_pyo3::{PyTensor, probe};
use pyo3::Borrowed;
use pyo3::ffi::{PyCapsule_GetPointer, PyObject};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PySlice, PyType};
use std::ffi::{c_int, c_void};
use std::{mem, ptr, slice};

/// What an array says of itself: the struct after the header of its object (`PyArrayObject_fields`).
#[repr(C)]
pub(crate) struct Fields {
    data: *const c_void,
    nd: c_int,
    dimensions: *const i64,
    /// In bytes.
    strides: *const i64,
    base: *mut PyObject,
    /// The `numpy.dtype`.
    dtype: *mut PyObject,
    flags: c_int,
}

// `npy_intp` is as wide as a pointer.
const _: () = assert!(size_of::<isize>() == size_of::<i64>());

/// `NPY_ARRAY_WARN_ON_WRITE`, of arrays that NumPy will make read-only: other frameworks take them as such.
const WARN_ON_WRITE: c_int = 1 << 31;

impl Fields {
    /// Returns the address of the first element.
    pub(crate) fn data(&self) -> usize {
        self.data.expose_provenance()
    }

    /// Returns the lengths.
    pub(crate) fn shape(&self) -> &[i64] {
        self.dims(self.dimensions)
    }

    /// Returns the strides, in bytes.
    pub(crate) fn strides(&self) -> &[i64] {
        self.dims(self.strides)
    }

    fn dims(&self, start: *const i64) -> &[i64] {
        match usize::try_from(self.nd) {
            // SAFETY: NumPy keeps `nd` lengths and as many strides for as long as the array is unchanged.
            Ok(nd) if nd > 0 => unsafe { slice::from_raw_parts(start, nd) },
            _ => &[],
        }
    }

    /// Returns the `numpy.dtype` of the array that the fields belong to.
    pub(crate) fn dtype<'a, 'py>(&'a self, array: &'a PyTensor<'py>) -> Borrowed<'a, 'py, PyAny> {
        // SAFETY: the array keeps its dtype.
        unsafe { Borrowed::from_ptr(array.py(), self.dtype) }
    }

    /// Returns whether the array may be written to.
    pub(crate) fn is_writeable(&self) -> bool {
        self.flags & (WRITEABLE | WARN_ON_WRITE) == WRITEABLE
    }
}

/// `PyArray_NewFromDescr`: type, dtype (taken over), dimensions, lengths, strides in bytes, address, flags, object.
type NewFromDescr = unsafe extern "C" fn(
    *mut c_void,
    *mut PyObject,
    c_int,
    *const i64,
    *const i64,
    *mut c_void,
    c_int,
    *mut PyObject,
) -> *mut PyObject;

/// `PyArray_SetBaseObject`: array, base (taken over).
type SetBaseObject = unsafe extern "C" fn(*mut PyObject, *mut PyObject) -> c_int;

/// The places of `PyArray_Type` and of the functions in the table.
const TYPE: usize = 2;
const NEW_FROM_DESCR: usize = 94;
const SET_BASE_OBJECT: usize = 282;

/// What NumPy offers to C.
pub(crate) struct Native {
    /// Bytes of the header of an object, which the fields follow.
    header: usize,
    array: Py<PyType>,
    new: NewFromDescr,
    set_base: SetBaseObject,
}

impl Native {
    /// Returns the functions, if they agree with Python about a few arrays.
    ///
    /// # Errors
    ///
    /// What ends the program, such as `KeyboardInterrupt`.
    pub(crate) fn find(numpy: &Bound<'_, PyModule>) -> PyResult<Option<Self>> {
        let look = || -> PyResult<Option<Self>> {
            let Some(native) = Self::of_table(numpy)? else { return Ok(None) };
            for sample in samples(numpy)? {
                if !native.reads(&sample)? || !native.remakes(&sample)? {
                    return Ok(None);
                }
            }
            Ok(Some(native))
        };
        Ok(probe(numpy.py(), look())?.flatten())
    }

    fn of_table(numpy: &Bound<'_, PyModule>) -> PyResult<Option<Self>> {
        let py = numpy.py();
        // NumPy 2 has renamed the package.
        let module =
            py.import("numpy._core._multiarray_umath").or_else(|_| py.import("numpy.core._multiarray_umath"))?;
        let capsule = module.getattr("_ARRAY_API")?;
        // SAFETY: the object is alive and the GIL held; the function returns null for any object but a nameless
        // capsule.
        let table = unsafe { PyCapsule_GetPointer(capsule.as_ptr(), ptr::null()) }.cast::<*mut c_void>();
        if table.is_null() {
            return Err(PyErr::fetch(py));
        }
        let array = numpy.getattr("ndarray")?.cast_into::<PyType>()?;
        // SAFETY: the table is longer, in every NumPy since 1.7, and lives as long as the process.
        let at = |place: usize| unsafe { *table.add(place) };
        if at(TYPE) != array.as_ptr().cast() || at(NEW_FROM_DESCR).is_null() || at(SET_BASE_OBJECT).is_null() {
            return Ok(None);
        }
        let header = py.get_type::<PyAny>().getattr("__basicsize__")?.extract()?;
        // SAFETY: these are the types of the functions at these places.
        let (new, set_base) = unsafe {
            let new = mem::transmute::<*mut c_void, NewFromDescr>(at(NEW_FROM_DESCR));
            (new, mem::transmute::<*mut c_void, SetBaseObject>(at(SET_BASE_OBJECT)))
        };
        Ok(Some(Self { header, array: array.unbind(), new, set_base }))
    }

    /// Returns the fields of an array, or of a subclass. They hold until other code runs.
    pub(crate) fn fields<'a>(&self, array: &'a PyTensor<'_>) -> &'a Fields {
        // SAFETY: the object is an array, and NumPy's struct follows the header of the object.
        unsafe { &*array.as_ptr().byte_add(self.header).cast() }
    }

    /// Makes an array over the memory at `data`, which `base` keeps.
    ///
    /// # Safety
    ///
    /// `base` keeps the bytes that dtype, shape and strides (in bytes) reach from `data`, which is not null.
    pub(crate) unsafe fn array<'py>(
        &self,
        dtype: &Bound<'py, PyAny>,
        (data, shape, strides): (usize, &[i64], &[i64]),
        writeable: bool,
        base: Bound<'py, PyAny>,
    ) -> PyResult<PyTensor<'py>> {
        let (py, nd) = (dtype.py(), shape.len() as c_int);
        let flags = if writeable { WRITEABLE } else { 0 };
        let (kind, dtype) = (self.array.as_ptr().cast(), dtype.clone().into_ptr());
        // SAFETY: the type and the dtype are NumPy's, and the dtype is handed over; the memory is the caller's
        // obligation. The results are a new reference, and 0, or an exception is set.
        unsafe {
            let data = data as *mut c_void;
            let array = (self.new)(kind, dtype, nd, shape.as_ptr(), strides.as_ptr(), data, flags, ptr::null_mut());
            let array = Bound::from_owned_ptr_or_err(py, array)?;
            match (self.set_base)(array.as_ptr(), base.into_ptr()) {
                0 => Ok(array),
                _ => Err(PyErr::fetch(py)),
            }
        }
    }

    /// Returns whether the fields of an array say what Python says.
    fn reads(&self, array: &PyTensor<'_>) -> PyResult<bool> {
        let fields = self.fields(array);
        let told: (usize, bool) = array.getattr("__array_interface__")?.get_item("data")?.extract()?;
        Ok(array.getattr("dtype")?.as_ptr() == fields.dtype
            && told == (fields.data(), !fields.is_writeable())
            && array.getattr("ndim")?.extract::<c_int>()? == fields.nd
            && array.getattr("shape")?.extract::<Vec<i64>>()? == fields.shape()
            && array.getattr("strides")?.extract::<Vec<i64>>()? == fields.strides())
    }

    /// Returns whether an array like this one can be made.
    fn remakes<'py>(&self, array: &PyTensor<'py>) -> PyResult<bool> {
        let fields = self.fields(array);
        let (shape, strides) = (Dims::from(fields.shape()), Dims::from(fields.strides()));
        let writeable = fields.is_writeable();
        // SAFETY: the array keeps its memory.
        let made = unsafe {
            self.array(&fields.dtype(array), (fields.data(), &shape, &strides), writeable, array.getattr("T")?)
        }?;
        let same = |name: &str| made.getattr(name)?.eq(array.getattr(name)?);
        let data = |array: &PyTensor<'py>| array.getattr("__array_interface__")?.get_item("data");
        Ok(same("shape")?
            && same("strides")?
            && made.getattr("dtype")?.is(&array.getattr("dtype")?)
            && data(&made)?.eq(data(array)?)?
            && !made.getattr("base")?.is_none())
    }
}

/// Returns a plain array, one with gaps and a negative stride, a read-only one, and one without dimensions.
fn samples<'py>(numpy: &Bound<'py, PyModule>) -> PyResult<Vec<PyTensor<'py>>> {
    let py = numpy.py();
    let plain = numpy.call_method1("zeros", ((2, 3, 4), "int16"))?;
    let strided = plain.get_item((PySlice::full(py), PySlice::new(py, 1, 3, 1), PySlice::new(py, 3, 0, -2)))?;
    let read_only = numpy.call_method1("broadcast_to", (numpy.call_method1("zeros", ((3, 1), "float64"))?, (3, 5)))?;
    let scalar = numpy.call_method("array", (1.0,), Some(&[("dtype", "complex64")].into_py_dict(py)?))?;
    Ok(vec![plain, strided, read_only, scalar])
}
