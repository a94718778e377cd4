//! The devices of the eager context.

use crate::eager::functions::{EagerRuntime, TFE_Context};
use crate::eager::handle::{COPY, Handle, execute};
use crate::runtime::Runtime;
use crate::runtime::gpus::{GPUS, Gpu, HOST, names};
use crate::runtime::status::Status;
use crate::runtime::stream::{self, FLOAT, STREAM};
use crate::runtime::tensor::{RuntimeTensor, no_tensor};
use bridge_core::{Device, DeviceKind, Error, ErrorKind, Keep, Result, Stream};
use std::ffi::{CStr, CString};

/// The devices of one eager context in this process.
pub(crate) struct Devices {
    /// The owner of the context.
    _kept: Keep,
    /// The start of their full names: job, replica and task, which a cluster changes.
    prefix: String,
    pub(crate) gpus: Vec<Gpu>,
    /// The full names that tensors usually have, and their indices in `gpus`; `None` for the host.
    full: Vec<(CString, Option<usize>)>,
}

/// The device of a tensor: the GPU and its stream, or `None` for the host.
pub(crate) type Place = Option<(Device, Stream)>;

/// The start of the host's full names, in any cluster.
const LOCALHOST: &str = "/job:localhost/replica:0/task:0";

impl Devices {
    /// Returns the GPU for a tensor in this memory. Where TensorFlow has split a GPU, it is the first part.
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

    /// Returns TensorFlow's name of a device.
    pub(crate) fn name_of(&self, device: Device) -> Result<&CStr> {
        match device.kind {
            DeviceKind::CUDA => Ok(&self.gpu(device)?.name),
            _ => Ok(HOST),
        }
    }

    /// Returns the device of this process with this full name.
    pub(crate) fn named(&self, name: &CStr) -> Option<Place> {
        let at = |gpu: &Gpu| Some((Device::cuda(gpu.ordinal), gpu.stream));
        if let Some((_, gpu)) = self.full.iter().find(|(known, _)| **known == *name) {
            return Some(gpu.and_then(|gpu| at(&self.gpus[gpu])));
        }
        let name = name.to_str().ok()?;
        let (prefix, device) = name.split_at(name.find("/device:")?);
        if prefix != self.prefix && prefix != LOCALHOST {
            return None;
        }
        let gpu = self.gpus.iter().find(|gpu| gpu.name.to_bytes() == device.as_bytes()).map(at);
        gpu.or_else(|| device.starts_with("/device:CPU:").then_some(None))
    }

    /// Queries the devices of a context, and the stream of each GPU.
    ///
    /// # Safety
    ///
    /// `context` is alive as long as `kept`.
    pub(crate) unsafe fn query(eager: &'static EagerRuntime, context: *mut TFE_Context, kept: Keep) -> Result<Self> {
        let runtime = eager.runtime;
        stream::register(runtime)?;
        // SAFETY: the caller's obligation, here and below.
        let prefix = unsafe { prefix(eager, context) }?;
        // SAFETY: see above.
        let listed = unsafe { list(eager, context) }?;
        let mut gpus = Vec::new();
        for name in listed.iter().filter_map(|name| name.strip_prefix(&prefix)) {
            if !name.starts_with(GPUS) || !runtime.has_cuda() {
                continue;
            }
            let name = CString::new(name).expect("it was a C string");
            // SAFETY: see above.
            let reported = unsafe { query_stream(eager, context, &name) }?;
            gpus.extend(reported.map(|(stream, ordinal)| Gpu { name, ordinal, stream }));
        }
        gpus.iter().for_each(|gpu| runtime.consumer.gpus.record(gpu.clone()));
        let full = full_names(&prefix, &gpus);
        Ok(Self { _kept: kept, prefix, gpus, full })
    }
}

/// The error for a tensor on a device of another process, or on a GPU of a version that was not tested.
#[cold]
pub(crate) fn elsewhere(runtime: &Runtime, name: &str) -> Error {
    if name.contains(GPUS) && !runtime.profile.private_functions {
        let version = runtime.version();
        let text = format!(
            "the tensor is on {name}, and on a GPU TensorFlow {version} is not supported yet: use 2.12 to 2.21, or copy it to the host"
        );
        return Error::new(ErrorKind::Version, text);
    }
    let text = format!(
        "the tensor is on {name}, which is not a device of this process: copy it to one with tf.identity under tf.device first"
    );
    Error::new(ErrorKind::Device, text)
}

/// Returns the full names of the GPUs and of the host, with the index of each GPU.
fn full_names(prefix: &str, gpus: &[Gpu]) -> Vec<(CString, Option<usize>)> {
    let devices = gpus.iter().enumerate().map(|(index, gpu)| (gpu.name.as_c_str(), Some(index)));
    let devices = devices.chain([(HOST, None)]);
    let full = |(device, place): (&CStr, _)| {
        let name = [prefix.as_bytes(), device.to_bytes()].concat();
        (CString::new(name).expect("both were C strings"), place)
    };
    devices.map(full).collect()
}

/// Returns the full names of all devices, also of other processes in a cluster.
///
/// # Safety
///
/// `context` is alive.
unsafe fn list(eager: &EagerRuntime, context: *mut TFE_Context) -> Result<Vec<String>> {
    let status = Status::new(&eager.runtime.core);
    // SAFETY: the context is alive; the list is ours, and handed over.
    unsafe {
        let list = (eager.functions.TFE_ContextListDevices)(context, status.raw());
        status.check()?;
        Ok(names(&eager.runtime.core, &eager.runtime.sessions, list))
    }
}

/// Returns the start of the full names of this process's devices, from the device that an operation ran on.
///
/// # Safety
///
/// `context` is alive.
unsafe fn prefix(eager: &'static EagerRuntime, context: *mut TFE_Context) -> Result<String> {
    // SAFETY: the caller's obligation; the handle is ours, and the name lives as long as the device.
    unsafe {
        let status = Status::new(&eager.runtime.core);
        let copy = execute(eager, context, COPY, HOST, &on_host(eager)?, &[(c"T", FLOAT)])?;
        let name = (eager.functions.TFE_TensorHandleDeviceName)(copy.raw(), status.raw());
        status.check()?;
        let name = CStr::from_ptr(name).to_string_lossy();
        Ok(name.split("/device:").next().unwrap_or_default().to_owned())
    }
}

/// Returns a small tensor in host memory.
fn on_host(eager: &'static EagerRuntime) -> Result<Handle> {
    Handle::of(eager, &stream::input(eager.runtime)?)
}

/// Returns the stream of a GPU and the driver's number of it.
///
/// # Safety
///
/// `context` is alive.
unsafe fn query_stream(
    eager: &'static EagerRuntime,
    context: *mut TFE_Context,
    gpu: &CStr,
) -> Result<Option<(Stream, i32)>> {
    // SAFETY: the caller's obligation; the handles are ours, the result is in host memory.
    unsafe {
        let (functions, status) = (&eager.functions, Status::new(&eager.runtime.core));
        let input = on_host(eager)?;
        let on_gpu = (functions.TFE_TensorHandleCopyToDevice)(input.raw(), context, gpu.as_ptr(), status.raw());
        status.check()?;
        let on_gpu = Handle::from_raw(eager, on_gpu).ok_or_else(no_tensor)?;
        let result = execute(eager, context, STREAM.name, gpu, &on_gpu, &[])?;
        let report = (functions.TFE_TensorHandleResolve)(result.raw(), status.raw());
        status.check()?;
        stream::reported(&RuntimeTensor::from_raw(&eager.runtime.core, report).ok_or_else(no_tensor)?)
    }
}
