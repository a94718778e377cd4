//! What the extension module `_conformance` holds: the runner and its workers, as functions that the script calls.

use super::borrow::{borrow_ns, borrowed};
use super::remote::{Process, serve_at};
use super::{package, plugged_in_use, subject, tensorflow1, tensorflow1_take};
use crate::Pair;
use crate::fault::RealFault;
use crate::names::{adapter_of, in_other_process};
use crate::processes::Flaw;
use crate::report::GitHub;
use crate::runner::{Known, Message, Options, Surroundings, known, run, work};
use bridge_frameworks::Framework;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::path::Path;

/// Fills the extension module, which is its own package.
///
/// # Errors
///
/// What Python raises.
#[doc(hidden)]
pub fn fill(module: &Bound<'_, PyModule>) -> PyResult<()> {
    bridge_pyo3::watch_for_exit(module.py());
    let names = Framework::ALL.iter().map(|framework| framework.name());
    module.add("FRAMEWORKS", PyTuple::new(module.py(), names)?)?;
    module.add_class::<super::floor::Floor>()?;
    module.add_function(wrap_pyfunction!(adapters, module)?)?;
    module.add_function(wrap_pyfunction!(borrow_ns, module)?)?;
    module.add_function(wrap_pyfunction!(borrowed, module)?)?;
    module.add_function(wrap_pyfunction!(main, module)?)?;
    module.add_function(wrap_pyfunction!(plugged_in_use, module)?)?;
    module.add_function(wrap_pyfunction!(remote, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow1, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow1_take, module)?)?;
    module.add_function(wrap_pyfunction!(worker, module)?)
}

/// Returns the known adapters, as JSON.
#[pyfunction]
fn adapters() -> PyResult<String> {
    json(&known().map(Known::description).collect::<Vec<_>>())
}

/// Runs the suite. `launch` is the command line of a worker, whose last element is the script; `describe` returns the
/// host, as JSON.
#[pyfunction]
fn main(py: Python<'_>, argv: Vec<String>, launch: Vec<String>, describe: &Bound<'_, PyAny>) -> PyResult<i32> {
    let options = match read(&argv) {
        Ok(options) => options,
        Err(code) => return Ok(code),
    };
    let host: String = describe.call0()?.extract()?;
    let host = serde_json::from_str(&host).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let script = launch.last().map(Path::new).and_then(Path::parent).unwrap_or(Path::new("."));
    let fixtures = script.join("fixtures");
    let launch = launch.into_iter().map(Into::into).collect();
    let github = GitHub::from_environment(|name| std::env::var_os(name));
    let written = options.replay.is_none().then(|| options.report.clone());
    let code = run(options, &Surroundings { launch, fixtures, host, github });
    if let Some(folder) = written.filter(|folder| folder.is_dir()) {
        let archived = py.import("shutil")?.call_method1("make_archive", (&folder, "gztar", &folder));
        match archived.and_then(|archive| archive.extract::<String>()) {
            Ok(archive) => println!("all of them are in {archive}"),
            Err(error) => println!("no archive of the reports: {error}"),
        }
    }
    Ok(code)
}

/// Judges one pair; `send` receives each message, as a line of JSON.
#[pyfunction]
fn worker(py: Python<'_>, argv: Vec<String>, send: &Bound<'_, PyAny>) -> PyResult<i32> {
    let options = match read(&argv) {
        Ok(options) => options,
        Err(code) => return Ok(code),
    };
    let mut send = |message: Message| {
        if json(&message).and_then(|line| send.call1((line,))).is_err() {
            // The runner has ended, and no process reads the messages.
            std::process::exit(1);
        }
    };
    let judged = judge(py, &options, &mut send);
    judged.unwrap_or_else(|reason| send(Message::Refused(reason)));
    Ok(0)
}

/// Loads the frameworks of the pair, and judges it.
///
/// # Errors
///
/// Why a framework cannot be tested.
fn judge(py: Python<'_>, options: &Options, send: &mut dyn FnMut(Message)) -> Result<(), String> {
    let pair = options.worker.as_ref().ok_or("a worker needs a pair")?;
    let device = options.device.resolve(usize::MAX)?;
    let (from, to) = (pair.from.as_str(), pair.to.as_str());
    let load = |name: &str| subject(py, name, device).map_err(|error| format!("{name}: {error}"));
    let flaw = match options.plant.as_deref().map(|name| (name, RealFault::named(name))) {
        Some((_, Some(fault))) => {
            fault.plant()?;
            None
        }
        Some((name, None)) => Some(Flaw::named(name).ok_or_else(|| format!("there is no flaw {name:?}"))?),
        None => None,
    };
    let start = |name, inner| Process::start(py, name, inner, device).map_err(|error| format!("{name}: {error}"));
    // The other process loads its framework while this one does.
    match (in_other_process(from), in_other_process(to)) {
        (None, None) => {
            let (source, target) = (load(from)?, load(to)?);
            // One that takes long to load, or that fills the device, is not worth it.
            let others = [Framework::Torch, Framework::CuPy, Framework::NumPy].map(Framework::name);
            let mut others = others.into_iter().filter(|name| ![from, to].map(adapter_of).contains(name));
            let third = others.find_map(|name| load(name).ok());
            let third = third.as_ref().map(|third| third as _);
            let mut pair = Pair::new(&source, &target).with_native_method().with_third(third);
            if package::is_chosen() {
                let conversions =
                    package::conversion(&target).and_then(|there| Ok((there, package::conversion(&source)?)));
                let (there, back) = conversions.map_err(|error| format!("truebridge: {error}"))?;
                pair = pair.by_package(there, back);
            }
            work(&pair, options, send);
        }
        (None, Some(inner)) => {
            let mut other = start(to, inner)?;
            work(&other.greet()?.with(flaw).after(&load(from)?), options, send);
        }
        (Some(inner), None) => {
            let mut other = start(from, inner)?;
            work(&other.greet()?.with(flaw).before(&load(to)?), options, send);
        }
        (Some(_), Some(_)) => return Err("one of two frameworks is in another process".into()),
    }
    Ok(())
}

/// Serves an adapter to the worker at the other ends of two pipes, whose descriptors become this function's.
#[pyfunction]
fn remote(py: Python<'_>, argv: Vec<String>, requests: i32, answers: i32) -> PyResult<i32> {
    let options = match read(&argv) {
        Ok(options) => options,
        Err(code) => return Ok(code),
    };
    let name = options.remote.as_deref().ok_or_else(|| PyValueError::new_err("--remote names an adapter"))?;
    let device = options.device.resolve(usize::MAX).map_err(PyValueError::new_err)?;
    serve_at(&subject(py, name, device)?, requests, answers)?;
    Ok(0)
}

/// Returns the options, or the exit code after printing why there are none.
fn read(argv: &[String]) -> Result<Options, i32> {
    Options::read(argv).map_err(|error| {
        // Where it cannot be printed, the exit code is all there is.
        let _ = error.print();
        error.exit_code()
    })
}

fn json<T: serde::Serialize + ?Sized>(value: &T) -> PyResult<String> {
    serde_json::to_string(value).map_err(|error| PyValueError::new_err(error.to_string()))
}
