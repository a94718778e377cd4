//! Everything that can be checked on this machine, one line a step.

use crate::run::{Result, ask, cargo, program, target};
use crate::{features, tensorflow1, venv};
use clap::ValueEnum;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

/// The oldest Rust that the workspace builds with (`rust-version` in Cargo.toml).
const OLDEST_RUST: &str = env!("CARGO_PKG_RUST_VERSION");

/// Folders with Python in them.
const PYTHON: [&str; 8] = [
    "benches",
    "crates/bridge-python",
    "crates/bridge-capi/python",
    "crates/bridge-cuda/kernels",
    "crates/bridge-tensorflow/tests",
    "conformance",
    "examples",
    "xtask/site",
];

/// The package that is built by itself, because no feature of its dependencies may bring Python in.
const C_INTERFACE: [&str; 2] = ["-p", "truebridge-capi"];

/// The packages that `cargo test` chooses.
const WITH_PYTHON: [&str; 3] = ["--workspace", "--exclude", "truebridge-capi"];

/// The adapter for `tch`, and the suite over the adapters for Rust. The suite's own tests of its simulated device are in
/// `cargo test`, and would take longer than all others here. Cargo gives a dependency the features that the chosen
/// packages want: those of `processes` and `ort` are the ones in `cargo test`, so that candle is not built again.
const SUITE: [&str; 28] = [
    "--package",
    "truebridge-torch",
    "--package",
    "truebridge-conformance",
    "--features",
    "truebridge-torch/tch,truebridge-conformance/candle,truebridge-conformance/cudarc,\
     truebridge-conformance/ndarray,truebridge-conformance/ort,truebridge-conformance/planted,\
     truebridge-conformance/processes,truebridge-conformance/tch,truebridge-conformance/tensorflow",
    "--lib",
    "--test",
    "host",
    "--test",
    "matrices",
    "--test",
    "ort_cuda",
    "--test",
    "*planted",
    "--test",
    "processes",
    "--test",
    "rust",
    "--test",
    "tch*",
    "--test",
    "tensorflow",
    "--",
    "--skip",
    "sim::faults::",
    "--skip",
    "properties::least::",
];

/// pytest, which names what it skips, and prints the stacks of all threads where a test takes longer than any does.
const PYTEST: [&str; 5] = ["pytest", "-q", "-rs", "-o", "faulthandler_timeout=600"];

/// The package of a third party, which is a separate workspace.
const OUTSIDE: [&str; 4] = ["--manifest-path", "examples/adapter/Cargo.toml", "--target-dir", "target"];

/// Packages of Python whose types are checked.
const TYPED: [&str; 4] = [
    "benches",
    "crates/bridge-python/python/truebridge",
    "crates/bridge-capi/python/truebridge_tf1",
    "conformance/python/truebridge_conformance",
];

/// The most processes that the Python tests are spread over: each loads every framework.
const MOST_WORKERS: usize = 4;

/// The Python tests that use a GPU, by parts of their names. What they need is visible only to them: elsewhere
/// frameworks would put tensors on a GPU that the tests expect on the host.
const ON_A_GPU: &str = "cuda or gpu or pages or gallery";

/// Names the GPUs that a process sees.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// A step: its name, and its command, or the reason why it is left out.
pub type Step = (&'static str, Result<Command>);

/// The outcome of a step.
#[derive(Clone, Copy, PartialEq)]
enum Outcome {
    Passed,
    Failed,
    LeftOut,
}

/// A part of the checks.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum Part {
    /// Formatting, lints, types, generated files and the site.
    Lints,
    /// The tests that cargo runs, and the documentation.
    Rust,
    /// The bundle, and the tests that Python runs.
    Python,
}

/// Runs every step of a part, or of all, in two lanes side by side: cargo has a lock for each profile, so the release
/// build of the bundle and the Python tests need not wait for the Rust tests. Those need what the setup installs, which
/// the steps before them do without.
pub fn run(part: Option<Part>) -> Result<ExitCode> {
    let wants = move |one| part.is_none_or(|part| part == one);
    let python = &venv::MAIN.made()?;
    let (set_up, is_set_up) = mpsc::channel::<Option<PathBuf>>();
    let of_rust = move || {
        let mut outcomes = run_all(if wants(Part::Lints) { rust_lints(python) } else { Vec::new() });
        if wants(Part::Rust) {
            outcomes.extend(run_all(rust_checks(python)));
            let tensorflow1 = is_set_up.recv().expect("the other lane sends it");
            outcomes.extend(run_all(rust_tests(python, tensorflow1.as_deref())));
        }
        outcomes
    };
    let of_python = || {
        let mut outcomes = run_all(vec![("setup", itself(&["setup".as_ref()]))]);
        let tensorflow1 = tensorflow1::folder_if_any(python);
        // No test of Rust waits where that part is not wanted.
        _ = set_up.send(tensorflow1.clone());
        outcomes.extend(run_all(if wants(Part::Lints) { python_lints(python) } else { Vec::new() }));
        let tests = || python_tests(python, tensorflow1.as_deref());
        outcomes.extend(run_all(if wants(Part::Python) { tests() } else { Vec::new() }));
        outcomes
    };
    let outcomes = thread::scope(|scope| {
        let of_rust = scope.spawn(of_rust);
        [of_python(), of_rust.join().expect("a lane does not panic")].concat()
    });
    Ok(conclude(&outcomes))
}

/// Runs these steps, and prints what came of them.
pub fn run_steps(steps: Vec<Step>) -> ExitCode {
    conclude(&run_all(steps))
}

/// Runs every step, also after one has failed.
fn run_all(steps: Vec<Step>) -> Vec<(&'static str, Outcome)> {
    steps.into_iter().map(run_step).collect()
}

/// Prints what came of all steps.
fn conclude(outcomes: &[(&'static str, Outcome)]) -> ExitCode {
    let failed: Vec<_> = outcomes.iter().filter(|(_, outcome)| *outcome == Outcome::Failed).collect();
    for (name, _) in &failed {
        println!("failed: {name}");
    }
    let passed = outcomes.iter().filter(|(_, outcome)| *outcome == Outcome::Passed).count();
    println!("{passed} passed, {} failed, {} left out", failed.len(), outcomes.len() - passed - failed.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs one step and prints a line about it, with the output of a step that failed.
fn run_step((name, step): Step) -> (&'static str, Outcome) {
    let started = Instant::now();
    let (outcome, word, output) = match step.map(|mut command| command.output()) {
        Err(reason) => {
            println!("{name:<40} left out: {reason}");
            return (name, Outcome::LeftOut);
        }
        Ok(Ok(output)) if output.status.success() && !(name.starts_with(TESTS) && warns(&output.stderr)) => {
            (Outcome::Passed, "ok", skipped(&output.stdout))
        }
        Ok(Ok(output)) => {
            let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
            (Outcome::Failed, "FAILED", text)
        }
        Ok(Err(error)) => (Outcome::Failed, "FAILED", format!("it does not start: {error}\n")),
    };
    print!("{name:<40} {word:<6} {:>7.1} s\n{output}", started.elapsed().as_secs_f64());
    (name, outcome)
}

/// How the names of steps begin in which a warning of the compiler is a failure: they build packages with fewer features
/// than clippy.
const TESTS: &str = "cargo test";

/// Returns whether the compiler has warned: a line such as `warning: unused import`, and below it the place.
fn warns(errors: &[u8]) -> bool {
    let errors = String::from_utf8_lossy(errors);
    let lines = || errors.lines();
    lines().zip(lines().skip(1)).any(|(one, next)| one.starts_with("warning") && next.trim_start().starts_with("--> "))
}

/// Returns the tests that a step which passed has skipped, as pytest lists them, and what the setup left out.
fn skipped(output: &[u8]) -> String {
    let output = String::from_utf8_lossy(output);
    let lines = output.lines().filter(|line| line.starts_with("SKIPPED") || line.starts_with("left out"));
    lines.map(|line| format!("    {line}\n")).collect()
}

/// The steps of cargo that need no package of Python.
fn rust_lints(python: &Path) -> Vec<Step> {
    let rust = |arguments: &[&[&str]]| of_cargo(python, arguments);
    let clippy = ["clippy", "--all-targets", "--quiet", "--workspace", "--all-features", "--", "-D", "warnings"];
    vec![
        ("cargo fmt", rust(&[&["fmt", "--check"]])),
        ("cargo clippy", rust(&[&clippy])),
        ("cargo fmt, an adapter from outside", rust(&[&["fmt", "--check"], &OUTSIDE[..2]])),
        ("cargo deny", dependencies()),
    ]
}

/// The other steps of cargo that need no package of Python.
fn rust_checks(python: &Path) -> Vec<Step> {
    let rust = |arguments: &[&[&str]]| of_cargo(python, arguments);
    vec![
        ("cargo doc", {
            let doc = rust(&[&["doc", "--workspace", "--all-features", "--no-deps", "--quiet"]]);
            doc.map(|doc| with(doc, "RUSTDOCFLAGS", "-D warnings"))
        }),
        ("packages", itself(&["package".as_ref()])),
        ("cargo check, oldest Rust", oldest_rust()),
        ("C header", itself(&["generate".as_ref(), "header".as_ref(), "--check".as_ref()])),
        // Clippy compiles the package, and cargo what it depends on, which a call of clippy would check once more. A
        // warning fails the step.
        (
            "cargo test, an adapter from outside",
            rust(&[&["test", "--quiet"], &OUTSIDE]).map(|test| with(test, "RUSTC_WORKSPACE_WRAPPER", "clippy-driver")),
        ),
    ]
}

/// The tests that use packages of Python, in the profile for development.
fn rust_tests(python: &Path, tensorflow1: Option<&Path>) -> Vec<Step> {
    let rust = |arguments: &[&[&str]]| of_cargo(python, arguments);
    let with_tensorflow1 = |step: Result<Command>| step.map(|step| tensorflow1::with_folder(step, tensorflow1));
    vec![
        (
            "cargo test",
            features::linked()
                .and_then(|of_the_facade| {
                    let features = ["--features", "truebridge-conformance/runner", "--features", &of_the_facade];
                    with_tensorflow1(rust(&[&["test", "--quiet"], &WITH_PYTHON, &features]))
                })
                .map(|step| with_onnxruntime(step, python)),
        ),
        (
            "cargo test, the suite over Rust",
            with_tensorflow1(rust(&[&["test", "--quiet"], &SUITE]))
                .map(|step| with_onnxruntime(with_libtorch(step, python), python)),
        ),
        ("cargo test, without Python", with_tensorflow1(rust(&[&["test", "--quiet"], &C_INTERFACE]))),
    ]
}

/// A call of cargo for which the crates that link Python are built for this one.
fn of_cargo(python: &Path, arguments: &[&[&str]]) -> Result<Command> {
    Ok(with(cargo(&arguments.concat()), "PYO3_PYTHON", python))
}

/// The steps of Python that need no bundle.
fn python_lints(python: &Path) -> Vec<Step> {
    let module = |arguments: &[&[&str]]| Ok(program(python, &[&["-m"], &arguments.concat()[..]].concat()));
    vec![
        ("ruff check", module(&[&["ruff", "check"], &PYTHON])),
        ("ruff format", module(&[&["ruff", "format", "--check"], &PYTHON])),
        ("mypy", module(&[&["mypy"], &TYPED])),
        ("tables of the documentation", itself(&["generate".as_ref(), "tables".as_ref(), "--check".as_ref()])),
        ("site", itself(&["site".as_ref()])),
    ]
}

/// The tests that Python runs, over a bundle.
fn python_tests(python: &Path, tensorflow1: Option<&Path>) -> Vec<Step> {
    let module = |arguments: &[&[&str]]| program(python, &[&["-m"], &arguments.concat()[..]].concat());
    let bundle = target().join("bundle");
    let over_bundle = |step: Command| with(tensorflow1::with_folder(step, tensorflow1), "PYTHONPATH", &bundle);
    let on_the_host = |step: Command| with(step, VISIBLE, "");
    let tests: &[&str] = &["crates/bridge-python/tests", "conformance/tests/python"];
    let workers = thread::available_parallelism().map_or(1, |cores| cores.get().min(MOST_WORKERS)).to_string();
    let pytest: &[&str] = &[&PYTEST[..], &["-n", &workers, "--dist", "loadfile"]].concat();
    vec![
        ("bundle", itself(&["bundle".as_ref(), bundle.as_os_str()])),
        ("pytest", Ok(on_the_host(over_bundle(module(&[pytest, tests]))))),
        ("pytest, GPU", has_gpu(python).map(|()| over_bundle(module(&[&PYTEST, &["-k", ON_A_GPU], tests])))),
        ("pytest, Python 3.7", {
            let arguments = [&["-m"], pytest, &["crates/bridge-capi/python/tests"]].concat();
            venv::PYTHON37.ready().map(|python| on_the_host(with(program(python, &arguments), "PYTHONPATH", &bundle)))
        }),
    ]
}

/// Returns an error where the driver shows no GPU.
fn has_gpu(python: &Path) -> Result<()> {
    let script = "import ctypes; cuda, count = ctypes.CDLL('libcuda.so.1'), ctypes.c_int(); \
                  assert cuda.cuInit(0) == cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 < count.value";
    ask(&mut program(python, &["-c", script])).map(drop).ok_or_else(|| "the driver shows no GPU".into())
}

pub fn with(mut command: Command, name: &str, value: impl AsRef<OsStr>) -> Command {
    command.env(name, value);
    command
}

/// Makes the build script of `tch` take the libtorch of this Python's PyTorch: it runs the first `python3` of `PATH`.
fn with_libtorch(step: Command, python: &Path) -> Command {
    let programs = python.parent().map(Path::to_path_buf);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::join_paths(programs.into_iter().chain(std::env::split_paths(&path)));
    let mut step = with(step, "LIBTORCH_USE_PYTORCH", "1");
    step.env_remove("VIRTUAL_ENV");
    with(step, "PATH", folders.unwrap_or(path))
}

/// The step, with the ONNX Runtime of the wheel. Without the wheel the tests that need it say so.
fn with_onnxruntime(step: Command, python: &Path) -> Command {
    let script = "import glob, importlib.util as u; print(*(f for s in [u.find_spec('onnxruntime')] if s \
                  for f in glob.glob(s.submodule_search_locations[0] + '/capi/libonnxruntime.so.*')))";
    let library = ask(&mut program(python, &["-c", script])).filter(|path| !path.is_empty());
    match library {
        Some(library) => with(step, "ORT_DYLIB_PATH", library),
        None => step,
    }
}

/// This program with another task. The other lane may build it anew meanwhile: this path is that of what runs.
pub fn itself(arguments: &[&OsStr]) -> Result<Command> {
    let running = PathBuf::from("/proc/self/exe");
    let path = if running.exists() { running } else { std::env::current_exe().map_err(|error| error.to_string())? };
    let mut command = program(path, &[]);
    command.args(arguments);
    Ok(command)
}

/// What uses candle, whose 0.11.1 needs a later Rust than its manifest says.
const LATER_RUST: [&str; 4] = ["--exclude", "truebridge-candle", "--exclude", "truebridge-example-candle"];

/// The check with the oldest Rust: clippy's `incompatible_msrv` covers the library, this the language.
fn oldest_rust() -> Result<Command> {
    let toolchains = ask(&mut program("rustup", &["toolchain", "list"])).unwrap_or_default();
    if !toolchains.lines().any(|line| line.starts_with(OLDEST_RUST)) {
        return Err(format!("the toolchain {OLDEST_RUST} is not installed"));
    }
    let toolchain = format!("+{OLDEST_RUST}");
    Ok(program("cargo", &[&[&*toolchain, "check", "--workspace", "--quiet"], &LATER_RUST[..]].concat()))
}

fn dependencies() -> Result<Command> {
    let installed = ask(&mut cargo(&["deny", "--version"])).is_some();
    let check = || cargo(&["deny", "--all-features", "check", "bans", "licenses", "sources"]);
    installed.then(check).ok_or_else(|| "cargo-deny is not installed".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_of_the_compiler_are_told_from_those_of_tests() {
        let of_rustc = b"\nwarning: unused import: `std::fmt`\n --> src/lib.rs:2:5\n  |\n";
        assert!(warns(of_rustc));
        for of_tests in
            ["", "warning: no GPU was found\n", "error\n --> src/lib.rs:2:5", "running 1 test\nwarning: one\n"]
        {
            assert!(!warns(of_tests.as_bytes()), "{of_tests}");
        }
    }
}
