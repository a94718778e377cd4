//! Hostile input: what the fuzzers are run over, and how.

use crate::bundle;
use crate::run::{Result, ask, at, cargo, code, program, status, target};
use crate::venv;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// The fuzzer of the Python package, which runs from the sources over the package of a bundle.
pub const PACKAGE: &str = "crates/bridge-python/fuzz/fuzz.py";

/// Runs a target under libFuzzer instead.
const GUIDED: &str = "--guided";

/// A target that is a test in Rust.
struct Target {
    name: &'static str,
    /// What receives the input.
    what: &'static str,
    package: &'static str,
    /// The program, and the test in it.
    program: &'static str,
    test: &'static str,
    /// Whether it is one of those under libFuzzer.
    guided: bool,
}

const TARGETS: [Target; 6] = [
    Target {
        name: "codec",
        what: "managed tensors of DLPack",
        package: "truebridge-core",
        program: "hostile",
        test: "any_managed_tensor",
        guided: true,
    },
    Target {
        name: "capi",
        what: "calls of the C functions",
        package: "truebridge-capi",
        program: "hostile",
        test: "any_calls",
        guided: true,
    },
    Target {
        name: "ticket",
        what: "tickets",
        package: "truebridge-ipc",
        program: "processes",
        test: "any_ticket",
        guided: true,
    },
    Target {
        name: "request",
        what: "messages to a process that shares, and to a server of names",
        package: "truebridge-ipc",
        program: "processes",
        test: "any_request",
        guided: true,
    },
    Target {
        name: "answer",
        what: "answers of a process that shares",
        package: "truebridge-ipc",
        program: "processes",
        test: "any_answer",
        guided: true,
    },
    Target {
        name: "sequence",
        what: "sequences of messages at both ends of the wire",
        package: "truebridge-ipc",
        program: "processes",
        test: "any_sequence",
        guided: false,
    },
];

/// Runs the fuzzers: of the Python package, unless `--target` names tests in Rust.
pub fn run(options: &[String]) -> Result<ExitCode> {
    let names = options.iter().position(|option| option == "--target").and_then(|at| options.get(at + 1));
    let known = |name: &str| TARGETS.iter().find(|target| target.name == name);
    let chosen: Vec<(&str, Option<&Target>)> =
        names.iter().flat_map(|names| names.split(',')).map(|name| (name, known(name))).collect();
    if options.iter().any(|option| option == "--help") {
        let lines = TARGETS.map(|Target { name, what, .. }| format!("  {name:<10} {what}\n")).concat();
        println!("Targets in Rust, with --seconds, --seed and {GUIDED} (libFuzzer):\n{lines}\nThe others:");
    }
    match chosen.iter().filter_map(|(_, target)| *target).collect::<Vec<_>>() {
        none if none.is_empty() => package(options),
        targets if targets.len() == chosen.len() => each(&targets, options),
        _ => Err(format!("run the targets in Rust by themselves: {}", TARGETS.map(|target| target.name).join(","))),
    }
}

/// Runs the fuzzer over the package of a bundle in the target folder.
fn package(options: &[String]) -> Result<ExitCode> {
    let (python, bundle) = (venv::MAIN.ready()?, target().join("bundle"));
    bundle::write(&bundle)?;
    let mut command = program(python, &[PACKAGE]);
    status(command.args(options).env("PYTHONPATH", &bundle)).map(code)
}

/// Runs each of these targets, and then returns the first failure. They need no Python.
fn each(targets: &[&Target], options: &[String]) -> Result<ExitCode> {
    let is_guided = options.iter().any(|option| option == GUIDED);
    let (mut seconds, mut seed) = (None, None);
    let rest: Vec<&String> = options.iter().filter(|option| *option != GUIDED).collect();
    for option in rest.chunks(2) {
        match option {
            [name, value] if *name == "--seconds" => seconds = Some(value.as_str()),
            [name, value] if *name == "--seed" => seed = Some(value.as_str()),
            [name, _] if *name == "--target" => (),
            _ => return Err(format!("these targets take --seconds and --seed, each with a number, not {option:?}")),
        }
    }
    let mut first = ExitCode::SUCCESS;
    for target in targets {
        let mut command = if is_guided { guided(target, seconds, seed)? } else { test(target, seconds, seed) };
        let done = status(&mut command)?;
        if !done.success() && first == ExitCode::SUCCESS {
            first = code(done);
        }
    }
    Ok(first)
}

/// Returns the test, which draws from the corpus.
fn test(target: &Target, seconds: Option<&str>, seed: Option<&str>) -> Command {
    let Target { package, program, test, .. } = target;
    let mut tests = cargo(&["test", "--quiet", "-p", package, "--test", program, "--", "--nocapture", test]);
    let variables = [("TRUEBRIDGE_FUZZ", seconds), ("TRUEBRIDGE_SEED", seed)];
    tests.envs(variables.into_iter().filter_map(|(variable, value)| Some((variable, value?))));
    tests
}

/// Returns the same under libFuzzer, which follows what an input reaches. What it finds stays in the target folder.
fn guided(target: &Target, seconds: Option<&str>, seed: Option<&str>) -> Result<Command> {
    if !target.guided {
        return Err(format!("{} does not run under libFuzzer", target.name));
    }
    if ask(&mut program("cargo", &["+nightly", "fuzz", "--version"])).is_none() {
        return Err("cargo-fuzz or the nightly toolchain is missing: cargo install --locked cargo-fuzz, \
                    rustup toolchain install nightly"
            .into());
    }
    let found = self::target().join("fuzz").join(target.name);
    let corpus = unpacked(target.name, &self::target().join("fuzz/corpus").join(target.name))?;
    at(&found, fs::create_dir_all(&found))?;
    let mut command = program("cargo", &["+nightly", "fuzz", "run", "--fuzz-dir", "fuzz/guided", target.name]);
    command.args([found, corpus]);
    // The cases count what is released, and memory of a device is leaked on purpose where there is no driver.
    command.env("ASAN_OPTIONS", "detect_leaks=0");
    command.args(["--", "-timeout=60", &format!("-max_total_time={}", seconds.unwrap_or("120"))]);
    command.arg(format!("-seed={}", seed.unwrap_or("0"))).env("CARGO_TARGET_DIR", self::target().join("fuzz/guided"));
    Ok(command)
}

/// Writes each input of a corpus into a file of `folder`, which is what libFuzzer reads.
fn unpacked(name: &str, folder: &Path) -> Result<PathBuf> {
    if folder.exists() {
        at(folder, fs::remove_dir_all(folder))?;
    }
    at(folder, fs::create_dir_all(folder))?;
    for (name, input) in bridge_fuzz::corpus(name) {
        at(folder, fs::write(folder.join(name), input))?;
    }
    Ok(folder.into())
}
