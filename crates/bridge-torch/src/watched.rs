//! Views of memory that must not change, and the writes to them that PyTorch counts.
//!
//! The version counter of such a view is 0 when it is made, and its own views share it. Memory may be leased for longer
//! than its storage lives, and a later storage may have the same address: it has other memory.

use crate::counter::counted_by;
use crate::fork;
use crate::raised;
use crate::runtime::Runtime;
use bridge_core::{Error, ErrorKind, Layout, Lease, Result};
use bridge_pyo3::{PyTensor, call, probe};
use pyo3::intern;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

/// A view that is watched.
struct View {
    layout: Layout,
    memory: usize,
    /// The number of its lease.
    lease: usize,
}

/// The views that are watched.
struct Views {
    /// By the address of their storage.
    views: BTreeMap<usize, View>,
    /// Their storages, by the number of their lease.
    storages: BTreeMap<usize, usize>,
}

static VIEWS: Mutex<Views> = Mutex::new(Views { views: BTreeMap::new(), storages: BTreeMap::new() });

/// How many views there are, which is read without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn views() -> MutexGuard<'static, Views> {
    VIEWS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Views {
    fn leave(&mut self, storage: usize) {
        self.views.remove(&storage);
        COUNT.store(self.views.len(), Relaxed);
    }
}

fn is_any() -> bool {
    COUNT.load(Relaxed) > 0
}

/// Watches the view that was made of the lease with this number.
pub(crate) fn enter(runtime: &Runtime, tensor: &PyTensor<'_>, lease: usize, layout: Layout) -> Result<()> {
    let (storage, memory) = storage(runtime, tensor)?;
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| fork::watch(|| Box::new(self::views())));
    let mut views = views();
    views.storages.insert(lease, storage);
    views.views.insert(storage, View { layout, memory, lease });
    COUNT.store(views.views.len(), Relaxed);
    Ok(())
}

/// Drops a lease whose view is watched no longer.
pub(crate) fn release(lease: Lease) {
    if let Some(number) = lease.watch() {
        let mut views = views();
        let storage = views.storages.remove(&number);
        if let Some(storage) = storage.filter(|at| views.views.get(at).is_some_and(|view| view.lease == number)) {
            views.leave(storage);
        }
    }
    drop(lease);
}

/// Refuses a tensor that shares the memory of a watched view, and its version counter, if PyTorch has written to it.
///
/// # Errors
///
/// [`ErrorKind::ReadOnly`] after a write.
#[inline(always)]
pub(crate) fn check(runtime: &Runtime, tensor: &PyTensor<'_>) -> Result<()> {
    if is_any() { check_written(runtime, tensor) } else { Ok(()) }
}

#[cold]
fn check_written(runtime: &Runtime, tensor: &PyTensor<'_>) -> Result<()> {
    let (storage, memory) = storage(runtime, tensor)?;
    let layout = views().views.get(&storage).filter(|view| view.memory == memory).map(|view| view.layout.clone());
    let Some(layout) = layout else { return Ok(()) };
    if !is_written(tensor, &layout)? {
        return Ok(());
    }
    let text = "torch has written to memory that must not change, and with it to the tensor that it came from: convert that one with copy=True to write to the result, and pass a .clone() of this one";
    Err(Error::new(ErrorKind::ReadOnly, text))
}

/// Watches a tensor no longer: the package writes to it, because the caller wants that.
pub(crate) fn excuse(runtime: &Runtime, tensor: &PyTensor<'_>) -> Result<()> {
    if is_any() {
        let (storage, _) = storage(runtime, tensor)?;
        views().leave(storage);
    }
    Ok(())
}

/// Returns whether the counter has moved, and not because of another shape: operations such as `t.t_()` count, too.
fn is_written(tensor: &PyTensor<'_>, layout: &Layout) -> Result<bool> {
    let py = tensor.py();
    let base = counted_by(tensor)?;
    let look = || -> PyResult<bool> {
        let version: usize = base.getattr(intern!(py, "_version"))?.extract()?;
        let dims = |dims: PyTensor<'_>| dims.extract::<Vec<i64>>();
        let shape = || dims(base.getattr(intern!(py, "shape"))?);
        let strides = || dims(call(&base, intern!(py, "stride"), &[])?);
        Ok(version > 0 && shape()? == layout.shape() && strides()? == layout.strides())
    };
    // A tensor of inference mode has no counter.
    Ok(probe(py, look()).map_err(|error| raised(py, error))? == Some(true))
}

/// Returns the address of a tensor's storage as an object of C++, and that of its memory.
fn storage(runtime: &Runtime, tensor: &PyTensor<'_>) -> Result<(usize, usize)> {
    if let Some(native) = &runtime.native {
        return Ok((native.storage(tensor), native.memory(tensor)));
    }
    let py = tensor.py();
    let look = || -> PyResult<_> {
        let storage = call(tensor, intern!(py, "untyped_storage"), &[])?;
        Ok((
            storage.getattr(intern!(py, "_cdata"))?.extract()?,
            call(&storage, intern!(py, "data_ptr"), &[])?.extract()?,
        ))
    };
    look().map_err(|error| raised(py, error))
}
