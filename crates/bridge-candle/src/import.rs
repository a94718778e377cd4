//! Makes tensors of candle to copy into.

use crate::storage::{elements, zeros};
use bridge_core::{COPY_ALIGNMENT, DType, Device, DeviceKind, Error, ErrorKind, Layout, Order, Result};
use candle_core::op::BackpropOp;
use candle_core::{Storage, Tensor};

pub(crate) fn empty(device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Tensor> {
    if device.kind != DeviceKind::CPU {
        return Err(Error::new(ErrorKind::CopyNeeded, format!("candle allocates no memory on {device} here")));
    }
    let layout = Layout::new(dtype, shape, None, 0)?;
    let mut dims: Vec<usize> = layout.shape().iter().map(|length| *length as usize).collect();
    if order == Order::ColumnMajor {
        dims.reverse();
    }
    let made = match layout.numel() {
        0 => Ok(Tensor::from_storage(Storage::Cpu(zeros(dtype, 0)?), dims, BackpropOp::none(), false)),
        numel => aligned(dtype, numel)?.reshape(dims),
    };
    let last = shape.len();
    let turned = made.and_then(|tensor| match order {
        Order::ColumnMajor => tensor.permute((0..last).rev().collect::<Vec<_>>()),
        _ => Ok(tensor),
    });
    turned.map_err(|error| Error::new(ErrorKind::Framework, format!("candle: {error}")))
}

/// Returns a vector of `numel` zeros at a multiple of [`COPY_ALIGNMENT`]. The allocator aligns to the element's size
/// alone, so that the vector begins inside its storage.
fn aligned(dtype: DType, numel: usize) -> Result<Tensor> {
    let itemsize = dtype.itemsize().unwrap_or(1);
    let len = numel + COPY_ALIGNMENT / itemsize;
    let storage = zeros(dtype, len)?;
    let start = elements(&storage).map_or(0, |(_, memory)| memory.start);
    let skipped = (start.next_multiple_of(COPY_ALIGNMENT) - start) / itemsize;
    let whole = Tensor::from_storage(Storage::Cpu(storage), len, BackpropOp::none(), false);
    whole.narrow(0, skipped, numel).map_err(|error| Error::new(ErrorKind::Framework, format!("candle: {error}")))
}
