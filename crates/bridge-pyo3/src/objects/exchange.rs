//! The C exchange table of DLPack 1.3, which a type of tensors may have.

use super::PyTensor;
use bridge_core::dlpack::ffi::{DLPACK_MAJOR_VERSION, DLPackExchangeAPI, DLPackExchangeAPIHeader};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi::PyCapsule_GetPointer;
use pyo3::intern;
use pyo3::prelude::*;

/// The most older tables that are searched: a bound for a circular chain.
const CHAIN: usize = 16;

/// Returns the exchange table of a type of tensors, or of a tensor; `None` where there is none of this major version. It
/// is valid for the life of the process (`dlpack.h`).
///
/// # Errors
///
/// What Python raises, and `BufferError` for a capsule without a table.
pub fn exchange_table(of: &PyTensor<'_>) -> PyResult<Option<&'static DLPackExchangeAPI>> {
    let py = of.py();
    let Some(capsule) = of.getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))? else { return Ok(None) };
    // SAFETY: the object is alive and the GIL is held; a wrong name returns null and sets an exception.
    let table = unsafe { PyCapsule_GetPointer(capsule.as_ptr(), c"dlpack_exchange_api".as_ptr()) };
    if table.is_null() {
        return Err(PyErr::take(py).unwrap_or_else(|| PyBufferError::new_err("empty exchange table")));
    }
    let mut header = table.cast::<DLPackExchangeAPIHeader>();
    for _ in 0..CHAIN {
        // SAFETY: a header of the chain is valid for the life of the process, or null.
        let Some(found) = (unsafe { header.as_ref() }) else { break };
        if found.version.major == DLPACK_MAJOR_VERSION {
            // SAFETY: a table of this major version begins with this header (`dlpack.h`), and lives as long.
            return Ok(Some(unsafe { &*header.cast() }));
        }
        header = found.prev_api;
    }
    Ok(None)
}
