//! Imports leases as CuPy arrays, and makes arrays to copy into.

use crate::raised;
use crate::runtime::Runtime;
use bridge_core::planted::is_planted;
use bridge_core::{DType, Device, DeviceKind, Error, ErrorKind, Lease, Order, Result};
use bridge_pyo3::{LeaseOwner, PyTensor};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

pub(crate) fn wrap<'py>(py: Python<'py>, runtime: &Runtime, lease: Lease) -> Result<PyTensor<'py>> {
    let dtype = runtime.dtypes.write(py, lease.dtype())?;
    make(py, runtime, lease, dtype).map_err(|error| raised(py, error))
}

fn make<'py>(py: Python<'py>, runtime: &Runtime, lease: Lease, dtype: &Bound<'py, PyAny>) -> PyResult<PyTensor<'py>> {
    let layout = lease.layout();
    let (address, len) = lease.buffer();
    let (offset, device) = (layout.offset(), lease.device().index);
    let shape = PyTuple::new(py, layout.shape())?;
    let strides = match layout.has_compact_strides() {
        true => None,
        false => Some(PyTuple::new(py, layout.strides().iter().map(|stride| stride * layout.itemsize() as i64))?),
    };
    let owner = Bound::new(py, LeaseOwner::new(lease))?;
    if is_planted("cupy_lease_leaked") {
        std::mem::forget(owner.clone());
    }
    let memory = runtime.unowned_memory.bind(py).call1((address, len, owner, device))?;
    let pointer = runtime.memory_pointer.bind(py).call1((memory, offset))?;
    runtime.make_array(py, shape, dtype, pointer, strides)
}

/// Calls `cupy.empty` on the device: CuPy's allocator returns memory of the current one, in its current stream.
pub(crate) fn empty<'py>(
    py: Python<'py>,
    runtime: &Runtime,
    device: Device,
    dtype: DType,
    shape: &[i64],
    order: Order,
) -> Result<PyTensor<'py>> {
    if device.kind != DeviceKind::CUDA {
        return Err(Error::new(ErrorKind::CopyNeeded, format!("cupy cannot allocate on {device}")));
    }
    let dtype = runtime.dtypes.write(py, dtype)?;
    let make = || {
        let cupy = py.import(intern!(py, "cupy"))?;
        let there = || cupy.getattr(intern!(py, "cuda"))?.call_method1(intern!(py, "Device"), (device.index,));
        let shape = PyTuple::new(py, shape)?;
        runtime.on_device(there, || cupy.call_method1(intern!(py, "empty"), (shape, dtype, order.letter())))
    };
    make().map_err(|error| raised(py, error))
}
