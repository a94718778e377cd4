//! Pointers that C hands in.

use crate::status::refused;
use bridge_core::Result;
use std::ffi::{CStr, c_char};

/// Refuses null.
pub(crate) fn there<T>(pointer: *const T, name: &str) -> Result<()> {
    if pointer.is_null() { Err(refused(format!("{name} is NULL"))) } else { Ok(()) }
}

/// What the pointer points to.
///
/// # Safety
///
/// The pointer is null, or to a `T` that is alive and unchanged as long as the result is used.
pub(crate) unsafe fn look<'a, T>(pointer: *const T, name: &str) -> Result<&'a T> {
    there(pointer, name)?;
    // SAFETY: the caller's obligation.
    Ok(unsafe { &*pointer })
}

/// The `count` values behind the pointer, which may be null if there are none.
///
/// # Safety
///
/// As for [`look`], for so many values.
pub(crate) unsafe fn slice<'a, T>(pointer: *const T, count: usize, name: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    there(pointer, name)?;
    // SAFETY: the caller's obligation.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// The text behind the pointer.
///
/// # Safety
///
/// As for [`look`], for a C string.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str> {
    there(pointer, name)?;
    // SAFETY: the caller's obligation.
    let text = unsafe { CStr::from_ptr(pointer) }.to_str();
    text.map_err(|error| refused(format!("{name} is no UTF-8: {error}")))
}

/// Writes a result.
///
/// # Safety
///
/// The pointer is null, or can be written.
pub(crate) unsafe fn put<T>(out: *mut T, value: T, name: &str) -> Result<()> {
    there(out, name)?;
    // SAFETY: the caller's obligation; what is there need not be initialised.
    unsafe { out.write(value) };
    Ok(())
}
