//! The folder that everything with a framework in it runs from, here and on hosts without Rust.

use crate::run::{Result, at, cargo, code, program, remove, root, run, status, target};
use crate::{tensorflow1, venv};
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

/// The most that a bundle may take.
const LIMIT: u64 = 64 << 20;

/// Arguments of cargo, in one call each: the extension modules, and the C library, whose dependencies are built without
/// Python.
const BUILDS: [&[&str]; 2] = [
    &[
        "--release",
        "-p",
        "truebridge-python",
        "-p",
        "truebridge-conformance",
        "-p",
        "truebridge-example-kernel",
        "--lib",
        "--example=extension",
        "--features=truebridge-conformance/python",
    ],
    &["--release", "-p", "truebridge-capi"],
];

/// The libraries that it builds, in the target folder, and their places in the bundle.
const LIBRARIES: [(&str, &str); 4] = [
    ("release/libbridge_python.so", "truebridge/_core.abi3.so"),
    ("release/examples/libextension.so", "truebridge_conformance/_conformance.abi3.so"),
    ("release/libbridge_capi.so", "truebridge_tf1/libtruebridge_tf1.so"),
    ("release/libscaled.so", "scaled.abi3.so"),
];

/// Folders and files of the repository, and their places in the bundle.
const SOURCES: [(&str, &str); 9] = [
    ("crates/bridge-python/python/truebridge", "truebridge"),
    ("crates/bridge-capi/python/truebridge_tf1", "truebridge_tf1"),
    ("conformance/python", "."),
    ("benches", "benches"),
    ("benches/bench.py", "bench.py"),
    ("fixtures", "fixtures"),
    ("LICENSE-MIT", "LICENSE-MIT"),
    ("LICENSE-APACHE", "LICENSE-APACHE"),
    ("README.md", "README.md"),
];

/// Builds the libraries and writes the bundle to `out`, which is replaced.
pub fn write(out: &Path) -> Result<()> {
    build(&BUILDS)?;
    if out.exists() {
        let marked = out.join("conformance.py").is_file() || at(out, fs::read_dir(out))?.next().is_none();
        if !marked {
            return Err(format!("{} is not a bundle: name a new or empty folder", out.display()));
        }
        remove(out)?;
    }
    let mut size = sources(&root(), out)?;
    for (library, place) in LIBRARIES {
        size += copy(&target().join(library), &out.join(place))?;
    }
    println!("{} holds {:.1} MiB", out.display(), size as f64 / f64::from(1 << 20));
    if size > LIMIT {
        return Err(format!("a bundle may take {} MiB", LIMIT >> 20));
    }
    Ok(())
}

/// What a bundle may have, too: arguments of cargo, and what they build, with its place.
pub type Extra = (&'static [&'static str], (&'static str, &'static str));

/// The suite that can plant faults into the adapters of the frameworks. The profile keeps it apart from everything that
/// users get, and the package in the bundle has none.
pub const PLANTED: Extra = (
    &["--profile", "planted", "-p", "truebridge-conformance", "--example=extension", "--features=planted,python"],
    ("planted/examples/libextension.so", "truebridge_conformance/_conformance.abi3.so"),
);

/// The example over candle, which takes as long to build as the package, although it is not optimised.
pub const CANDLE: Extra =
    (&["--profile", "example", "-p", "truebridge-example-candle"], ("example/libperceptron.so", "perceptron.abi3.so"));

/// Builds an extra, and puts it into a bundle.
pub fn add(out: &Path, (arguments, (library, place)): Extra) -> Result<()> {
    build(&[arguments])?;
    copy(&target().join(library), &out.join(place)).map(drop)
}

/// Copies what a bundle has of the repository at `root`. Returns the bytes copied.
pub fn sources(root: &Path, out: &Path) -> Result<u64> {
    SOURCES.iter().map(|(source, place)| copy(&root.join(source), &out.join(place))).sum()
}

/// Runs the suite from a bundle in the target folder.
pub fn conformance(options: &[String]) -> Result<ExitCode> {
    let fixtures = root().join("fixtures");
    let first = ["--fixtures", &fixtures.to_string_lossy(), "--command", "cargo xtask conformance"];
    status(&mut script("conformance", &first, options)?).map(code)
}

/// Runs another script of a bundle in the target folder.
pub fn other(name: &str, options: &[String]) -> Result<ExitCode> {
    let here = at(".".as_ref(), std::env::current_dir())?;
    let mut script = script(name, &[], options)?;
    // The user names the checkout that judges, and may do so from the folder that the command is called in.
    status(if name == "judge" { script.current_dir(here) } else { &mut script }).map(code)
}

/// Writes a bundle and returns the call of a script in it, which reports to a folder of this name.
fn script(name: &str, first: &[&str], options: &[String]) -> Result<Command> {
    let python = venv::MAIN.ready()?;
    let tensorflow1 = tensorflow1::folder_if_any(&python);
    let (bundle, report) = (target().join("bundle"), target().join(name));
    write(&bundle)?;
    let has = |wanted: &str| options.iter().any(|option| option == wanted);
    if has("--faults") && !has("--across-processes") {
        add(&bundle, PLANTED)?;
    }
    let mut command = tensorflow1::with_folder(program(python, &[]), tensorflow1);
    command.arg(bundle.join(format!("{name}.py"))).args(first).args(options);
    if !options.iter().any(|option| option == "--report" || option.starts_with("--report=")) {
        command.arg("--report").arg(report);
    }
    Ok(command)
}

fn build(calls: &[&[&str]]) -> Result<()> {
    calls.iter().try_for_each(|packages| {
        let mut command = cargo(&["build", "--quiet"]);
        // The modules take Python's symbols from the interpreter that loads them, and so need none to be built.
        run(command.args(*packages).env("PYO3_BUILD_EXTENSION_MODULE", "1").env("PYO3_NO_PYTHON", "1"))
    })
}

/// Copies a file, or a folder without compiled Python. Returns the bytes copied.
pub fn copy(source: &Path, place: &Path) -> Result<u64> {
    if source.is_file() {
        let parent = place.parent().unwrap_or(place);
        at(parent, fs::create_dir_all(parent))?;
        return at(source, fs::copy(source, place));
    }
    let mut size = 0;
    at(place, fs::create_dir_all(place))?;
    for entry in at(source, fs::read_dir(source))? {
        let name = at(source, entry)?.file_name();
        if name != "__pycache__" && !name.to_string_lossy().ends_with(".so") {
            size += copy(&source.join(&name), &place.join(&name))?;
        }
    }
    Ok(size)
}
