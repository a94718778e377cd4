//! Kernels that a crate brings with it, loaded once per device.

use crate::context::Devices;
use crate::driver::{Context, Driver, Failure, Function, Grid, Outcome, RELAXED, error};
use crate::ordering::cuda;
use bridge_core::{Device, Error, ErrorKind, Result, Stream};
use std::ffi::{CStr, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

/// A launch of a kernel.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Launch {
    /// Index of the kernel in [`Kernels::new`]'s names.
    pub kernel: usize,
    /// Blocks, at least 1.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared: u32,
}

impl Launch {
    /// Returns a launch without dynamic shared memory.
    pub const fn new(kernel: usize, blocks: u32, threads: u32) -> Self {
        Self { kernel, blocks, threads, shared: 0 }
    }

    /// Returns the same launch with dynamic shared memory, in bytes for each block.
    #[must_use]
    pub const fn with_shared(self, shared: u32) -> Self {
        Self { shared, ..self }
    }
}

/// The kernels of a crate. Each device loads them at its first launch.
pub struct Kernels {
    image: &'static [u8],
    /// Name and the most dynamic shared memory of each, in bytes.
    names: &'static [(&'static CStr, u32)],
    loaded: Mutex<Vec<(Context, &'static Loaded)>>,
}

bridge_core::debug_fields!(impl[] Kernels: names);

/// The functions on one device, or why there are none.
type Loaded = OnceLock<std::result::Result<Box<[Function]>, Failure>>;

impl Kernels {
    /// Names the kernels of an image: a fatbinary, a cubin, or PTX that ends with a zero byte (`cuModuleLoadData`).
    /// Nothing is loaded yet. Of a fatbinary the driver takes the code for the device, else compiles its PTX.
    ///
    /// # Safety
    ///
    /// `image` is whole, and a fatbinary or cubin is aligned to 8 bytes.
    pub const unsafe fn new(image: &'static [u8], names: &'static [(&'static CStr, u32)]) -> Self {
        Self { image, names, loaded: Mutex::new(Vec::new()) }
    }

    /// Launches a kernel with one parameter, of the type `P`, in `stream` of `device`.
    ///
    /// # Errors
    ///
    /// Those of [`available`](crate::available), [`ErrorKind::Device`] for a device that is not CUDA's,
    /// [`ErrorKind::CopyNeeded`] where the driver cannot load the kernels, and [`ErrorKind::Driver`] when the launch
    /// fails. Nothing has been launched then.
    ///
    /// # Safety
    ///
    /// `P` has the layout of the kernel's parameter. The memory that it names stays valid until the kernel has run, and
    /// `stream` is alive and belongs to `device`.
    pub unsafe fn launch<P: Copy>(&self, device: Device, stream: Stream, launch: Launch, parameter: &P) -> Result<()> {
        // SAFETY: the caller's promises.
        unsafe { self.launch_on(cuda()?.devices(), device, stream, launch, parameter) }
    }

    /// As [`launch`](Self::launch), over any driver.
    unsafe fn launch_on<D: Driver, P: Copy>(
        &self,
        devices: &Devices<D>,
        device: Device,
        stream: Stream,
        launch: Launch,
        parameter: &P,
    ) -> Result<()> {
        let entered = devices.enter(device)?;
        let driver = devices.driver();
        let functions = self.slot(entered.context()).get_or_init(|| self.load(driver));
        let functions = functions.as_ref().map_err(|failure| {
            let cause = error(driver, *failure);
            let text = format!("the kernels for copies cannot be loaded on {device} ({cause}): update the driver");
            Error::new(ErrorKind::CopyNeeded, text).caused_by(cause)
        })?;
        let grid = Grid { blocks: launch.blocks, threads: launch.threads, shared: launch.shared };
        let parameter: *const c_void = std::ptr::from_ref(parameter).cast();
        // SAFETY: the driver reads the parameter during the call; the rest is the caller's promise.
        unsafe { driver.launch(functions[launch.kernel], grid, stream, parameter) }
            .map_err(|failure| error(driver, failure))
    }

    /// Returns the slot for a device's primary context. There are as many as devices, and they are never freed.
    fn slot(&self, context: Context) -> &'static Loaded {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, slot)) = loaded.iter().find(|(known, _)| *known == context) {
            return slot;
        }
        let slot = Box::leak(Box::default());
        loaded.push((context, slot));
        slot
    }

    /// Loads the kernels into the current context. A capture on another thread must not forbid it.
    fn load<D: Driver>(&self, driver: &D) -> Outcome<Box<[Function]>> {
        let mode = driver.exchange_capture_mode(RELAXED)?;
        let loaded = self.load_relaxed(driver);
        driver.exchange_capture_mode(mode)?;
        loaded
    }

    fn load_relaxed<D: Driver>(&self, driver: &D) -> Outcome<Box<[Function]>> {
        let module = driver.load_module(self.image)?;
        let function = |&(name, shared): &(&CStr, u32)| {
            let function = driver.function(module, name)?;
            // Beyond 48 KiB a kernel has to opt in. Where the device has less, the launch fails.
            if shared > 48 << 10 {
                let _ = driver.allow_shared(function, shared);
            }
            Ok(function)
        };
        self.names.iter().map(function).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Call, Fake};

    // SAFETY: no driver sees this stream.
    const STREAM: Stream = unsafe { Stream::from_handle(0xa0) };
    const IMAGE: &[u8] = b"fatbinary";
    const LAUNCH: Launch = Launch::new(1, 3, 256);

    fn kernels() -> Kernels {
        // SAFETY: no driver reads the image.
        unsafe { Kernels::new(IMAGE, &[(c"a", 48 << 10), (c"b", (48 << 10) + 16)]) }
    }

    fn launched(devices: &Devices<Fake>, kernels: &Kernels, device: i32) -> Result<()> {
        // SAFETY: nothing runs.
        unsafe { kernels.launch_on(devices, Device::cuda(device), STREAM, LAUNCH, &7u64) }
    }

    fn loads(calls: Vec<Call>) -> Vec<&'static [u8]> {
        calls.into_iter().filter_map(|call| if let Call::Load(image) = call { Some(image) } else { None }).collect()
    }

    #[test]
    fn each_device_loads_the_image_once() {
        let devices = Devices::new(Fake::default(), 2);
        let kernels = kernels();
        launched(&devices, &kernels, 0).unwrap();
        launched(&devices, &kernels, 0).unwrap();
        let calls = devices.driver().take_calls();
        let grid = Grid { blocks: 3, threads: 256, shared: 0 };
        assert_eq!(calls.iter().filter(|call| **call == Call::Launch(Function(b'b'.into()), grid, STREAM)).count(), 2);
        // 48 KiB need no leave.
        let allowed = calls.iter().filter(|call| matches!(call, Call::AllowShared(..))).collect::<Vec<_>>();
        assert_eq!(allowed, [&Call::AllowShared(Function(b'b'.into()), (48 << 10) + 16)]);
        assert_eq!(loads(calls), [IMAGE]);
        launched(&devices, &kernels, 1).unwrap();
        assert_eq!(loads(devices.driver().take_calls()), [IMAGE], "another device loads it, too");
    }

    #[test]
    fn failures_are_typed_and_leave_the_context_as_it_was() {
        for (call, kind) in [
            ("cuModuleLoadData", ErrorKind::CopyNeeded),
            ("cuModuleGetFunction", ErrorKind::CopyNeeded),
            ("cuLaunchKernel", ErrorKind::Driver),
            ("cuCtxPushCurrent_v2", ErrorKind::Driver),
        ] {
            let devices = Devices::new(Fake::default(), 1);
            devices.driver().fail(call, 1);
            assert_eq!(launched(&devices, &kernels(), 0).unwrap_err().kind(), kind, "{call}");
            assert_eq!(devices.driver().current_context(), Ok(None));
        }
    }
}
