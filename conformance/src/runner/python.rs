//! The extension module `_conformance`: the runner and its workers, as functions that the script calls.

use super::{KNOWN, Message, Options, Surroundings, run, work};
use crate::python::{plugged_in_use, subject, tensorflow1, tensorflow1_take};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::path::Path;

/// The native half of `tensor_bridge_conformance`.
#[pymodule(gil_used = true)]
#[pyo3(name = "_conformance")]
fn extension(module: &Bound<'_, PyModule>) -> PyResult<()> {
    bridge_pyo3::watch_for_exit(module.py());
    module.add_function(wrap_pyfunction!(main, module)?)?;
    module.add_function(wrap_pyfunction!(plugged_in_use, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow1, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow1_take, module)?)?;
    module.add_function(wrap_pyfunction!(worker, module)?)
}

/// Runs the suite. `launch` is the command line of a worker, whose last element is the script; `describe` takes the
/// known adapters and gives the host, both as JSON.
#[pyfunction]
fn main(argv: Vec<String>, launch: Vec<String>, describe: &Bound<'_, PyAny>) -> PyResult<i32> {
    let options = match read(&argv) {
        Ok(options) => options,
        Err(code) => return Ok(code),
    };
    let host: String = describe.call1((json(KNOWN)?,))?.extract()?;
    let host = serde_json::from_str(&host).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let script = launch.last().map(Path::new).and_then(Path::parent).unwrap_or(Path::new("."));
    let fixtures = script.join("fixtures");
    Ok(run(options, &Surroundings { launch: launch.into_iter().map(Into::into).collect(), fixtures, host }))
}

/// Judges one pair; `send` takes each message, as a line of JSON.
#[pyfunction]
fn worker(py: Python<'_>, argv: Vec<String>, send: &Bound<'_, PyAny>) -> PyResult<i32> {
    let options = match read(&argv) {
        Ok(options) => options,
        Err(code) => return Ok(code),
    };
    let mut send = |message: Message| {
        if json(&message).and_then(|line| send.call1((line,))).is_err() {
            // Nobody listens any more: the runner is gone.
            std::process::exit(1);
        }
    };
    let prepared = || {
        let pair = options.worker.as_ref().ok_or("a worker needs a pair")?;
        let device = options.device.resolve(usize::MAX)?;
        let load = |name: &str| subject(py, name, device).map_err(|error| format!("{name}: {error}"));
        Ok::<_, String>((load(&pair.from)?, load(&pair.to)?))
    };
    match prepared() {
        Ok((from, to)) => work(&from, &to, bridge_cuda::ordering(), &options, &mut send),
        Err(reason) => send(Message::Refused(reason)),
    }
    Ok(0)
}

/// The options, or the exit code after printing what was wrong with them.
fn read(argv: &[String]) -> Result<Options, i32> {
    Options::read(argv).map_err(|error| {
        // Where that cannot be printed, the exit code has to do.
        let _ = error.print();
        error.exit_code()
    })
}

fn json<T: serde::Serialize + ?Sized>(value: &T) -> PyResult<String> {
    serde_json::to_string(value).map_err(|error| PyValueError::new_err(error.to_string()))
}
