//! Imports leases as NumPy arrays, and makes arrays to copy into.

use crate::interface::{ALIGNED, NOTSWAPPED, PyArrayInterface, WRITEABLE};
use crate::raised;
use crate::runtime::Runtime;
use bridge_core::{Access, COPY_ALIGNMENT, DType, Device, Dims, Error, ErrorKind, Layout, Lease, Order, Result};
use bridge_pyo3::{NUMPY_DTYPES, PyTensor};
use pyo3::exceptions::PyMemoryError;
use pyo3::ffi::{PyCapsule_GetPointer, PyCapsule_New, PyObject};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::ffi::{c_char, c_int};
use std::ptr;

/// The base of the array, which NumPy keeps: the lease, with the array interface.
#[pyclass(frozen, module = "truebridge", name = "Lease")]
pub(crate) struct Base {
    lease: Lease,
    /// The kind character of the dtype; `V`, raw bytes, for dtypes that are not NumPy's own.
    kind: u8,
}

impl Base {
    /// Returns whether the memory is of a framework that never changes it.
    pub(crate) fn is_constant(&self) -> bool {
        self.lease.access() == Access::Immutable
    }
}

/// The struct, and the arrays that it points to.
struct Interface {
    header: PyArrayInterface,
    dims: Vec<isize>,
}

#[pymethods]
impl Base {
    #[getter]
    fn __array_struct__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let layout = self.lease.layout();
        let itemsize = layout.itemsize() as isize;
        let shape = layout.shape().iter().map(|length| *length as isize);
        let dims = shape.chain(layout.strides().iter().map(|stride| *stride as isize * itemsize)).collect();
        let writeable = if self.lease.access() == Access::ReadWrite { WRITEABLE } else { 0 };
        let aligned = if self.lease.data().is_multiple_of(layout.itemsize()) { ALIGNED } else { 0 };
        let mut interface = Box::new(Interface {
            header: PyArrayInterface {
                two: 2,
                nd: layout.shape().len() as c_int,
                typekind: self.kind as c_char,
                itemsize: itemsize as c_int,
                flags: NOTSWAPPED | writeable | aligned,
                shape: ptr::null_mut(),
                strides: ptr::null_mut(),
                data: self.lease.data() as *mut _,
                descr: ptr::null_mut(),
            },
            dims,
        });
        interface.header.shape = interface.dims.as_mut_ptr();
        interface.header.strides = interface.header.shape.wrapping_add(layout.shape().len());
        let interface = Box::into_raw(interface);
        // SAFETY: the pointer is that of the header inside a box that `free` takes back, and the destructor may be
        // called on it once.
        let capsule = unsafe { PyCapsule_New(&raw mut (*interface).header as *mut _, ptr::null(), Some(free)) };
        // SAFETY: a new reference, or null with an exception set.
        unsafe { Bound::from_owned_ptr_or_opt(py, capsule) }.ok_or_else(|| {
            // SAFETY: no capsule was made, so `free` is not called.
            drop(unsafe { Box::from_raw(interface) });
            PyErr::take(py).unwrap_or_else(|| PyMemoryError::new_err("no memory for a capsule"))
        })
    }
}

/// Destructor of the capsule.
///
/// # Safety
///
/// Python calls it once, for a capsule made above.
unsafe extern "C" fn free(capsule: *mut PyObject) {
    // SAFETY: the capsule holds the address of the header of a boxed `Interface`, and has no reader any more.
    unsafe {
        let header = PyCapsule_GetPointer(capsule, ptr::null()).cast::<u8>();
        drop(Box::from_raw(header.sub(std::mem::offset_of!(Interface, header)).cast::<Interface>()));
    }
}

/// The kind character by DLPack's type code.
const KINDS: &[u8] = b"iuf??cb";

pub(crate) fn wrap<'py>(py: Python<'py>, runtime: &Runtime, lease: Lease) -> Result<PyTensor<'py>> {
    let dtype = lease.dtype();
    let own = NUMPY_DTYPES.contains(&dtype);
    let kind = if own { KINDS[usize::from(dtype.code)] } else { b'V' };
    let known = runtime.dtypes.write(py, dtype)?;
    // For the null address of an array without elements, the function would allocate memory.
    let native = runtime.native.as_ref().filter(|_| lease.data() != 0);
    let make = || -> PyResult<PyTensor<'py>> {
        let Some(native) = native else {
            let writeable = lease.access() == Access::ReadWrite;
            let array = runtime.asarray.bind(py).call1((Bound::new(py, Base { lease, kind })?,))?;
            let array = if own { array } else { array.call_method1("view", (known,))? };
            if !writeable {
                array.call_method1("setflags", (false,))?;
            }
            return Ok(array);
        };
        let (data, writeable) = (lease.data(), lease.access() == Access::ReadWrite);
        let base = Bound::new(py, Base { lease, kind })?;
        let layout = base.get().lease.layout();
        let strides: Dims = layout.strides().iter().map(|stride| stride * layout.itemsize() as i64).collect();
        // SAFETY: the base holds the lease, which keeps the memory of its layout.
        unsafe { native.array(known, (data, layout.shape(), &strides), writeable, base.clone().into_any()) }
    };
    make().map_err(|error| raised(py, error))
}

pub(crate) fn empty<'py>(
    py: Python<'py>,
    runtime: &Runtime,
    device: Device,
    dtype: DType,
    shape: &[i64],
    order: Order,
) -> Result<PyTensor<'py>> {
    if device != Device::CPU {
        return Err(Error::new(ErrorKind::CopyNeeded, format!("numpy cannot allocate on {device}")));
    }
    let nbytes = Layout::new(dtype, shape, None, 0)?.nbytes();
    let dtype = runtime.dtypes.write(py, dtype)?;
    let shape = PyTuple::new(py, shape).map_err(|error| raised(py, error))?;
    aligned(nbytes, &shape, dtype, order).map_err(|error| raised(py, error))
}

/// Returns an array of `nbytes` bytes at a multiple of [`COPY_ALIGNMENT`]: NumPy itself aligns to 16 bytes only.
pub(crate) fn aligned<'py>(
    nbytes: usize,
    shape: &Bound<'py, PyAny>,
    dtype: &Bound<'py, PyAny>,
    order: Order,
) -> PyResult<PyTensor<'py>> {
    let py = shape.py();
    let numpy = py.import(intern!(py, "numpy"))?;
    let memory = numpy.call_method1(intern!(py, "empty"), (nbytes + COPY_ALIGNMENT, intern!(py, "uint8")))?;
    let address: usize = memory.getattr(intern!(py, "ctypes"))?.getattr(intern!(py, "data"))?.extract()?;
    let kwargs = PyDict::new(py);
    kwargs.set_item(intern!(py, "dtype"), dtype)?;
    kwargs.set_item(intern!(py, "buffer"), memory)?;
    kwargs.set_item(intern!(py, "offset"), address.next_multiple_of(COPY_ALIGNMENT) - address)?;
    kwargs.set_item(intern!(py, "order"), order.letter())?;
    numpy.call_method(intern!(py, "ndarray"), (shape,), Some(&kwargs))
}
