//! What an adapter does whose author does not know the traps of Paddle: faults that the suite must find.

use crate::raised;
use bridge_core::dlpack::wrap_as;
use bridge_core::planted::is_planted;
use bridge_core::{Access, Allocation, Export, Lease, Memory, Result};
use bridge_pyo3::{PyOwner, PyTensor, capsule};
use pyo3::Python;
use pyo3::prelude::*;
use std::thread;

/// How the lease of a tensor is released that Paddle has imported by DLPack, where that fault is planted.
pub(crate) fn release() -> Option<fn(Lease)> {
    match (is_planted("paddle_deleter_enters_paddle"), is_planted("paddle_deleters_by_address")) {
        (true, _) => Some(drop),
        // Not under the lock, but only by the address.
        (_, true) => Some(|lease| drop(thread::spawn(|| drop(lease)))),
        _ => None,
    }
}

/// Returns a tensor that Paddle has imported by DLPack.
pub(crate) fn imported<'py>(py: Python<'py>, lease: Lease, release: fn(Lease)) -> Result<PyTensor<'py>> {
    // SAFETY: the profile says that Paddle may write, so memory that must not change is here by the user's promise.
    let (managed, handover) = unsafe { wrap_as(lease, release) };
    let import = || py.import("paddle")?.call_method1("from_dlpack", (capsule(py, managed)?,));
    import().map_err(|error| {
        // SAFETY: Paddle has made no tensor of the memory.
        unsafe { handover.reclaim() };
        raised(py, error)
    })
}

/// Returns an export that keeps the object, where that fault is planted. Operations of Paddle may give the object other
/// memory.
pub(crate) fn kept_by_object(tensor: &PyTensor<'_>, exported: Export) -> Result<Export> {
    if !is_planted("paddle_object_kept") {
        return Ok(exported);
    }
    let bytes = exported.layout().extent_at(exported.data(), None)?;
    // SAFETY: none, which is the fault: the object may lose the memory.
    let memory = unsafe { Memory::new(Allocation::host(bytes, Access::ReadWrite), PyOwner::new(tensor)) };
    Export::at(exported.data(), exported.dtype(), exported.layout().clone(), memory)
}
