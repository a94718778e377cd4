//! GPUs: TensorFlow's names of them, the driver's, and the one stream in which each computes.

use crate::runtime::api::{Core, Sessions, TF_DeviceList};
use crate::runtime::status::Status;
use bridge_core::{Device, DeviceKind, Result, Stream};
use std::ffi::{CStr, CString};
use std::sync::{PoisonError, RwLock};

/// TensorFlow's name of host memory. Names without job and task mean the devices of this process.
pub(crate) const HOST: &CStr = c"/device:CPU:0";

/// The start of TensorFlow's names of GPUs; a number follows.
pub(crate) const GPUS: &str = "/device:GPU:";

/// A GPU. `set_visible_devices` and logical devices make TensorFlow's numbers differ from the driver's.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    /// TensorFlow's name, such as `/device:GPU:0`; empty where it is unknown.
    pub(crate) name: CString,
    /// The driver's number.
    pub(crate) ordinal: i32,
    /// The stream in which TensorFlow computes there, always the same one.
    pub(crate) stream: Stream,
}

/// The GPUs of every session and eager context that was queried, and of every kernel that ran. Entries stay valid: the
/// stream of a GPU never changes.
#[derive(Default)]
pub(crate) struct Gpus(RwLock<Vec<Gpu>>);

impl Gpus {
    /// Adds a GPU, unless the list says as much already.
    pub(crate) fn record(&self, gpu: Gpu) {
        let says_more = |known: &Gpu| known.name.is_empty() && !gpu.name.is_empty();
        let same = |known: &Gpu| (known.stream, known.ordinal) == (gpu.stream, gpu.ordinal);
        if self.find(|known| same(known) && !says_more(known)).is_some() {
            return;
        }
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.retain(|other| other.stream != gpu.stream);
        known.push(gpu);
    }

    /// Adds a GPU on which a kernel computes in this stream. A kernel does not see the GPU's name.
    pub(crate) fn record_unnamed(&self, device: Device, stream: Stream) {
        self.record(Gpu { name: CString::default(), ordinal: device.index, stream });
    }

    fn find(&self, is: impl Fn(&Gpu) -> bool) -> Option<Gpu> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).iter().find(|gpu| is(gpu)).cloned()
    }

    /// Returns the stream of a GPU, if it is known.
    pub(crate) fn stream_of(&self, device: Device) -> Option<Stream> {
        self.find(|gpu| device == Device::cuda(gpu.ordinal)).map(|gpu| gpu.stream)
    }

    /// Returns the driver's number of the GPU with this stream, if it is known.
    pub(crate) fn ordinal_of(&self, stream: Stream) -> Option<i32> {
        self.find(|gpu| gpu.stream == stream).map(|gpu| gpu.ordinal)
    }

    /// Returns TensorFlow's name of a GPU, if a session or a context has reported it.
    pub(crate) fn name_of(&self, device: Device) -> Option<CString> {
        self.find(|gpu| Device::cuda(gpu.ordinal) == device && !gpu.name.is_empty()).map(|gpu| gpu.name)
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

/// Returns the full names in a list of devices, and deletes the list.
///
/// # Safety
///
/// The list is TensorFlow's, and the caller's to delete.
pub(crate) unsafe fn names(core: &Core, sessions: &Sessions, list: *mut TF_DeviceList) -> Vec<String> {
    let status = Status::new(core);
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
