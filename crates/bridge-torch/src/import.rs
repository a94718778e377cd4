//! Imports leases as PyTorch tensors.

use crate::runtime::{Runtime, raised};
use bridge_core::{DeviceKind, Lease, Result, dlpack};
use bridge_pyo3::PyTensor;
use pyo3::Python;

pub(crate) fn wrap<'py>(py: Python<'py>, runtime: &Runtime, lease: Lease) -> Result<PyTensor<'py>> {
    if lease.device().kind == DeviceKind::CUDA {
        runtime.start_cuda(py)?;
    }
    let (managed, handover) = dlpack::wrap(lease);
    match runtime.consumer.exchange.import(py, managed) {
        Ok(tensor) => Ok(tensor),
        Err(error) => {
            // PyTorch does not say whether it took ownership before it failed.
            handover.reclaim();
            Err(raised(py, error))
        }
    }
}
