//! A release: everything that is published, built and checked on this machine. Nothing is uploaded.

use crate::run::{Result, ask, at, empty, program, remove, root, run, target};
use crate::{bill, install, package, venv, version, versions, wheels};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The folder in the target folder that holds what is published.
const OUT: &str = "release-dry-run";

/// The file with the hashes of the others, as `sha256sum --check` reads it.
const SUMS: &str = "SHA256SUMS";

/// Builds the packages of the crates, the wheel, the source distribution and the C library, installs the wheel for every
/// Python that the table of versions names and that is here, and writes the notes, the bill of materials and the
/// hashes into the same folder.
pub fn dry_run() -> Result<()> {
    let tools = venv::WHEELS.ready()?;
    let out = target().join(OUT);
    empty(&out)?;
    step("version", || Ok(format!("{}, in {} lines", version::CURRENT, version::agree()?)))?;
    step("addresses", addresses)?;
    step("change log", || notes(&out))?;
    let mut names = Vec::new();
    step("crates", || {
        let packages = package::packages(true)?;
        names = packages.iter().filter_map(|file| package_name(file)).collect();
        keep(&out.join("crates"), &packages)?;
        // The order in which they can be published.
        write(&out.join("crates/order.txt"), &names.iter().map(|name| format!("{name}\n")).collect::<String>())?;
        Ok(format!("{} packages, each built from what is in it", packages.len()))
    })?;
    let mut wheel = PathBuf::new();
    step("wheels", || {
        let made = wheels::make(&tools)?;
        keep(&out.join("python"), &[made.source, made.wheel.clone()])?;
        wheel = made.wheel;
        let said = "built from the source distribution; ran the README";
        match made.aarch64 {
            Ok(wheel) => {
                keep(&out.join("python"), &[wheel])?;
                Ok(format!("{said}; that for aarch64 runs nowhere here"))
            }
            Err(reason) => Ok(format!("{said}; none for aarch64: {reason}")),
        }
    })?;
    step("Pythons", || pythons(&wheel))?;
    step("C library", || c_library(&out))?;
    step("bill of materials", || {
        let bill = bill::of(&names)?;
        let count = bill.matches("\"bom-ref\"").count();
        write(&out.join(format!("truebridge-{}.cyclonedx.json", version::CURRENT)), &bill)?;
        Ok(format!("{count} crates"))
    })?;
    step("hashes", || hashes(&out))?;
    println!("{}", out.display());
    Ok(())
}

/// Takes a step, and prints what it says and how long it took.
fn step(name: &str, step: impl FnOnce() -> Result<String>) -> Result<()> {
    let started = Instant::now();
    let said = step().map_err(|error| format!("{name}: {error}"))?;
    println!("{name:<18} {:>6.1} s  {said}", started.elapsed().as_secs_f64());
    Ok(())
}

/// Fields with which a package says where the project is.
const ADDRESSES: [&str; 2] = ["repository", "homepage"];

/// Returns where the packages say that the project is: all of them, or none before there is a place.
fn addresses() -> Result<String> {
    said(&package::published()?)
}

/// See [`addresses`].
fn said(packages: &[Value]) -> Result<String> {
    let mut said = Vec::new();
    for field in ADDRESSES {
        let (with, without): (Vec<&Value>, Vec<&Value>) = packages.iter().partition(|one| one[field].is_string());
        match (with.first(), without.first()) {
            (Some(_), Some(one)) => {
                return Err(format!("{} needs {field}.workspace = true, as others have it", package::name(one)));
            }
            (Some(one), None) => said.push(format!("{field} {}", one[field].as_str().unwrap_or_default())),
            (None, _) => said.push(format!("no {field} yet: set it in [workspace.package] and in each package")),
        }
    }
    Ok(said.join("; "))
}

/// Writes the section of the change log that this version has, or the one of what is not released yet.
fn notes(out: &Path) -> Result<String> {
    let log = root().join("CHANGELOG.md");
    let log = at(&log, fs::read_to_string(&log))?;
    let (title, text) = section(&log, version::CURRENT).ok_or("CHANGELOG.md has no section for this version")?;
    write(&out.join("notes.md"), text)?;
    let next = if title == UNRELEASED { ": give it the version and the date before a release" } else { "" };
    Ok(format!("the section {title:?}{next}"))
}

/// The section of what has no version yet.
const UNRELEASED: &str = "[Unreleased]";

/// Returns the title and the text of the section of a version, else of what is not released, unless it is empty.
fn section<'a>(log: &'a str, version: &str) -> Option<(&'a str, &'a str)> {
    let sections = || log.split("\n## ").skip(1).filter_map(|section| section.split_once('\n'));
    let of_version = |title: &str| title.starts_with(&format!("[{version}]"));
    let found =
        sections().find(|(title, _)| of_version(title)).or_else(|| sections().find(|(title, _)| *title == UNRELEASED));
    found.map(|(title, text)| (title, text.trim())).filter(|(_, text)| !text.is_empty())
}

/// Returns the name of a crate, of which this is the package.
fn package_name(file: &Path) -> Option<String> {
    let stem = file.file_stem()?.to_str()?;
    stem.strip_suffix(version::CURRENT)?.strip_suffix('-').map(str::to_owned)
}

/// Installs the wheel into a bare environment of each Python that the table of versions names and that is here, where it
/// is imported, has this version, and says what the machine has.
fn pythons(wheel: &Path) -> Result<String> {
    let (mut done, mut missing) = (Vec::new(), Vec::new());
    for minor in wheels::passed(&versions::rows()?) {
        let version = format!("3.{minor}");
        let Some(found) = venv::interpreter(&version) else {
            missing.push(version);
            continue;
        };
        let bare = target().join("release-python");
        wheels::in_bare(&found, wheel, &bare).map_err(|error| format!("Python {version}: {error}"))?;
        remove(&bare)?;
        done.push(version);
    }
    match (done.is_empty(), missing.is_empty()) {
        (true, _) => Err("no Python that the table names is here".into()),
        (_, true) => Ok(done.join(", ")),
        _ => Ok(format!("{}; not here: {}", done.join(", "), missing.join(", "))),
    }
}

/// Installs the C library under a prefix, and makes an archive of it.
fn c_library(out: &Path) -> Result<String> {
    let name = format!("truebridge-c-{}-linux-x86_64", version::CURRENT);
    let prefix = target().join("release-c").join(&name);
    install::install(&prefix)?;
    let archive = out.join(format!("{name}.tar.gz"));
    // Without the user, and with one time, so that two builds are equal.
    let mut tar = program("tar", &["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "-czf"]);
    run(tar.arg(&archive).arg("-C").arg(target().join("release-c")).arg(&name))?;
    remove(&target().join("release-c"))?;
    Ok(format!("{name}.tar.gz"))
}

/// Writes the hashes of all files, and checks them as a user would.
fn hashes(out: &Path) -> Result<String> {
    let mut files = Vec::new();
    listed(out, Path::new(""), &mut files)?;
    files.sort();
    let mut sum = program("sha256sum", &[]);
    let sums = ask(sum.current_dir(out).args(&files)).ok_or("sha256sum fails")?;
    write(&out.join(SUMS), &(sums + "\n"))?;
    run(program("sha256sum", &["--check", "--quiet", SUMS]).current_dir(out))?;
    Ok(format!("{} files", files.len()))
}

/// Adds the files in a folder, by their paths below `top`.
fn listed(top: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let path = top.join(folder);
    for entry in at(&path, fs::read_dir(&path))?.flatten() {
        let name = folder.join(entry.file_name());
        match entry.path().is_dir() {
            true => listed(top, &name, files)?,
            false => files.push(name),
        }
    }
    Ok(())
}

fn keep(folder: &Path, files: &[PathBuf]) -> Result<()> {
    at(folder, fs::create_dir_all(folder))?;
    files
        .iter()
        .try_for_each(|file| at(file, fs::copy(file, folder.join(file.file_name().unwrap_or_default()))).map(drop))
}

fn write(path: &Path, text: &str) -> Result<()> {
    at(path, fs::write(path, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_package_says_where_the_project_is_or_none_does() {
        let (with, without) = (json!({ "name": "a", "repository": "there" }), json!({ "name": "b" }));
        assert!(said(&[with.clone(), without.clone()]).unwrap_err().starts_with("b needs repository.workspace"));
        assert!(said(&[without]).unwrap().starts_with("no repository yet"));
        assert!(said(&[with]).unwrap().starts_with("repository there; no homepage yet"));
    }

    #[test]
    fn notes_are_those_of_the_version() {
        let log = "# Changelog\n\n## [Unreleased]\n\nnew\n\n## [0.1.0] - 2026-12-01\n\n### Added\n\n- it\n\n## [0.0.1]\n\nold\n";
        assert_eq!(section(log, "0.1.0"), Some(("[0.1.0] - 2026-12-01", "### Added\n\n- it")));
        assert_eq!(section(log, "0.0.1"), Some(("[0.0.1]", "old")));
        assert_eq!(section(log, "0.2.0"), Some(("[Unreleased]", "new")));
        assert_eq!(section("# Changelog\n\n## [Unreleased]\n\n## [0.0.1]\n\nold\n", "0.2.0"), None);
    }

    #[test]
    fn a_package_names_its_crate() {
        let file = format!("target/package/truebridge-core-{}.crate", version::CURRENT);
        assert_eq!(package_name(Path::new(&file)).as_deref(), Some("truebridge-core"));
        assert_eq!(package_name(Path::new("truebridge-core-9.9.9.crate")), None);
    }
}
