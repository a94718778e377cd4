//! The interpreter, for callers that run inside Python: `bridge-interpreter` behind C functions.

use crate::external::CExternal;
use crate::pointers::{borrow, into_raw, non_null, write};
use crate::status::{Status, answer};
use crate::tensor::CTensor;
use crate::view;
use bridge_interpreter::{Functions, Object, close, new_capsule, open, report_unraisable, take_capsule};

/// Opens the way into the interpreter. Calls after the first do nothing.
///
/// # Safety
///
/// `python` is null or holds the functions of the interpreter that runs in this process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_python_open(python: *const Functions) -> Status {
    answer(|| {
        // SAFETY: the caller's obligation.
        unsafe { open(*borrow(python, "python")?) };
        Ok(())
    })
}

/// Closes it before the interpreter shuts down.
#[unsafe(no_mangle)]
pub extern "C" fn tb_python_close() -> Status {
    answer(|| {
        close();
        Ok(())
    })
}

/// Takes the tensor out of a DLPack capsule, which is consumed.
///
/// # Safety
///
/// `capsule` is null or a Python object, and the caller holds the GIL. A capsule of DLPack's names holds what they say,
/// and its producer keeps DLPack's promises. `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_python_tensor(capsule: Object, out: *mut *mut CTensor) -> Status {
    answer(|| {
        non_null(capsule, "capsule")?;
        non_null(out, "out")?;
        // SAFETY: the caller's obligations.
        unsafe {
            let tensor = CTensor::managed(take_capsule(capsule)?);
            // The deleter of a refused tensor has run.
            report_unraisable();
            write(out, into_raw(tensor?), "out")
        }
    })
}

/// Returns a DLPack capsule over a fetched tensor, or over one that is fed.
///
/// # Safety
///
/// `external` is null or alive, the caller holds the GIL, and `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_python_capsule(
    external: *const CExternal,
    stream: u64,
    versioned: i32,
    out: *mut Object,
) -> Status {
    answer(|| {
        non_null(out, "out")?;
        // SAFETY: the caller's obligations; the managed tensor is fresh, and passed on.
        unsafe {
            let managed = view::managed(borrow(external, "external")?, stream, versioned != 0)?;
            write(out, new_capsule(managed)?, "out")
        }
    })
}
