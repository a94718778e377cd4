//! The driver's functions for words of host memory in streams.

use super::{Cuda, handle as raw_stream};
use crate::driver::{Failure, Outcome, WordsDriver};
use bridge_core::Stream;
use cudarc::driver::sys::{CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CUdeviceptr, CUresult, CUstream};
use libloading::Library;
use std::ffi::{c_uint, c_void};
use std::ptr::with_exposed_provenance_mut;

/// `CU_STREAM_WRITE_VALUE_DEFAULT`: after the writes of earlier work in the stream.
const IN_ORDER: c_uint = 0;

/// `CU_STREAM_WAIT_VALUE_GEQ`
const REACHED: c_uint = 0;

// Drivers before CUDA 11.7 have others of these.
functions! {
    WordsFunctions:
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
    cuStreamWriteValue64_v2(CUstream, CUdeviceptr, u64, c_uint);
    cuStreamWaitValue64_v2(CUstream, CUdeviceptr, u64, c_uint);
}

impl Cuda {
    fn words(&self, call: &'static str) -> Outcome<&WordsFunctions> {
        self.4.as_ref().ok_or(Failure { call, code: CUresult::CUDA_ERROR_NOT_SUPPORTED as u32 })
    }

    /// Returns the address of a word for the device of the current context.
    fn on_device(&self, word: usize) -> Outcome<CUdeviceptr> {
        let (functions, mut address) = (self.words("cuMemHostGetDevicePointer_v2")?, 0);
        let word = with_exposed_provenance_mut(word);
        // SAFETY: the output is writable; memory that is not registered is an error.
        unsafe { call!(in functions, cuMemHostGetDevicePointer_v2(&mut address, word, 0)) }?;
        Ok(address)
    }
}

impl WordsDriver for Cuda {
    unsafe fn register(&self, start: usize, nbytes: usize) -> Outcome<()> {
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        let (functions, start) = (self.words("cuMemHostRegister_v2")?, with_exposed_provenance_mut(start));
        // SAFETY: the caller's promise; memory that is not mapped is an error.
        unsafe { call!(in functions, cuMemHostRegister_v2(start, nbytes, flags)) }
    }

    unsafe fn unregister(&self, start: usize) -> Outcome<()> {
        let (functions, start) = (self.words("cuMemHostUnregister")?, with_exposed_provenance_mut(start));
        // SAFETY: the caller's promises.
        unsafe { call!(in functions, cuMemHostUnregister(start)) }
    }

    unsafe fn write_word(&self, stream: Stream, word: usize, value: u64) -> Outcome<()> {
        let (functions, word) = (self.words("cuStreamWriteValue64_v2")?, self.on_device(word)?);
        // SAFETY: the caller's promises; the stream is alive, as in the parent module.
        unsafe { call!(in functions, cuStreamWriteValue64_v2(raw_stream(stream), word, value, IN_ORDER)) }
    }

    unsafe fn wait_word(&self, stream: Stream, word: usize, value: u64) -> Outcome<()> {
        let (functions, word) = (self.words("cuStreamWaitValue64_v2")?, self.on_device(word)?);
        // SAFETY: the caller's promises; the stream is alive, as in the parent module.
        unsafe { call!(in functions, cuStreamWaitValue64_v2(raw_stream(stream), word, value, REACHED)) }
    }
}
