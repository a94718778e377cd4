//! Eager tensors, of TensorFlow 2.

pub(crate) mod devices;
#[cfg(feature = "python")]
pub(crate) mod export;
pub(crate) mod handle;
#[cfg(feature = "python")]
pub(crate) mod import;
#[cfg(feature = "python")]
pub(crate) mod process;
