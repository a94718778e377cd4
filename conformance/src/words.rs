//! What reports say of plans, errors and steps. They show no value as Rust writes it.

use crate::model::Expected;
use crate::{Calls, End, Observed, Op, Pieces, Spec};
use bridge_core::{ErrorKind, Pending, Plan};
use std::fmt;

/// Returns what a plan does.
pub fn plan(plan: Plan) -> String {
    plan.reason().map_or("in place".into(), |reason| format!("a copy because of {reason}"))
}

/// Returns the kind of an error, such as `copy needed`.
pub fn kind(kind: ErrorKind) -> String {
    let mut words = String::new();
    for letter in format!("{kind:?}").chars() {
        if letter.is_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.extend(letter.to_lowercase());
    }
    words
}

/// Returns a number of things, such as `1 byte` and `2 bytes`.
pub fn counted(count: usize, thing: &str) -> String {
    counted_as(count, thing, &format!("{thing}s"))
}

/// Returns a number of things that have their own plural.
pub fn counted_as(count: usize, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

/// Returns the bytes that an allocator has in use.
pub fn in_use(bytes: Option<usize>) -> String {
    bytes.map_or("an unknown number of bytes".into(), |bytes| counted(bytes, "byte"))
}

/// Returns what was requested of a conversion.
pub fn copy(copy: Option<bool>) -> &'static str {
    match copy {
        None => "a copy if one is needed",
        Some(true) => "a copy",
        Some(false) => "no copy",
    }
}

/// Returns what is deferred.
pub fn pending(pending: Pending) -> &'static str {
    match pending {
        Pending::Conjugation => "conjugation",
        Pending::Negation => "negation",
        Pending::NegatedConjugation => "conjugation and negation",
        _ => "packing",
    }
}

/// Returns how pieces are copied.
pub fn calls(calls: Calls) -> &'static str {
    match calls {
        Calls::Together => "by one call",
        Calls::Halves => "by two calls, every second piece by the second one",
        Calls::Prepared => "by a copier",
    }
}

/// The pieces in one line: `2 pieces of int8, shape [3], strides [1], offset 0 into int8, …`.
impl fmt::Display for Pieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, count, shared, on_host } = self;
        write!(f, "{} of {from} into {to}", counted(*count, "piece"))?;
        if *shared {
            f.write_str("; every second one is a part of the one before")?;
        }
        match on_host {
            Some(End::Source) => f.write_str("; the sources are on the host"),
            Some(End::Target) => f.write_str("; the targets are on the host"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InPlace => f.write_str("in place"),
            Self::Copied => f.write_str("a copy"),
            Self::Refused(error) => write!(f, "an error of the kind “{}”", kind(*error)),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create(seed) => write!(f, "make another tensor of seed {seed}"),
            Self::Convert(which, requested) => write!(f, "convert tensor {which}, with {}", copy(*requested)),
            Self::Write(which, seed) => write!(f, "write to tensor {which}, with seed {seed}"),
            Self::Read(which) => write!(f, "read tensor {which}"),
            Self::Part(which, start) => write!(f, "make a view of tensor {which}, from row {start} on"),
            Self::Through(which) => write!(f, "convert tensor {which} to a third framework and back"),
            Self::Drop(which) => write!(f, "drop tensor {which}"),
            Self::DropElsewhere(which) => write!(f, "drop tensor {which} on another thread"),
            Self::Collect => f.write_str("collect garbage and empty caches"),
            Self::Pressure => f.write_str("allocate blocks of garbage and drop them"),
        }
    }
}

/// The tensor in one line: `float32, shape [2, 3], strides [3, 1], offset 0`.
impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dtype, shape, strides, offset, .. } = self;
        write!(f, "{dtype}, shape {shape:?}, strides {strides:?}, offset {offset}")
    }
}

impl fmt::Display for Observed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dtype, shape, strides, address, .. } = self;
        write!(f, "{dtype}, shape {shape:?}, strides {strides:?}, at {address:#x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bridge_core::{DType, Reason};

    #[test]
    fn words_stand_in_the_place_of_values() {
        assert_eq!(plan(Plan::Copy(Reason::NegativeStrides)), "a copy because of negative strides");
        assert_eq!((plan(Plan::ZeroCopy), kind(ErrorKind::CopyNeeded)), ("in place".into(), "copy needed".into()));
        assert_eq!(Expected::Refused(ErrorKind::ReadOnly).to_string(), "an error of the kind “read only”");
        assert_eq!(Op::Convert(3, Some(false)).to_string(), "convert tensor 3, with no copy");
        assert_eq!((in_use(None), in_use(Some(1))), ("an unknown number of bytes".into(), "1 byte".into()));
        assert_eq!(counted(0, "row"), "0 rows");
        let row = Spec::compact(DType::INT8, &[3]);
        let pieces = Pieces { from: row.clone(), to: row, count: 2, shared: true, on_host: Some(End::Target) };
        let expected = "2 pieces of int8, shape [3], strides [1], offset 0 into int8, shape [3], strides [1], offset 0; \
                        every second one is a part of the one before; the targets are on the host";
        assert_eq!(pieces.to_string(), expected);
    }
}
