//! Tensors of candle on CUDA devices: slices of `cudarc`, in the stream of candle's device.

use crate::raised;
use crate::storage::{self, Origin, Slice};
use bridge_core::{Consumer, DType, Device, Error, ErrorKind, Keep, Result, Reuse, Stream, Views};
use bridge_cudarc::keeping_context;
use candle_core::backend::BackendDevice;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, Shape, Storage, Tensor};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, result};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;

/// A device of candle, into whose memory tensors are copied.
pub(crate) struct OnDevice {
    pub(crate) candle: CudaDevice,
    pub(crate) views: Views,
}

impl OnDevice {
    pub(crate) fn device(&self) -> Device {
        device_of(&self.candle.cuda_stream())
    }

    /// Refuses another device than that of candle.
    pub(crate) fn check(&self, device: Device) -> Result<()> {
        let own = self.device();
        if device == own {
            return Ok(());
        }
        let text = format!("this adapter imports on {own}, not on {device}: make one for candle's device there");
        Err(Error::new(ErrorKind::Device, text))
    }

    /// Allocates a tensor by candle, whose elements are not written yet.
    pub(crate) fn allocate(&self, dtype: DType, numel: usize, dims: Vec<usize>) -> Result<Tensor> {
        let (kind, len) = (storage::kind(dtype)?, Shape::from(numel.max(1)));
        // SAFETY: any bits are a number, and core writes the elements before the caller has the tensor.
        let storage = keeping_context(|| unsafe { self.candle.alloc_uninit(&len, kind) }).map_err(raised)?;
        Ok(Tensor::from_storage(Storage::Cuda(storage), dims, BackpropOp::none(), false))
    }
}

// SAFETY: candle does all work of a device in the stream of the device, which this keeps.
unsafe impl Consumer for OnDevice {
    /// candle works in one stream of a device. `None` on the host, and for other devices, on which it takes nothing.
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        Ok((device == self.device()).then(|| handle_of(&self.candle.cuda_stream())))
    }

    fn keep(&self, _: Device, stream: Stream) -> Option<Keep> {
        let own = self.candle.cuda_stream();
        (stream == handle_of(&own)).then_some(own as Keep)
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

fn device_of(stream: &CudaStream) -> Device {
    Device::cuda(stream.context().ordinal() as i32)
}

fn is_per_thread(stream: &CudaStream) -> bool {
    stream.cu_stream().addr() as u64 == Stream::PER_THREAD.handle()
}

/// Returns the stream in which others may use the memory of candle. For a device with the per-thread default stream
/// that is the legacy stream: a tensor may have been written in the stream of another thread, and this one waits for
/// all.
fn handle_of(stream: &CudaStream) -> Stream {
    // SAFETY: the stream is that of the device, which keeps it.
    unsafe { Stream::from_handle(stream.cu_stream().addr() as u64) }.on_any_thread()
}

impl<T> Slice for CudaSlice<T> {
    fn memory(&self, stream: &CudaStream) -> Range<usize> {
        let (start, recording) = self.device_ptr(stream);
        // `cudarc` has one event for the last read: it stays that of candle. Others are ordered by the stream.
        std::mem::forget(recording);
        start as usize..start as usize + self.num_bytes()
    }

    fn is_freed_in(&self, stream: &CudaStream) -> bool {
        // Without a pool, `cudarc` waits for the stream before it frees. The stream of a thread is another one on the
        // thread that drops.
        self.context().has_async_alloc() && self.stream().cu_stream() == stream.cu_stream() && !is_per_thread(stream)
    }
}

/// Returns what is known of a storage, whose writes its stream waits for. `None` for a dtype of less than a byte.
pub(crate) fn origin(storage: &CudaStorage) -> Result<Option<Origin>> {
    let Some((dtype, slice)) = storage::slice(storage) else { return Ok(None) };
    let stream = storage.device.cuda_stream();
    let memory = keeping_context(|| {
        let memory = slice.memory(&stream);
        // `cudarc` keeps the error of a wait for the next call.
        stream.context().check_err().map(|()| memory)
    });
    let memory = memory.map_err(|error| {
        Error::new(ErrorKind::Driver, format!("cudarc: {error:?}: the tensor was not read")).caused_by(error)
    })?;
    let reuse = if slice.is_freed_in(&stream) { Reuse::InStreamOrder } else { Reuse::Unknown };
    Ok(Some(Origin { dtype, memory, device: device_of(&stream), stream: Some(handle_of(&stream)), reuse }))
}

/// A tensor on a device, which may be dropped on any thread.
pub(crate) struct Held(ManuallyDrop<(Tensor, Arc<CudaStream>)>);

impl Held {
    pub(crate) fn new(tensor: &Tensor, storage: &CudaStorage) -> Self {
        Self(ManuallyDrop::new((tensor.clone(), storage.device.cuda_stream())))
    }
}

impl Drop for Held {
    /// Frees the memory in the order of the stream, if this is the last reference. Where the order fails, it leaks.
    fn drop(&mut self) {
        let (_, stream) = &*self.0;
        // The tensor is freed in the stream of this thread, and other threads may have used it in theirs.
        let ordering = bridge_cuda::ordering();
        // SAFETY: both are default streams.
        let order_after = || unsafe { ordering.order(device_of(stream), Stream::LEGACY, Stream::PER_THREAD) };
        if is_per_thread(stream) && order_after().is_err() {
            return;
        }
        let context = stream.context().cu_ctx();
        keeping_context(|| {
            // SAFETY: the stream keeps the context. Without a current one the driver frees nothing in a default stream.
            if unsafe { result::ctx::set_current(context) }.is_ok() {
                // SAFETY: both are dropped once.
                unsafe { ManuallyDrop::drop(&mut self.0) };
            }
        });
    }
}
