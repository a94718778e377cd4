//! Pointers that C passes.

use crate::status::{quietly, refused};
use bridge_core::{Error, ErrorKind, Result};
use std::ffi::{CStr, c_char};

/// Refuses null.
pub(crate) fn non_null<T>(pointer: *const T, name: &str) -> Result<()> {
    if pointer.is_null() { Err(refused(format!("{name} is NULL"))) } else { Ok(()) }
}

/// Borrows the value at the pointer.
///
/// # Safety
///
/// The pointer is null, or points to a `T` that is alive and unchanged as long as the result is used.
pub(crate) unsafe fn borrow<'a, T>(pointer: *const T, name: &str) -> Result<&'a T> {
    non_null(pointer, name)?;
    // SAFETY: the caller's obligation.
    Ok(unsafe { &*pointer })
}

/// Checks the size of the struct at the pointer, which is its first field. A struct of another size is not borrowed:
/// its memory may end before ours would. Null is not a fault.
///
/// # Safety
///
/// The pointer is null, or to a struct whose size is set.
pub(crate) unsafe fn right_size<T>(pointer: *const T, name: &str) -> Result<()> {
    // SAFETY: the caller's obligation; only the size is read.
    let size = (!pointer.is_null()).then(|| unsafe { pointer.cast::<usize>().read() });
    let own = size_of::<T>();
    match size.filter(|size| *size != own) {
        None => Ok(()),
        Some(size) => {
            let text = format!(
                "size of the {name} is {size}, and this library knows {own}: set it to sizeof({name}), and compile with the header of this library"
            );
            Err(Error::new(ErrorKind::Version, text))
        }
    }
}

/// Borrows the struct at the pointer, which begins with its size; `None` where it is null.
///
/// # Safety
///
/// As for [`right_size`], and a struct of the right size is alive and unchanged as long as the result is used.
pub(crate) unsafe fn sized<'a, T>(pointer: *const T, name: &str) -> Result<Option<&'a T>> {
    // SAFETY: the caller's obligation.
    unsafe { right_size(pointer, name) }?;
    // SAFETY: as above.
    Ok(unsafe { pointer.as_ref() })
}

/// Borrows the `count` values at the pointer, which may be null if `count` is 0. Refuses more than memory can hold.
///
/// # Safety
///
/// As for [`borrow`], for `count` values.
pub(crate) unsafe fn slice<'a, T>(pointer: *const T, count: usize, name: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    non_null(pointer, name)?;
    // A slice of more bytes than an `isize` counts, or beyond the last address, would be undefined behaviour.
    let bytes = count.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
    if bytes.and_then(|bytes| pointer.addr().checked_add(bytes)).is_none() {
        return Err(refused(format!("{count} {name} exceed the address space: pass their real number")));
    }
    // SAFETY: the caller's obligation.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// Borrows the text at the pointer.
///
/// # Safety
///
/// As for [`borrow`], for a C string.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str> {
    non_null(pointer, name)?;
    // SAFETY: the caller's obligation.
    let text = unsafe { CStr::from_ptr(pointer) }.to_str();
    text.map_err(|error| refused(format!("{name} is not UTF-8: {error}")).caused_by(error))
}

/// Writes a result.
///
/// # Safety
///
/// The pointer is null or writable.
pub(crate) unsafe fn write<T>(out: *mut T, value: T, name: &str) -> Result<()> {
    non_null(out, name)?;
    // SAFETY: the caller's obligation; the memory need not be initialised.
    unsafe { out.write(value) };
    Ok(())
}

/// Moves a value to the heap, for C to own.
pub(crate) fn into_raw<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// Drops a value that C owns, and then the owners that the drop, or an earlier one, has deferred. Null is allowed.
///
/// # Safety
///
/// The pointer is null, or from [`into_raw`] and used no more.
pub(crate) unsafe fn drop_raw<T>(value: *mut T) {
    if !value.is_null() {
        quietly(|| {
            // SAFETY: the caller's obligation.
            drop(unsafe { Box::from_raw(value) });
            bridge_pyo3::interpreter::drop_deferred();
        });
    }
}
