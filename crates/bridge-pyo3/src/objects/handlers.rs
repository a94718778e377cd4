//! Exceptions that signal handlers raise. Python runs a handler between any two steps of the main thread, so its exception
//! comes out of whatever runs then, such as a function of a framework.

use pyo3::intern;
use pyo3::prelude::*;

/// Returns whether a signal handler of the program has raised an exception: its code is in the traceback.
pub(crate) fn has_raised(py: Python<'_>, error: &PyErr) -> bool {
    let Some(traceback) = error.traceback(py) else { return false };
    let look = || -> PyResult<bool> {
        let handlers = codes(py)?;
        let mut next = Some(traceback.into_any());
        while let Some(step) = next.filter(|step| !step.is_none()) {
            let code = step.getattr(intern!(py, "tb_frame"))?.getattr(intern!(py, "f_code"))?;
            if handlers.iter().any(|handler| handler.is(&code)) {
                return Ok(true);
            }
            next = Some(step.getattr(intern!(py, "tb_next"))?);
        }
        Ok(false)
    };
    look().unwrap_or(false)
}

/// Returns the code of every handler that is written in Python.
fn codes(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyAny>>> {
    let signal = py.import(intern!(py, "signal"))?;
    let code = intern!(py, "__code__");
    let mut codes = Vec::new();
    for number in signal.call_method0(intern!(py, "valid_signals"))?.try_iter()? {
        let handler = signal.call_method1(intern!(py, "getsignal"), (number?,))?;
        // A function or a method, or else an object that can be called.
        let found = match handler.getattr_opt(code)? {
            Some(found) => Some(found),
            None => match handler.get_type().getattr_opt(intern!(py, "__call__"))? {
                Some(call) => call.getattr_opt(code)?,
                None => None,
            },
        };
        codes.extend(found);
    }
    Ok(codes)
}
