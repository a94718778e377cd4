//! The features of the facade: what each of them brings in, and whether they fit together.

use crate::run::{Result, ask, cargo, run};
use crate::{package, venv};
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Command;

/// The facade.
const FACADE: &str = "truebridge";

/// Type-checks the feature `torch` where there is no libtorch. It is not a feature to choose.
const DOC_ONLY: &str = "doc-only";

/// The feature that links CUDA's libraries. Without a toolkit it is type-checked only.
const TOOLKIT: &str = "candle-cuda";

/// The feature that links libtorch.
const LIBTORCH: &str = "torch";

/// All that the facade is made of without a feature.
const CORE: [&str; 10] = [
    "proc-macro2",
    "quote",
    "serde",
    "serde_core",
    "serde_derive",
    "smallvec",
    "syn",
    FACADE,
    "truebridge-core",
    "unicode-ident",
];

/// Packages, and the features that bring each of them in by themselves: all packages of this workspace but the adapters
/// for Python's frameworks, which only `python` brings in, and the others that cost a program build time or a library.
const BROUGHT_IN_BY: &[(&str, &[&str])] = &[
    ("candle-core", &["candle", "candle-cuda"]),
    ("candle-kernels", &["candle-cuda"]),
    ("cudarc", &["candle-cuda", "cuda", "cudarc", "tensorflow"]),
    ("dlpark", &["dlpack", "python"]),
    ("libloading", &["candle-cuda", "cuda", "cudarc", "ort", "python", "tensorflow", "torch"]),
    ("ndarray", &["ndarray", "torch"]),
    ("object", &["tensorflow"]),
    ("ort", &["ort"]),
    ("prost", &["tensorflow"]),
    ("pyo3", &["python"]),
    ("rustix", &["candle", "candle-cuda", "cuda", "cudarc", "ipc", "tensorflow"]),
    ("tch", &["torch"]),
    // adapters: begin
    ("truebridge-candle", &["candle", "candle-cuda"]),
    ("truebridge-cuda", &["candle-cuda", "cuda", "cudarc", "tensorflow"]),
    ("truebridge-cudarc", &["candle-cuda", "cudarc"]),
    ("truebridge-frameworks", &["python"]),
    ("truebridge-ipc", &["ipc"]),
    ("truebridge-ndarray", &["ndarray"]),
    ("truebridge-ort", &["ort"]),
    ("truebridge-pyo3", &["python"]),
    ("truebridge-tensorflow", &["tensorflow"]),
    ("truebridge-torch", &["python", "torch"]),
    // adapters: end
];

/// Checks the dependencies of each feature, and lints the code with the sets of features of [`sets`].
pub fn check() -> Result<()> {
    let features = features()?;
    dependencies(&features)?;
    let (python, published) = (venv::MAIN.ready()?, package::published()?);
    let manifest = published.iter().find(|member| package::name(member) == FACADE).ok_or("the facade is missing")?;
    for set in sets(&features, together(manifest)) {
        let mut command = facade(&["clippy", "--quiet", "--all-targets"], &set);
        run(command.args(["--", "-D", "warnings"]).env("PYO3_PYTHON", &python))
            .map_err(|error| format!("with the features {set:?}: {error}"))?;
    }
    Ok(())
}

/// Compares the packages that each feature brings in with the tables.
fn dependencies(features: &[String]) -> Result<()> {
    let (mut wrong, python) = (Vec::new(), of_python()?);
    let core = packages(&[])?;
    if core != CORE.into_iter().map(String::from).collect() {
        wrong.push(format!("without a feature the facade takes {core:?}"));
    }
    for (package, by) in BROUGHT_IN_BY {
        let unknown = by.iter().filter(|feature| !features.iter().any(|known| known == *feature));
        wrong.extend(unknown.map(|feature| format!("{package}: there is no feature {feature}")));
    }
    for feature in features {
        let packages = packages(&[feature])?;
        for (package, by) in BROUGHT_IN_BY {
            match (packages.contains(*package), by.contains(&feature.as_str())) {
                (true, false) => wrong.push(format!("{feature} must not bring in {package}")),
                (false, true) => wrong.push(format!("{feature} does not bring in {package} any more")),
                _ => {}
            }
        }
        let of_python = |name: &str| feature == PYTHON && python.contains(name);
        let listed = |name: &str| {
            CORE.contains(&name) || of_python(name) || BROUGHT_IN_BY.iter().any(|(package, _)| *package == name)
        };
        let new = packages.iter().filter(|name| name.starts_with(FACADE) && !listed(name));
        wrong.extend(new.map(|name| format!("{feature} brings in {name}, which the table lacks")));
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

/// Returns no feature, each one, all of them, and those that have code [`together`]. A single feature shows what it does
/// not declare, those that meet what they rely on, and all whether they clash.
fn sets<'a>(features: &'a [String], together: Vec<BTreeSet<&'a str>>) -> Vec<Vec<&'a str>> {
    let names: Vec<&str> = features.iter().map(String::as_str).collect();
    let mut sets = vec![vec![], names.clone()];
    sets.extend(names.iter().map(|one| vec![*one]));
    sets.extend(together.into_iter().map(|set| set.into_iter().collect()));
    sets
}

/// Returns the sets of features of a member that have code which none of them has alone: those that a target requires,
/// and those where one has a feature of a crate that another one brings in (`crate?/feature`).
fn together(member: &Value) -> Vec<BTreeSet<&str>> {
    fn strings(list: &Value) -> impl Iterator<Item = &str> {
        list.as_array().into_iter().flatten().filter_map(Value::as_str)
    }
    let features: Vec<(&str, Vec<&str>)> = member["features"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, enables)| (name.as_str(), strings(enables).collect()))
        .collect();
    let targets = member["targets"].as_array().into_iter().flatten();
    let mut sets: BTreeSet<BTreeSet<&str>> =
        targets.map(|target| strings(&target["required-features"]).collect()).collect();
    for (one, enables) in features.iter().filter(|(name, _)| *name != DOC_ONLY) {
        for weak in enables.iter().filter_map(|enabled| enabled.split_once("?/")) {
            let brought = format!("dep:{}", weak.0);
            let others = features.iter().filter(|(_, enables)| enables.contains(&brought.as_str()));
            sets.extend(others.map(|(other, _)| BTreeSet::from([*one, *other])));
        }
    }
    sets.into_iter().filter(|set| set.len() > 1).collect()
}

/// Returns the features of the facade, as cargo lists them.
fn features() -> Result<Vec<String>> {
    let arguments = ["tree", "-p", FACADE, "--all-features", "--depth", "0", "--prefix", "none", "--format", "{f}"];
    let listed = ask(&mut cargo(&arguments)).ok_or("cargo tree fails for the facade")?;
    Ok(listed.split(',').filter(|feature| *feature != DOC_ONLY).map(String::from).collect())
}

/// Returns the features with which the facade links without libtorch and a toolkit, for the option of cargo. What the
/// feature `torch` adds is a module that only names another crate.
pub fn linked() -> Result<String> {
    let features = features()?;
    let linked = features.iter().filter(|feature| ![TOOLKIT, LIBTORCH].contains(&feature.as_str()));
    Ok(linked.map(|feature| format!("{FACADE}/{feature}")).collect::<Vec<_>>().join(","))
}

/// The feature for modules of Python.
const PYTHON: &str = "python";

/// What prints the names of packages, one a line.
const TREE: [&str; 7] = ["tree", "-e", "normal", "--prefix", "none", "--format", "{p}"];

/// Returns the names of the packages that the facade takes with these features.
fn packages(features: &[&str]) -> Result<BTreeSet<String>> {
    names(&mut facade(&TREE, features)).ok_or_else(|| format!("cargo tree fails with the features {features:?}"))
}

/// Returns the names of the adapters for Python's frameworks.
fn of_python() -> Result<BTreeSet<String>> {
    let mut tree = cargo(&TREE);
    tree.args(["--depth", "1", "-p", "truebridge-frameworks", "--features", "adapters"]);
    names(&mut tree).ok_or_else(|| "cargo tree fails for the adapters".into())
}

fn names(tree: &mut Command) -> Option<BTreeSet<String>> {
    Some(ask(tree)?.lines().filter_map(|line| line.split(' ').next()).map(String::from).collect())
}

/// Returns a call of cargo for the facade with these features.
fn facade(arguments: &[&str], features: &[&str]) -> Command {
    let mut command = cargo(arguments);
    command.args(["-p", FACADE, "--no-default-features", "--features", &[features, &[DOC_ONLY]].concat().join(",")]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::{at, remove, root, target};
    use std::fs;

    #[test]
    fn features_meet_in_a_target_or_in_a_crate_that_one_brings_in() {
        let member = serde_json::json!({
            "features": { "a": ["x?/a"], "b": ["dep:x"], "c": ["dep:y"], DOC_ONLY: ["x?/doc"] },
            "targets": [{ "required-features": ["c"] }, { "required-features": ["c", "a"] }, {}],
        });
        assert_eq!(together(&member), [BTreeSet::from(["a", "b"]), BTreeSet::from(["a", "c"])]);
    }

    #[test]
    fn a_user_can_copy_the_dependencies_of_each_feature() {
        blocks(&features().unwrap()).unwrap();
    }

    /// The page with the dependencies that a user copies, and how a block of them begins.
    const PAGE: &str = "docs/rust.md";
    const BLOCK: &str = "```toml\n[dependencies]\n";

    /// Resolves each block of the page in a separate package, outside the workspace. A library that the block names
    /// next to the facade is the adapter's: there is one version of it. The blocks name every feature.
    fn blocks(features: &[String]) -> Result<()> {
        let (folder, page) = (target().join("blocks"), root().join(PAGE));
        let page = at(&page, fs::read_to_string(&page))?;
        remove(&folder)?;
        at(&folder, fs::create_dir_all(folder.join("src")))?;
        at(&folder, fs::write(folder.join("src/lib.rs"), ""))?;
        let mut missing: BTreeSet<&str> = features.iter().map(String::as_str).collect();
        for block in page.split(BLOCK).skip(1).filter_map(|rest| rest.split("```").next()) {
            let lines = || block.lines().filter_map(|line| line.split_once(" = "));
            let chosen = lines().filter(|(name, _)| *name == FACADE).flat_map(|(_, line)| line.split('"'));
            chosen.for_each(|feature| _ = missing.remove(feature));
            let path = root().join("crates/bridge").display().to_string();
            let manifest = format!(
                "[workspace]\n[package]\nname = \"user\"\nedition = \"2024\"\nrust-version = \"{}\"\n[dependencies]\n{}",
                env!("CARGO_PKG_RUST_VERSION"),
                block.replace("truebridge/crates/bridge", &path)
            );
            at(&folder, fs::write(folder.join("Cargo.toml"), manifest))?;
            at(&folder, fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock")))?;
            let tree = ask(cargo(&TREE).arg("--manifest-path").arg(folder.join("Cargo.toml")));
            let tree = tree.ok_or_else(|| format!("{PAGE}: cargo does not resolve\n{block}"))?;
            for (library, _) in lines() {
                let of_library = |line: &&str| line.split(' ').next() == Some(library);
                let versions: BTreeSet<&str> =
                    tree.lines().filter(of_library).map(|line| line.trim_end_matches(" (*)")).collect();
                if versions.len() != 1 {
                    return Err(format!(
                        "{PAGE} must name the version of {library} that the adapter takes: {versions:?}"
                    ));
                }
            }
        }
        remove(&folder)?;
        match missing.is_empty() {
            true => Ok(()),
            false => Err(format!("{PAGE} has no block for {missing:?}")),
        }
    }
}
