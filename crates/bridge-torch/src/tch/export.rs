//! Exports tensors of `tch`.

use super::libtorch::{Libtorch, Read, failed};
use super::runtime::Runtime;
use super::tensors::empty;
use crate::library::Held;
use crate::memory::Kept;
use ::tch::{Kind, TchError, Tensor};
use bridge_core::planted::is_planted;
use bridge_core::{
    Access, Allocation, Consumer, Device, DeviceKind, Error, ErrorKind, Export, Layout, Memory, Order, Pending, Result,
    Reuse, Stream,
};
use std::{ptr, slice};

/// What keeps exported memory until it is dropped.
enum KeepAlive {
    Memory(#[expect(dead_code, reason = "it is dropped")] Kept),
    Storage(#[expect(dead_code, reason = "it is dropped")] Held),
}

pub(crate) fn export(runtime: &Runtime, tensor: &Tensor) -> Result<Export> {
    let libtorch = &runtime.libtorch;
    let device = screen(runtime, tensor)?;
    let number = libtorch.read(libtorch.dtype, tensor, 0)?;
    let dtype = runtime.numbers.dtype(number).ok_or_else(|| without_dtype(tensor, number))?;
    let (shape, strides) = (dims(libtorch, libtorch.sizes, tensor)?, dims(libtorch, libtorch.strides, tensor)?);
    let layout = Layout::new(dtype, shape, Some(strides), 0)?;
    let data = libtorch.read(libtorch.data, tensor, ptr::null_mut())?.expose_provenance();
    if data == 0 && layout.nbytes() > 0 {
        let text = "the tensor of zeros has no memory: call .clone() first";
        return Err(Error::new(ErrorKind::NotATensor, text));
    }
    let (stream, reuse) = origin(runtime, tensor, device)?;
    let bytes = layout.extent_at(data, None)?;
    let allocation = Allocation::new(bytes, device, Access::ReadWrite, stream, reuse);
    let pending = pending(tensor).map_err(raised)?.filter(|_| !is_planted("tch_pending_dropped"));
    let kept = if device == Device::CPU { runtime.allocator.keep(tensor) } else { None };
    let keep_alive = match kept {
        Some(kept) => KeepAlive::Memory(kept),
        None => KeepAlive::Storage(libtorch.keep_alive(tensor)?),
    };
    // SAFETY: libtorch has checked the view against the storage, whose memory is held, or which is held itself. Either
    // is deleted on any thread. The stream is libtorch's current one, whose streams are never destroyed; the allocator
    // reuses its own blocks after a stream that was recorded.
    let memory = unsafe { Memory::new(allocation, keep_alive) };
    Ok(Export::at(data, dtype, layout, memory)?.with_pending(pending))
}

/// Refuses what is not strided memory outside autograd, and returns the device.
fn screen(runtime: &Runtime, tensor: &Tensor) -> Result<Device> {
    let libtorch = &runtime.libtorch;
    let refused = |kind, text: &str| Err(Error::new(kind, text));
    if !libtorch.read(libtorch.is_defined, tensor, false)? {
        return refused(ErrorKind::NotATensor, "the tensor is undefined: make a real one first");
    }
    // SAFETY: functions without arguments that return a number.
    let (strided, meta) = unsafe { ((libtorch.layout_strided)(), (libtorch.device_type_meta)()) };
    if libtorch.read(libtorch.layout, tensor, strided)? != strided {
        let text = "a sparse or mkldnn tensor has no single memory: call .to_dense(None, None) first";
        return refused(ErrorKind::NotATensor, text);
    }
    if tensor.requires_grad() {
        let text = "the tensor requires grad, and autograd does not reach into other frameworks: call .detach() first";
        return refused(ErrorKind::RequiresGrad, text);
    }
    let kind = libtorch.read(libtorch.device_type, tensor, meta)?;
    if kind == meta {
        return refused(ErrorKind::NotATensor, "a meta tensor has no memory: make a real one first");
    }
    let index = libtorch.read(libtorch.device_index, tensor, 0)?;
    runtime.numbers.device(kind, index).ok_or_else(|| {
        let text = format!("the tensor is on a device of libtorch's type {kind}: move it to the host or to CUDA first");
        Error::new(ErrorKind::Device, text)
    })
}

/// Returns the tensor's sizes or strides, which are its own: valid while it is unchanged.
fn dims<'a>(libtorch: &Libtorch, which: Read<*mut i64>, tensor: &'a Tensor) -> Result<&'a [i64]> {
    let ndim = libtorch.read(libtorch.dim, tensor, 0)?;
    let start = libtorch.read(which, tensor, ptr::null_mut())?;
    if ndim == 0 {
        return Ok(&[]);
    }
    if start.is_null() {
        return Err(failed("does not describe the tensor"));
    }
    // SAFETY: libtorch has as many lengths and strides as dimensions, and keeps them with the tensor, which is
    // borrowed.
    Ok(unsafe { slice::from_raw_parts(start, ndim as usize) })
}

/// Returns the stream of the memory, and when it is reused. On a CUDA device the stream is recorded: the caching
/// allocator then reuses the memory after it, whatever stream it was allocated on.
fn origin(runtime: &Runtime, tensor: &Tensor, device: Device) -> Result<(Option<Stream>, Reuse)> {
    if device.kind != DeviceKind::CUDA {
        return Ok((None, Reuse::InStreamOrder));
    }
    let stream = runtime.consumer.current_stream(device)?.unwrap_or(Stream::LEGACY);
    let settled = runtime.allocator.record_stream(tensor, device, stream);
    Ok((Some(stream), if settled { Reuse::InStreamOrder } else { Reuse::Unknown }))
}

fn pending(tensor: &Tensor) -> Result<Option<Pending>, TchError> {
    Ok(Pending::of(tensor.f_is_conj()?, tensor.f_is_neg()?))
}

#[cold]
fn without_dtype(tensor: &Tensor, number: i32) -> Error {
    let quantised = matches!(tensor.f_kind(), Ok(Kind::QInt8 | Kind::QUInt8 | Kind::QInt32));
    let text = match quantised {
        true => "a quantised dtype has no counterpart: call .dequantize() or .int_repr() first".into(),
        false => format!("libtorch's dtype {number} has no counterpart: cast the tensor, or view its bytes, first"),
    };
    Error::new(ErrorKind::Dtype, text)
}

/// Wraps an error of `tch`.
#[cold]
pub(crate) fn raised(error: TchError) -> Error {
    let text = format!("tch: {error}");
    let kind = if text.contains("out of memory") { ErrorKind::OutOfMemory } else { ErrorKind::Framework };
    Error::new(kind, text)
}

pub(crate) fn compact(runtime: &Runtime, tensor: &Tensor) -> Result<Tensor> {
    let device = screen(runtime, tensor)?;
    let number = runtime.libtorch.read(runtime.libtorch.dtype, tensor, 0)?;
    let dtype = runtime.numbers.dtype(number).ok_or_else(|| without_dtype(tensor, number))?;
    let mut copy = empty(
        &runtime.libtorch,
        &runtime.numbers,
        device,
        dtype,
        dims(&runtime.libtorch, runtime.libtorch.sizes, tensor)?,
        Order::RowMajor,
    )?;
    copy.f_copy_(tensor).map_err(raised)?;
    Ok(copy)
}

/// Increments the version counter, by which autograd notices that a tensor that it has saved was written to: an
/// operation in place on a view without elements, which shares the counter, and launches nothing.
pub(crate) fn overwritten(tensor: &Tensor) -> Result<()> {
    let nothing = tensor.f_detach().and_then(|tensor| tensor.f_as_strided([0], [1], None));
    nothing.and_then(|mut nothing| nothing.f_zero_()).map(drop).map_err(raised)
}
