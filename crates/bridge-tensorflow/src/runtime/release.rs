//! The deleter of memory that TensorFlow borrows.

use std::ffi::c_void;

/// Keeps the memory until TensorFlow calls [`release`].
pub(crate) type Owner = Box<dyn Send + Sync>;

/// Converts the owner to the argument that TensorFlow passes to [`release`].
pub(crate) fn into_raw(owner: Owner) -> *mut c_void {
    Box::into_raw(Box::new(owner)).cast()
}

/// Drops the owner. TensorFlow calls this once, on any thread, with or without the GIL. The thread may be one that a
/// thread with the GIL is joining; so owners inside that need the GIL must not wait for it there
/// (`bridge-interpreter`).
pub(crate) unsafe extern "C" fn release(_: *mut c_void, _: usize, owner: *mut c_void) {
    // SAFETY: this is what `into_raw` returned, and TensorFlow passes it once. A lease lets no panic out of its drop,
    // and the other owners have none.
    drop(unsafe { Box::from_raw(owner.cast::<Owner>()) });
}
