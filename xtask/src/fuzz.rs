//! Hostile input: what the fuzzers are run over, and how.

use crate::bundle;
use crate::run::{Result, at, cargo, code, empty, needs, needs_nightly, program, status, target};
use crate::venv;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Fuzzes the Python package: each kind of case is a target.
const OF_THE_PACKAGE: &str = "crates/bridge-python/tests/test_fuzz.py";

/// Feed hostile input to the Python package, or to targets in Rust. docs/testing.md lists the targets.
#[derive(clap::Args)]
pub struct Fuzz {
    /// Targets, such as capsule,file or codec [default: every target of the Python package]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    target: Vec<String>,
    /// Draw new cases of each target for that long [default: a few, the same ones for the Python package]
    #[arg(long)]
    seconds: Option<u32>,
    /// The seed of the first case that is drawn [default: a new one]
    #[arg(long)]
    seed: Option<u32>,
    /// Run targets in Rust under libFuzzer: needs cargo-fuzz and a nightly toolchain.
    #[arg(long)]
    guided: bool,
}

/// A target that is a test in Rust.
struct Target {
    name: &'static str,
    package: &'static str,
    /// The program, and the test in it.
    program: &'static str,
    test: &'static str,
    /// Whether it is one of those under libFuzzer.
    guided: bool,
}

const TARGETS: [Target; 6] = [
    Target { name: "codec", package: "truebridge-core", program: "hostile", test: "any_managed_tensor", guided: true },
    Target { name: "capi", package: "truebridge-capi", program: "hostile", test: "any_calls", guided: true },
    Target { name: "ticket", package: "truebridge-ipc", program: "processes", test: "any_ticket", guided: true },
    Target { name: "request", package: "truebridge-ipc", program: "processes", test: "any_request", guided: true },
    Target { name: "answer", package: "truebridge-ipc", program: "processes", test: "any_answer", guided: true },
    Target { name: "sequence", package: "truebridge-ipc", program: "processes", test: "any_sequence", guided: false },
];

/// Runs the targets, and returns the first failure.
pub fn run(Fuzz { target: names, seconds, seed, guided: is_guided }: &Fuzz) -> Result<ExitCode> {
    let known = |name: &&String| TARGETS.iter().find(|target| target.name == **name);
    let (in_rust, of_package): (Vec<_>, Vec<_>) = names.iter().partition(|name| known(name).is_some());
    let mut commands: Vec<Command> = Vec::new();
    for target in in_rust.iter().filter_map(known) {
        commands.push(if *is_guided { guided(target, *seconds, *seed)? } else { test(target) });
    }
    if names.is_empty() || !of_package.is_empty() {
        commands.push(package(&of_package)?);
    }
    let variables = [("TRUEBRIDGE_FUZZ", seconds), ("TRUEBRIDGE_SEED", seed)];
    let mut first = ExitCode::SUCCESS;
    for command in &mut commands {
        command.envs(variables.iter().filter_map(|(name, value)| Some((name, value.as_ref()?.to_string()))));
        let done = status(command)?;
        if !done.success() && first == ExitCode::SUCCESS {
            first = code(done);
        }
    }
    Ok(first)
}

/// Returns the tests of these targets, or of all, over the package of a bundle in the target folder.
fn package(names: &[&String]) -> Result<Command> {
    let (python, bundle) = (venv::MAIN.ready()?, target().join("bundle"));
    bundle::write(&bundle)?;
    let mut tests = program(python, &["-m", "pytest", "-q", "-p", "no:cacheprovider"]);
    match names {
        [] => _ = tests.arg(OF_THE_PACKAGE),
        names => _ = tests.args(names.iter().map(|name| format!("{OF_THE_PACKAGE}::test_hostile_input[{name}]"))),
    }
    tests.env("PYTHONPATH", &bundle);
    Ok(tests)
}

/// Returns the test, which draws from the corpus.
fn test(target: &Target) -> Command {
    let Target { package, program, test, .. } = target;
    cargo(&["test", "--quiet", "-p", package, "--test", program, "--", "--nocapture", test])
}

/// Returns the same under libFuzzer, which follows what an input reaches. What it finds stays in the target folder.
fn guided(target: &Target, seconds: Option<u32>, seed: Option<u32>) -> Result<Command> {
    if !target.guided {
        return Err(format!("{} does not run under libFuzzer", target.name));
    }
    needs_nightly()?;
    needs(program("cargo", &["+nightly", "fuzz", "--version"]), "cargo-fuzz", "cargo install --locked cargo-fuzz")?;
    let found = self::target().join("fuzz").join(target.name);
    let corpus = unpacked(target.name, &self::target().join("fuzz/corpus").join(target.name))?;
    at(&found, fs::create_dir_all(&found))?;
    let mut command = program("cargo", &["+nightly", "fuzz", "run", "--fuzz-dir", "fuzz/guided", target.name]);
    command.args([found, corpus]);
    // The cases count what is released, and memory of a device is leaked on purpose where there is no driver.
    command.env("ASAN_OPTIONS", "detect_leaks=0");
    command.args(["--", "-timeout=60", &format!("-max_total_time={}", seconds.unwrap_or(120))]);
    command.arg(format!("-seed={}", seed.unwrap_or(0))).env("CARGO_TARGET_DIR", self::target().join("fuzz/guided"));
    Ok(command)
}

/// Writes each input of a corpus into a file of `folder`, which is what libFuzzer reads.
fn unpacked(name: &str, folder: &Path) -> Result<PathBuf> {
    empty(folder)?;
    for (name, input) in bridge_fuzz::corpus(name) {
        at(folder, fs::write(folder.join(name), input))?;
    }
    Ok(folder.into())
}
