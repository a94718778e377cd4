//! One error type for the whole path: callers branch on its [`ErrorKind`].

use std::error::Error as StdError;
use std::fmt;

/// The kind of an error, coarse enough to branch on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is invalid, such as the name of a target or of a device.
    Argument,
    /// The object is not a tensor that the adapter can export.
    NotATensor,
    /// The target has no counterpart for the dtype.
    Dtype,
    /// The shape, the strides or the offset describe no valid view of the memory.
    Layout,
    /// The tensor is not on the requested device, or is on a device that the target does not have.
    Device,
    /// The tensor is read-only, and the target would make it writable.
    ReadOnly,
    /// A copy is needed, and `copy=False` forbids it or no framework can make it.
    CopyNeeded,
    /// The tensor requires grad.
    RequiresGrad,
    /// A DLPack capsule was consumed before.
    Consumed,
    /// A DLPack capsule or an array interface breaks the rules of its protocol.
    Protocol,
    /// The DLPack major version, or the version of a framework, is not supported.
    Version,
    /// A framework or a driver library is missing.
    Missing,
    /// The producer refuses to export the tensor (array API: `BufferError`).
    Refused,
    /// One of two streams is being captured into a CUDA graph and the other is not.
    Captured,
    /// A framework, the host or the device is out of memory.
    OutOfMemory,
    /// The CUDA driver reported an error.
    Driver,
    /// A framework raised an error of its own.
    Framework,
    /// Another process may not have what it asks for: it is of another user, or its ticket is not the right one.
    Denied,
    /// The process that shares the memory has ended or taken it back.
    Gone,
    /// Another process has as many shares, leases or connections as it allows, or does not answer in time; or memory
    /// that was freed is still in use.
    Busy,
}

/// An error: its kind, a message that tells the user what to do next and, where there is one, its cause.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The result of a function that fails with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Makes an error. The message tells the user what to do next.
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

    /// Puts the place of the error in front of the message.
    #[must_use]
    pub fn at(mut self, place: &str) -> Self {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// Returns the kind.
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
