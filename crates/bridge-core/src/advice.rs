//! What a caller can ask for instead of what was refused: said by core, and worded by each front end.

use std::fmt;

/// A change of the caller's requests that an error recommends. Core names it, and each front end has words for it: see
/// [`Error::worded`](crate::Error::worded).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Advice {
    /// Allow a copy.
    AllowCopy,
    /// Allow a move to the other device.
    AllowMove,
    /// Ask for a copy.
    Copy,
    /// Promise to write nothing.
    PromiseReadOnly,
    /// Copy the tensor by itself first.
    CopyFirst,
    /// Ask for no device, or for another one.
    OtherDevice,
    /// Ask for the device `cpu`.
    MoveToHost,
    /// Ask for a device of the kind `cuda`.
    MoveToCuda,
    /// Ask for no order.
    AnyOrder,
    /// Detach the tensor from autograd.
    Detach,
    /// Detach the source of a copy first.
    DetachFirst,
    /// Pass the detached tensor, which shares the memory, as the target of a copy.
    DetachTarget,
    /// Reverse the dimensions by a permutation.
    ReverseDimensions,
    /// Pass an ordering that has copies.
    Copies,
    /// Ask for a cast to the dtype of the target.
    Cast,
    /// Cast the source of a copy first.
    CastFirst,
}

/// Makes the words of a front end: a function from each [`Advice`] to the half sentence that says it.
#[doc(hidden)]
#[macro_export]
macro_rules! words {
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident { $($advice:ident => $text:literal,)* }) => {
        $(#[$attribute])*
        $visibility fn $name(advice: $crate::Advice) -> &'static str {
            match advice {
                $($crate::Advice::$advice => $text,)*
                #[allow(unreachable_patterns, reason = "core knows all of them, and other crates need it")]
                _ => "ask for something else",
            }
        }
    };
}

words! {
    /// The words for programs in Rust.
    pub(crate) fn rust {
        AllowCopy => "allow a copy, with Options::copy at None",
        AllowMove => "allow a move, with Options::copy at None",
        Copy => "ask for a copy, with Options::copied()",
        PromiseReadOnly => "promise not to write to the result, with Options::with_read_only",
        CopyFirst => "copy the tensor first, for example with Options::copied()",
        OtherDevice => "leave Options::device out, or name another device",
        MoveToHost => "move it, with Options::device at Device::CPU",
        MoveToCuda => "move it, with a CUDA device as Options::device",
        AnyOrder => "leave Options::order out",
        Detach => "detach the tensor",
        DetachFirst => "detach the source first",
        DetachTarget => "pass the detached tensor, which shares its memory",
        ReverseDimensions => "reverse the dimensions with Options::permute",
        Copies => "pass an ordering with copies: that of bridge-cuda, or of the facade with the feature `cuda`",
        Cast => "cast the source first, or name the target's dtype in Pair::dtype of copy_all to cast on the way",
        CastFirst => "cast the source first",
    }
}

/// The words for Python, which several front ends share.
#[doc(hidden)]
pub mod python {
    words! {
        /// The words for callers in Python.
        pub fn words {
            AllowCopy => "pass copy=None to allow a copy",
            AllowMove => "pass copy=None to allow a move",
            Copy => "pass copy=True",
            PromiseReadOnly => "pass read_only=True to promise that you do not write to the result",
            CopyFirst => "copy the source first, for example by convert(src, target, copy=True)",
            OtherDevice => "leave device= out, or pass another (`python -m truebridge doctor` says what prevents a device)",
            MoveToHost => "pass device=\"cpu\" to move it",
            MoveToCuda => "pass device=\"cuda\" to move it",
            AnyOrder => "leave order=\"F\" out",
            Detach => "call .detach() first or pass detach=True to a conversion; truebridge.autograd takes gradients across",
            DetachFirst => "call .detach() on the source first",
            DetachTarget => "pass its .detach(), which shares its memory",
            ReverseDimensions => "pass permute= to reverse the dimensions",
            Copies => "copy it with the framework that owns it first",
            Cast => "pass the target's dtype as dtype= to cast on the way, or cast the source first",
            CastFirst => "cast the source first",
        }
    }
}

/// The advice of an error, in two bytes and a flag. Beyond the second it is dropped.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Advised {
    all: [Option<Advice>; 2],
    /// Whether the message before it already ends with advice.
    follows: bool,
}

impl Advised {
    pub(crate) fn push(&mut self, advice: Advice, follows: bool) {
        if self.all[0].is_none() {
            self.follows = follows;
        }
        if let Some(free) = self.all.iter_mut().find(|place| place.is_none()) {
            *free = Some(advice);
        }
    }

    pub(crate) fn replace(&mut self, advice: Advice, other: Advice) {
        self.all.iter_mut().filter(|place| **place == Some(advice)).for_each(|place| *place = Some(other));
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Advice> {
        self.all.into_iter().flatten()
    }

    pub(crate) fn write(&self, f: &mut impl fmt::Write, words: impl Fn(Advice) -> &'static str) -> fmt::Result {
        for (i, advice) in self.iter().enumerate() {
            f.write_str(if i > 0 || self.follows { ", or " } else { ": " })?;
            f.write_str(words(advice))?;
        }
        Ok(())
    }
}
