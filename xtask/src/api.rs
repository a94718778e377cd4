//! The public API of the published crates, as text in the repository.

use crate::package::{name, published};
use crate::run::{Result, at, cargo, needs, needs_nightly, program, root, target, without_nvcc};
use crate::venv;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The archive of the lists, one for each package.
const FILE: &str = "fixtures/api.txtar";

/// Traits that the compiler implements by itself, and that differ between toolchains or matter to no caller. `Send` and
/// `Sync` are promises, and stay in the lists.
const LEFT_OUT: [&str; 6] = [
    "core::marker::Freeze",
    "core::marker::StructuralPartialEq",
    "core::marker::Unpin",
    "core::marker::UnsafeUnpin",
    "core::panic::unwind_safe::RefUnwindSafe",
    "core::panic::unwind_safe::UnwindSafe",
];

/// Checks that there is what makes the lists.
pub fn ready() -> Result<()> {
    needs_nightly()?;
    needs(cargo(&["public-api", "--version"]), "cargo-public-api", "cargo install --locked cargo-public-api")
}

/// Writes the lists, or with `check` compares them with what is checked in.
pub fn write(check: bool) -> Result<()> {
    ready()?;
    let (python, path, published) = (venv::MAIN.ready()?, root().join(FILE), published()?);
    let packages: BTreeSet<&str> = published.iter().map(name).collect();
    if !check {
        let list = |package| Ok(format!("-- {package} --\n{}", listed(package, &python)?));
        return at(&path, fs::write(&path, packages.into_iter().map(list).collect::<Result<String>>()?));
    }
    let lists = bridge_fuzz::unpacked(&at(&path, fs::read_to_string(&path))?);
    if let Some((package, _)) = lists.iter().find(|(package, _)| !packages.contains(package.as_str())) {
        return Err(format!("{FILE} lists {package}, which is not published: run cargo xtask generate api"));
    }
    for package in packages {
        let before = lists.iter().find(|(name, _)| name == package).map(|(_, list)| String::from_utf8_lossy(list));
        let changes = changes(&before.unwrap_or_default(), &listed(package, &python)?);
        if !changes.is_empty() {
            return Err(format!(
                "the interface of {package} has changed:\n{changes}If that is meant, run cargo xtask generate api, and say it in the CHANGELOG"
            ));
        }
    }
    Ok(())
}

/// Lists the items of a package, with all features, one a line.
fn listed(package: &str, python: &Path) -> Result<String> {
    let arguments = ["+nightly", "public-api", "-p", package, "--all-features", "--omit", "blanket-impls"];
    let mut list = without_nvcc(program("cargo", &arguments));
    list.args(["--color", "never"]).env("PYO3_PYTHON", python).env("CARGO_TARGET_DIR", target().join("audit/api"));
    let output = list.output().map_err(|error| format!("cargo public-api does not start: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo public-api: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().filter(|line| !is_left_out(line)).flat_map(|line| [line, "\n"]).collect())
}

fn is_left_out(line: &str) -> bool {
    line.starts_with("impl") && LEFT_OUT.iter().any(|name| line.contains(&format!("{name} for ")))
}

/// Returns the lines of one list that the other lacks.
fn changes(before: &str, now: &str) -> String {
    let lacks = |list: &str, sign: &str, other: &str| -> String {
        let lines = list.lines().filter(|line| !other.lines().any(|kept| kept == *line));
        lines.map(|line| format!("{sign} {line}\n")).collect()
    };
    lacks(before, "-", now) + &lacks(now, "+", before)
}
