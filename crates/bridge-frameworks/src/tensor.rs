//! Tensors as arguments and results of functions that Python calls.

use crate::unsupported::no_tensor;
use crate::{AnyAdapter, adapter_of};
use bridge_core::{DType, Error, ErrorKind, Options, Ordering, Output, Result, output, transfer};
use bridge_pyo3::{Borrowed, PyTensor, exception};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::convert::Infallible;
use std::sync::Arc;

/// A tensor of any framework, or of any producer that speaks DLPack or an array interface, as an argument of a function
/// that Python calls.
///
/// pyo3 extracts it; any other object raises `TypeError`. A function returns it, or what it has made from it.
pub struct Tensor<'py> {
    object: PyTensor<'py>,
    adapter: AnyAdapter<'py>,
}

bridge_core::debug_fields!(impl[] Tensor<'_>: adapter);

impl<'py> Tensor<'py> {
    /// Finds the framework of an object.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotATensor`] for an object of no framework that the program has imported, which speaks no protocol
    /// either. [`ErrorKind::Argument`] for a DLPack capsule, which can be read once only. Those of [`adapter_of`].
    pub fn new(object: PyTensor<'py>) -> Result<Self> {
        if object.is_instance_of::<PyCapsule>() {
            let text = "reading a DLPack capsule consumes it: pass the tensor that it came from";
            return Err(Error::new(ErrorKind::Argument, text));
        }
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

    /// Borrows the tensor for the length of a call: see [`borrow`](crate::borrow).
    ///
    /// # Errors
    ///
    /// Those of [`PyAdapter::borrow`](bridge_pyo3::PyAdapter::borrow).
    pub fn borrow(&self) -> Result<Borrowed<'_>> {
        self.adapter.borrow(&self.object)
    }

    /// Returns memory for a result in the framework and on the device of this tensor.
    ///
    /// A result for an object that speaks a protocol is a tensor of the framework that its `__array_namespace__` names
    /// (array API): for an array of JAX an array of JAX, in place.
    ///
    /// # Errors
    ///
    /// Those of [`borrow`](Self::borrow) and of [`output`]. [`ErrorKind::Argument`] for an object that names no
    /// framework.
    pub fn output<'a>(
        &'a self,
        ordering: &'a Arc<dyn Ordering>,
        dtype: DType,
        shape: &[i64],
    ) -> Result<Output<'a, PyTensor<'py>>> {
        if let AnyAdapter::Protocol(protocol) = &self.adapter {
            // Before the caller computes anything.
            protocol.importer()?;
        }
        let device = self.borrow()?.device();
        output(&self.adapter, ordering, device, dtype, shape)
    }

    /// Takes the tensor to another framework, as [`transfer`] does.
    ///
    /// # Errors
    ///
    /// Those of [`transfer`].
    pub fn to(&self, target: AnyAdapter<'py>, ordering: &Arc<dyn Ordering>, options: &Options) -> Result<Self> {
        let (object, _) = transfer(&self.adapter, &target, &self.object, ordering, options)?;
        Ok(Self { object, adapter: target })
    }
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
