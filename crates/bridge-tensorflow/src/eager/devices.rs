//! TensorFlow's devices: their names, which GPU is which, and the one stream that each computes in.

use crate::eager::handle::{Handle, execute, nothing};
use crate::runtime::Runtime;
use crate::runtime::api::{Status, TF_DeviceList, TFE_Context};
use crate::runtime::kernel::{Call, Kernel, Operation, Tensor, entry, is_registered};
use bridge_core::{Device, DeviceKind, Error, ErrorKind, Keep, Result, Stream};
use std::ffi::{CStr, CString, c_int};
use std::sync::{Mutex, PoisonError};

/// A GPU, as TensorFlow numbers them: `set_visible_devices` and logical devices make numbers of their own.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    /// TensorFlow's name of it, `/device:GPU:` and a number.
    pub(crate) name: CString,
    /// The driver's number.
    pub(crate) ordinal: i32,
    /// The stream in which TensorFlow computes there, always the same one.
    pub(crate) stream: Stream,
}

/// The devices of one eager context in this process.
pub(crate) struct Devices {
    /// The context's address, and what keeps it alive: another one at the same address would have other devices.
    pub(crate) context: usize,
    _kept: Keep,
    /// What whole names of them begin with: job, replica and task, which a cluster changes.
    prefix: String,
    pub(crate) gpus: Vec<Gpu>,
}

/// Where a tensor is.
pub(crate) enum Place<'a> {
    Host,
    Gpu(&'a Gpu),
}

/// TensorFlow's name of host memory. Names without job and task mean the devices of this process.
pub(crate) const HOST: &CStr = c"/device:CPU:0";

/// What names of host memory begin with whatever the cluster.
const LOCALHOST: &str = "/job:localhost/replica:0/task:0";

impl Devices {
    /// The GPU on which a tensor in this memory would be. Where TensorFlow has split a GPU, it is the first part.
    pub(crate) fn gpu(&self, device: Device) -> Result<&Gpu> {
        self.gpus.iter().find(|gpu| device == Device::cuda(gpu.ordinal)).ok_or_else(|| {
            let shown: Vec<_> = self.gpus.iter().map(|gpu| format!("cuda:{}", gpu.ordinal)).collect();
            let shown = if shown.is_empty() { "no GPU".into() } else { shown.join(", ") };
            let text = format!(
                "the tensor is on {device}, and tensorflow shows {shown} in this process: see tf.config.set_visible_devices"
            );
            Error::new(ErrorKind::Device, text)
        })
    }

    /// The device of this process with this whole name.
    pub(crate) fn named(&self, name: &CStr) -> Option<Place<'_>> {
        let name = name.to_str().ok()?;
        let (prefix, device) = name.split_at(name.find("/device:")?);
        if prefix != self.prefix && prefix != LOCALHOST {
            return None;
        }
        let gpu = self.gpus.iter().find(|gpu| gpu.name.to_bytes() == device.as_bytes()).map(Place::Gpu);
        gpu.or_else(|| device.starts_with("/device:CPU:").then_some(Place::Host))
    }

    /// Asks TensorFlow for its devices, and each GPU for its stream.
    ///
    /// # Safety
    ///
    /// `context` is alive as long as `kept`.
    pub(crate) unsafe fn learn(runtime: &'static Runtime, context: *mut TFE_Context, kept: Keep) -> Result<Self> {
        register(runtime)?;
        // SAFETY: the caller's obligation, here and below.
        let prefix = unsafe { prefix(runtime, context) }?;
        // SAFETY: see above.
        let listed = unsafe { list(runtime, context) }?;
        let mut gpus = Vec::new();
        for name in listed.iter().filter_map(|name| name.strip_prefix(&prefix)) {
            if !name.starts_with("/device:GPU:") || !runtime.capabilities().cuda {
                continue;
            }
            let name = CString::new(name).expect("it was a C string");
            // SAFETY: see above.
            let told = unsafe { ask(runtime, context, &name) }?;
            gpus.extend(told.map(|(stream, ordinal)| Gpu { name, ordinal, stream }));
        }
        gpus.iter().for_each(|gpu| runtime.consumer.learn(gpu.clone()));
        Ok(Self { context: context.addr(), _kept: kept, prefix, gpus })
    }
}

/// Returns the CUDA device whose memory, its own or managed (`TF_FORCE_UNIFIED_MEMORY`), an address lies in; `None` for
/// host memory.
///
/// # Errors
///
/// Those of [`bridge_cuda::locate`]. An address that the driver does not answer for must not pass for one on the host.
pub(crate) fn gpu_of(address: usize) -> Result<Option<Device>> {
    let located = bridge_cuda::locate(address)?;
    let device = located.map(|located| located.device);
    let on_device = device.filter(|device| [DeviceKind::CUDA, DeviceKind::CUDA_MANAGED].contains(&device.kind));
    Ok(on_device.map(|device| Device::cuda(device.index)))
}

pub(crate) const CPU: &CStr = c"CPU";
pub(crate) const GPU: &CStr = c"GPU";

/// The whole names of all devices, also of other processes in a cluster.
///
/// # Safety
///
/// `context` is alive.
unsafe fn list(runtime: &Runtime, context: *mut TFE_Context) -> Result<Vec<String>> {
    let status = Status::new(&runtime.core);
    // SAFETY: the context is alive; the list is given away.
    unsafe {
        let list = (runtime.eager().TFE_ContextListDevices)(context, status.raw());
        status.check()?;
        Ok(names(runtime, list))
    }
}

/// The names in a list.
///
/// # Safety
///
/// The list is one of TensorFlow's, and taken over.
pub(crate) unsafe fn names(runtime: &Runtime, list: *mut TF_DeviceList) -> Vec<String> {
    let (sessions, status) = (&runtime.sessions, Status::new(&runtime.core));
    // SAFETY: the list is ours until it is deleted, and so are its strings.
    unsafe {
        let text = |i| {
            let name = (sessions.TF_DeviceListName)(list, i, status.raw());
            if name.is_null() { String::new() } else { CStr::from_ptr(name).to_string_lossy().into_owned() }
        };
        let names = (0..(sessions.TF_DeviceListCount)(list)).map(text).collect();
        (sessions.TF_DeleteDeviceList)(list);
        names
    }
}

/// What whole names of this process's devices begin with: that of the device that an operation ran on says it.
///
/// # Safety
///
/// `context` is alive.
unsafe fn prefix(runtime: &'static Runtime, context: *mut TFE_Context) -> Result<String> {
    // SAFETY: the caller's obligation; the handle is ours, and the name lives as long as the device.
    unsafe {
        let status = Status::new(&runtime.core);
        let copy = execute(runtime, context, COPY, HOST, &on_host(runtime)?, &[(c"T", FLOAT)])?;
        let name = (runtime.eager().TFE_TensorHandleDeviceName)(copy.raw(), status.raw());
        status.check()?;
        let name = CStr::from_ptr(name).to_string_lossy();
        Ok(name.split("/device:").next().unwrap_or_default().to_owned())
    }
}

/// The operation that copies a tensor on any device.
pub(crate) const COPY: &CStr = c"DeepCopy";

/// A small tensor in host memory.
fn on_host(runtime: &'static Runtime) -> Result<Handle> {
    Tensor::of(&runtime.core, FLOAT, &[0f32])?.into_handle(runtime)
}

/// Returns TensorFlow's stream and the driver's number of the GPU that it runs on, or -1 where that is no CUDA device.
pub(crate) static STREAM: Operation = Operation {
    name: c"TensorBridgeDevice",
    inputs: &[c"x: float"],
    outputs: &[c"told: int64"],
    attributes: &[],
    host: &[c"told"],
    kernels: &[entry::<Tell>(GPU)],
};

struct Tell;

impl Kernel for Tell {
    fn compute(call: &Call) -> Result<()> {
        let input = call.input(0)?;
        // Here and not later: memory of a stream-ordered pool (`TF_GPU_ALLOCATOR=cuda_malloc_async`) is unknown to the
        // driver as soon as TensorFlow has freed it, which is when this operation is over.
        let gpu = gpu_of(input.address()).ok().flatten();
        let ordinal = gpu.map_or(NO_CUDA, |gpu| i64::from(gpu.index));
        let told = [call.stream()?.handle(), ordinal as u64];
        call.output(&Tensor::of(&call.runtime.core, INT64, &told)?)
    }
}

/// Registers [`STREAM`], unless it is there. Another copy of this crate may have been here, and any copy's kernel tells
/// the same.
pub(crate) fn register(runtime: &'static Runtime) -> Result<()> {
    static REGISTERING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = REGISTERING.lock().unwrap_or_else(PoisonError::into_inner);
    if is_registered(runtime, STREAM.name) { Ok(()) } else { STREAM.register(runtime) }
}

/// What [`STREAM`] returned: the stream and the driver's number, or `None` for another vendor's GPU.
///
/// # Safety
///
/// The tensor is in host memory.
pub(crate) unsafe fn told(tensor: &Tensor) -> Result<Option<(Stream, i32)>> {
    // SAFETY: the caller's obligation.
    let [stream, ordinal] = unsafe { tensor.numbers::<i64, 2>() }.ok_or_else(nothing)?;
    Ok((ordinal != NO_CUDA).then(|| (Stream::from_handle(stream as u64), ordinal as i32)))
}

pub(crate) const FLOAT: c_int = 1;
const INT64: c_int = 9;
/// The number of a GPU that the CUDA driver does not know.
const NO_CUDA: i64 = -1;

/// Returns the stream of a GPU and the driver's number of it.
///
/// # Safety
///
/// `context` is alive.
unsafe fn ask(runtime: &'static Runtime, context: *mut TFE_Context, gpu: &CStr) -> Result<Option<(Stream, i32)>> {
    // SAFETY: the caller's obligation; the handles are ours, the result is in host memory and holds two numbers.
    unsafe {
        let (eager, status) = (runtime.eager(), Status::new(&runtime.core));
        let there = (eager.TFE_TensorHandleCopyToDevice)(on_host(runtime)?.raw(), context, gpu.as_ptr(), status.raw());
        status.check()?;
        let there = Handle::from_raw(runtime, there).ok_or_else(nothing)?;
        let told = execute(runtime, context, STREAM.name, gpu, &there, &[])?;
        let told = (eager.TFE_TensorHandleResolve)(told.raw(), status.raw());
        status.check()?;
        self::told(&Tensor::from_raw(&runtime.core, told).ok_or_else(nothing)?)
    }
}
