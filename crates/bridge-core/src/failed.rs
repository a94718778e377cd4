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
