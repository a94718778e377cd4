//! Borrows for C code that Python calls: a table of functions in a capsule, as `truebridge_borrow.h` declares it.

use crate::errors::into_python;
use bridge_core::{Export, MAX_NDIM};
use bridge_frameworks::borrow;
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi::{PyCapsule_New, PyObject};
use pyo3::prelude::*;
use std::ffi::{CStr, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

/// `tb_borrowed`
#[repr(C)]
struct CBorrowed {
    data: *mut c_void,
    kept: *mut c_void,
    stream: u64,
    device_type: i32,
    device_id: i32,
    dtype_code: u8,
    dtype_bits: u8,
    read_only: u16,
    ndim: i32,
    shape: [i64; MAX_NDIM],
    strides: [i64; MAX_NDIM],
}

/// `tb_borrow_api`
#[repr(C)]
struct Table {
    abi: u32,
    borrow: unsafe extern "C" fn(*mut PyObject, *mut CBorrowed) -> c_int,
    end: unsafe extern "C" fn(*mut CBorrowed),
}

static TABLE: Table = Table { abi: 1, borrow: fill, end };

/// `TB_BORROW_CAPSULE`: where `PyCapsule_Import` finds the table.
const NAME: &CStr = c"truebridge._core.borrow";

/// Returns the table in a capsule.
pub(crate) fn capsule(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    // SAFETY: the table and the name are static, and the GIL is held; the result is a new reference, or null with an
    // exception.
    unsafe {
        Bound::from_owned_ptr_or_err(py, PyCapsule_New((&raw const TABLE).cast_mut().cast(), NAME.as_ptr(), None))
    }
}

/// `borrow` of the table.
///
/// # Safety
///
/// The object is alive, `out` is writable, and the caller holds the GIL.
unsafe extern "C" fn fill(object: *mut PyObject, out: *mut CBorrowed) -> c_int {
    // SAFETY: the caller's obligation.
    let py = unsafe { Python::assume_attached() };
    // SAFETY: the caller's obligations.
    let filled = catch_unwind(AssertUnwindSafe(|| unsafe { try_fill(py, object, out) }));
    let error = match filled {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => error,
        Err(_) => PyRuntimeError::new_err("truebridge panicked: please report this"),
    };
    error.restore(py);
    -1
}

/// Fills `out`, all of it but the entries after `ndim`.
///
/// # Safety
///
/// As for [`fill`].
unsafe fn try_fill(py: Python<'_>, object: *mut PyObject, out: *mut CBorrowed) -> PyResult<()> {
    // SAFETY: the object is alive, and the GIL is held.
    let object = unsafe { Bound::from_borrowed_ptr(py, object) };
    let borrowed = borrow(&object).map_err(|error| into_python(py, error))?;
    let (dtype, device) = (borrowed.dtype(), borrowed.device());
    let (shape, strides) = (borrowed.shape(), borrowed.strides());
    // SAFETY: `out` is writable, and a layout has at most `MAX_NDIM` dimensions. Nothing of it is read.
    unsafe {
        (&raw mut (*out).data).write(borrowed.as_ptr());
        (&raw mut (*out).stream).write(borrowed.stream().map_or(0, |stream| stream.handle()));
        (&raw mut (*out).device_type).write(device.kind.0);
        (&raw mut (*out).device_id).write(device.index);
        (&raw mut (*out).dtype_code).write(dtype.code);
        (&raw mut (*out).dtype_bits).write(dtype.bits);
        (&raw mut (*out).read_only).write(borrowed.is_read_only().into());
        (&raw mut (*out).ndim).write(shape.len() as i32);
        ptr::copy_nonoverlapping(shape.as_ptr(), (&raw mut (*out).shape).cast(), shape.len());
        ptr::copy_nonoverlapping(strides.as_ptr(), (&raw mut (*out).strides).cast(), strides.len());
        let kept = borrowed.into_kept().map_or(ptr::null_mut(), Box::into_raw);
        (&raw mut (*out).kept).write(kept.cast());
    }
    Ok(())
}

/// `end` of the table.
///
/// # Safety
///
/// `borrowed` was filled by [`fill`], and has not been passed to this function since.
unsafe extern "C" fn end(borrowed: *mut CBorrowed) {
    // SAFETY: the caller's obligation; the box is taken back once.
    let kept = unsafe { ptr::replace(&raw mut (*borrowed).kept, ptr::null_mut()) }.cast::<Export>();
    if !kept.is_null() {
        // SAFETY: the pointer came from a box of this type.
        let kept = unsafe { Box::from_raw(kept) };
        // Protocol code: a panic must not meet C.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(kept)));
    }
}
