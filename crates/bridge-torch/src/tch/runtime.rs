//! The libtorch of this process, looked up once.

use super::import::{empty, none_of};
use super::libtorch::{Libtorch, failed, named};
use super::memory::Allocator;
use crate::library::function;
use ::tch::Cuda;
use bridge_core::{
    Consumer, DType, Device, DeviceKind, Error, ErrorKind, Order, Profile, Result, Stream, Strides, Views,
};
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, OnceLock};

pub(crate) struct Runtime {
    pub(crate) profile: Profile,
    pub(crate) consumer: Arc<TchConsumer>,
    pub(crate) libtorch: Libtorch,
    pub(crate) allocator: Allocator,
    /// The dtypes that this version names, and their numbers.
    dtypes: Vec<(DType, i32)>,
    /// `c10::DeviceType` of the kinds of device.
    kinds: [(DeviceKind, i32); 2],
    started: OnceLock<()>,
}

impl Runtime {
    pub(crate) fn of_process() -> Result<&'static Self> {
        static RUNTIME: OnceLock<Runtime> = OnceLock::new();
        if let Some(runtime) = RUNTIME.get() {
            return Ok(runtime);
        }
        let made = Self::new()?;
        Ok(RUNTIME.get_or_init(|| made))
    }

    fn new() -> Result<Self> {
        let libtorch = Libtorch::find()?;
        let streams = Streams::find().filter(|_| Cuda::device_count() > 0);
        // SAFETY: functions without arguments that return a number.
        let (cpu, cuda) = unsafe { ((libtorch.device_type_cpu)(), (libtorch.device_type_cuda)()) };
        let allocator = Allocator::find(&libtorch);
        let mut devices = vec![DeviceKind::CPU];
        devices.extend(streams.is_some().then_some(DeviceKind::CUDA));
        let profile = Profile::export_only("tch")
            .with_name("tch")
            .with_strides(Strides::NonNegative)
            .with_alignment(1)
            .with_devices(devices)
            .with_keeps_read_only(false)
            .with_private_functions(allocator.knows_its_memory());
        let mut runtime = Self {
            profile,
            consumer: Arc::new(TchConsumer { streams, views: Views::default() }),
            libtorch,
            allocator,
            dtypes: dtypes(),
            kinds: [(DeviceKind::CPU, cpu), (DeviceKind::CUDA, cuda)],
            started: OnceLock::new(),
        };
        // `tch` has no kind for some dtypes of libtorch, and panics when it is asked for one.
        let has_kind = |(dtype, _): &&(DType, i32)| Ok::<_, Error>(none_of(&runtime, *dtype)?.f_kind().is_ok());
        let kinds = runtime.dtypes.iter().map(|known| Ok((known.0, has_kind(&known)?)));
        let kinds: Vec<_> = kinds.collect::<Result<_>>()?;
        runtime.profile.dtypes = kinds.into_iter().filter(|(_, has)| *has).map(|(dtype, _)| dtype).collect();
        Ok(runtime)
    }

    /// Returns the dtype with this number.
    pub(crate) fn dtype(&self, number: i32) -> Option<DType> {
        self.dtypes.iter().find(|(_, known)| *known == number).map(|(dtype, _)| *dtype)
    }

    /// Returns the number of a dtype.
    pub(crate) fn number(&self, dtype: DType) -> Result<i32> {
        let found = self.dtypes.iter().find(|(known, _)| *known == dtype).map(|(_, number)| *number);
        found.ok_or_else(|| {
            Error::new(ErrorKind::Dtype, format!("libtorch has no dtype {dtype}: cast the tensor first"))
        })
    }

    /// Returns the device with this type and index of `c10::Device`.
    pub(crate) fn device(&self, kind: i32, index: i32) -> Option<Device> {
        let (kind, _) = self.kinds.iter().find(|(_, number)| *number == kind)?;
        Some(Device { kind: *kind, index: index.max(0) })
    }

    /// Returns type and index of `c10::Device`, in which the host has the index -1.
    pub(crate) fn place(&self, device: Device) -> Result<(i32, i32)> {
        let found = self.kinds.iter().find(|(kind, _)| *kind == device.kind).map(|(_, number)| *number);
        let number = found.filter(|_| self.profile.devices.contains(&device.kind)).ok_or_else(|| {
            Error::new(ErrorKind::CopyNeeded, format!("libtorch has no memory on {device} in this process"))
        })?;
        Ok((number, if device.kind == DeviceKind::CPU { -1 } else { device.index }))
    }

    /// Makes libtorch initialise CUDA, once: its allocator does not work before.
    pub(crate) fn start_cuda(&self, device: Device) -> Result<()> {
        if self.started.get().is_none() {
            drop(empty(self, device, DType::UINT8, &[0], Order::RowMajor)?);
            let _ = self.started.set(());
        }
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Tch::set_current_stream`](super::Tch::set_current_stream).
    pub(crate) unsafe fn set_current_stream(&self, device: Device, stream: Stream) -> Result<()> {
        let streams = self.consumer.streams(device)?;
        // libtorch knows the legacy stream only by the handle 0.
        let handle = if stream == Stream::LEGACY { 0 } else { stream.handle() };
        // SAFETY: the caller's obligation.
        match unsafe { (streams.set_current)(ptr::with_exposed_provenance_mut(handle as usize), device.index) } {
            0 => Ok(()),
            _ => Err(failed("does not change its current stream")),
        }
    }
}

/// Returns the dtypes that this version of libtorch names, with their numbers in it.
fn dtypes() -> Vec<(DType, i32)> {
    let number = |(dtype, name): &(DType, &str)| {
        // Names of the newer of the two interfaces have no prefix.
        let spelled = [format!("aoti_torch_dtype_{name}"), format!("torch_dtype_{name}")];
        // SAFETY: functions of these names take nothing and return a number (`shim.h`).
        let function = spelled.iter().find_map(|name| unsafe { named::<unsafe extern "C" fn() -> i32>(name) })?;
        // SAFETY: as above.
        Some((*dtype, unsafe { function() }))
    };
    DType::NAMED.iter().filter_map(number).collect()
}

/// C functions of libtorch's part for CUDA.
struct Streams {
    current: unsafe extern "C" fn(i32, *mut *mut c_void) -> c_int,
    set_current: unsafe extern "C" fn(*mut c_void, i32) -> c_int,
}

impl Streams {
    fn find() -> Option<Self> {
        const CUDA: &str = "libtorch_cuda.so";
        // SAFETY: the types are those of the two `shim.h`.
        unsafe {
            Some(Self {
                current: function(CUDA, "aoti_torch_get_current_cuda_stream")?,
                set_current: function(CUDA, "torch_set_current_cuda_stream")?,
            })
        }
    }
}

pub(crate) struct TchConsumer {
    /// `None` without CUDA.
    streams: Option<Streams>,
    views: Views,
}

impl TchConsumer {
    fn streams(&self, device: Device) -> Result<&Streams> {
        let streams = self.streams.as_ref().filter(|_| (0..Cuda::device_count()).contains(&i64::from(device.index)));
        streams.ok_or_else(|| {
            let text = format!(
                "libtorch has no {device} in this process: link libtorch_cuda, and check tch::Cuda::device_count()"
            );
            Error::new(ErrorKind::Framework, text)
        })
    }
}

// SAFETY: libtorch uses a tensor in its current stream, and in those that `record_stream` notes.
unsafe impl Consumer for TchConsumer {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        if device.kind != DeviceKind::CUDA {
            return Ok(None);
        }
        let mut stream = ptr::null_mut();
        // SAFETY: the function reads a thread-local of libtorch, and the result is writable.
        match unsafe { (self.streams(device)?.current)(device.index, &mut stream) } {
            // SAFETY: PyTorch keeps its streams as long as the process, and an external one is its maker's to keep.
            0 => Ok(Some(unsafe { Stream::from_handle(stream.addr() as u64) })),
            _ => Err(failed("has no current stream")),
        }
    }

    fn views(&self) -> &Views {
        &self.views
    }
}
