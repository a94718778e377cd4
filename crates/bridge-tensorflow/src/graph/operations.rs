//! Operations that take a tensor of another framework into a graph and one of TensorFlow out of it.
//!
//! `TensorBridgeInput` gives the tensor that was fed under its handle, in place; `TensorBridgeOutput` keeps its input and
//! gives a handle to take it by, until the session is gone, or for as long as the process lives where `outlived` is 1: a
//! `tf.function` may be gone as soon as it was called. Handles are two `int32`, because TensorFlow leaves tensors of that dtype in host memory on
//! any device.

use crate::eager::devices::{CPU, GPU, gpu_of};
use crate::graph::external::{self, Held, Value};
use crate::runtime::Runtime;
use crate::runtime::dtypes::{self, INT32};
use crate::runtime::kernel::{Call, Kernel, Operation, Tensor, entry};
use crate::runtime::release::{into_raw, release};
use bridge_core::{Device, Error, ErrorKind, Result, Stream};
use std::ffi::{CStr, c_int};
use std::ptr::null_mut;
use std::sync::Arc;

pub(crate) static INPUT: Operation = Operation {
    name: c"TensorBridgeInput",
    inputs: &[c"handle: int32"],
    outputs: &[c"y: T"],
    attributes: &[c"T: type", c"place: int = -1"],
    host: &[c"handle"],
    kernels: &[entry::<Input<false>>(CPU), entry::<Input<true>>(GPU)],
};

pub(crate) static OUTPUT: Operation = Operation {
    name: c"TensorBridgeOutput",
    inputs: &[c"x: T"],
    outputs: &[c"handle: int32"],
    attributes: &[c"T: type", c"outlived: int = 0"],
    host: &[c"handle"],
    kernels: &[entry::<Output<false>>(CPU), entry::<Output<true>>(GPU)],
};

/// What a session has in the place of `TensorBridgeOutput`: it chooses the handle itself, and so knows it also where the
/// run fails.
pub(crate) static KEEP: Operation = Operation {
    name: c"TensorBridgeKeep",
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

    /// A number that is never used again, or 0 where nothing ends with the instance.
    fn instance(outlived: i32) -> u64 {
        if outlived == 1 { 0 } else { external::unique() }
    }

    fn compute(call: &Call) -> Result<()> {
        let handle = external::new_handle();
        external::enter_fetched(handle, fetched(call, stream::<ON_GPU>(call)?, call.instance)?);
        call.output(&Tensor::of(&call.runtime.core, INT32, &handle)?)
    }

    fn gone(instance: u64) {
        external::reclaim(instance);
    }
}

struct Keep<const ON_GPU: bool>;

impl<const ON_GPU: bool> Kernel for Keep<ON_GPU> {
    const ATTRIBUTE: Option<&CStr> = Some(PLACE);

    fn instance(place: i32) -> u64 {
        (place + 1) as u64
    }

    fn compute(call: &Call) -> Result<()> {
        let entered = external::enter_fetched(handle(call, 1)?, fetched(call, stream::<ON_GPU>(call)?, 0)?);
        entered.then_some(()).ok_or_else(|| refused("another tensor waits under this handle"))
    }
}

/// The stream that a kernel computes in, or `None` on the host.
fn stream<const ON_GPU: bool>(call: &Call) -> Result<Option<Stream>> {
    ON_GPU.then(|| call.stream()).transpose()
}

fn refused(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Argument, text)
}

/// The attribute that says which one of several handles in a tensor is meant: a session feeds all at once, because each
/// tensor that is fed costs some microseconds on its way to a GPU's kernels. The number of an instance is one more.
pub(crate) const PLACE: &CStr = c"place";

/// The handle that is this input, or in it.
fn handle(call: &Call, number: c_int) -> Result<[i32; 2]> {
    let place = (call.instance as usize).checked_sub(1);
    // SAFETY: the operations have their handles in host memory.
    let handle = unsafe { call.input(number)?.handle(place) };
    handle.ok_or_else(|| refused("a handle is what feed gives: two int32"))
}

/// Gives the tensor that was fed.
fn input(call: &Call, stream: Option<Stream>) -> Result<()> {
    let fed = external::fed(handle(call, 0)?)
        .ok_or_else(|| refused("no tensor is fed under this handle: keep what feed gave until the run is over"))?;
    let (dtype, device) = (fed.dtype, fed.device);
    if !std::ptr::eq(fed.runtime, call.runtime) {
        let version = fed.runtime.version();
        return Err(refused(format!("the tensor was fed to TensorFlow {version}, which is another one: convert it")));
    }
    let code = dtypes::code(dtype).filter(|code| *code == call.output_code());
    let code = code.ok_or_else(|| {
        let declared = dtypes::dtype(call.output_code()).map_or("another dtype".into(), |dtype| dtype.to_string());
        refused(format!("the tensor fed is {dtype}, but {declared} was declared"))
    })?;
    if fed.stream != stream && !stands_for(call.runtime, &fed, stream)? {
        let place = if stream.is_some() { "a GPU" } else { "the CPU" };
        return Err(refused(format!(
            "the tensor fed is on {device}, but this external_input was placed on {place}: build it under tf.device of the tensor's device"
        )));
    }
    match &fed.held {
        Held::Tensor(tensor) => call.output(tensor),
        Held::Owner { .. } => call.output(&over(call.runtime, code, fed)?),
    }
}

/// Whether the tensor was fed under the legacy stream because this one was not known: a stream of its device that waits
/// for the legacy one.
fn stands_for(runtime: &Runtime, fed: &Value, stream: Option<Stream>) -> Result<bool> {
    let (Some(Stream::LEGACY), Some(stream)) = (fed.stream, stream) else { return Ok(false) };
    let stands = bridge_cuda::works_behind_legacy(fed.device, stream)?;
    if stands {
        runtime.consumer.learn_stream(stream, fed.device);
    }
    Ok(stands)
}

/// A tensor over the memory of what was fed.
fn over(runtime: &'static Runtime, code: c_int, fed: Arc<Value>) -> Result<Tensor> {
    let (shape, nbytes) = (fed.shape.clone(), fed.bytes.len());
    // Memory of no bytes may be anywhere, but TensorFlow looks at its alignment all the same.
    let data = if nbytes == 0 { null_mut() } else { fed.bytes.start as *mut _ };
    // SAFETY: the memory is compact, of the length that shape and dtype need, aligned as core has checked it against the
    // profile, and kept by the owner, which comes back once, also where no tensor is made.
    unsafe {
        let (core, ndim) = (&runtime.core, shape.len() as c_int);
        let raw = (core.TF_NewTensor)(code, shape.as_ptr(), ndim, data, nbytes, release, into_raw(Box::new(fed)));
        Tensor::from_raw(core, raw).ok_or_else(|| refused("tensorflow made no tensor of the memory"))
    }
}

/// The input, written in `stream` or on the host, which goes with the instance `by`.
fn fetched(call: &Call, stream: Option<Stream>, by: u64) -> Result<Value> {
    let (tensor, runtime) = (call.input(0)?, call.runtime);
    let dtype = dtypes::dtype(tensor.code()).map_err(refused)?;
    let device = match stream {
        None => Device::CPU,
        Some(stream) => match gpu_of(tensor.address())? {
            Some(gpu) => {
                runtime.consumer.learn_stream(stream, gpu);
                gpu
            }
            // Of a tensor without elements TensorFlow shows no memory.
            None if tensor.nbytes() == 0 => Device::cuda(runtime.consumer.ordinal_of(stream).unwrap_or(0)),
            None => Device::CPU,
        },
    };
    let stream = stream.filter(|_| device != Device::CPU);
    let (shape, start) = (tensor.shape(), tensor.address());
    let bytes = start..start + tensor.nbytes();
    Ok(Value { runtime, dtype, device, shape, bytes, stream, held: Held::Tensor(tensor), by })
}
