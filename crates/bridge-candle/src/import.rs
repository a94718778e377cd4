//! Makes tensors of candle to copy into.

use crate::raised;
use crate::storage::{elements, zeros};
use bridge_core::{COPY_ALIGNMENT, DType, Layout, Order, Result};
use candle_core::op::BackpropOp;
use candle_core::{Storage, Tensor};

/// Makes a tensor by `allocate`, which takes the dtype, the number of elements and the lengths of a row-major tensor.
pub(crate) fn empty(
    dtype: DType,
    shape: &[i64],
    order: Order,
    allocate: impl FnOnce(DType, usize, Vec<usize>) -> Result<Tensor>,
) -> Result<Tensor> {
    let layout = Layout::new(dtype, shape, None, 0)?;
    let mut dims: Vec<usize> = layout.shape().iter().map(|length| *length as usize).collect();
    if order == Order::ColumnMajor {
        dims.reverse();
    }
    let made = allocate(dtype, layout.numel(), dims)?;
    match order {
        Order::ColumnMajor => made.permute((0..shape.len()).rev().collect::<Vec<_>>()).map_err(raised),
        _ => Ok(made),
    }
}

/// Allocates a tensor of zeros on the host.
pub(crate) fn on_host(dtype: DType, numel: usize, dims: Vec<usize>) -> Result<Tensor> {
    match numel {
        0 => Ok(Tensor::from_storage(Storage::Cpu(zeros(dtype, 0)?), dims, BackpropOp::none(), false)),
        numel => aligned(dtype, numel)?.reshape(dims).map_err(raised),
    }
}

/// Returns a vector of `numel` zeros at a multiple of [`COPY_ALIGNMENT`]. The allocator aligns only to the element's
/// size, so the vector begins inside its storage.
fn aligned(dtype: DType, numel: usize) -> Result<Tensor> {
    let itemsize = dtype.itemsize().unwrap_or(1);
    let len = numel + COPY_ALIGNMENT / itemsize;
    let storage = zeros(dtype, len)?;
    let start = elements(&storage).map_or(0, |(_, memory)| memory.start);
    let skipped = (start.next_multiple_of(COPY_ALIGNMENT) - start) / itemsize;
    let whole = Tensor::from_storage(Storage::Cpu(storage), len, BackpropOp::none(), false);
    whole.narrow(0, skipped, numel).map_err(raised)
}
