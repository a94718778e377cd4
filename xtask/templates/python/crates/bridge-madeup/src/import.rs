//! Imports leases as tensors of MadeUp.

use crate::runtime::Runtime;
use crate::unwritten;
//% if writes
use bridge_core::{DType, Device, Order};
//% end
use bridge_core::{Lease, Result};
use bridge_pyo3::PyTensor;
use pyo3::Python;

/// Returns a tensor over the memory of a lease. The framework drops the lease with the last view, on any thread.
pub(crate) fn wrap<'py>(_py: Python<'py>, _runtime: &Runtime, _lease: Lease) -> Result<PyTensor<'py>> {
    // By DLPack: `bridge_core::dlpack::wrap(lease)` makes a managed tensor, and `bridge_pyo3::capsule` a capsule of it.
    // Where the framework's import fails, `Handover::reclaim` drops the lease. A framework whose tensors keep an owner
    // takes `LeaseOwner::new(lease)`, an object of Python that keeps the lease.
    Err(unwritten("import.rs, wrap", "a tensor over the memory of a lease, which it keeps"))
}
//% if writes

/// Returns fresh memory, compact in this order, to copy into.
pub(crate) fn empty<'py>(
    _py: Python<'py>,
    _runtime: &Runtime,
    (_device, _dtype): (Device, DType),
    _shape: &[i64],
    _order: Order,
) -> Result<PyTensor<'py>> {
    Err(unwritten("import.rs, empty", "a fresh tensor of this shape, compact in this order"))
}
//% end
