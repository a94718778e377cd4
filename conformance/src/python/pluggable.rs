//! An allocator for PyTorch's `CUDAPluggableAllocator`: a pool that reuses a block at once in the order of its stream,
//! whatever work of other streams still uses it, as RAPIDS' memory manager does.
//!
//! PyTorch finds the two functions by their names in this library.

use libloading::{Library, Symbol};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// Blocks that can be handed out, by device, stream and bytes.
type Free = HashMap<(c_int, usize, isize), Vec<usize>>;

static FREE: LazyLock<Mutex<Free>> = LazyLock::new(Mutex::default);
static IN_USE: AtomicI64 = AtomicI64::new(0);

fn free_blocks() -> MutexGuard<'static, Free> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocates memory of the current CUDA context from the driver. Returns null where there is none.
fn from_driver(size: isize) -> *mut c_void {
    type Allocate = unsafe extern "C" fn(*mut u64, usize) -> c_int;
    let (mut address, size) = (0u64, size.max(1) as usize);
    // SAFETY: loading CUDA's driver runs its initialisers, which any process may do; PyTorch has loaded it before.
    let Ok(driver) = (unsafe { Library::new("libcuda.so.1") }) else { return std::ptr::null_mut() };
    // SAFETY: `cuMemAlloc_v2(CUdeviceptr *, size_t)` has had this signature since CUDA 3.2.
    let Ok(allocate) = (unsafe { driver.get::<Allocate>(c"cuMemAlloc_v2".to_bytes_with_nul()) }) else {
        return std::ptr::null_mut();
    };
    let allocate: Symbol<'_, Allocate> = allocate;
    // SAFETY: `address` is writable for the duration of the call.
    let failed = unsafe { allocate(&mut address, size) };
    if failed == 0 { address as *mut c_void } else { std::ptr::null_mut() }
}

/// `void *alloc(ssize_t size, int device, cudaStream_t stream)`, which PyTorch calls with the device's context current.
/// Returns null where there is no memory.
#[unsafe(no_mangle)]
pub extern "C" fn tb_plug_malloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let known = free_blocks().get_mut(&(device, stream as usize, size)).and_then(Vec::pop);
    let block = known.map_or_else(|| from_driver(size), |address| address as *mut c_void);
    if !block.is_null() {
        IN_USE.fetch_add(size as i64, Relaxed);
    }
    block
}

/// `void free(void *pointer, ssize_t size, int device, cudaStream_t stream)`.
#[unsafe(no_mangle)]
pub extern "C" fn tb_plug_free(pointer: *mut c_void, size: isize, device: c_int, stream: *mut c_void) {
    if pointer.is_null() {
        return;
    }
    IN_USE.fetch_sub(size as i64, Relaxed);
    free_blocks().entry((device, stream as usize, size)).or_default().push(pointer as usize);
}

/// Returns the bytes that PyTorch has in use, which it does not count itself.
pub(crate) fn in_use() -> i64 {
    IN_USE.load(Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_reused_by_stream_and_size() {
        let (one, other) = (0x10 as *mut c_void, 0x20 as *mut c_void);
        let block = 0x7000 as *mut c_void;
        IN_USE.fetch_add(512, Relaxed);
        tb_plug_free(block, 512, 0, one);
        assert_eq!(in_use(), 0);
        let elsewhere = free_blocks().get_mut(&(0, other as usize, 512)).and_then(Vec::pop);
        assert_eq!(elsewhere, None);
        assert_eq!(tb_plug_malloc(512, 0, one), block);
        assert_eq!(in_use(), 512);
        tb_plug_free(block, 512, 0, one);
        tb_plug_free(std::ptr::null_mut(), 512, 0, one);
        assert_eq!(in_use(), 0);
    }
}
