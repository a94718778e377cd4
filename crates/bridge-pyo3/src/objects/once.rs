//! Values that are made once in a process.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Returns what a cell holds. The first call makes it.
///
/// Threads that come meanwhile make it as well, and the first one is kept. Waiting for another thread would never end in
/// a child that is forked before that thread is done: the child does not have it.
///
/// # Errors
///
/// Those of `make`. The next call makes it again.
#[inline]
pub fn once<'a, T, E>(
    py: Python<'_>,
    cell: &'a PyOnceLock<T>,
    make: impl FnOnce() -> Result<T, E>,
) -> Result<&'a T, E> {
    if let Some(known) = cell.get(py) {
        return Ok(known);
    }
    let made = make()?;
    // It may hold another by now. The GIL is held from here on, so no process is forked between the two calls.
    let _ = cell.set(py, made);
    Ok(cell.get(py).expect("one of the threads has set it"))
}
