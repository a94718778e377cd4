//! Exports tensors of candle.

use crate::storage::elements;
use bridge_core::{Access, Allocation, Dims, Error, ErrorKind, Layout, Lent, Memory, Result};
use candle_core::{Storage, Tensor};

pub(crate) fn lend(tensor: &Tensor) -> Result<Lent> {
    if tensor.track_op() {
        let text =
            "candle tracks the tensor for gradients, which do not reach into other frameworks: call .detach() first";
        return Err(Error::new(ErrorKind::RequiresGrad, text));
    }
    let (storage, view) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        let place = tensor.device().location();
        let text = format!("the tensor is on {place:?}, and only the host is supported: call .to_device(&Device::Cpu)");
        return Err(Error::new(ErrorKind::Device, text));
    };
    let (dtype, memory) = elements(storage).ok_or_else(|| {
        let name = tensor.dtype().as_str();
        Error::new(ErrorKind::Dtype, format!("candle's dtype {name} has no counterpart: cast the tensor first"))
    })?;
    let layout = Layout::new(dtype, &signed(view.dims()), Some(&signed(view.stride())), 0)?;
    // `Tensor::from_storage` takes any shape, also one that the storage is too short for.
    let data = view.start_offset().checked_mul(layout.itemsize()).and_then(|start| memory.start.checked_add(start));
    let data = data.ok_or_else(|| {
        let text = "the tensor starts outside its storage: check what was passed to Tensor::from_storage";
        Error::new(ErrorKind::Layout, text)
    })?;
    let bytes = layout.hull(data, Some(&memory))?;
    let allocation = Allocation::host(bytes, Access::ReadWrite);
    // SAFETY: the tensor keeps the storage, whose vector stays in place and is not written to elsewhere at the same time:
    // the obligations of `Candle::new`. A tensor may be dropped on any thread.
    let memory = unsafe { Memory::new(allocation, tensor.clone()) };
    Lent::at(data, dtype, layout, memory)
}

/// Returns lengths or strides as core has them. One that does not fit becomes `i64::MAX`, which
/// [`Layout::new`] refuses.
fn signed(dims: &[usize]) -> Dims {
    dims.iter().map(|dim| i64::try_from(*dim).unwrap_or(i64::MAX)).collect()
}
