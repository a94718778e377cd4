//! Managed tensors: the owners of those that are passed, and those that the library returns.

use super::interface::*;
use bridge_fuzz::addresses;
use std::ffi::c_void;
use std::ptr::with_exposed_provenance;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// The owner of memory, with the shape and the strides of a managed tensor.
pub struct Owner {
    pub released: Arc<AtomicU32>,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
}

pub unsafe extern "C" fn release(owner: *mut c_void) {
    // SAFETY: the owner is of `calls`, and released once.
    unsafe { Box::from_raw(owner.cast::<Owner>()) }.released.fetch_add(1, SeqCst);
}

pub unsafe extern "C" fn delete_legacy(managed: *mut Legacy) {
    // SAFETY: the managed tensor is of `calls`, and deleted once.
    unsafe { release(Box::from_raw(managed).context) };
}

pub unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    // SAFETY: as above.
    unsafe { release(Box::from_raw(managed).context) };
}

/// A managed tensor of the library.
#[derive(Clone, Copy)]
pub struct Made {
    pub managed: *mut c_void,
    pub versioned: bool,
}

impl Made {
    fn tensor(&self) -> DlTensor {
        // SAFETY: the managed tensor is alive, and of this ABI.
        unsafe {
            match self.versioned {
                true => (*self.managed.cast::<Versioned>()).tensor,
                false => (*self.managed.cast::<Legacy>()).tensor,
            }
        }
    }

    /// Checks what every managed tensor of the library is, and reads all elements where that is allowed.
    pub fn check(&self, readable: bool) {
        let tensor = self.tensor();
        let ndim = usize::try_from(tensor.ndim).expect("the number of dimensions is not negative");
        assert!(ndim <= 64 && tensor.byte_offset == 0);
        assert!(tensor.dtype.lanes == 1 || tensor.dtype.bits == 4);
        if ndim > 0 {
            assert!(!tensor.shape.is_null() && !tensor.strides.is_null());
        }
        let numbers = |pointer: *mut i64| match ndim {
            0 => &[][..],
            // SAFETY: both have so many numbers, and live as long as the managed tensor.
            _ => unsafe { std::slice::from_raw_parts(pointer, ndim) },
        };
        let (shape, strides) = (numbers(tensor.shape), numbers(tensor.strides));
        if readable && matches!(tensor.device.kind, 1 | 3) {
            let itemsize = i128::from(tensor.dtype.bits) / 8;
            for address in addresses(tensor.data.addr() as i128, shape, strides, itemsize) {
                for byte in address..address + itemsize {
                    // SAFETY: the byte is one of an element.
                    std::hint::black_box(unsafe { with_exposed_provenance::<u8>(byte as usize).read() });
                }
            }
        }
    }

    pub fn delete(self) {
        // SAFETY: the managed tensor is alive, of this ABI, and used no more.
        unsafe {
            match self.versioned {
                true => {
                    let managed = self.managed.cast::<Versioned>();
                    ((*managed).deleter.expect("the library has a deleter"))(managed);
                }
                false => {
                    let managed = self.managed.cast::<Legacy>();
                    ((*managed).deleter.expect("the library has a deleter"))(managed);
                }
            }
        }
    }
}
