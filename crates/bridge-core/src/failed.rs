//! Which of many tensors has failed.

use crate::Error;

/// A tensor of a batch that could not be converted, or copied.
#[derive(Debug)]
pub struct Failed {
    /// Its index in the batch.
    pub index: usize,
    /// The reason.
    pub error: Error,
}

impl Failed {
    /// Returns the failure of the tensor that is at the index among these.
    pub(crate) fn among(self, tensors: &[usize]) -> Self {
        Self { index: tensors.get(self.index).copied().unwrap_or_default(), error: self.error }
    }
}
