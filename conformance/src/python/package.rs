//! Conversions as users of the Python package `truebridge` make them.

use super::PySubject;
use crate::properties::Conversion;
use bridge_core::{CopiedBy, Error, ErrorKind, Plan, Reason, Stream, Transfer};
use bridge_pyo3::PyTensor;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Why a conversion copies, as far as one within a device does.
const REASONS: [Reason; 10] = [
    Reason::Asked,
    Reason::PendingConjugation,
    Reason::PendingNegation,
    Reason::PendingPacking,
    Reason::NegativeStrides,
    Reason::Strides,
    Reason::Order,
    Reason::Alignment,
    Reason::MemoryNotOwned,
    Reason::Mutable,
];

/// Returns whether this process judges the package: see `VARIANTS`.
pub(super) fn is_chosen() -> bool {
    std::env::var_os("CONFORMANCE_PACKAGE").is_some()
}

/// Who copies.
const COPIED_BY: [CopiedBy; 5] =
    [CopiedBy::Kernels, CopiedBy::Host, CopiedBy::Move, CopiedBy::Producer, CopiedBy::Consumer];

/// What a conversion returned: the result, or nothing; why it copies, or the kind of the error; the bytes that it copies;
/// who copies them, or the text of the error.
type Converted<'py> = (Option<PyTensor<'py>>, Option<String>, usize, String);

/// Returns what converts to this framework.
pub(super) fn conversion<'a, 'py>(to: &'a PySubject<'py>) -> PyResult<Conversion<'a, PyTensor<'py>, PyTensor<'py>>> {
    let convert = to.py().import("truebridge_conformance.subjects.package")?.getattr("convert")?;
    let target = to.profile_name().to_owned();
    Ok(Box::new(move |tensor, _, copy| {
        let converted: PyResult<Converted<'_>> =
            convert.call1((tensor, target.as_str(), copy)).and_then(|made| made.extract());
        let (result, word, nbytes, text) = to.raised(converted)?;
        let word = word.unwrap_or_default();
        match result {
            Some(view) => {
                let copied_by = COPIED_BY.into_iter().find(|by| by.to_string() == text);
                Ok((view, Transfer::planned(to.raised(plan(&word))?, nbytes, copied_by)))
            }
            None => Err(Error::new(to.raised(kind(&word))?, text)),
        }
    }))
}

/// Records a use of a view of the package. What core has converted is none of its views.
pub(super) fn note(view: &PyTensor<'_>, stream: Stream) -> PyResult<()> {
    let package = view.py().import("truebridge_conformance.subjects.package")?;
    package.call_method1("record_stream", (view, stream.handle())).map(drop)
}

fn plan(word: &str) -> PyResult<Plan> {
    if word.is_empty() {
        return Ok(Plan::ZeroCopy);
    }
    let reason = REASONS.into_iter().find(|reason| reason.to_string() == word);
    reason.map(Plan::Copy).ok_or_else(|| PyValueError::new_err(format!("{word:?} is not a reason for a copy")))
}

fn kind(word: &str) -> PyResult<ErrorKind> {
    let named = serde_json::from_value(word.into());
    named.map_err(|_| PyValueError::new_err(format!("{word:?} is not a kind of errors of core")))
}
