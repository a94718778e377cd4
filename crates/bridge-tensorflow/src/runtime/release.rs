//! The deleter of memory that TensorFlow borrows.

use crate::runtime::api::Deallocator;
use std::ffi::c_void;

/// Keeps memory until it is dropped.
pub(crate) type Owner = Box<dyn Send + Sync>;

/// Returns the deleter of memory that `owner` keeps, and the argument that TensorFlow passes to it, once.
pub(crate) fn handed_over<O: Send + Sync + 'static>(owner: O) -> (Deallocator, *mut c_void) {
    (release::<O>, Box::into_raw(Box::new(owner)).cast())
}

/// Drops the owner. TensorFlow calls this once, on any thread, with or without the GIL. The thread may be one that a
/// thread with the GIL is joining; so owners inside that need the GIL must not wait for it there
/// (`bridge-pyo3`).
unsafe extern "C" fn release<O>(_: *mut c_void, _: usize, owner: *mut c_void) {
    // SAFETY: this is the box that `handed_over` made, and TensorFlow passes it once. A lease catches panics of its
    // drop, and the other owners have none.
    drop(unsafe { Box::from_raw(owner.cast::<O>()) });
}
