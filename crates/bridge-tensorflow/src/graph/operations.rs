//! The operations that read a tensor of another framework in a graph, and record a tensor of TensorFlow for others.
//!
//! `TruebridgeInput` outputs the tensor that was fed under its handle, in place. `TruebridgeOutput` records its input
//! and outputs a handle to take it by. A tensor that is not taken is dropped with its session, or kept for the life of
//! the process if `outlived` is not 0: a `tf.function` may be destroyed right after its call. It is 2 in eager
//! execution. Handles are two `int32`, because TensorFlow keeps tensors of that dtype in host memory on any device.

use crate::graph::argument;
use crate::graph::external::{self, Held, Origin, Value};
use crate::runtime::Runtime;
use crate::runtime::dtypes::{self, INT32};
use crate::runtime::gpus::gpu_of;
use crate::runtime::kernel::{CPU, Call, GPU, Kernel, Operation, entry};
use crate::runtime::release::handed_over;
use crate::runtime::tensor::RuntimeTensor;
use bridge_core::{Device, Result, Stream};
use std::ffi::{CStr, c_int};
use std::ptr::null_mut;
use std::sync::Arc;

pub(crate) static INPUT: Operation = Operation {
    name: c"TruebridgeInput",
    inputs: &[c"handle: int32"],
    outputs: &[c"y: T"],
    attributes: &[c"T: type", c"place: int = -1"],
    host: &[c"handle"],
    kernels: &[entry::<Input<false>>(CPU), entry::<Input<true>>(GPU)],
};

pub(crate) static OUTPUT: Operation = Operation {
    name: c"TruebridgeOutput",
    inputs: &[c"x: T"],
    outputs: &[c"handle: int32"],
    attributes: &[c"T: type", c"outlived: int = 0"],
    host: &[c"handle"],
    kernels: &[entry::<Output<false>>(CPU), entry::<Output<true>>(GPU)],
};

/// A session's replacement for `TruebridgeOutput`: the session chooses the handle, and so knows it even if the run
/// fails.
pub(crate) static KEEP: Operation = Operation {
    name: c"TruebridgeKeep",
    inputs: &[c"x: T", c"handle: int32"],
    outputs: &[],
    attributes: &[c"T: type", c"place: int = -1"],
    host: &[c"handle"],
    kernels: &[entry::<Keep<false>>(CPU), entry::<Keep<true>>(GPU)],
};

struct Input<const ON_GPU: bool>;

impl<const ON_GPU: bool> Kernel for Input<ON_GPU> {
    const ATTRIBUTE: Option<&CStr> = Some(PLACE);

    fn instance(place: i32) -> u64 {
        (place + 1) as u64
    }

    fn compute(call: &Call) -> Result<()> {
        input(call, stream::<ON_GPU>(call)?)
    }
}

struct Output<const ON_GPU: bool>;

impl<const ON_GPU: bool> Kernel for Output<ON_GPU> {
    const ATTRIBUTE: Option<&CStr> = Some(c"outlived");

    /// A unique number, 0 if its tensors are kept when the instance is destroyed, or [`EAGER`].
    fn instance(outlived: i32) -> u64 {
        match outlived {
            0 => external::unique(),
            1 => 0,
            _ => EAGER,
        }
    }

    fn compute(call: &Call) -> Result<()> {
        let (origin, instance) = if call.instance == EAGER { (Origin::Eager, 0) } else { (Origin::Run, call.instance) };
        let handle = external::new_handle();
        external::record_fetched(handle, Value { origin, instance, ..fetched(call, stream::<ON_GPU>(call)?)? });
        call.output(&RuntimeTensor::of(&call.runtime.core, INT32, &handle)?)
    }

    fn destroyed(instance: u64) {
        external::reclaim(instance);
    }
}

/// Instead of the number of an instance: the operation was run eagerly.
const EAGER: u64 = u64::MAX;

struct Keep<const ON_GPU: bool>;

impl<const ON_GPU: bool> Kernel for Keep<ON_GPU> {
    const ATTRIBUTE: Option<&CStr> = Some(PLACE);

    fn instance(place: i32) -> u64 {
        (place + 1) as u64
    }

    fn compute(call: &Call) -> Result<()> {
        let recorded = external::record_fetched(handle(call, 1)?, fetched(call, stream::<ON_GPU>(call)?)?);
        recorded
            .then_some(())
            .ok_or_else(|| argument("this handle already has a tensor that was not taken: take that one first"))
    }
}

/// Returns the stream that a kernel computes in, or `None` on the host.
fn stream<const ON_GPU: bool>(call: &Call) -> Result<Option<Stream>> {
    // SAFETY: kernels with `ON_GPU` are registered for GPUs.
    ON_GPU.then(|| unsafe { call.stream() }).transpose()
}

/// The attribute with the index of a handle among several in one tensor. A session feeds all handles at once, because
/// each fed tensor costs a GPU's kernels some microseconds. The number of an instance is one more than the index.
pub(crate) const PLACE: &CStr = c"place";

/// Returns the handle in an input: the only one, or the one at the instance's index.
fn handle(call: &Call, number: c_int) -> Result<[i32; 2]> {
    let tensor = call.input(number)?;
    // SAFETY: the operations have their handles in host memory, and any bytes are a handle.
    let handle = unsafe {
        match (call.instance as usize).checked_sub(1) {
            Some(place) => tensor.item(place),
            None => tensor.whole(),
        }
    };
    handle.ok_or_else(|| argument("a handle is the two int32 that feed returned: pass those"))
}

/// Outputs the fed tensor.
fn input(call: &Call, stream: Option<Stream>) -> Result<()> {
    let fed = external::fed(handle(call, 0)?)
        .ok_or_else(|| argument("no tensor is fed under this handle: keep what feed returned until the run is over"))?;
    let (dtype, device) = (fed.dtype, fed.device);
    if !std::ptr::eq(fed.runtime, call.runtime) {
        let version = fed.runtime.version();
        return Err(argument(format!("the tensor was fed to another TensorFlow, {version}: convert it")));
    }
    let code = dtypes::code(dtype).filter(|code| *code == call.output_code());
    let code = code.ok_or_else(|| {
        let declared = dtypes::dtype(call.output_code()).map_or("another dtype".into(), |dtype| dtype.to_string());
        argument(format!("the tensor fed is {dtype}, but {declared} was declared"))
    })?;
    if fed.stream != stream && !stands_for(call.runtime, &fed, stream)? {
        let place = if stream.is_some() { "a GPU" } else { "the CPU" };
        return Err(argument(format!(
            "the tensor fed is on {device}, but this external_input was placed on {place}: build it under tf.device of the tensor's device"
        )));
    }
    match &fed.held {
        Held::Tensor(tensor) => call.output(tensor),
        Held::Owner { .. } => call.output(&over(call.runtime, code, fed)?),
    }
}

/// Returns whether the tensor was fed under the legacy stream instead of this one: a stream of its device that waits
/// for the legacy stream.
fn stands_for(runtime: &Runtime, fed: &Value, stream: Option<Stream>) -> Result<bool> {
    let (Some(Stream::LEGACY), Some(stream)) = (fed.stream, stream) else { return Ok(false) };
    // SAFETY: TensorFlow computes in the stream, and destroys none.
    let stands = unsafe { bridge_cuda::works_after_legacy(fed.device, stream) }?;
    if stands {
        runtime.consumer.gpus.record_unnamed(fed.device, stream);
    }
    Ok(stands)
}

/// Returns a tensor over the memory of a fed one.
fn over(runtime: &'static Runtime, code: c_int, fed: Arc<Value>) -> Result<RuntimeTensor> {
    let (shape, nbytes) = (fed.shape.clone(), fed.bytes.len());
    // TensorFlow checks the alignment of empty memory, too.
    let data = if nbytes == 0 { null_mut() } else { fed.bytes.start as *mut _ };
    // SAFETY: the memory is compact, has the length that shape and dtype need, and is aligned, which core has checked
    // against the profile. The owner keeps it; TensorFlow calls the deleter once, even if it makes no
    // tensor.
    unsafe {
        let (core, ndim) = (&runtime.core, shape.len() as c_int);
        let (release, owner) = handed_over(fed);
        let raw = (core.TF_NewTensor)(code, shape.as_ptr(), ndim, data, nbytes, release, owner);
        RuntimeTensor::from_raw(core, raw).ok_or_else(|| argument("tensorflow made no tensor of the memory"))
    }
}

/// Returns the input, written in `stream` or on the host, as a fetched tensor.
fn fetched(call: &Call, stream: Option<Stream>) -> Result<Value> {
    let (tensor, runtime) = (call.input(0)?, call.runtime);
    let dtype = dtypes::dtype(tensor.code()).map_err(argument)?;
    let device = match stream {
        None => Device::CPU,
        Some(stream) => match gpu_of(tensor.address())? {
            Some(gpu) => {
                runtime.consumer.gpus.record_unnamed(gpu, stream);
                gpu
            }
            // TensorFlow shows no memory of an empty tensor.
            None if tensor.nbytes() == 0 => Device::cuda(runtime.consumer.gpus.ordinal_of(stream).unwrap_or(0)),
            None => Device::CPU,
        },
    };
    let stream = stream.filter(|_| device != Device::CPU);
    let (shape, start) = (tensor.shape(), tensor.address());
    let bytes = start..start + tensor.nbytes();
    let held = Held::Tensor(tensor);
    Ok(Value { runtime, dtype, device, shape, bytes, stream, held, origin: Origin::Run, instance: 0 })
}
