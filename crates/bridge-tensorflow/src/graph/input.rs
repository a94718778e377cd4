//! The inputs of a session.

use crate::graph::argument;
use crate::graph::definition::OutputName;
use crate::graph::external::External;
use bridge_core::{DType, Result};
use std::ffi::CString;

/// A tensor of a graph. A run replaces it by the one that is fed.
#[derive(Debug, Clone)]
pub struct Input {
    pub(crate) name: OutputName,
    pub(crate) dtype: DType,
    pub(crate) shape: Option<Vec<Option<i64>>>,
    pub(crate) device: Option<CString>,
    /// Its name in the signature of a saved model.
    pub(crate) key: Option<String>,
}

impl Input {
    /// Declares the tensor with this name, such as `x:0`, of this dtype and shape. Lengths that may differ between runs
    /// are `None`, or -1.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`](bridge_core::ErrorKind::Argument) for a text that is not a name of a tensor.
    pub fn new(name: &str, dtype: DType, shape: &[Option<i64>]) -> Result<Self> {
        let shape = shape.iter().map(|length| length.filter(|length| *length >= 0)).collect();
        Ok(Self { shape: Some(shape), ..Self::of_any_shape(name, dtype)? })
    }

    /// Declares a tensor of any shape.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn of_any_shape(name: &str, dtype: DType) -> Result<Self> {
        Ok(Self { name: OutputName::parse(name)?, dtype, shape: None, device: None, key: None })
    }

    /// Sets the device of the fed tensors, by TensorFlow's name, such as `/device:GPU:1`. The default is the first GPU
    /// if the session has one, and the host if not.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`](bridge_core::ErrorKind::Argument) for a name with a null character.
    pub fn on(mut self, device: &str) -> Result<Self> {
        let name = CString::new(device).map_err(|_| argument("the name of a device holds a null character"))?;
        self.device = Some(name);
        Ok(self)
    }

    /// Returns what is wrong with a tensor that is fed, if anything.
    pub(crate) fn refusal(&self, fed: &External) -> Option<String> {
        if fed.dtype() != self.dtype {
            return Some(format!("is {}, but what was fed is {}", self.dtype, fed.dtype()));
        }
        let shape = self.shape.as_ref()?;
        let fits = shape.len() == fed.shape().len()
            && shape.iter().zip(fed.shape()).all(|(declared, fed)| declared.is_none_or(|declared| declared == *fed));
        let shown: Vec<_> = shape.iter().map(|length| length.map_or("?".into(), |length| length.to_string())).collect();
        (!fits).then(|| format!("has the shape [{}], but what was fed has {:?}", shown.join(", "), fed.shape()))
    }
}

/// The name by which it is fed: its key in a signature, or that of its tensor.
impl std::fmt::Display for Input {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.key {
            Some(key) => f.write_str(key),
            None => self.name.fmt(f),
        }
    }
}
