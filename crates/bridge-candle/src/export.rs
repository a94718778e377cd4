//! Exports tensors of candle.

use crate::storage::Origin;
use bridge_core::planted::is_planted;
use bridge_core::{Dims, Error, ErrorKind, Export, Layout, Memory, Result};
use candle_core::{Storage, Tensor};

pub(crate) fn export(tensor: &Tensor) -> Result<Export> {
    if tensor.track_op() {
        let text = "candle tracks the tensor for gradients, and these stop at other frameworks: call .detach() first";
        return Err(Error::new(ErrorKind::RequiresGrad, text));
    }
    let (storage, view) = tensor.storage_and_layout();
    let origin = match &*storage {
        Storage::Cpu(storage) => Origin::on_host(storage),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => crate::cuda::origin(storage)?,
        _ => return Err(elsewhere(tensor)),
    };
    let origin = origin.ok_or_else(|| {
        let name = tensor.dtype().as_str();
        Error::new(ErrorKind::Dtype, format!("candle's dtype {name} has no counterpart: cast the tensor first"))
    })?;
    let strides = if is_planted("candle_strides_dropped") { None } else { Some(signed(view.stride())) };
    let layout = Layout::new(origin.dtype, &signed(view.dims()), strides.as_deref(), 0)?;
    // `Tensor::from_storage` takes any shape, also one that the storage is too short for.
    let start = origin.memory.start;
    let data = view.start_offset().checked_mul(layout.itemsize()).and_then(|offset| start.checked_add(offset));
    let data = data.ok_or_else(|| {
        let text = "the tensor starts outside its storage: check what was passed to Tensor::from_storage";
        Error::new(ErrorKind::Layout, text)
    })?;
    let allocation = origin.allocation(layout.extent_at(data, Some(&origin.memory))?);
    #[cfg(feature = "cuda")]
    if let Storage::Cuda(storage) = &*storage {
        // SAFETY: the tensor keeps the slice, whose memory stays in place, and the device its stream, which waits for
        // the writes that cudarc knows. Other streams do not use it at the same time: an obligation of `Candle::new`.
        // `Held` drops both on any thread, in the order of the stream.
        let memory = unsafe { Memory::new(allocation, crate::cuda::Held::new(tensor, storage)) };
        return Export::at(data, origin.dtype, layout, memory);
    }
    // SAFETY: the tensor keeps the storage, whose vector stays in place and is not written to elsewhere at the same time:
    // the obligations of `Candle::new`. A tensor may be dropped on any thread.
    let memory = unsafe { Memory::new(allocation, tensor.clone()) };
    Export::at(data, origin.dtype, layout, memory)
}

#[cold]
fn elsewhere(tensor: &Tensor) -> Error {
    let place = tensor.device().location();
    let supported = if cfg!(feature = "cuda") { "the host and CUDA devices are" } else { "only the host is" };
    let text = format!("the tensor is on {place:?}, and {supported} supported: call .to_device(&Device::Cpu)");
    Error::new(ErrorKind::Device, text)
}

/// Returns lengths or strides as core has them. One that does not fit becomes `i64::MAX`, which
/// [`Layout::new`] refuses.
fn signed(dims: &[usize]) -> Dims {
    dims.iter().map(|dim| i64::try_from(*dim).unwrap_or(i64::MAX)).collect()
}
