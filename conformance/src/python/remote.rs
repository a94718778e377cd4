//! A framework of Python in its own process.

use super::PySubject;
use crate::processes::{Around, Remote, serve};
use bridge_core::Device;
use bridge_frameworks::Framework;
use pyo3::prelude::*;
use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::parent_id;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long the other process may take to end when its requests have ended. The runner waits longer for this one.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long it may outlive this process.
const OUTLIVES: Duration = Duration::from_secs(10);

/// Names a Python 3.7 with TensorFlow 1.15, which then is the other process of `tensorflow1` on the host.
const PYTHON37: &str = "TRUEBRIDGE_PYTHON37";

/// Returns the program for that Python.
fn beside(py: Python<'_>) -> PyResult<PathBuf> {
    let package: PathBuf = py.import("truebridge_conformance")?.getattr("__file__")?.extract()?;
    Ok(package.with_file_name("python37.py"))
}

/// What surrounds processes with an interpreter.
const AROUND: Around = Around { detached, ended };

/// Other threads return leases while this one waits, and need the interpreter for it.
fn detached(body: &mut (dyn FnMut() + Send)) {
    Python::attach(|py| py.detach(body));
}

/// Ends this process: the case at hand has made the other crash.
fn ended(reason: &str) {
    eprintln!("{reason}");
    std::process::exit(3);
}

/// Another process, which serves a framework. The drop ends it.
pub(super) struct Process {
    child: Child,
    name: String,
    ends: Option<(std::process::ChildStdout, std::process::ChildStdin)>,
}

impl Process {
    /// Starts this script again, to serve the adapter `inner`. `name` is the one in reports.
    ///
    /// # Errors
    ///
    /// It does not start.
    pub(super) fn start(py: Python<'_>, name: &str, inner: &str, device: Device) -> PyResult<Self> {
        let sys = py.import("sys")?;
        let (program, argv): (String, Vec<String>) =
            (sys.getattr("executable")?.extract()?, sys.getattr("argv")?.extract()?);
        let own =
            std::env::var_os(PYTHON37).filter(|_| (inner, device) == (Framework::TensorFlow1.name(), Device::CPU));
        let mut command = Command::new(own.as_deref().unwrap_or(program.as_ref()));
        match own.is_some() {
            true => command.arg(beside(py)?),
            false => command.args(argv.first()).args(["--remote", inner, "--device", &device.to_string()]),
        };
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let ends = child.stdout.take().zip(child.stdin.take());
        Ok(Self { child, name: name.into(), ends })
    }

    /// Waits until the framework is loaded, and returns its subject.
    ///
    /// # Errors
    ///
    /// It cannot be loaded: the other process has said why.
    pub(super) fn greet(&mut self) -> Result<Remote, String> {
        let (from, to) = self.ends.take().ok_or("it was greeted before")?;
        let greeted = Remote::new(&self.name, from, to, bridge_cuda::ordering().clone(), AROUND);
        greeted.map_err(|error| format!("{}: {error}", self.name))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let until = Instant::now() + PATIENCE;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Neither has an effect on a process that was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ends this process where it hangs and its parent has ended: no other process knows it.
fn end_with(parent: u32) {
    std::thread::spawn(move || {
        while parent_id() == parent {
            std::thread::sleep(Duration::from_secs(1));
        }
        std::thread::sleep(OUTLIVES);
        std::process::abort();
    });
}

/// Serves a subject at two pipes until the process at their other ends closes them.
pub(super) fn serve_at(subject: &PySubject<'_>, requests: i32, answers: i32) -> PyResult<()> {
    end_with(parent_id());
    // SAFETY: the caller has made the descriptors for this call.
    let [requests, answers] = [requests, answers].map(|fd| File::from(unsafe { OwnedFd::from_raw_fd(fd) }));
    serve(subject, requests, answers, AROUND);
    Ok(())
}
