//! What users of a framework do other than create tensors as a [`Spec`](crate::Spec) says.

use bridge_core::{ErrorKind, Pending, Result};
use std::fmt;

/// What becomes of the original while a view of it lives.
pub type Afterwards<'a, T> = Box<dyn Fn(&T) -> Result<()> + 'a>;

/// A tensor as users make it.
pub struct Usual<'a, T> {
    /// What it is, for reports.
    pub name: String,
    /// The tensor.
    pub tensor: T,
    /// The operation that its framework defers.
    pub pending: Option<Pending>,
    /// The kind of the error with which its export is refused; `None` for a tensor that is exported.
    pub refused: Option<ErrorKind>,
    /// What its user does with it while a view of it lives. It leaves the elements of the view as they are.
    pub afterwards: Option<Afterwards<'a, T>>,
}

/// Shows everything but the tensor.
impl<T> fmt::Debug for Usual<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, pending, refused, .. } = self;
        f.debug_struct("Usual")
            .field("name", name)
            .field("pending", pending)
            .field("refused", refused)
            .finish_non_exhaustive()
    }
}

/// A function of a framework that was made to raise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Raised {
    /// The function and what it raised, for reports.
    pub name: String,
    /// The kind of the error that an adapter makes of it.
    pub kind: ErrorKind,
    /// Whether it was called.
    pub called: bool,
    /// Whether the error must reach the caller, also where there is another way to convert.
    pub reaches: bool,
}

impl Raised {
    /// The words that the error has.
    pub const WORDS: &'static str = "the suite made this function raise";
}
