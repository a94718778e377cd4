//! Exports tensors of ONNX Runtime.

use crate::elements::dtype_of;
use bridge_core::planted::is_planted;
use bridge_core::{
    Access, Allocation, Consumer, DType, Device, Error, ErrorKind, Export, Layout, Memory, Result, Reuse,
};
use ort::memory::{AllocationDevice, MemoryInfo};
use ort::value::DynTensor;
use std::sync::Arc;

pub(crate) fn export(consumer: &dyn Consumer, tensor: &Arc<DynTensor>) -> Result<Export> {
    let dtype = match dtype_of(*tensor.data_type())? {
        DType::INT32 if is_planted("ort_dtype_mistaken") => DType::UINT32,
        dtype => dtype,
    };
    let device = place(tensor.memory_info())?;
    let layout = Layout::new(dtype, tensor.shape(), None, 0)?;
    let data = tensor.data_ptr().expose_provenance();
    let bytes = layout.extent_at(data, None)?;
    let allocation = match consumer.current_stream(device)? {
        None => Allocation::host(bytes, Access::ReadWrite),
        // The arena reuses memory in an order that ONNX Runtime does not show.
        stream => Allocation::new(bytes, device, Access::ReadWrite, stream, Reuse::Unknown),
    };
    // SAFETY: the value keeps its memory, which never moves, and may be released on any thread. Its last work is in the
    // compute stream, which outlives it, and no code writes to it meanwhile: the obligations of the constructors of `Ort`.
    let memory = unsafe { Memory::new(allocation, Arc::clone(tensor)) };
    Export::at(data, dtype, layout, memory)
}

fn place(info: &MemoryInfo) -> Result<Device> {
    let name = info.allocation_device();
    match name {
        _ if name == AllocationDevice::CUDA => Ok(Device::cuda(info.device_id())),
        // ONNX Runtime 1.23 and later calls pinned memory that of a GPU. A run that waits for the device has filled it.
        _ if name == AllocationDevice::CUDA_PINNED || info.is_cpu_accessible() => Ok(Device::CPU),
        _ => {
            let text = format!("the tensor is in memory of {}: bind the output to the host or to CUDA", name.as_str());
            Err(Error::new(ErrorKind::Device, text))
        }
    }
}
