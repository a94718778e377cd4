//! Everything that can be checked on a machine without a GPU, one line a step.

use crate::bundle::FUZZER;
use crate::run::{Result, ask, cargo, program, target};
use crate::{tensorflow1, venv};
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

/// The oldest Rust that the workspace builds with (`rust-version` in Cargo.toml).
const OLDEST_RUST: &str = env!("CARGO_PKG_RUST_VERSION");

/// Folders with Python in them.
const PYTHON: [&str; 4] = ["crates/bridge-python", "crates/bridge-capi/python", "conformance", "examples"];

/// The package that is built by itself, because no feature of its dependencies may bring Python in.
const C_INTERFACE: [&str; 2] = ["--package", "bridge-capi"];

/// Packages of Python whose types are checked.
const TYPED: [&str; 2] = ["crates/bridge-python/python/tensor_bridge", "crates/bridge-capi/python/tensor_bridge_tf1"];

/// A step: its name, and the program that is the step, or why there is none.
type Step = (&'static str, Result<Command>);

/// Runs every step, whatever becomes of the others.
pub fn all() -> Result<ExitCode> {
    let python = venv::MAIN.ready()?;
    let tensorflow1 = tensorflow1::folder_if_any(&python);
    let mut failed = Vec::new();
    let (mut passed, mut left_out) = (0, Vec::new());
    for (name, step) in steps(&python, tensorflow1.as_deref()) {
        let started = Instant::now();
        let (word, output) = match step.map(|mut command| command.output()) {
            Err(reason) => {
                left_out.push((name, reason));
                continue;
            }
            Ok(Ok(output)) if output.status.success() => ("ok", skipped(&output.stdout)),
            Ok(Ok(output)) => {
                ("FAILED", String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
            }
            Ok(Err(error)) => ("FAILED", format!("it does not start: {error}\n")),
        };
        println!("{name:<40} {word:<6} {:>7.1} s", started.elapsed().as_secs_f64());
        print!("{output}");
        if word == "ok" { passed += 1 } else { failed.push(name) }
    }
    for (name, reason) in left_out {
        println!("{name:<40} left out: {reason}");
    }
    for name in &failed {
        println!("failed: {name}");
    }
    println!("{passed} passed, {} failed", failed.len());
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What a step that passed has left out all the same, as pytest says it.
fn skipped(output: &[u8]) -> String {
    let output = String::from_utf8_lossy(output);
    let lines = output.lines().filter(|line| line.starts_with("SKIPPED"));
    lines.map(|line| format!("    {line}\n")).collect()
}

fn steps(python: &Path, tensorflow1: Option<&Path>) -> Vec<Step> {
    let rust = |arguments: &[&[&str]]| Ok(with(cargo(&arguments.concat()), "PYO3_PYTHON", python));
    let module = |arguments: &[&[&str]]| Ok(program(python, &[&["-m"], &arguments.concat()[..]].concat()));
    let told = |step: Result<Command>| {
        step.map(|mut step| {
            tensorflow1::tell(&mut step, tensorflow1);
            step
        })
    };
    let clippy: &[&str] = &["clippy", "--workspace", "--all-targets", "--quiet"];
    let deny: &[&str] = &["--", "-D", "warnings"];
    let bundle = target().join("bundle");
    vec![
        ("cargo fmt", rust(&[&["fmt", "--check"]])),
        ("cargo clippy", rust(&[clippy, deny])),
        ("cargo clippy, all features", rust(&[clippy, &["--all-features"], deny])),
        ("cargo clippy, without Python", rust(&[&["clippy", "--all-targets", "--quiet"], &C_INTERFACE, deny])),
        ("cargo test", told(rust(&[&["test", "--workspace", "--quiet"]]))),
        ("cargo test, without Python", told(rust(&[&["test", "--quiet"], &C_INTERFACE]))),
        ("cargo doc", {
            let doc = rust(&[&["doc", "--workspace", "--no-deps", "--quiet"]]);
            doc.map(|doc| with(doc, "RUSTDOCFLAGS", "-D warnings"))
        }),
        ("cargo check, oldest Rust", oldest_rust()),
        ("cargo deny", dependencies()),
        ("ruff check", module(&[&["ruff", "check"], &PYTHON])),
        ("ruff format", module(&[&["ruff", "format", "--check"], &PYTHON])),
        ("mypy", module(&[&["mypy"], &TYPED])),
        ("bundle", itself(&["bundle".as_ref(), bundle.as_os_str()])),
        ("pytest", {
            let pytest =
                told(module(&[&["pytest", "-q", "-rs", "crates/bridge-python/tests", "conformance/tests/python"]]));
            pytest.map(|pytest| with(pytest, "PYTHONPATH", &bundle))
        }),
        ("fuzz", {
            let fuzz = program(python, &[FUZZER, "--seconds", "30", "--seed", "1"]);
            Ok(with(fuzz, "PYTHONPATH", &bundle))
        }),
        ("pytest, Python 3.7", {
            let pytest = ["-m", "pytest", "-q", "-rs", "crates/bridge-capi/python/tests"];
            venv::PYTHON37.ready().map(|python| with(program(python, &pytest), "PYTHONPATH", &bundle))
        }),
    ]
}

fn with(mut command: Command, name: &str, value: impl AsRef<OsStr>) -> Command {
    command.env(name, value);
    command
}

/// This program with another task.
fn itself(arguments: &[&OsStr]) -> Result<Command> {
    let path = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = program(path, &[]);
    command.args(arguments);
    Ok(command)
}

/// The check with the oldest Rust: clippy's `incompatible_msrv` covers the library, this the language.
fn oldest_rust() -> Result<Command> {
    let toolchains = ask(&mut program("rustup", &["toolchain", "list"])).unwrap_or_default();
    if !toolchains.lines().any(|line| line.starts_with(OLDEST_RUST)) {
        return Err(format!("the toolchain {OLDEST_RUST} is not installed"));
    }
    let toolchain = format!("+{OLDEST_RUST}");
    Ok(program("cargo", &[&toolchain, "check", "--workspace", "--quiet"]))
}

fn dependencies() -> Result<Command> {
    let installed = ask(&mut cargo(&["deny", "--version"])).is_some();
    let check = || cargo(&["deny", "--all-features", "check", "bans", "licenses", "sources"]);
    installed.then(check).ok_or_else(|| "cargo-deny is not installed".into())
}
