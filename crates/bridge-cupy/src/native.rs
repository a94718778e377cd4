//! The fields of CuPy's objects, read without Python: an attribute costs as much as all of them.
//!
//! CuPy's classes are C structs, and nothing states their layout. It is found by looking at a few arrays: a field is
//! where the value is that Python reads. Where it is not found, or not in the same place in all, attributes are read.

use bridge_core::Dims;
use bridge_pyo3::{PyTensor, probe};
use pyo3::ffi::PyObject;
use pyo3::prelude::*;
use pyo3::types::PyType;
use std::ptr;
use std::slice;

const WORD: usize = size_of::<usize>();

/// Distances in bytes from the start of an object.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fields {
    /// In an array: the memory pointer, the dtype, and the two vectors of C++.
    data: usize,
    dtype: usize,
    shape: usize,
    strides: usize,
    /// In a memory pointer: the address and the memory.
    ptr: usize,
    mem: usize,
}

/// What an array's fields say.
pub(crate) struct Values<'py> {
    /// The memory pointer.
    pub(crate) data: PyTensor<'py>,
    pub(crate) address: usize,
    pub(crate) memory: PyTensor<'py>,
    pub(crate) dtype: PyTensor<'py>,
    pub(crate) shape: Dims,
    /// In bytes.
    pub(crate) strides: Dims,
}

/// Returns the word `offset` bytes after the start of an object.
///
/// # Safety
///
/// The object is alive and longer than `offset + WORD` bytes.
unsafe fn word(object: *mut PyObject, offset: usize) -> usize {
    // SAFETY: the caller's obligation; objects and words are aligned.
    unsafe { object.cast::<u8>().add(offset).cast::<usize>().read() }
}

/// Returns the values of a vector of C++: three addresses, of its start, its end and the end of its memory.
///
/// # Safety
///
/// A vector of 64-bit integers is there, in an object that is alive.
unsafe fn vector(object: *mut PyObject, offset: usize) -> Dims {
    // SAFETY: the caller's obligation.
    unsafe {
        let [start, end] = [offset, offset + WORD].map(|offset| word(object, offset));
        match (end - start) / WORD {
            0 => Dims::default(),
            length => slice::from_raw_parts(ptr::with_exposed_provenance::<i64>(start), length).into(),
        }
    }
}

/// An array, and what Python says of it.
struct Sample<'py> {
    array: PyTensor<'py>,
    values: Values<'py>,
}

impl<'py> Sample<'py> {
    fn of(array: PyTensor<'py>) -> PyResult<Self> {
        let data = array.getattr("data")?;
        let values = Values {
            address: data.getattr("ptr")?.extract()?,
            memory: data.getattr("mem")?,
            dtype: array.getattr("dtype")?,
            shape: array.getattr("shape")?.extract::<Vec<i64>>()?.into_iter().collect(),
            strides: array.getattr("strides")?.extract::<Vec<i64>>()?.into_iter().collect(),
            data,
        };
        Ok(Self { array, values })
    }

    /// Returns where the fields are in this array, which must have dimensions.
    fn fields(&self) -> PyResult<Option<Fields>> {
        let length = |object: &PyTensor<'py>| object.get_type().getattr("__basicsize__")?.extract::<usize>();
        let (of_array, of_data) = (length(&self.array)?, length(&self.values.data)?);
        let (array, data, values) = (self.array.as_ptr(), self.values.data.as_ptr(), &self.values);
        // After the header: a count and the type.
        let search = |object, length, value: usize| {
            // SAFETY: the object is alive and of that length.
            (2 * WORD..length / WORD * WORD).step_by(WORD).find(|at| unsafe { word(object, *at) } == value)
        };
        let dims = |expected: &Dims| {
            (2 * WORD..(of_array / WORD).saturating_sub(2) * WORD).step_by(WORD).find(|at| {
                // SAFETY: the object is alive and of that length.
                let [start, end, all] = [0, 1, 2].map(|i| unsafe { word(array, at + i * WORD) });
                let is_vector = start != 0
                    && start.is_multiple_of(WORD)
                    && end.checked_sub(start) == Some(expected.len() * WORD)
                    && all.checked_sub(end).is_some_and(|rest| rest <= SAMPLE_BYTES);
                // SAFETY: three such addresses are a vector of as many integers as the array has dimensions.
                is_vector && unsafe { vector(array, *at) } == *expected
            })
        };
        let find = || {
            Some(Fields {
                data: search(array, of_array, data.expose_provenance())?,
                dtype: search(array, of_array, values.dtype.as_ptr().expose_provenance())?,
                shape: dims(&values.shape)?,
                strides: dims(&values.strides)?,
                ptr: search(data, of_data, values.address)?,
                mem: search(data, of_data, values.memory.as_ptr().expose_provenance())?,
            })
        };
        Ok(find())
    }
}

/// The most bytes that a vector of a sample has left.
const SAMPLE_BYTES: usize = 1 << 12;

impl Fields {
    /// Returns where the fields are. `make` returns an array of a shape, strides in bytes and a dtype's name.
    ///
    /// # Errors
    ///
    /// What ends the program, such as `KeyboardInterrupt`.
    pub(crate) fn find<'py>(
        py: Python<'py>,
        make: impl Fn(&[i64], &[i64], &str) -> PyResult<PyTensor<'py>>,
    ) -> PyResult<Option<Self>> {
        let look = || -> PyResult<Option<Self>> {
            let samples: [(&[i64], &[i64], &str); 3] = [
                (&[2, 3, 5, 7], &[4000, 800, 80, 8], "float64"),
                (&[6, 11], &[2, 24], "int16"),
                (&[13, 4, 9, 2, 3], &[5000, 300, 24, 12, 4], "float32"),
            ];
            let mut found = Vec::new();
            for (shape, strides, dtype) in samples {
                found.push(Sample::of(make(shape, strides, dtype)?)?.fields()?);
            }
            let first = found[0];
            Ok(first.filter(|_| found.iter().all(|fields| *fields == first)))
        };
        Ok(probe(py, look())?.flatten())
    }

    /// Returns the values of an array; `None` where its memory pointer is of another class.
    pub(crate) fn read<'py>(&self, array: &PyTensor<'py>, pointer: &Bound<'py, PyType>) -> Option<Values<'py>> {
        let (py, array) = (array.py(), array.as_ptr());
        // SAFETY: the object is an array, whose fields are there. No other code runs, because the GIL is held.
        unsafe {
            let data = ptr::with_exposed_provenance_mut::<PyObject>(word(array, self.data));
            let data = Bound::from_borrowed_ptr_or_opt(py, data)?;
            if !ptr::eq(data.get_type_ptr(), pointer.as_type_ptr()) {
                return None;
            }
            let object = |word| Bound::from_borrowed_ptr_or_opt(py, ptr::with_exposed_provenance_mut::<PyObject>(word));
            Some(Values {
                address: word(data.as_ptr(), self.ptr),
                memory: object(word(data.as_ptr(), self.mem))?,
                dtype: object(word(array, self.dtype))?,
                shape: vector(array, self.shape),
                strides: vector(array, self.strides),
                data: data.to_owned(),
            })
        }
    }
}
