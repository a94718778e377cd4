//! Tensors of MadeUp: out, in, and fresh ones.

use crate::unwritten;
//% if writes
use bridge_core::Order;
//% end
use bridge_core::{DType, Device, Layout, Lease, Result};

/// Stands for MadeUp's own type: depend on its crate, and write `pub use madeup::Tensor`. A clone is another reference
/// to the same memory.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Tensor;

/// Returns what a tensor says of itself: the address of its first element, device, dtype and layout.
pub(crate) fn view(_tensor: &Tensor) -> Result<(usize, Device, DType, Layout)> {
    // `Layout::new(dtype, &shape, None, 0)` for a compact one, or with the strides in elements.
    Err(unwritten("tensor.rs, view", "the address of the first element, device, dtype and layout of a tensor"))
}

/// Returns a tensor over the memory of a lease, which it keeps until its last clone is dropped, on any thread.
pub(crate) fn wrap(_lease: Lease) -> Result<Tensor> {
    Err(unwritten("tensor.rs, wrap", "a tensor over the memory of a lease, which it keeps"))
}
//% if compact

/// Returns a copy by the framework itself: fresh memory, row-major, in its current stream.
pub(crate) fn compact(_tensor: &Tensor) -> Result<Tensor> {
    Err(unwritten("tensor.rs, compact", "a fresh, row-major copy of a tensor"))
}
//% end
//% if writes

/// Returns fresh memory, compact in this order, to copy into.
pub(crate) fn empty(_device: Device, _dtype: DType, _shape: &[i64], _order: Order) -> Result<Tensor> {
    Err(unwritten("tensor.rs, empty", "a fresh tensor of this shape, compact in this order"))
}
//% end
