//! The allocator for PyTorch's memory pools in memory that a store takes over (`CUDAPluggableAllocator`).

use bridge_core::{Device, Stream};
use std::ffi::{c_int, c_void};
use std::panic::catch_unwind;
use std::ptr;

/// Allocates memory. Null tells PyTorch that there is none.
#[unsafe(no_mangle)]
extern "C" fn truebridge_pool_allocate(nbytes: isize, device: c_int, _: *mut c_void) -> *mut c_void {
    let allocate = || bridge_ipc::allocate(Device::cuda(device), usize::try_from(nbytes).ok()?).ok();
    catch_unwind(allocate).ok().flatten().map_or(ptr::null_mut(), ptr::with_exposed_provenance_mut)
}

/// Frees it after the work that is now in the stream.
///
/// # Safety
///
/// `stream` is a stream of the device, or null for the default stream. All work that uses the memory is in it, or
/// ordered before it.
#[unsafe(no_mangle)]
unsafe extern "C" fn truebridge_pool_free(address: *mut c_void, _: isize, device: c_int, stream: *mut c_void) {
    let address = address.expose_provenance();
    let _ = catch_unwind(|| {
        // SAFETY: the caller's promise. PyTorch frees memory in the stream that uses it, after the others.
        unsafe {
            let stream = Stream::from_handle(stream.expose_provenance() as u64);
            bridge_ipc::free(address, Device::cuda(device), stream);
        }
    });
}
