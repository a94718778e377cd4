//! Which framework an object belongs to.

use crate::errors::{argument, text};
use crate::foreign::Foreign;
use bridge_core::Result;
use bridge_frameworks::{AnyAdapter, adapter_of};
pub(crate) use bridge_frameworks::{Framework, seen};
use bridge_pyo3::{PyAdapter, PyTensor, brief};
use pyo3::prelude::*;
use std::ops::Deref;

/// The adapter that exports an object.
pub(crate) enum Source<'py> {
    Framework(AnyAdapter<'py>),
    /// The object belongs to none of the frameworks, and may speak a protocol.
    Foreign(Foreign<'py>),
}

impl<'py> Deref for Source<'py> {
    type Target = dyn PyAdapter<'py> + 'py;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Framework(adapter) => &**adapter,
            Self::Foreign(adapter) => adapter,
        }
    }
}

/// Returns the framework that users call `target`, a `str`.
pub(crate) fn named(target: &Bound<'_, PyAny>) -> Result<Framework> {
    let name = text(target, "a target")?;
    Framework::named(&name).ok_or_else(|| {
        let names: Vec<_> = Framework::ALL.iter().map(|known| known.name()).collect();
        argument(format!("{:?} is no target: choose one of {}", brief(&name), names.join(", ")))
    })
}

/// Returns whether `object` is a tensor of a framework, or an object that speaks a protocol.
pub(crate) fn is_tensor(object: &PyTensor<'_>) -> Result<bool> {
    match source(object)? {
        Source::Framework(_) => Ok(true),
        Source::Foreign(_) => Foreign::speaks(object),
    }
}

/// Returns the adapter of the framework that `object` belongs to, or the one for foreign objects.
pub(crate) fn source<'py>(object: &PyTensor<'py>) -> Result<Source<'py>> {
    Ok(adapter_of(object)?.map_or_else(|| Source::Foreign(Foreign(object.py())), Source::Framework))
}
