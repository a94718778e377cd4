//! Exports tensors of MadeUp.

use crate::runtime::Runtime;
use crate::unwritten;
//% if cuda
use bridge_core::{Consumer, Reuse};
//% end
use bridge_core::{Access, Allocation, DType, Device, Layout, Lent, Memory, Result};
use bridge_pyo3::{PyOwner, PyTensor, not_a_tensor};

pub(crate) fn lend(runtime: &Runtime, tensor: &PyTensor<'_>) -> Result<Lent> {
    if !runtime.is_tensor(tensor) {
        return Err(not_a_tensor("madeup", tensor));
    }
    let (data, device, dtype, layout) = view(tensor)?;
//% if writes
    let access = Access::ReadWrite;
//% end
//% if immutable
    let access = Access::Immutable;
//% end
    let bytes = layout.hull(data, None)?;
//% if cuda
    let stream = runtime.consumer.current_stream(device)?;
    // `InStreamOrder` only with evidence, for this block, that the allocator reuses it after that stream.
    let reuse = Reuse::Unknown;
    let allocation = Allocation::new(bytes, device, access, stream, reuse);
//% end
//% if host
    debug_assert_eq!(device, Device::CPU);
    let allocation = Allocation::host(bytes, access);
//% end
    // SAFETY: the object keeps its memory alive, and MadeUp vouches for what `view` reads.
    let memory = unsafe { Memory::new(allocation, PyOwner::new(tensor)) };
    Lent::at(data, dtype, layout, memory)
}

/// Returns what a tensor says of itself: the address of its first element, device, dtype and layout.
fn view(_tensor: &PyTensor<'_>) -> Result<(usize, Device, DType, Layout)> {
    // `Layout::from_byte_strides(dtype, &shape, &strides)`, or `Layout::new(dtype, &shape, None, 0)` for a compact one.
    Err(unwritten("export.rs, view", "the address of the first element, device, dtype and layout of a tensor"))
}
//% if compact

/// Returns a copy by the framework itself: fresh memory, row-major, in its current stream.
pub(crate) fn compact<'py>(_runtime: &Runtime, _tensor: &PyTensor<'py>) -> Result<PyTensor<'py>> {
    Err(unwritten("export.rs, compact", "a fresh, row-major copy of a tensor"))
}
//% end
