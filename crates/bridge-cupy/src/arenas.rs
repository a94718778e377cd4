//! The arenas of CuPy's memory pools: the stream that a block was allocated on.

use bridge_pyo3::probe;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

/// Each pool's dictionary of arenas by stream, found once per pool. There is one pool per device, unless the user makes
/// more; the dictionaries of further pools are searched every time.
pub(crate) struct Arenas([PyOnceLock<Pool>; 16]);

/// The weak reference to the pool that its blocks hold, and the dictionary, if it was found.
type Pool = (Py<PyAny>, Option<Py<PyDict>>);

impl Arenas {
    pub(crate) const fn new() -> Self {
        Self([const { PyOnceLock::new() }; 16])
    }

    /// Returns whether a block of a pool belongs to the arena of the stream with this handle; `false` where CuPy's
    /// internals differ from those of CuPy 14.
    pub(crate) fn holds(&self, memory: &Bound<'_, PyAny>, handle: u64) -> PyResult<bool> {
        let pool = memory.getattr(intern!(memory.py(), "pool"))?;
        let Some(arenas) = self.of_pool(&pool)? else { return Ok(false) };
        let Some(expected) = arenas.get_item(handle)? else { return Ok(false) };
        // A pool with a single arena has allocated all its blocks there.
        Ok(arenas.len() == 1 || expected.call0()?.is(&arena_of(memory)?))
    }

    fn of_pool<'py>(&self, pool: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let py = pool.py();
        let known = self.0.iter().map_while(|slot| slot.get(py));
        if let Some((_, arenas)) = known.into_iter().find(|(seen, _)| seen.as_ptr() == pool.as_ptr()) {
            return Ok(arenas.as_ref().map(|arenas| arenas.bind(py).clone()));
        }
        let found = find(&pool.call0()?)?;
        if let Some(free) = self.0.iter().find(|slot| slot.get(py).is_none()) {
            // If another thread was faster, the next call searches again.
            let _ = free.set(py, (pool.clone().unbind(), found.clone().map(Bound::unbind)));
        }
        Ok(found)
    }
}

/// Returns the arena of a pooled block: an attribute of its chunk, which only the pickling state exposes to Python.
fn arena_of<'py>(memory: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let reduced = bridge_pyo3::call(memory, intern!(memory.py(), "__reduce__"), &[])?.cast_into::<PyTuple>()?;
    let chunk = reduced.get_borrowed_item(2)?.cast::<PyTuple>()?.get_item(0)?;
    chunk.getattr(intern!(memory.py(), "arena"))
}

/// Finds, among the objects that the pool refers to, the dictionary of weak references to arenas, as in CuPy 14. A pool
/// with a block in use has at least one arena.
fn find<'py>(pool: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyDict>>> {
    let py = pool.py();
    let arena = py.import("cupy.cuda.memory")?.getattr("_Arena")?;
    for object in py.import("gc")?.call_method1("get_referents", (pool,))?.try_iter()? {
        let Ok(candidate) = object?.cast_into::<PyDict>() else { continue };
        let of_arenas = |value: Bound<'py, PyAny>| value.call0().and_then(|value| value.is_instance(&arena));
        for value in candidate.values() {
            if probe(py, of_arenas(value))? == Some(true) {
                return Ok(Some(candidate));
            }
        }
    }
    Ok(None)
}
