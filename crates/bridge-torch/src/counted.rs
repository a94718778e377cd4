//! Holds on storages that PyTorch counts as its own.
//!
//! A tensor over a storage holds it, too, but is allocated and freed. So a hold adds one to the references of the storage,
//! where their number is found by looking. Only where it says that nothing but tensors refers to the storage: else, such
//! as where an object of Python knows the storage, the hold is a tensor. PyTorch itself drops the last reference.

use crate::functions::Functions;
use crate::library::{AtTensor, Held, SEARCHED, WORD, word};
use bridge_pyo3::{Guarded, PyTensor};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;
use std::ptr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

/// The count of a storage to which only tensors refer, without their number, which is the lower half
/// (`c10/util/intrusive_ptr.h`).
const PLAIN: u64 = 1 << 32;

/// The most references that are counted here. PyTorch has other uses for higher numbers.
const MOST: u64 = 1 << 24;

/// Returns how many tensors refer to a storage with this count, if nothing else does.
fn tensors(count: u64) -> Option<u64> {
    count.checked_sub(PLAIN).filter(|tensors| (1..MOST).contains(tensors))
}

/// Where storages count their references.
pub(crate) struct Counts {
    functions: Functions,
    /// From a `StorageImpl` to its count.
    count: usize,
    /// From a `TensorImpl` to the pointer to its `StorageImpl`.
    storage: usize,
    /// A tensor whose storage nothing else uses.
    spare: Held,
}

/// A reference to a storage. It may be dropped on any thread: PyTorch drops the last one, with the GIL.
pub(crate) struct Counted {
    storage: usize,
    counts: &'static Counts,
}

impl Counts {
    /// Returns where the count is, if it agrees with what PyTorch does with references. `tensor` returns the handle of an
    /// object, and `storage` is the offset of the pointer to the storage.
    ///
    /// # Errors
    ///
    /// What Python raises.
    pub(crate) fn find(
        torch: &Bound<'_, PyModule>,
        functions: Functions,
        tensor: impl Fn(&PyTensor<'_>) -> AtTensor,
        storage: usize,
    ) -> PyResult<Option<&'static Self>> {
        let py = torch.py();
        // The memory is an object of Python, whose references tell when it is released.
        let bytes = py.import("builtins")?.call_method1("bytearray", (64,))?;
        let dtype = [("dtype", torch.getattr("uint8")?)].into_py_dict(py)?;
        let imported = || torch.call_method("frombuffer", (&bytes,), Some(&dtype));
        // SAFETY: the object is alive, and the GIL is held.
        let references = || unsafe { ffi::Py_REFCNT(bytes.as_ptr()) };
        let (unused, sample) = (references(), imported()?);
        // SAFETY: the tensors are alive; a tensor keeps its storage, which is longer than what is searched.
        let (words, held, spare) = unsafe {
            let address = word((*tensor(&sample)).expose_provenance(), storage);
            let words = move || (0..SEARCHED).step_by(WORD).map(move |at| word(address, at)).collect::<Vec<_>>();
            (words, functions.hold(tensor(&sample)), functions.hold(tensor(&imported()?)))
        };
        let (Some(held), Some(spare)) = (held, spare) else { return Ok(None) };
        let of_two = words();
        drop(held);
        let of_one = words();
        let changed: Vec<_> = (0..of_one.len()).filter(|at| of_one[*at] != of_two[*at]).collect();
        let [at] = changed[..] else { return Ok(None) };
        let both = [of_one[at], of_two[at]].map(|count| tensors(count as u64));
        if both != [Some(1), Some(2)] {
            return Ok(None);
        }
        let counts: &Self = Box::leak(Box::new(Self { functions, count: at * WORD, storage, spare }));
        // SAFETY: the sample is alive.
        let counted = unsafe { counts.hold(word((*tensor(&sample)).expose_provenance(), storage)) };
        let two_are_counted = words() == of_two;
        drop(sample);
        let is_kept = words() == of_one && references() == unused + 2;
        drop(counted);
        // SAFETY: the spare tensor is alive.
        let spared = unsafe { counts.number(counts.spare_storage()).load(Relaxed) };
        let is_released = references() == unused + 1 && tensors(spared) == Some(1);
        Ok((two_are_counted && is_kept && is_released).then_some(counts))
    }

    /// Returns a reference to a storage; `None` where not only tensors refer to it.
    ///
    /// # Safety
    ///
    /// The storage is alive, and the GIL is held.
    pub(crate) unsafe fn hold(&'static self, storage: usize) -> Option<Counted> {
        // SAFETY: the caller's obligation.
        let count = unsafe { self.number(storage) };
        // Until it is counted, no object of Python is made for the storage: that takes the GIL.
        tensors(count.load(Relaxed)).map(|_| {
            count.fetch_add(1, Relaxed);
            Counted { storage, counts: self }
        })
    }

    /// # Safety
    ///
    /// The storage is alive as long as the result.
    unsafe fn number<'a>(&self, storage: usize) -> &'a AtomicU64 {
        // SAFETY: the caller's obligation. PyTorch changes the word by atomic operations only.
        unsafe { AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(storage + self.count)) }
    }

    fn spare_storage(&self) -> usize {
        // SAFETY: the tensor is alive.
        unsafe { word((*self.spare.tensor.as_ptr()).expose_provenance(), self.storage) }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // SAFETY: the reference keeps the storage.
        let count = unsafe { self.counts.number(self.storage) };
        let others = |count| tensors(count).filter(|tensors| *tensors > 1).map(|_| count - 1);
        if count.fetch_update(AcqRel, Relaxed, others).is_err() {
            drop(Guarded::new(Last { storage: self.storage, counts: self.counts }));
        }
    }
}

/// A reference that PyTorch drops.
struct Last {
    storage: usize,
    counts: &'static Counts,
}

impl Drop for Last {
    /// Makes another tensor over the spare storage, puts this storage there in place of it, and drops that tensor. Without
    /// memory for a tensor the storage is leaked.
    fn drop(&mut self) {
        let Self { storage, counts } = *self;
        // SAFETY: the spare tensor is alive, and keeps its storage, to which the new tensor no longer refers. Its reference
        // to the other storage is this one.
        unsafe {
            let Some(held) = counts.functions.hold(counts.spare.tensor.as_ptr()) else { return };
            let implementation = (*held.tensor.as_ptr()).expose_provenance();
            ptr::with_exposed_provenance_mut::<usize>(implementation + counts.storage).write(storage);
            counts.number(counts.spare_storage()).fetch_sub(1, AcqRel);
        }
    }
}
