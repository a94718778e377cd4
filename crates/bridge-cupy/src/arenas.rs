//! The arenas of CuPy's memory pools.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::{Mutex, PoisonError};

/// A pool's dictionary of arenas by stream, found once per pool.
///
/// It lets the usual case be told apart quickly: a pool that has arenas for one stream alone has allocated every one of
/// its blocks there.
#[derive(Default)]
pub(crate) struct Arenas(Mutex<Vec<Pool>>);

/// A weak reference to the pool, as its blocks hold it, and the dictionary, where it was found.
type Pool = (Py<PyAny>, Option<Py<PyDict>>);

/// More pools than this are not remembered: there is one per device, unless the user makes more.
const POOLS_KEPT: usize = 64;

impl Arenas {
    /// Whether the pool behind this weak reference has no arena but that of the stream with this handle.
    pub(crate) fn only(&self, pool: &Bound<'_, PyAny>, handle: u64) -> PyResult<bool> {
        let py = pool.py();
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let position = known.iter().position(|(seen, _)| seen.as_ptr() == pool.as_ptr());
        let position = match position {
            Some(position) => position,
            None if known.len() >= POOLS_KEPT => return Ok(false),
            None => {
                known.push((pool.clone().unbind(), find(&pool.call0()?)?.map(Bound::unbind)));
                known.len() - 1
            }
        };
        let Some(arenas) = &known[position].1 else { return Ok(false) };
        let arenas = arenas.bind(py);
        Ok(arenas.len() == 1 && arenas.contains(handle)?)
    }
}

/// The dictionary among what the pool refers to that holds weak references to arenas, which is how CuPy 14 keeps them. A
/// pool with a block in use has at least one.
fn find<'py>(pool: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyDict>>> {
    let py = pool.py();
    let arena = py.import("cupy.cuda.memory")?.getattr("_Arena")?;
    for object in py.import("gc")?.call_method1("get_referents", (pool,))?.try_iter()? {
        let Ok(candidate) = object?.cast_into::<PyDict>() else { continue };
        let of_arenas = |value: Bound<'py, PyAny>| value.call0().and_then(|value| value.is_instance(&arena));
        if candidate.values().iter().any(|value| of_arenas(value).unwrap_or(false)) {
            return Ok(Some(candidate));
        }
    }
    Ok(None)
}
