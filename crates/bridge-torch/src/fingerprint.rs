//! Fields: the words of a tensor's implementation, to see later whether it has changed.
//!
//! Shape, strides, offset, dtype, device, flags and the storage are all words of one object. Their offsets need not be
//! known: a tensor whose words are what they were has changed none of them. That is tried out with a tensor, which is
//! changed in each of these, before any fingerprint is used.

use crate::library::{WORD, word};
use bridge_core::MAX_NDIM;
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;
use std::{ptr, slice};

/// The most words of an implementation that are looked at for the flags, which are the last of what a fingerprint
/// holds.
const MOST: usize = 32;

/// The most dimensions whose lengths and strides are in the implementation itself.
pub(crate) const INLINE: usize = 5;

const _: () = assert!(INLINE < MAX_NDIM);

/// A change of a tensor in one respect, or how it is undone.
type Change<'a> = &'a dyn Fn() -> PyResult<()>;

/// Where the words of a fingerprint are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fields {
    /// The offset, in bytes, of the storage, which is the first of them: references are counted before it.
    first: usize,
    /// How many there are.
    count: usize,
}

impl Fields {
    /// Looks where the words are that change with the tensor. `None` where a change would not be noticed.
    ///
    /// # Errors
    ///
    /// What Python raises.
    pub(crate) fn find(torch: &Bound<'_, PyModule>, first: usize) -> PyResult<Option<Self>> {
        let py = torch.py();
        let flags = torch.getattr("_C")?;
        let options = [("dtype", torch.getattr("complex64")?), ("device", "cpu".into_pyobject(py)?.into_any())];
        let options = options.into_py_dict(py)?;
        let zeros = |count: usize| torch.call_method("zeros", (count,), Some(&options));
        let (memory, other) =
            (zeros(64)?.call_method0("untyped_storage")?, zeros(64)?.call_method0("untyped_storage")?);
        let tensor = zeros(1)?;
        let implementation: usize = tensor.getattr("_cdata")?.extract()?;
        let set = |storage, offset: usize, shape: [usize; INLINE], strides: [usize; INLINE]| {
            tensor.call_method1("set_", (storage, offset, shape, strides)).map(drop)
        };
        let (shape, strides) = ([2, 1, 3, 1, 2], [1, 7, 2, 7, 6]);
        let reset = || set(&memory, 3, shape, strides);
        let flag = |name: &str, value: bool| flags.call_method1(name, (&tensor, value)).map(drop);
        reset()?;
        // SAFETY: the tensor is alive. The flags are inside its implementation, and nothing after them is read.
        let at = |index: usize| unsafe { word(implementation, first + index * WORD) };
        let mut count = 0;
        loop {
            let before = at(count);
            flag("_set_neg", true)?;
            let after = at(count);
            flag("_set_neg", false)?;
            count += 1;
            match before == after {
                true if count == MOST => return Ok(None),
                true => (),
                false => break,
            }
        }
        let fields = Self { first, count };
        // SAFETY: as above.
        let words = || unsafe { fields.of(implementation) }.to_vec();
        let marked = words();
        let is_noticed = |change: Change<'_>, undo: Change<'_>| -> PyResult<bool> {
            change()?;
            let is_noticed = words() != marked;
            undo()?;
            Ok(is_noticed && words() == marked)
        };
        let of_dtype = |dtype: &str| {
            let view = tensor.call_method1("view", (torch.getattr(dtype)?,))?;
            tensor.setattr("data", view)
        };
        let changes: [(Change<'_>, Change<'_>); 7] = [
            (&|| set(&memory, 3, [2, 1, 2, 1, 3], strides), &reset),
            (&|| set(&memory, 3, shape, [1, 7, 2, 8, 6]), &reset),
            (&|| set(&memory, 4, shape, strides), &reset),
            (&|| set(&other, 3, shape, strides), &reset),
            (&|| flag("_set_conj", true), &|| flag("_set_conj", false)),
            (&|| flag("_set_neg", true), &|| flag("_set_neg", false)),
            (&|| of_dtype("float64"), &|| of_dtype("complex64")),
        ];
        for (change, undo) in changes {
            if !is_noticed(change, undo)? {
                return Ok(None);
            }
        }
        Ok(Some(fields))
    }

    /// Returns the words of an implementation.
    ///
    /// # Safety
    ///
    /// That of [`words`].
    pub(crate) unsafe fn of<'a>(&self, implementation: usize) -> &'a [usize] {
        // SAFETY: the caller's obligation. As many words have been found in an implementation.
        unsafe { words(implementation + self.first, self.count) }
    }

    /// Returns how many words these are.
    pub(crate) fn count(&self) -> usize {
        self.count
    }
}

/// Returns the words at an address.
///
/// # Safety
///
/// The object there is alive and has so many, and no code changes it as long as the result is used.
pub(crate) unsafe fn words<'a>(start: usize, count: usize) -> &'a [usize] {
    // SAFETY: the caller's obligation; objects and words are aligned.
    unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(start), count) }
}
