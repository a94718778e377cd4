//! The libtorch of this process, looked up once.

use super::libtorch::{Libtorch, failed};
use super::memory::Allocator;
use super::numbers::Numbers;
use super::tensors::{empty, none_of};
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
    pub(crate) numbers: Numbers,
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
        let numbers = Numbers::of(&libtorch, streams.is_some());
        let allocator = Allocator::find(&libtorch);
        // `tch` has no kind for some dtypes of libtorch, and panics when one is requested.
        let has_kind = |dtype: DType| Ok::<_, Error>(none_of(&libtorch, &numbers, dtype)?.f_kind().is_ok());
        let kinds = numbers.dtypes().map(|dtype| Ok((dtype, has_kind(dtype)?))).collect::<Result<Vec<_>>>()?;
        let profile = Profile::export_only("tch")
            .with_name("tch")
            .with_strides(Strides::NonNegative)
            .with_alignment(1)
            .with_dtypes(kinds.into_iter().filter(|(_, has)| *has).map(|(dtype, _)| dtype).collect())
            .with_devices(numbers.kinds().collect())
            .with_keeps_read_only(false)
            .with_private_functions(allocator.knows_its_memory());
        let consumer = Arc::new(TchConsumer { streams, views: Views::default() });
        Ok(Self { profile, consumer, libtorch, allocator, numbers, started: OnceLock::new() })
    }

    /// Makes libtorch initialise CUDA, once: its allocator does not work before.
    pub(crate) fn start_cuda(&self, device: Device) -> Result<()> {
        if self.started.get().is_none() {
            drop(empty(&self.libtorch, &self.numbers, device, DType::UINT8, &[0], Order::RowMajor)?);
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
