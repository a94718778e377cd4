//! The driver itself: functions of `libcuda.so.1`.
//!
//! Types and constants are cudarc's. The functions are looked up here, for three reasons: cudarc tries `libcuda.so`
//! first, which may be the stub of a CUDA toolkit; it panics on a missing function; and it declares result codes as a
//! closed enum, although newer drivers add codes.

use crate::driver::{Context, Direction, Driver, Event, Failure, Function, Grid, Module, Outcome, Pointer, RELAXED};
use bridge_core::{Error, ErrorKind, Stream};
use cudarc::driver::sys::{
    CU_MEMHOSTALLOC_PORTABLE, CUcontext, CUdevice, CUdeviceptr, CUevent, CUevent_flags, CUfunction,
    CUfunction_attribute, CUmemoryPool, CUmodule, CUpointer_attribute, CUresult, CUstream, CUstream_flags,
    CUstreamCaptureStatus,
};
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::ptr::{null_mut, with_exposed_provenance, with_exposed_provenance_mut};

/// The driver library that comes with the kernel module, never the toolkit's stub.
pub(crate) const NAME: &str = "libcuda.so.1";

macro_rules! functions {
    ($table:ident: $($name:ident($($type:ty),*);)*) => {
        /// The functions used, by their names in the library.
        #[expect(non_snake_case, reason = "the names of the CUDA driver API")]
        pub(crate) struct $table {
            $($name: unsafe extern "C" fn($($type),*) -> u32,)*
        }

        impl $table {
            /// Looks up all functions. The error is the first missing name.
            pub(crate) fn find(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $(
                        // SAFETY: the signature is that of `cuda.h` for this name, unchanged since the name was
                        // introduced (a changed function gets a new name, such as `_v2`). A library without such names
                        // is an error; one with other functions of these names is not a driver.
                        $name: *unsafe { library.get(stringify!($name).as_bytes()) }.map_err(|_| stringify!($name))?,
                    )*
                })
            }
        }
    };
}

functions! {
    Functions:
    cuInit(c_uint);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuCtxGetCurrent(*mut CUcontext);
    cuCtxPushCurrent_v2(CUcontext);
    cuCtxPopCurrent_v2(*mut CUcontext);
    cuCtxGetDevice(*mut CUdevice);
    cuCtxEnablePeerAccess(CUcontext, c_uint);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuEventSynchronize(CUevent);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamGetFlags(CUstream, *mut c_uint);
    cuStreamQuery(CUstream);
    cuStreamSynchronize(CUstream);
    cuStreamGetCtx(CUstream, *mut CUcontext);
    cuStreamIsCapturing(CUstream, *mut u32);
    cuThreadExchangeStreamCaptureMode(*mut u32);
    cuPointerGetAttributes(c_uint, *mut CUpointer_attribute, *mut *mut c_void, CUdeviceptr);
    cuModuleLoadData(*mut CUmodule, *const c_void);
    cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    cuFuncSetAttribute(CUfunction, c_int, c_int);
    cuLaunchKernel(CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
    cuMemcpyPeerAsync(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, usize, CUstream);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuGetErrorName(u32, *mut *const c_char);
    cuGetErrorString(u32, *mut *const c_char);
}

// Drivers before CUDA 11.2 have no pools.
functions! {
    Pools:
    cuMemAllocAsync(*mut CUdeviceptr, usize, CUstream);
    cuMemFreeAsync(CUdeviceptr, CUstream);
    cuDeviceGetMemPool(*mut CUmemoryPool, CUdevice);
    cuMemPoolSetAccess(CUmemoryPool, *const AccessOf, usize);
}

// Drivers before CUDA 12.5 mark no contexts.
functions! {
    Contexts:
    cuCtxRecordEvent(CUcontext, CUevent);
}

/// Calls a function of the table, and names it in the failure.
///
/// The caller's SAFETY comment states why the arguments are sound.
macro_rules! call {
    ($cuda:expr, $name:ident($($argument:expr),*)) => {
        call!(in $cuda.0, $name($($argument),*))
    };
    (in $table:expr, $name:ident($($argument:expr),*)) => {
        match ($table.$name)($($argument),*) {
            0 => Ok(()),
            code => Err(Failure { call: stringify!($name), code }),
        }
    };
}

mod sharing;
mod words;

use sharing::{AccessOf, SharingFunctions};
use words::WordsFunctions;

/// The CUDA driver, initialised, with at least one device.
pub(crate) struct Cuda(Functions, Option<Pools>, Option<SharingFunctions>, Option<Contexts>, Option<WordsFunctions>);

impl Cuda {
    /// Loads and initialises the driver. Returns it and the number of its devices.
    pub fn load(name: &str) -> Result<(Self, usize), Error> {
        let missing = |text: String| Error::new(ErrorKind::Missing, text);
        // SAFETY: loading the driver runs its initialisers, which every CUDA program does.
        let library = unsafe { Library::new(name) }
            .map_err(|cause| missing(format!("{name} was not found: install the NVIDIA driver")).caused_by(cause))?;
        let functions = Functions::find(&library)
            .map_err(|function| missing(format!("{name} has no {function}: install a newer NVIDIA driver")))?;
        let (pools, sharing) = (Pools::find(&library).ok(), SharingFunctions::find(&library).ok());
        let (contexts, words) = (Contexts::find(&library).ok(), WordsFunctions::find(&library).ok());
        // The driver is never unloaded: frameworks use it, too, and it may have its own threads.
        std::mem::forget(library);
        let cuda = Self(functions, pools, sharing, contexts, words);
        match cuda.initialise() {
            Ok(count @ 1..) => Ok((cuda, count as usize)),
            Ok(_) => Err(no_device()),
            Err(failure) if failure.code == CUresult::CUDA_ERROR_NO_DEVICE as u32 => Err(no_device()),
            Err(failure) => Err(crate::driver::error(&cuda, failure)),
        }
    }

    fn initialise(&self) -> Outcome<c_int> {
        let mut count = 0;
        // SAFETY: the flags must be 0, and `count` is writable.
        unsafe {
            call!(self, cuInit(0))?;
            call!(self, cuDeviceGetCount(&mut count))?;
        }
        Ok(count)
    }

    fn pools(&self, call: &'static str) -> Outcome<&Pools> {
        self.1.as_ref().ok_or(Failure { call, code: CUresult::CUDA_ERROR_NOT_SUPPORTED as u32 })
    }

    /// Returns the text of `cuGetErrorName` or `cuGetErrorString` for a code.
    fn text(&self, function: unsafe extern "C" fn(u32, *mut *const c_char) -> u32, code: u32) -> Option<&'static str> {
        let mut text = std::ptr::null();
        // SAFETY: `text` is writable; an unknown code sets it to null.
        unsafe { function(code, &mut text) };
        if text.is_null() {
            return None;
        }
        // SAFETY: not null, hence a constant of the driver, which is never unloaded.
        unsafe { CStr::from_ptr(text) }.to_str().ok()
    }
}

fn no_device() -> Error {
    Error::new(ErrorKind::Missing, "no CUDA device: the driver sees none (CUDA_VISIBLE_DEVICES may hide it)")
}

fn handle(stream: Stream) -> CUstream {
    stream.handle() as usize as CUstream
}

// SAFETY of the calls below, where a comment says "see above": contexts and events come from this driver and are alive,
// because the crate keeps contexts for the whole process and destroys an event only through its last handle; streams
// are alive by the promise of the caller of an unsafe public function, as the module `driver` says.
impl Driver for Cuda {
    fn retain_primary_context(&self, ordinal: i32) -> Outcome<Context> {
        let (mut device, mut context) = (0, null_mut());
        // SAFETY: both outputs are writable; a wrong ordinal is an error.
        unsafe {
            call!(self, cuDeviceGet(&mut device, ordinal))?;
            call!(self, cuDevicePrimaryCtxRetain(&mut context, device))?;
        }
        Ok(Context(context as usize))
    }

    fn current_context(&self) -> Outcome<Option<Context>> {
        let mut context = null_mut();
        // SAFETY: the output is writable.
        unsafe { call!(self, cuCtxGetCurrent(&mut context)) }?;
        Ok((!context.is_null()).then_some(Context(context as usize)))
    }

    fn enable_peer_access(&self, context: Context) -> Outcome<()> {
        // SAFETY: the context is alive, see above; the flags must be 0.
        unsafe { call!(self, cuCtxEnablePeerAccess(context.0 as CUcontext, 0)) }
    }

    fn open_pool(&self, owner: i32, reader: i32) -> Outcome<()> {
        let pools = self.pools("cuMemPoolSetAccess")?;
        let (mut device, mut pool) = (0, null_mut());
        // SAFETY: the outputs are writable, and a wrong ordinal is an error; the pool lives as long as the driver.
        unsafe {
            call!(self, cuDeviceGet(&mut device, owner))?;
            call!(in pools, cuDeviceGetMemPool(&mut pool, device))?;
            call!(in pools, cuMemPoolSetAccess(pool, &AccessOf::all(reader), 1))
        }
    }

    fn push_context(&self, context: Context) -> Outcome<()> {
        // SAFETY: the context is alive, see above.
        unsafe { call!(self, cuCtxPushCurrent_v2(context.0 as CUcontext)) }
    }

    fn pop_context(&self) -> Outcome<()> {
        let mut popped = null_mut();
        // SAFETY: the output is writable; an empty stack is an error.
        unsafe { call!(self, cuCtxPopCurrent_v2(&mut popped)) }
    }

    fn create_event(&self) -> Outcome<Event> {
        let mut event = null_mut();
        // SAFETY: the output is writable.
        unsafe { call!(self, cuEventCreate(&mut event, CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint)) }?;
        Ok(Event(event as usize))
    }

    fn create_stream(&self) -> Outcome<Stream> {
        let mut stream = null_mut();
        // SAFETY: the output is writable.
        unsafe { call!(self, cuStreamCreate(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint)) }?;
        // SAFETY: the driver has made the stream, and nothing destroys it.
        Ok(unsafe { Stream::from_handle(stream as u64) })
    }

    fn destroy_event(&self, event: Event) -> Outcome<()> {
        // SAFETY: the event is alive, and this is its last handle, see above.
        unsafe { call!(self, cuEventDestroy_v2(event.0 as CUevent)) }
    }

    fn record_event(&self, event: Event, stream: Stream) -> Outcome<()> {
        // SAFETY: event and stream are alive, see above.
        unsafe { call!(self, cuEventRecord(event.0 as CUevent, handle(stream))) }
    }

    fn can_record_contexts(&self) -> bool {
        self.3.is_some()
    }

    fn record_context(&self, event: Event, context: Context) -> Outcome<()> {
        let missing = Failure { call: "cuCtxRecordEvent", code: CUresult::CUDA_ERROR_NOT_SUPPORTED as u32 };
        let contexts = self.3.as_ref().ok_or(missing)?;
        // SAFETY: event and context are alive, see above.
        unsafe { call!(in contexts, cuCtxRecordEvent(context.0 as CUcontext, event.0 as CUevent)) }
    }

    fn wait_event(&self, stream: Stream, event: Event) -> Outcome<()> {
        // SAFETY: event and stream are alive, see above; the flags must be 0.
        unsafe { call!(self, cuStreamWaitEvent(handle(stream), event.0 as CUevent, 0)) }
    }

    fn query_event(&self, event: Event) -> Outcome<bool> {
        // SAFETY: the event is alive, see above.
        match unsafe { call!(self, cuEventQuery(event.0 as CUevent)) } {
            Ok(()) => Ok(true),
            Err(failure) if failure.code == CUresult::CUDA_ERROR_NOT_READY as u32 => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// A blocking stream waits for the legacy stream, but its query does not see work in the legacy stream. The query
    /// of the legacy stream does see work in blocking streams. (Tried on an H200 with CUDA 13.0; not documented.)
    fn is_blocking(&self, stream: Stream) -> Outcome<bool> {
        let mut flags = 0;
        // SAFETY: the stream is alive, see above; the output is writable.
        unsafe { call!(self, cuStreamGetFlags(handle(stream), &mut flags)) }?;
        Ok(flags & CUstream_flags::CU_STREAM_NON_BLOCKING as u32 == 0)
    }

    fn is_idle(&self, stream: Stream) -> Outcome<bool> {
        Ok((stream == Stream::LEGACY || !self.is_blocking(stream)?) && self.is_done(stream)?)
    }

    fn is_done(&self, stream: Stream) -> Outcome<bool> {
        let before = self.exchange_capture_mode(RELAXED)?;
        // SAFETY: the stream is alive, see above.
        let queried = unsafe { call!(self, cuStreamQuery(handle(stream))) };
        self.exchange_capture_mode(before)?;
        match queried {
            Ok(()) => Ok(true),
            Err(failure) if failure.code == CUresult::CUDA_ERROR_NOT_READY as u32 => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    fn is_capturing(&self, stream: Stream) -> Outcome<bool> {
        let mut status = 0;
        // SAFETY: the stream is alive, see above; the output is writable.
        unsafe { call!(self, cuStreamIsCapturing(handle(stream), &mut status)) }?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32)
    }

    fn synchronize(&self, stream: Stream) -> Outcome<()> {
        // SAFETY: the stream is alive, see above.
        unsafe { call!(self, cuStreamSynchronize(handle(stream))) }
    }

    fn synchronize_event(&self, event: Event) -> Outcome<()> {
        // SAFETY: the event is alive, see above.
        unsafe { call!(self, cuEventSynchronize(event.0 as CUevent)) }
    }

    unsafe fn copy(&self, direction: Direction, to: usize, from: usize, nbytes: usize, stream: Stream) -> Outcome<()> {
        let stream = handle(stream);
        let (device_to, device_from) = (to as CUdeviceptr, from as CUdeviceptr);
        // SAFETY: the stream and the contexts are alive, see above; the caller guarantees both ranges.
        unsafe {
            match direction {
                Direction::Up => {
                    call!(self, cuMemcpyHtoDAsync_v2(device_to, with_exposed_provenance(from), nbytes, stream))
                }
                Direction::Down => {
                    call!(self, cuMemcpyDtoHAsync_v2(with_exposed_provenance_mut(to), device_from, nbytes, stream))
                }
                Direction::Within => call!(self, cuMemcpyDtoDAsync_v2(device_to, device_from, nbytes, stream)),
                Direction::Across { to, from } => {
                    let (to, from) = (to.0 as CUcontext, from.0 as CUcontext);
                    call!(self, cuMemcpyPeerAsync(device_to, to, device_from, from, nbytes, stream))
                }
            }
        }
    }

    unsafe fn fill(&self, address: usize, byte: u8, nbytes: usize, stream: Stream) -> Outcome<()> {
        // SAFETY: the stream is alive, see above; the caller guarantees the range.
        unsafe { call!(self, cuMemsetD8Async(address as CUdeviceptr, byte, nbytes, handle(stream))) }
    }

    fn allocate_pinned(&self, nbytes: usize) -> Outcome<usize> {
        let mut memory = null_mut();
        // SAFETY: the output is writable.
        unsafe { call!(self, cuMemHostAlloc(&mut memory, nbytes, CU_MEMHOSTALLOC_PORTABLE)) }?;
        Ok(memory.expose_provenance())
    }

    unsafe fn free_pinned(&self, address: usize) -> Outcome<()> {
        // SAFETY: the caller's promises.
        unsafe { call!(self, cuMemFreeHost(with_exposed_provenance_mut(address))) }
    }

    fn allocate(&self, nbytes: usize, stream: Stream) -> Outcome<usize> {
        let mut address = 0;
        // SAFETY: the output is writable, and the stream is alive, see above.
        unsafe { call!(in self.pools("cuMemAllocAsync")?, cuMemAllocAsync(&mut address, nbytes, handle(stream))) }?;
        Ok(address as usize)
    }

    unsafe fn free(&self, address: usize, stream: Stream) -> Outcome<()> {
        // SAFETY: the stream is alive, see above; the caller guarantees the address.
        unsafe { call!(in self.pools("cuMemFreeAsync")?, cuMemFreeAsync(address as CUdeviceptr, handle(stream))) }
    }

    fn current_device(&self) -> Outcome<i32> {
        let (mut current, mut count) = (0, 0);
        // SAFETY: the outputs are writable; without a current context the first call is an error.
        unsafe {
            call!(self, cuCtxGetDevice(&mut current))?;
            call!(self, cuDeviceGetCount(&mut count))?;
        }
        let is_current = |ordinal: &c_int| {
            let mut device = 0;
            // SAFETY: the output is writable.
            unsafe { call!(self, cuDeviceGet(&mut device, *ordinal)) }.is_ok() && device == current
        };
        let unknown = Failure { call: "cuCtxGetDevice", code: CUresult::CUDA_ERROR_INVALID_DEVICE as u32 };
        (0..count).find(is_current).ok_or(unknown)
    }

    fn context_of(&self, stream: Stream) -> Outcome<Context> {
        let mut context = null_mut();
        // SAFETY: the stream is alive, see above; the output is writable.
        unsafe { call!(self, cuStreamGetCtx(handle(stream), &mut context)) }?;
        Ok(Context(context as usize))
    }

    fn exchange_capture_mode(&self, mut mode: u32) -> Outcome<u32> {
        // SAFETY: the mode is readable and writable, and a C enum is an unsigned int here.
        unsafe { call!(self, cuThreadExchangeStreamCaptureMode(&mut mode)) }?;
        Ok(mode)
    }

    fn pointer(&self, address: usize) -> Outcome<Pointer> {
        use CUpointer_attribute::{
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        };
        let (mut memory_type, mut managed, mut ordinal) = (0u32, 0u32, 0i32);
        let (mut start, mut size): (CUdeviceptr, usize) = (0, 0);
        let mut attributes = [
            (CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (&raw mut memory_type).cast::<c_void>()),
            (CU_POINTER_ATTRIBUTE_IS_MANAGED, (&raw mut managed).cast()),
            (CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, (&raw mut ordinal).cast()),
            (CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, (&raw mut start).cast()),
            (CU_POINTER_ATTRIBUTE_RANGE_SIZE, (&raw mut size).cast()),
        ];
        let mut names = attributes.map(|(name, _)| name);
        let mut outputs = attributes.each_mut().map(|(_, output)| *output);
        let count = names.len() as c_uint;
        // SAFETY: both arrays have `count` entries, and each output is of the attribute's type in the driver API, or
        // zeroed and larger (`bool`). The address is only looked up, never read.
        unsafe {
            call!(self, cuPointerGetAttributes(count, names.as_mut_ptr(), outputs.as_mut_ptr(), address as CUdeviceptr))
        }?;
        Ok(Pointer { memory_type, managed: managed != 0, ordinal, start: start as usize, size })
    }

    fn load_module(&self, image: &'static [u8]) -> Outcome<Module> {
        let mut module = null_mut();
        // SAFETY: the output is writable; the image is whole, as `Kernels::new` demands.
        unsafe { call!(self, cuModuleLoadData(&mut module, image.as_ptr().cast())) }?;
        Ok(Module(module as usize))
    }

    fn function(&self, module: Module, name: &CStr) -> Outcome<Function> {
        let mut function = null_mut();
        // SAFETY: the output is writable, and modules are never unloaded.
        unsafe { call!(self, cuModuleGetFunction(&mut function, module.0 as CUmodule, name.as_ptr())) }?;
        Ok(Function(function as usize))
    }

    fn allow_shared(&self, function: Function, nbytes: u32) -> Outcome<()> {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as c_int;
        // SAFETY: the function belongs to a module, and modules are never unloaded.
        unsafe { call!(self, cuFuncSetAttribute(function.0 as CUfunction, attribute, nbytes as c_int)) }
    }

    unsafe fn launch(&self, function: Function, grid: Grid, stream: Stream, parameter: *const c_void) -> Outcome<()> {
        let Grid { blocks, threads, shared } = grid;
        let (function, mut parameters) = (function.0 as CUfunction, [parameter.cast_mut()]);
        let (parameters, none) = (parameters.as_mut_ptr(), null_mut());
        // SAFETY: the caller guarantees the parameter, which the driver copies; the stream is alive, see above.
        unsafe {
            call!(self, cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, handle(stream), parameters, none))
        }
    }

    fn describe(&self, code: u32) -> String {
        match (self.text(self.0.cuGetErrorName, code), self.text(self.0.cuGetErrorString, code)) {
            (Some(name), Some(text)) => format!("{name} ({text})"),
            _ => format!("CUDA error {code}, unknown to the driver"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(name: &str) -> Error {
        Cuda::load(name).err().expect("no such driver exists")
    }

    #[test]
    fn a_missing_library_is_a_typed_error() {
        let error = refusal("libcuda-of-nobody.so.1");
        assert_eq!(error.kind(), ErrorKind::Missing);
        assert_eq!(error.to_string(), "libcuda-of-nobody.so.1 was not found: install the NVIDIA driver");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_missing_function_is_a_typed_error() {
        let error = refusal("libc.so.6");
        assert_eq!(error.kind(), ErrorKind::Missing);
        assert_eq!(error.to_string(), "libc.so.6 has no cuInit: install a newer NVIDIA driver");
    }
}
