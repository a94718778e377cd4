//! `truebridge.stats`.

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Return counts of the whole process.
///
/// Returns
/// -------
/// dict of str to int
///     ``leased`` views were made, and ``released`` views were returned to their owners. The memory of ``pending``
///     views still waits for the device; the memory of ``leaked`` views is kept permanently, because the driver cannot
///     tell when it may be reused. ``unclaimed`` results of TensorFlow's graphs wait for ``take``; ``reclaimed``
///     results were dropped with their session before any ``take``.
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> import truebridge as tb
/// >>> before = tb.stats()["leased"]
/// >>> t = tb.to_torch(np.zeros(3))
/// >>> tb.stats()["leased"] - before
/// 1
#[pyfunction]
pub(crate) fn stats(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let stats = bridge_core::stats();
    let counts = PyDict::new(py);
    counts.set_item("leased", stats.leased)?;
    counts.set_item("released", stats.released)?;
    counts.set_item("leaked", stats.leaked + bridge_cuda::leaked() as u64)?;
    counts.set_item("pending", bridge_cuda::pending_releases())?;
    counts.set_item("unclaimed", bridge_tensorflow::External::unclaimed())?;
    counts.set_item("reclaimed", bridge_tensorflow::External::reclaimed())?;
    // After the counts, so that the owners of all views that they call released are dropped when this returns.
    bridge_pyo3::drop_deferred();
    Ok(counts.into_any())
}
