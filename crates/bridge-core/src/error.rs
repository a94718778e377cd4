//! One error type for the whole path, so that every caller can branch on [`ErrorKind`].

use std::error::Error as StdError;
use std::fmt;

/// What went wrong, coarse enough to branch on. The message says what to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument, such as the name of a target or of a device, means nothing here.
    Argument,
    /// The object is not a tensor that this adapter can lend.
    NotATensor,
    /// The target has no counterpart for the dtype.
    Dtype,
    /// The shape, the strides or the offset describe no valid view of the memory.
    Layout,
    /// The tensor is on another device than asked, or on one that the target does not have.
    Device,
    /// The tensor is read-only and the target cannot keep it so.
    ReadOnly,
    /// A copy would be needed, and `copy=False` forbids it.
    CopyNeeded,
    /// The tensor takes part in automatic differentiation.
    RequiresGrad,
    /// A DLPack capsule was used up before.
    Consumed,
    /// A DLPack capsule breaks the rules of the protocol.
    Protocol,
    /// The DLPack major version, or the version of a framework, is not supported.
    Version,
    /// A framework or a driver library is missing.
    Missing,
    /// The producer refuses to export the tensor (array API: `BufferError`).
    Refused,
    /// One of two streams is being captured into a CUDA graph and the other is not.
    Captured,
    /// A framework or the device has no memory left.
    OutOfMemory,
    /// The CUDA driver reported an error.
    Driver,
    /// A framework raised an error of its own.
    Framework,
}

/// An error with its kind, a message for the user and, where there is one, its cause.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error whose message tells the user what to do next.
    #[cold]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// Attaches the error that caused this one.
    #[must_use]
    pub fn caused_by(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
