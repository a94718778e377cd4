//! Tries what `new-adapter` writes, in a copy of the repository: as it is written, the suite says what to write next;
//! filled in from `xtask/fixtures`, the suite certifies it.

use crate::bundle;
use crate::new_adapter::{self, NewAdapter};
use crate::run::{Result, at, cargo, program, remove, root, run, target};
use crate::venv;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The folders of the repository that are copied; single files are listed apart.
const FOLDERS: [&str; 10] =
    [".cargo", "LICENSES", "benches", "conformance", "crates", "docs", "examples", "fixtures", "fuzz", "xtask"];

/// What the suite says of a subject that is not written yet.
const NEXT: &str = "write create in ";

#[test]
#[ignore = "builds adapters, which takes minutes: .ci/run packages runs it"]
fn what_new_adapter_writes_is_certified() -> Result<()> {
    let copy = target().join("new-adapter");
    remove(&copy)?;
    repository(&copy)?;
    for name in ["tiny", "mini"] {
        NewAdapter::of_host(name, name == "tiny").write(&copy)?;
    }
    in_rust(&copy)?;
    in_python(&copy)?;
    remove(&copy)
}

/// Copies the repository without what is built.
fn repository(copy: &Path) -> Result<()> {
    for folder in FOLDERS {
        bundle::copy(&root().join(folder), &copy.join(folder))?;
    }
    for entry in at(&root(), fs::read_dir(root()))?.flatten() {
        if entry.path().is_file() {
            bundle::copy(&entry.path(), &copy.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// An adapter of Rust: its own test is the certificate.
fn in_rust(copy: &Path) -> Result<()> {
    let test = || within(copy, cargo(&["test", "--quiet", "-p", "truebridge-mini"]));
    says_what_is_next(test()?)?;
    fill_in("fixtures/rust", copy, "")?;
    run(&mut test()?)
}

/// An adapter of Python: the suite runs from what a bundle holds.
fn in_python(copy: &Path) -> Result<()> {
    let out = copy.join("target/bundle");
    fill_in("fixtures/python", copy, "module/")?;
    let suite = || -> Result<Command> {
        let packages = ["-p", "truebridge-python", "-p", "truebridge-conformance", "--lib", "--example=extension"];
        let features = "--features=truebridge-conformance/python";
        let build = [&["build", "--quiet", features], &packages[..]].concat();
        run(&mut within(copy, cargo(&build))?)?;
        bundle::sources(copy, &out)?;
        bundle::copy(&target().join("debug/libbridge_python.so"), &out.join("truebridge/_core.abi3.so"))?;
        let module = out.join("truebridge_conformance/_conformance.abi3.so");
        bundle::copy(&target().join("debug/examples/libextension.so"), &module)?;
        let mut suite =
            program(venv::MAIN.ready()?, &["conformance.py", "--device", "cpu", "--adapters", "tiny,numpy"]);
        suite.args(["--cases", "100", "--seed", "1", "--report"]).arg(copy.join("target/report"));
        suite.current_dir(&out).env("PYTHONPATH", copy.join("module"));
        Ok(suite)
    };
    says_what_is_next(suite()?)?;
    fill_in("fixtures/python", copy, "")?;
    run(&mut suite()?)
}

/// Writes the files of an archive of `xtask` whose places begin so into the copy.
fn fill_in(archive: &str, copy: &Path, begin: &str) -> Result<()> {
    for (place, text) in new_adapter::archive(&root(), archive)?.iter().filter(|(place, _)| place.starts_with(begin)) {
        let path = copy.join(place);
        let folder = path.parent().unwrap_or(copy);
        at(folder, fs::create_dir_all(folder))?;
        at(&path, fs::write(&path, text))?;
    }
    Ok(())
}

/// The call of cargo, for the copy, with what is compiled shared.
fn within(copy: &Path, mut cargo: Command) -> Result<Command> {
    cargo.current_dir(copy).env("CARGO_TARGET_DIR", target()).env("PYO3_PYTHON", venv::MAIN.ready()?);
    Ok(cargo)
}

fn says_what_is_next(mut command: Command) -> Result<()> {
    let output = command.output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    match !output.status.success() && text.contains(NEXT) {
        true => Ok(()),
        false => Err(format!("the suite does not say what to write next: {text}")),
    }
}
