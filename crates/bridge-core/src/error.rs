//! One error type for the whole path: callers branch on its [`ErrorKind`].

use crate::advice::{self, Advice, Advised};
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
    /// The shape, the strides or the offset describe no valid view of the memory, or the target takes no tensor of so many
    /// dimensions.
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
    /// A stream is being captured into a CUDA graph: the only one of two, or one where the work would not be captured.
    Captured,
    /// A framework, the host or the device is out of memory.
    OutOfMemory,
    /// The CUDA driver reported an error.
    Driver,
    /// A framework raised its own error.
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
///
/// What the caller can ask for instead is [`Advice`], which [`Display`](fmt::Display) writes in the words of Rust. A
/// front end for another language writes it in its own: see [`worded`](Self::worded).
///
/// ```
/// use bridge_core::{Advice, Error, ErrorKind};
///
/// let error = Error::new(ErrorKind::CopyNeeded, "the strides are not compact").advise(Advice::AllowCopy);
/// assert_eq!(error.to_string(), "the strides are not compact: allow a copy, with Options::copy at None");
/// assert_eq!(error.worded(|_| "set copy to 1"), "the strides are not compact: set copy to 1");
/// ```
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    advised: Advised,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The result of a function that fails with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Words of advice to make another tensor: see [`Error::of_target`].
const MAKES_ANOTHER: [&str; 8] = [".to_", ".to()", ".astype(", ".clone()", ".dequantize()", ".filled(", "cast", "copy"];

impl Error {
    /// Makes an error. The message tells the user what to do next.
    #[cold]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, advised: Advised::default(), message: message.into(), source: None }
    }

    /// Adds advice to a message that has none.
    #[must_use]
    pub fn advise(mut self, advice: Advice) -> Self {
        self.advised.push(advice, false);
        self
    }

    /// Adds an alternative to the advice at the end of the message. An error keeps at most two.
    #[must_use]
    pub fn or_advise(mut self, advice: Advice) -> Self {
        self.advised.push(advice, true);
        self
    }

    /// Returns the advice, without that in the message.
    pub fn advice(&self) -> impl Iterator<Item = Advice> {
        self.advised.iter()
    }

    /// Returns the message with the advice in a front end's words.
    pub fn worded(&self, words: impl Fn(Advice) -> &'static str) -> String {
        let mut text = self.message.clone();
        self.advised.write(&mut text, words).expect("a string takes all text");
        text
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

    /// Replaces `advice`.
    pub(crate) fn instead(mut self, advice: Advice, other: Advice) -> Self {
        self.advised.replace(advice, other);
        self
    }

    /// Returns the error for a tensor that is a target. Advice to make another tensor of it is replaced: a copy into that
    /// one would be lost.
    pub(crate) fn of_target(self) -> Self {
        let mut error = self.instead(Advice::Detach, Advice::DetachTarget);
        if let Some((reason, advice)) = error.message.rsplit_once(": ")
            && MAKES_ANOTHER.iter().any(|word| advice.contains(word))
        {
            error.message = format!(
                "{reason}: pass one with plain memory, or copy into such a tensor and assign it with the framework of the target"
            );
        }
        error.at("the target")
    }

    /// Returns the kind.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        self.advised.write(f, advice::rust)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_does_not_enlarge_results() {
        assert_eq!(size_of::<Error>(), size_of::<(String, Box<dyn StdError>, ErrorKind)>());
    }

    #[test]
    fn advice_follows_the_message_in_the_words_of_the_front_end() {
        let order = || Error::new(ErrorKind::Argument, "row-major only").advise(Advice::AnyOrder);
        let both = order().or_advise(Advice::ReverseDimensions).or_advise(Advice::Copy);
        assert!(both.advice().eq([Advice::AnyOrder, Advice::ReverseDimensions]), "the first two");
        let python = r#"row-major only: leave order="F" out, or pass permute= to reverse the dimensions"#;
        assert_eq!(both.worded(crate::python::words), python);
        let beside = Error::new(ErrorKind::Device, "not here: move it first").or_advise(Advice::MoveToHost);
        assert_eq!(beside.to_string(), "not here: move it first, or move it, with Options::device at Device::CPU");
        assert_eq!(order().at("x").worded(|_| "…"), "x: row-major only: …");
        let detached = Error::new(ErrorKind::RequiresGrad, "it requires grad").advise(Advice::Detach);
        let text = "the target: it requires grad: pass the detached tensor, which shares its memory";
        assert_eq!(detached.of_target().to_string(), text);
        let sparse =
            Error::new(ErrorKind::NotATensor, "this is sparse: call .to_dense() first").of_target().to_string();
        assert!(sparse.starts_with("the target: this is sparse: pass one with plain memory"), "{sparse}");
        let object = Error::new(ErrorKind::Dtype, "no counterpart: cast the array first").of_target();
        assert!(object.to_string().starts_with("the target: no counterpart: pass one with plain memory"), "{object}");
        let narrow = Error::new(ErrorKind::Dtype, "elements of 4 bits: view it as uint8").of_target();
        assert_eq!(narrow.to_string(), "the target: elements of 4 bits: view it as uint8");
    }
}
