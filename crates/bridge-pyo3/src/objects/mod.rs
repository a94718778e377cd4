//! Objects of Python, in the terms of pyo3.

mod borrowed;
mod capsule;
mod dtypes;
mod errors;
mod exchange;
mod gil;
mod handlers;
mod methods;
mod together;

pub use borrowed::{Borrowed, without_pending};
pub use capsule::{capsule, legacy_capsule, take_capsule};
pub use dtypes::{ArrayDTypes, EXTENSION_DTYPES, NUMPY_DTYPES};
pub use errors::{
    brief, brief_repr, brief_str, exception, framework_error, installed, is_interrupt, is_ordinary, is_out_of_memory,
    not_a_tensor, probe, type_name,
};
pub use exchange::exchange_table;
pub use gil::{
    LeaseOwner, PyOwner, drop_guarded, drop_with_gil, once, refuse_subinterpreters, take_raised, watch_for_exit,
    with_gil,
};
pub use methods::{call, is_instance};
/// The crate `pyo3`, in the version that the adapters take.
#[doc(no_inline)]
pub use pyo3;
pub use together::{apart, batch, together};

use pyo3::prelude::*;

/// Tensors of the adapters for Python.
pub type PyTensor<'py> = Bound<'py, PyAny>;

/// What an adapter remembers of a tensor to see whether it has changed: [`PyAdapter::fingerprint`].
pub type Fingerprint = Box<[usize]>;

/// An adapter whose tensors are Python objects.
pub trait PyAdapter<'py>: bridge_core::Adapter<Tensor = PyTensor<'py>> {
    /// Returns whether `object` is a tensor of this framework, of any kind.
    fn owns(&self, object: &PyTensor<'py>) -> bool;

    /// Borrows a tensor for the length of a call: see [`Borrowed`]. The default exports it, which costs more than a
    /// borrow should.
    ///
    /// # Errors
    ///
    /// Those of [`export`](bridge_core::Adapter::export), except that a tensor may require grad;
    /// [`ErrorKind::CopyNeeded`](bridge_core::ErrorKind::CopyNeeded) for a tensor with a deferred operation.
    fn borrow<'a>(&self, tensor: &'a PyTensor<'py>) -> bridge_core::Result<Borrowed<'a>> {
        Borrowed::of(tensor, self.export(tensor)?)
    }

    /// Returns the device and the address of the first element of `tensor`, or `None` for a tensor without elements.
    /// Unlike [`export`](bridge_core::Adapter::export) it also answers for tensors that cannot be converted, such as
    /// those that require grad.
    ///
    /// # Errors
    ///
    /// Those of [`export`](bridge_core::Adapter::export).
    fn locate(&self, tensor: &PyTensor<'py>) -> bridge_core::Result<Option<(bridge_core::Device, usize)>> {
        let exported = self.export(tensor)?;
        Ok((exported.layout().numel() > 0).then(|| (exported.device(), exported.data())))
    }

    /// Returns what [`is_still`](Self::is_still) later compares a tensor with, in addition to its export, `exported`.
    /// The default is nothing.
    fn fingerprint(&self, tensor: &PyTensor<'py>, exported: &bridge_core::Export) -> Fingerprint {
        let _ = (tensor, exported);
        Fingerprint::default()
    }

    /// Returns whether a tensor still is what was exported as `exported`, as another export would say: the same memory,
    /// shape, strides and dtype. `fingerprint` is that of the tensor. It may answer `false` where that is not known
    /// without an export, and the default does.
    fn is_still(&self, tensor: &PyTensor<'py>, exported: &bridge_core::Export, fingerprint: &Fingerprint) -> bool {
        let _ = (tensor, exported, fingerprint);
        false
    }

    /// Returns a number that tensors of one storage share, where the framework may free the storage's memory although an
    /// export keeps it, as PyTorch's `resize_` of a storage does. `None` where memory that is kept stays. By default each
    /// tensor has its own storage.
    ///
    /// # Errors
    ///
    /// What Python raises.
    fn storage(&self, tensor: &PyTensor<'py>) -> bridge_core::Result<Option<usize>> {
        Ok(Some(tensor.as_ptr() as usize))
    }

    /// Returns whether the tensor has the storage that [`storage`](Self::storage) returned as `number`, with the same
    /// memory. It may answer `false` where that is not known at once, and the default does.
    fn has_storage(&self, tensor: &PyTensor<'py>, number: usize) -> bool {
        let _ = (tensor, number);
        false
    }

    /// Returns the tensor that counts the writes to `tensor`, for
    /// [`overwritten`](bridge_core::Adapter::overwritten): itself, which is the default, or the one that it is a view of.
    /// `None` where writes are not counted.
    ///
    /// # Errors
    ///
    /// What Python raises.
    fn counted_by(&self, tensor: &PyTensor<'py>) -> bridge_core::Result<Option<PyTensor<'py>>> {
        Ok(Some(tensor.clone()))
    }
}
