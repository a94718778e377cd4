//! Which of many tensors has failed.

use crate::Error;
use std::fmt;

/// A tensor of a batch that could not be converted, or copied.
#[derive(Debug)]
#[non_exhaustive]
pub struct Failed {
    /// Its index in the batch.
    pub index: usize,
    /// The reason.
    pub error: Error,
}

impl Failed {
    /// Returns the failure of the tensor at an index.
    pub const fn new(index: usize, error: Error) -> Self {
        Self { index, error }
    }

    /// Returns the failure of the tensor that is at the index among these.
    pub(crate) fn among(self, tensors: &[usize]) -> Self {
        Self { index: tensors.get(self.index).copied().unwrap_or_default(), error: self.error }
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor {}: {}", self.index, self.error)
    }
}

impl std::error::Error for Failed {}

/// The error names the index.
impl From<Failed> for Error {
    fn from(Failed { index, error }: Failed) -> Self {
        error.at(&format!("tensor {index}"))
    }
}
