//! Imports leases as CuPy arrays.

use crate::runtime::{Runtime, raised};
use bridge_core::{Lease, Result};
use bridge_pyo3::{LeaseOwner, PyTensor};
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
    let memory = runtime.unowned_memory.bind(py).call1((address, len, owner, device))?;
    let pointer = runtime.memory_pointer.bind(py).call1((memory, offset))?;
    runtime.make_array(py, shape, dtype, pointer, strides)
}
