//! What users of a framework of Python do.

use super::{PySubject, pending};
use crate::{Raised, Usual, words};
use bridge_core::{Error, ErrorKind, Result};
use bridge_pyo3::PyTensor;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// The kinds of errors that a subject names.
const KINDS: [ErrorKind; 9] = [
    ErrorKind::NotATensor,
    ErrorKind::Dtype,
    ErrorKind::Layout,
    ErrorKind::Device,
    ErrorKind::RequiresGrad,
    ErrorKind::Consumed,
    ErrorKind::Refused,
    ErrorKind::OutOfMemory,
    ErrorKind::Framework,
];

fn kind(name: &str) -> PyResult<ErrorKind> {
    let found = KINDS.into_iter().find(|kind| words::kind(*kind) == name);
    found.ok_or_else(|| PyValueError::new_err(format!("{name:?} is not a kind of error that a subject names")))
}

/// Keeps those that are right by the framework's public interface, where an adapter uses no other.
pub(super) fn of<'py>(usual: Vec<Bound<'py, PyAny>>, is_public: bool) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let kept = |usual: Bound<'py, PyAny>| -> PyResult<_> {
        Ok((!is_public || usual.getattr("public")?.is_truthy()?).then_some(usual))
    };
    usual.into_iter().filter_map(|usual| kept(usual).transpose()).collect()
}

/// Makes the tensor of a `Usual` of `truebridge_conformance.subjects`.
pub(super) fn usual<'a, 'py>(
    subject: &'a PySubject<'py>,
    usual: &'a Bound<'py, PyAny>,
    seed: u64,
) -> PyResult<Usual<'a, PyTensor<'py>>> {
    let deferred: Option<String> = usual.getattr("pending")?.extract()?;
    let refused: Option<String> = usual.getattr("refused")?.extract()?;
    let afterwards = usual.getattr("afterwards")?;
    Ok(Usual {
        name: usual.getattr("name")?.extract()?,
        tensor: usual.call_method1("make", (seed,))?,
        pending: deferred.map(|name| pending(&name)).transpose()?,
        refused: refused.map(|name| kind(&name)).transpose()?,
        afterwards: (!afterwards.is_none()).then(|| {
            let run = move |tensor: &PyTensor<'py>| subject.raised(afterwards.call1((tensor,)).map(drop));
            Box::new(run) as _
        }),
    })
}

/// Runs `body` while the function of a `Raising` of `truebridge_conformance.subjects` raises.
pub(super) fn raising(raising: &Bound<'_, PyAny>, body: &mut dyn FnMut()) -> PyResult<Raised> {
    let named: String = raising.getattr("kind")?.extract()?;
    raising.call_method1("begin", (Raised::WORDS,))?;
    body();
    Ok(Raised {
        called: raising.call_method0("end")?.extract()?,
        name: raising.getattr("name")?.extract()?,
        kind: kind(&named)?,
        reaches: raising.getattr("reaches")?.extract()?,
    })
}

/// Drops the tensor while an exception is pending.
pub(super) fn drop_amid_exception(tensor: PyTensor<'_>) -> Result<()> {
    let py = tensor.py();
    let pending = PyRuntimeError::new_err(Raised::WORDS);
    pending.clone_ref(py).restore(py);
    drop(tensor);
    let text = match PyErr::take(py) {
        Some(left) if left.value(py).is(pending.value(py)) => return Ok(()),
        Some(other) => format!("an exception was pending when a tensor was dropped, and is now another: {other}"),
        None => "an exception was pending when a tensor was dropped, and is no longer".into(),
    };
    Err(Error::new(ErrorKind::Framework, text))
}
