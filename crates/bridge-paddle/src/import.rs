//! Imports leases as tensors of Paddle, and makes tensors to copy into.

use crate::naive;
use crate::raised;
use crate::runtime::Runtime;
use bridge_core::{DType, Device, Error, ErrorKind, Lease, Order, Result};
use bridge_pyo3::PyTensor;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyTuple};
use std::ops::Range;

/// The bytes that a lease has elements in, as NumPy takes them by the array interface: the base of the array that Paddle
/// keeps.
#[pyclass(frozen, module = "truebridge", name = "Lease")]
struct Bytes {
    range: Range<usize>,
    _lease: Lease,
}

#[pymethods]
impl Bytes {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = [("shape", (self.range.len(),))].into_py_dict(py)?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (self.range.start, false))?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }
}

/// Returns a tensor over the memory of a lease, which is dropped with the last view.
pub(crate) fn wrap<'py>(py: Python<'py>, runtime: &Runtime, lease: Lease) -> Result<PyTensor<'py>> {
    runtime.refuse_static_mode(py)?;
    let (dtype, layout) = (runtime.dtype(py, lease.dtype())?, lease.layout().clone());
    if layout.numel() == 0 {
        // Its address may be any, also null.
        return fresh(py, runtime, dtype, layout.shape()).map_err(|error| raised(py, error));
    }
    if let Some(release) = naive::release() {
        return naive::imported(py, lease, release);
    }
    let range = layout.extent_at(lease.data(), None)?;
    let offset = lease.data() - range.start;
    let make = || {
        let bytes = runtime.asarray.bind(py).call1((Bound::new(py, Bytes { range, _lease: lease })?,))?;
        let elements = over(runtime, &bytes, dtype)?.call_method1(intern!(py, "view"), (dtype,))?;
        strided(py, &elements, (layout.shape(), layout.strides()), offset)
    };
    make().map_err(|error| without_strides(py, error))
}

/// Returns a tensor of bytes over an array, which it keeps. The constructor of `paddle.Tensor` does the same, and leaks
/// two objects a call. The tensor is made with another dtype, which does not matter.
fn over<'py>(runtime: &Runtime, bytes: &Bound<'py, PyAny>, dtype: &Bound<'py, PyAny>) -> PyResult<PyTensor<'py>> {
    let py = bytes.py();
    let dense = runtime.dense.bind(py).call0()?;
    dense.call_method1(intern!(py, "set"), (bytes, runtime.host.bind(py), true))?;
    let tensor = fresh(py, runtime, dtype, &[0])?;
    tensor.call_method0(intern!(py, "get_tensor"))?.call_method1(intern!(py, "_share_data_with"), (dense,))?;
    Ok(tensor)
}

/// Returns fresh memory on the host, compact in this order, to copy into.
pub(crate) fn empty<'py>(
    py: Python<'py>,
    runtime: &Runtime,
    (device, dtype): (Device, DType),
    shape: &[i64],
    order: Order,
) -> Result<PyTensor<'py>> {
    if device != Device::CPU {
        return Err(Error::new(ErrorKind::CopyNeeded, format!("paddle allocates no memory on {device}")));
    }
    runtime.refuse_static_mode(py)?;
    let dtype = runtime.dtype(py, dtype)?;
    let make = || {
        let made = fresh(py, runtime, dtype, shape)?;
        match order {
            Order::RowMajor => Ok(made),
            _ => strided(py, &made, (shape, &order.strides(shape)), 0),
        }
    };
    make().map_err(|error| without_strides(py, error))
}

/// Returns a compact tensor of the host whose elements are undefined.
fn fresh<'py>(py: Python<'py>, runtime: &Runtime, dtype: &Bound<'py, PyAny>, shape: &[i64]) -> PyResult<PyTensor<'py>> {
    let keywords = [("dtype", dtype), ("device", runtime.host.bind(py))].into_py_dict(py)?;
    let paddle = py.import(intern!(py, "paddle"))?;
    paddle.call_method(intern!(py, "empty"), (PyTuple::new(py, shape)?,), Some(&keywords))
}

/// Returns a view with this shape and these strides, in elements, that begins so many bytes into the memory.
fn strided<'py>(
    py: Python<'py>,
    tensor: &PyTensor<'py>,
    (shape, strides): (&[i64], &[i64]),
    offset: usize,
) -> PyResult<PyTensor<'py>> {
    let (shape, strides) = (PyTuple::new(py, shape)?, PyTuple::new(py, strides)?);
    tensor.call_method1(intern!(py, "as_strided"), (shape, strides, offset))
}

/// Wraps an exception of what needs Paddle's kernels for strides, which a flag switches off.
#[cold]
fn without_strides(py: Python<'_>, error: PyErr) -> Error {
    const FLAG: &str = "FLAGS_use_stride_kernel";
    let flags = || py.import("paddle")?.call_method1("get_flags", (FLAG,))?.get_item(FLAG)?.is_truthy();
    match flags() {
        Ok(false) => {
            let text =
                format!("Paddle makes no views while {FLAG} is off: call paddle.set_flags({{\"{FLAG}\": True}})");
            Error::new(ErrorKind::Refused, text).caused_by(error)
        }
        _ => raised(py, error),
    }
}
