//! The interpreter, for callers that run inside Python: the module `interpreter` of `bridge-pyo3` as C functions.

use crate::external::CExternal;
use crate::pointers::{borrow, into_raw, non_null, write};
use crate::status::{Status, answer, refused, speak_python};
use crate::tensor::CTensor;
use crate::view;
use bridge_pyo3::interpreter::{Functions, Object, close, new_capsule, open, report_unraisable, take_capsule};

/// From now on imported memory is released with the GIL, so tb_memory.release may be Py_DecRef. A thread that Python
/// knows takes the GIL and releases the memory at once. On other threads, such as TensorFlow's, the release is deferred
/// to the next drop of an object here on a thread that Python knows, or to a thread of this library. Calls after the
/// first do nothing. TB_ARGUMENT where a function is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_python_open(python: *const Functions) -> Status {
    answer(|| {
        non_null(python, "python")?;
        // SAFETY: the caller's obligation. Numbers may be 0, which functions may not be.
        let addresses = unsafe { python.cast::<[usize; size_of::<Functions>() / size_of::<usize>()]>().read() };
        if let Some(index) = addresses.iter().position(|address| *address == 0) {
            return Err(refused(format!("function {index} of the tb_python is NULL: set every one")));
        }
        // SAFETY: the caller's obligation.
        unsafe { open(*borrow(python, "python")?) };
        speak_python();
        Ok(())
    })
}

/// Call it before the interpreter shuts down, without the GIL. Imported memory that is still in use then is leaked.
#[unsafe(no_mangle)]
pub extern "C" fn tb_python_close() -> Status {
    answer(|| {
        close();
        Ok(())
    })
}

/// Makes a tensor of a DLPack capsule, versioned or not, as tb_tensor_dlpack does for the legacy default stream. The
/// caller holds the GIL. The capsule is consumed, also on most errors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_python_tensor(capsule: Object, out: *mut *mut CTensor) -> Status {
    answer(|| {
        non_null(capsule, "capsule")?;
        non_null(out, "out")?;
        // SAFETY: the caller's obligations.
        unsafe {
            let tensor = CTensor::managed(take_capsule(capsule)?, 0);
            // The deleter of a refused tensor has run.
            report_unraisable();
            write(out, into_raw(tensor?), "out")
        }
    })
}

/// Returns tb_external_dlpack as a capsule (a new reference). The caller holds the GIL.
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
