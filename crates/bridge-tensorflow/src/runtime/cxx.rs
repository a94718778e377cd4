//! The one C++ function that the runtime calls: no C function returns the stream of a GPU. Without it, TensorFlow is
//! used on the host only.

use crate::runtime::api::TF_OpKernelContext;
use crate::runtime::library::{Libraries, Version, Versions};
use bridge_core::Stream;
use std::ffi::c_void;

/// Versions whose `eigen_device` returns a device whose first member is the interface of its stream: run on a GPU with
/// 1.15 and 2.21, and the same instructions in the versions between.
const STREAMS: [Versions; 2] = [(1, 15)..=(1, 15), (2, 12)..=(2, 21)];

/// Returns whether the stream of a GPU can be queried in this version.
pub(crate) fn shows_streams(version: Version) -> bool {
    STREAMS.iter().any(|versions| versions.contains(&version))
}

/// `const GpuDevice& OpKernelContext::eigen_device<GpuDevice>() const`, in builds for CUDA.
#[derive(Clone, Copy)]
pub(crate) struct GpuDevice(unsafe extern "C" fn(*mut TF_OpKernelContext) -> *const *const *const c_void);

impl GpuDevice {
    pub(crate) fn find(libraries: &Libraries, version: Version) -> Option<Self> {
        if !shows_streams(version) {
            return None;
        }
        // SAFETY: the signatures are what the mangled names say, with a reference as a pointer; tried with the versions
        // of the table.
        unsafe {
            let found = libraries.optional("_ZNK10tensorflow15OpKernelContext12eigen_deviceIN5Eigen9GpuDeviceEEERKT_v");
            found.filter(|_| is_for_cuda(libraries)).map(Self)
        }
    }

    /// Returns the stream of the GPU that a kernel runs on.
    ///
    /// # Safety
    ///
    /// `context` is that of a kernel for GPUs, which is running.
    pub(crate) unsafe fn stream(self, context: *mut TF_OpKernelContext) -> Stream {
        type StreamOf = unsafe extern "C" fn(*const c_void) -> *const u64;
        // SAFETY: in a GPU kernel's run (the caller's obligation), the function returns the address of Eigen's device,
        // whose first member is the address of its stream interface (`GpuDevice` in Eigen's TensorDeviceGpu.h). The
        // interface's table of virtual functions begins with the two destructors, followed by `stream()`, which returns
        // a reference to the handle.
        let handle = unsafe {
            let interface = *(self.0)(context);
            let functions = *interface.cast::<*const *const c_void>();
            let stream_of: StreamOf = std::mem::transmute::<*const c_void, StreamOf>(*functions.add(2));
            *stream_of(interface.cast())
        };
        // SAFETY: TensorFlow keeps its streams as long as the process.
        unsafe { Stream::from_handle(handle) }
    }
}

/// Returns whether the libraries were built for CUDA: builds for the host have the functions for GPUs as well.
///
/// # Safety
///
/// The version is one of [`STREAMS`].
unsafe fn is_for_cuda(libraries: &Libraries) -> bool {
    // SAFETY: the function has this signature in these versions, and no obligations.
    unsafe {
        let built: Option<unsafe extern "C" fn() -> bool> =
            libraries.optional("_ZN10tensorflow19IsGoogleCudaEnabledEv");
        built.is_none_or(|built| built())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::installed;
    use crate::runtime::library::Series;

    #[test]
    fn streams_are_queried_in_tested_versions_alone() {
        let tested = |version: &Version| [(1, 15), (2, 12), (2, 19), (2, 20), (2, 21)].contains(version);
        let versions = [(1, 14), (1, 15), (2, 11), (2, 12), (2, 19), (2, 20), (2, 21), (2, 22), (3, 12)];
        for version in versions {
            assert_eq!(shows_streams(version), tested(&version), "{version:?}");
        }
        let Some(folder) = installed::two() else {
            eprintln!("left out: no TensorFlow 2 (cargo xtask setup fetches it)");
            return;
        };
        // TensorFlow cannot be unloaded.
        // SAFETY: it is the folder of a TensorFlow.
        let libraries = unsafe { Libraries::load(Series::Two, &folder) };
        let libraries = std::mem::ManuallyDrop::new(libraries.unwrap());
        for version in versions {
            assert!(tested(&version) || GpuDevice::find(&libraries, version).is_none(), "{version:?}");
        }
    }
}
