//! What takes longer than the tests, or needs a nightly toolchain or another tool, one line a step.

use crate::check::{Step, itself, run_steps, with};
use crate::run::{Result, ask, at, cargo, needs, needs_nightly, program, target};
use crate::{api, features, venv};
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Packages whose tests need neither a device nor Python, and touch memory through raw pointers.
const POINTERS: [&str; 3] = ["truebridge-core", "truebridge-cuda", "truebridge-pyo3"];

/// The code of a package that is changed, and the tests that must notice.
struct Mutants {
    step: &'static str,
    package: &'static str,
    files: &'static [&'static str],
    features: &'static str,
    /// Arguments of `cargo test`. The documentation's examples, and tests with threads or processes, take longer than
    /// they find.
    tests: &'static [&'static str],
}

/// What decides which memory is shared, where, until when and in which order. Changes of adapters for Python objects
/// are not among these: the tests that would notice are Python's, over a bundle that takes minutes to build.
const MUTANTS: [Mutants; 7] = [
    Mutants {
        step: "mutants of core",
        package: "truebridge-core",
        files: &[
            "crates/bridge-core/src/{cast,layout,dtype,plan,lease,views}.rs",
            "crates/bridge-core/src/{prepared,held,copied,copy_all,copy_into}.rs",
        ],
        features: "dlpack",
        tests: &["--lib", "--test", "contract"],
    },
    Mutants {
        step: "mutants of the codec",
        package: "truebridge-core",
        files: &["crates/bridge-core/src/dlpack.rs", "crates/bridge-core/src/dlpack/adapter.rs"],
        features: "dlpack",
        tests: &["--test", "contract", "--test", "hostile"],
    },
    Mutants {
        step: "mutants of the order on a device",
        package: "truebridge-cuda",
        files: &["crates/bridge-cuda/src/*.rs"],
        features: "",
        tests: &["--lib"],
    },
    Mutants {
        step: "mutants of copies",
        package: "truebridge-cuda",
        files: &[
            "crates/bridge-cuda/src/copy/{floats,plan,host,moves}.rs",
            "crates/bridge-cuda/src/copy/host/*.rs",
            "crates/bridge-cuda/src/copy/moves/*.rs",
            "crates/bridge-cuda/src/copy/kernels/{casts,choose,many,pieces,parameters}.rs",
            "crates/bridge-cuda/src/copy/kernels/choose/*.rs",
        ],
        features: "",
        tests: &["--lib"],
    },
    Mutants {
        step: "mutants of other processes",
        package: "truebridge-ipc",
        files: &["crates/bridge-ipc/src/*.rs"],
        features: "",
        tests: &["--lib", "--test", "processes"],
    },
    Mutants {
        step: "mutants of the adapter of ndarray",
        package: "truebridge-ndarray",
        files: &["crates/bridge-ndarray/src/*.rs"],
        features: "",
        tests: &["--tests"],
    },
    Mutants {
        step: "mutants of the adapter of candle",
        package: "truebridge-candle",
        files: &["crates/bridge-candle/src/*.rs"],
        features: "",
        tests: &["--tests"],
    },
];

/// Runs every step, or names the reason why it is left out.
pub fn all() -> Result<ExitCode> {
    let python = venv::MAIN.ready()?;
    Ok(run_steps(steps(&python)))
}

fn steps(python: &Path) -> Vec<Step> {
    let misuse = |features: String| {
        nightly("misuse", &["test", "--quiet", "--doc", "-p", "truebridge", "--features", &features, "misuse"])
    };
    let packages: Vec<&str> = POINTERS.iter().flat_map(|name| ["-p", name]).collect();
    // The target names the sanitizer's programs apart from build scripts, which are not sanitized.
    let sanitized = [&["test", "--quiet", "--lib", "--tests", "--target", "host-tuple"], &packages[..]].concat();
    // TensorFlow is opened with RTLD_DEEPBIND, which the sanitizers' runtime refuses.
    let c_program = ["test", "--quiet", "-p", "truebridge-capi", "--target", "host-tuple", "--test", "program"];
    let c_program =
        [&c_program[..], &["--test", "layer", "--", "--skip", "with_tensorflow", "--skip", "torch"]].concat();
    let mut steps = vec![
        ("errors of misuse", features::linked().and_then(misuse).map(|step| with(step, "PYO3_PYTHON", python))),
        ("Miri over core", miri(&["test", "--quiet", "--lib", "--test", "contract", "-p", "truebridge-core"])),
        ("Miri over arrays of the host", miri(&["test", "--quiet", "--tests", "-p", "truebridge-ndarray"])),
        ("Miri over the simulated device", miri(&["test", "--quiet", "--test", "sim", "-p", "truebridge-conformance"])),
        ("models of views and groups", Ok(models(&["-p", "truebridge-core", "--test", "models"]))),
        ("models of pending releases", Ok(models(&["-p", "truebridge-cuda", "--lib", "models::"]))),
        ("models of connections", Ok(models(&["-p", "truebridge-ipc", "--lib", "models::"]))),
        ("public API", api::ready().and_then(|()| itself(&["generate".as_ref(), "api".as_ref(), "--check".as_ref()]))),
        ("free-threaded Python", free_threaded()),
        (
            "AddressSanitizer",
            nightly("sanitized", &sanitized).map(|step| {
                // Tests leak on purpose where a driver fails.
                with(with(step, "RUSTFLAGS", "-Zsanitizer=address"), "ASAN_OPTIONS", "detect_leaks=0")
            }),
        ),
        ("ThreadSanitizer", threads()),
        (
            "sanitizers over programs in C and C++",
            nightly("sanitized", &c_program).map(|step| {
                let step = with(with(step, "RUSTFLAGS", "-Zsanitizer=address"), "ASAN_OPTIONS", "detect_leaks=1");
                with(step, "TRUEBRIDGE_CFLAGS", "-g -fsanitize=address")
            }),
        ),
    ];
    steps.extend(MUTANTS.iter().map(|mutants| (mutants.step, changed(mutants))));
    steps
}

/// Returns a call of tests in which shuttle chooses the order of the threads.
fn models(arguments: &[&str]) -> Command {
    let tests = cargo(&[&["test", "--quiet"], arguments].concat());
    with(with(tests, "RUSTFLAGS", "--cfg shuttle"), "CARGO_TARGET_DIR", target().join("audit/models"))
}

/// Returns a call that compiles the package for a free-threaded Python, which needs none: pyo3 leaves abi3 for the
/// interface of that one version.
fn free_threaded() -> Result<Command> {
    let folder = target().join("audit/free-threaded");
    at(&folder, fs::create_dir_all(&folder))?;
    let config = folder.join("pyo3.txt");
    at(&config, fs::write(&config, FREE_THREADED))?;
    let check = cargo(&["check", "--quiet", "-p", "truebridge-python"]);
    Ok(with(with(check, "PYO3_CONFIG_FILE", config), "CARGO_TARGET_DIR", folder))
}

/// The configuration of pyo3 for that Python.
const FREE_THREADED: &str = "\
implementation=CPython
version=3.14
shared=true
build_flags=Py_GIL_DISABLED
pointer_width=64
suppress_build_script_link_lines=true
";

/// Returns a call of cargo-mutants, which `.cargo/mutants.toml` tells what to leave out. It leaves its reports in
/// `target/audit/PACKAGE/mutants.out`.
fn changed(mutants: &Mutants) -> Result<Command> {
    needs(cargo(&["mutants", "--version"]), "cargo-mutants", "cargo install --locked cargo-mutants")?;
    let Mutants { package, files, features, tests, .. } = mutants;
    let mut command = cargo(&["mutants", "-p", package, "--jobs", "2", "--colors", "never"]);
    command.args(files.iter().flat_map(|file| ["--file", file])).args(["--features", features]);
    command.arg("--output").arg(target().join("audit").join(package)).arg("--").args(*tests);
    // Without debug information a mutant builds faster.
    Ok(with(command, "CARGO_PROFILE_DEV_DEBUG", "0"))
}

/// Returns a call of the nightly cargo, with a separate target folder.
fn nightly(folder: &str, arguments: &[&str]) -> Result<Command> {
    needs_nightly()?;
    let command = program("cargo", &[&["+nightly"], arguments].concat());
    Ok(with(command, "CARGO_TARGET_DIR", target().join("audit").join(folder)))
}

/// Returns a call of Miri. Addresses pass between frameworks as numbers, so provenance is permissive; memory is leaked
/// on purpose where a driver fails. Core's tests with threads take too long in it.
fn miri(arguments: &[&str]) -> Result<Command> {
    let command = nightly("miri", &[&["miri"], arguments].concat())?;
    let how = "rustup component add --toolchain nightly miri rust-src";
    needs(program("cargo", &["+nightly", "miri", "--version"]), "Miri", how)?;
    let flags = "-Zmiri-permissive-provenance -Zmiri-disable-isolation -Zmiri-ignore-leaks";
    Ok(with(with(command, "MIRIFLAGS", flags), "PROPTEST_CASES", CASES))
}

/// Returns a call of the tests of the contract and of arrays of the host under ThreadSanitizer, for which the standard
/// library is compiled, too.
fn threads() -> Result<Command> {
    let source = "lib/rustlib/src/rust/library/Cargo.toml";
    let sysroot = ask(&mut program("rustc", &["+nightly", "--print", "sysroot"]));
    if !sysroot.is_some_and(|folder| Path::new(&folder).join(source).is_file()) {
        return Err(
            "the standard library's source is not installed: rustup component add --toolchain nightly rust-src".into(),
        );
    }
    let packages = ["-p", "truebridge-core", "-p", "truebridge-ndarray"];
    let tests = [&["test", "--quiet", "-Zbuild-std", "--target", "host-tuple", "--lib", "--tests"], &packages[..]];
    nightly("threads", &tests.concat()).map(|step| with(step, "RUSTFLAGS", "-Zsanitizer=thread"))
}

/// Random cases for each property under Miri, which is a hundred times slower.
const CASES: &str = "4";
