//! Whether this package is the last owner of memory.
//!
//! A [`KeepAlive`] is taken of the object that frees the memory: a storage of PyTorch, a memory block of CuPy, an array
//! of NumPy. It is the last owner if it has the only reference left, the object is of a kind that frees the memory
//! itself, and the bytes lie inside that memory. Everything else counts as shared.

use bridge_pyo3::{PyTensor, drop_guarded, probe, with_gil};
use pyo3::exceptions::PyValueError;
use pyo3::ffi::Py_REFCNT;
use pyo3::intern;
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::ops::Range;

/// How the object of a framework is found, and how it is seen that no other owner is left.
struct Kind {
    framework: &'static str,
    object: for<'py> fn(&PyTensor<'py>) -> PyResult<PyTensor<'py>>,
    is_last: fn(&Bound<'_, PyAny>, &Range<usize>) -> PyResult<bool>,
}

/// TensorFlow is missing: it shares constants and buffers in ways that it does not tell.
static KINDS: [Kind; 3] = [
    Kind { framework: "torch", object: storage_of, is_last: of_torch },
    Kind {
        framework: "cupy",
        object: |array| array.getattr(intern!(array.py(), "data"))?.getattr(intern!(array.py(), "mem")),
        is_last: of_cupy,
    },
    Kind { framework: "numpy", object: |array| Ok(array.clone()), is_last: of_numpy },
];

/// A reference to the object that frees the memory of a tensor. It may be dropped on any thread.
pub(crate) struct KeepAlive {
    kind: &'static Kind,
    /// `None` only while it is being dropped.
    object: Option<Reference>,
}

impl KeepAlive {
    /// Returns a hold on the memory of a tensor; `None` for a framework that does not tell who owns its memory.
    ///
    /// # Errors
    ///
    /// An interrupt.
    pub(super) fn of(framework: &str, tensor: &PyTensor<'_>) -> PyResult<Option<Self>> {
        let Some(kind) = KINDS.iter().find(|kind| kind.framework == framework) else { return Ok(None) };
        let object = probe(tensor.py(), (kind.object)(tensor))?;
        Ok(object.map(|object| Self { kind, object: Some(Reference(Some(object.unbind()))) }))
    }

    /// Returns whether dropping the hold frees these bytes.
    pub(super) fn is_last(&self, py: Python<'_>, bytes: &Range<usize>) -> bool {
        let Some(object) = self.object.as_ref().and_then(|object| object.0.as_ref()) else { return false };
        let object = object.bind(py);
        // Twice: what lies between the two may run Python.
        let is_only = || references(object) == 1;
        let is_last = || {
            probe(py, (self.kind.is_last)(object, bytes)).unwrap_or_else(|error| {
                // An interrupt, and no caller to raise it in.
                error.write_unraisable(py, Some(object));
                None
            })
        };
        is_only() && is_last() == Some(true) && is_only()
    }
}

impl Drop for KeepAlive {
    fn drop(&mut self) {
        self.object.take().into_iter().for_each(|object| drop_guarded(Box::new(object)));
    }
}

/// A counted reference, which is dropped with the GIL. Once the interpreter shuts down it is leaked.
struct Reference(Option<Py<PyAny>>);

impl Drop for Reference {
    fn drop(&mut self) {
        let object = self.0.take();
        let mut object = ManuallyDrop::new(object);
        // A bound reference is given up at once, a bare one when pyo3 next enters Python.
        with_gil(|py| object.take().map(|object| drop(object.into_bound(py))));
    }
}

fn references(object: &Bound<'_, PyAny>) -> isize {
    // SAFETY: the object is alive, and the GIL is held.
    unsafe { Py_REFCNT(object.as_ptr()) }
}

fn is_within(bytes: &Range<usize>, start: usize, nbytes: usize) -> bool {
    start <= bytes.start && bytes.end <= start.saturating_add(nbytes)
}

/// Returns the storage of a tensor. Pinned memory is refused: a copy of the device may read it after it is freed.
fn storage_of<'py>(tensor: &PyTensor<'py>) -> PyResult<PyTensor<'py>> {
    let py = tensor.py();
    match tensor.call_method0(intern!(py, "is_pinned"))?.is_truthy()? {
        true => Err(PyValueError::new_err("pinned")),
        false => tensor.call_method0(intern!(py, "untyped_storage")),
    }
}

/// A storage that PyTorch's allocators have made, that no tensor and no other storage object refers to. Files that are
/// mapped, memory of other processes and of other libraries have storages that cannot be resized, are shared, or have a
/// file name.
fn of_torch(storage: &Bound<'_, PyAny>, bytes: &Range<usize>) -> PyResult<bool> {
    let py = storage.py();
    let number = |name: &str| storage.call_method0(name)?.extract::<usize>();
    let is = |name: &str| storage.call_method0(name)?.is_truthy();
    let users = py
        .import(intern!(py, "torch"))?
        .getattr(intern!(py, "_C"))?
        .call_method1(intern!(py, "_storage_Use_Count"), (storage.getattr(intern!(py, "_cdata"))?,))?;
    let on_host = storage.getattr(intern!(py, "device"))?.getattr(intern!(py, "type"))?.eq("cpu")?;
    Ok(users.extract::<usize>()? == 1
        && is("resizable")?
        && storage.getattr(intern!(py, "filename"))?.is_none()
        && !(on_host && is("is_shared")?)
        && is_within(bytes, number("data_ptr")?, number("nbytes")?))
}

/// Memory of CuPy's own allocators, to which no array refers.
fn of_cupy(memory: &Bound<'_, PyAny>, bytes: &Range<usize>) -> PyResult<bool> {
    let (py, kind) = (memory.py(), memory.get_type());
    let name = kind.name()?;
    let own = ["PooledMemory", "Memory", "MemoryAsync"].contains(&name.to_str()?)
        && kind.module()?.to_str()? == "cupy.cuda.memory";
    let number = |name| memory.getattr(name)?.extract::<usize>();
    Ok(own && is_within(bytes, number(intern!(py, "ptr"))?, number(intern!(py, "size"))?))
}

/// An array with its own memory, to which only its views refer that are dropped with this reference.
fn of_numpy(array: &Bound<'_, PyAny>, bytes: &Range<usize>) -> PyResult<bool> {
    let py = array.py();
    let kind = py.import(intern!(py, "numpy"))?.getattr(intern!(py, "ndarray"))?;
    let mut array = array.clone();
    // The clone, and the owner: the caller, or the view whose base it is.
    while array.get_type().is(&kind) && references(&array) == 2 {
        let base = array.getattr(intern!(py, "base"))?;
        if !base.is_none() {
            array = base;
            continue;
        }
        let flags = array.getattr(intern!(py, "flags"))?;
        let flag = |name: &str| flags.getattr(name)?.is_truthy();
        let interface = array.getattr(intern!(py, "__array_interface__"))?;
        let (start, _): (usize, bool) = interface.get_item(intern!(py, "data"))?.extract()?;
        let nbytes = array.getattr(intern!(py, "nbytes"))?.extract()?;
        return Ok(flag("owndata")? && flag("writeable")? && flag("forc")? && is_within(bytes, start, nbytes));
    }
    Ok(false)
}
