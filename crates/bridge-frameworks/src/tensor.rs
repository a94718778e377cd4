//! Tensors as arguments and results of functions that Python calls.

use crate::{AnyAdapter, adapter_of};
use bridge_core::{DType, Error, ErrorKind, Options, Ordering, Output, Result, output, transfer};
use bridge_pyo3::{Borrowed, PyTensor, exception, type_name};
use pyo3::prelude::*;
use std::convert::Infallible;
use std::sync::Arc;

/// A tensor of any framework, as an argument of a function that Python calls.
///
/// pyo3 extracts it; an object of no framework raises `TypeError`. A function returns it, or what it has made from it.
pub struct Tensor<'py> {
    object: PyTensor<'py>,
    adapter: AnyAdapter<'py>,
}

impl<'py> Tensor<'py> {
    /// Finds the framework of an object.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotATensor`] for an object of no framework that the program has imported, and those of
    /// [`adapter_of`].
    pub fn new(object: PyTensor<'py>) -> Result<Self> {
        match adapter_of(&object)? {
            Some(adapter) => Ok(Self { object, adapter }),
            None => Err(no_tensor(&object)),
        }
    }

    /// Returns the Python object.
    pub fn object(&self) -> &PyTensor<'py> {
        &self.object
    }

    /// Returns the adapter of its framework.
    pub fn adapter(&self) -> &AnyAdapter<'py> {
        &self.adapter
    }

    /// Borrows the tensor for the length of a call.
    ///
    /// # Errors
    ///
    /// Those of [`PyAdapter::borrow`](bridge_pyo3::PyAdapter::borrow).
    pub fn borrow(&self) -> Result<Borrowed<'_>> {
        self.adapter.borrow(&self.object)
    }

    /// Returns memory for a result in the framework and on the device of this tensor.
    ///
    /// # Errors
    ///
    /// Those of [`borrow`](Self::borrow) and of [`output`].
    pub fn output<'a>(
        &'a self,
        ordering: &'a Arc<dyn Ordering>,
        dtype: DType,
        shape: &[i64],
    ) -> Result<Output<'a, PyTensor<'py>>> {
        let device = self.borrow()?.device();
        output(&*self.adapter, ordering, device, dtype, shape)
    }

    /// Takes the tensor to another framework, as [`transfer`] does.
    ///
    /// # Errors
    ///
    /// Those of [`transfer`].
    pub fn to(&self, target: AnyAdapter<'py>, ordering: &Arc<dyn Ordering>, options: &Options) -> Result<Self> {
        let (object, _) = transfer(&*self.adapter, &*target, &self.object, ordering, options)?;
        Ok(Self { object, adapter: target })
    }
}

/// Returns the error for an object of no framework.
#[cold]
pub(crate) fn no_tensor(object: &PyTensor<'_>) -> Error {
    let names: Vec<_> = crate::Framework::ALL.iter().map(|framework| framework.name()).collect();
    let text = format!("{} is no tensor: pass one of {}", type_name(object), names.join(", "));
    Error::new(ErrorKind::NotATensor, text)
}

impl<'py> FromPyObject<'_, 'py> for Tensor<'py> {
    type Error = PyErr;

    fn extract(object: pyo3::Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Self::new(object.to_owned()).map_err(|error| exception(object.py(), error))
    }
}

impl<'py> IntoPyObject<'py> for Tensor<'py> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = Infallible;

    fn into_pyobject(self, _: Python<'py>) -> Result<Self::Output, Infallible> {
        Ok(self.object)
    }
}
