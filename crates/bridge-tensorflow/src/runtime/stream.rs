//! An operation that reports the stream of the GPU that it runs on: neither the C functions nor Python return it.

use crate::runtime::Runtime;
use crate::runtime::gpus::gpu_of;
use crate::runtime::kernel::{Call, GPU, Kernel, Operation, entry, is_registered};
use crate::runtime::library::Series;
use crate::runtime::tensor::{RuntimeTensor, no_tensor};
use bridge_core::{Result, Stream};
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

/// Returns TensorFlow's stream and the driver's number of the GPU that it runs on, or [`NO_CUDA`] for a GPU of another
/// vendor.
pub(crate) static STREAM: Operation = Operation {
    name: c"TruebridgeDevice",
    inputs: &[c"x: float"],
    outputs: &[c"report: int64"],
    attributes: &[],
    host: &[c"report"],
    kernels: &[entry::<Report>(GPU)],
};

/// TensorFlow's code of the input's dtype.
pub(crate) const FLOAT: c_int = 1;
const INT64: c_int = 9;
/// The number of a GPU that the CUDA driver does not know.
const NO_CUDA: i64 = -1;

struct Report;

impl Kernel for Report {
    fn compute(call: &Call) -> Result<()> {
        let input = call.input(0)?;
        // Here and not later: memory of a stream-ordered pool (`TF_GPU_ALLOCATOR=cuda_malloc_async`) is unknown to the
        // driver as soon as TensorFlow has freed it, which is when this operation is over.
        let gpu = gpu_of(input.address()).ok().flatten();
        let ordinal = gpu.map_or(NO_CUDA, |gpu| i64::from(gpu.index));
        // SAFETY: the kernel is registered only for GPUs.
        let stream = unsafe { call.stream() }?;
        let report = [stream.handle(), ordinal as u64];
        call.output(&RuntimeTensor::of(&call.runtime.core, INT64, &report)?)
    }
}

/// Registers [`STREAM`], unless it is registered: another copy of this crate may have done so, and its kernel reports
/// the same.
pub(crate) fn register(runtime: &'static Runtime) -> Result<()> {
    /// The series for which it is registered. A look at TensorFlow's list of operations takes 10 ms.
    static REGISTERED: Mutex<Vec<Series>> = Mutex::new(Vec::new());
    let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    let series = runtime.series();
    if !registered.contains(&series) {
        if !is_registered(runtime, STREAM.name) {
            STREAM.register(runtime)?;
        }
        registered.push(series);
    }
    Ok(())
}

/// Returns the input of [`STREAM`], in host memory.
pub(crate) fn input(runtime: &'static Runtime) -> Result<RuntimeTensor> {
    RuntimeTensor::of(&runtime.core, FLOAT, &[0f32])
}

/// Reads the result of [`STREAM`]; `None` for another vendor's GPU.
///
/// # Safety
///
/// The tensor is in host memory.
pub(crate) unsafe fn reported(tensor: &RuntimeTensor) -> Result<Option<(Stream, i32)>> {
    // SAFETY: the caller's obligation.
    let [stream, ordinal] = unsafe { tensor.whole::<[i64; 2]>() }.ok_or_else(no_tensor)?;
    // SAFETY: TensorFlow keeps its streams as long as the process.
    Ok((ordinal != NO_CUDA).then(|| (unsafe { Stream::from_handle(stream as u64) }, ordinal as i32)))
}
