//! The packages for the crate registry: complete, and in an order in which they can be published. Beside them the wheels.

use crate::run::{Result, ask, at, cargo, cargo_home, run, target};
use crate::{venv, wheels};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Fields that a package must have, beyond its name and version.
const FIELDS: [&str; 7] =
    ["description", "documentation", "keywords", "categories", "license", "readme", "rust_version"];

/// Files that a package must hold.
const FILES: [&str; 3] = ["README.md", "LICENSES/LICENSE-MIT", "LICENSES/LICENSE-APACHE"];

/// The folder that no package holds: cases that once failed, for the tests of this repository.
const LEFT_OUT: &str = "proptest-regressions";

/// Limits of the registry: keywords and categories of a package, and the letters of a keyword.
const MOST: (usize, usize) = (5, 20);

/// Features that need a CUDA toolkit, which docs.rs lacks.
const TOOLKIT: [(&str, &str); 3] =
    [("truebridge", "candle-cuda"), ("truebridge-candle", "cuda"), ("truebridge-conformance", "candle-cuda")];

/// The most bytes that the registry takes of a package.
const MOST_BYTES: u64 = 10 << 20;

/// Checks every member that is published, and packages them. With `verify`, each package is also built by itself, and
/// so are the wheels.
pub fn check(verify: bool) -> Result<()> {
    packages(verify)?;
    if verify { wheels::check() } else { Ok(()) }
}

/// Packages every member that is published, and with `verify` builds each package by itself. Returns the packages in an
/// order in which they can be published: each after those that it depends on.
pub fn packages(verify: bool) -> Result<Vec<PathBuf>> {
    let members = members()?;
    let (published, kept): (Vec<&Value>, Vec<&Value>) = members.iter().partition(|member| is_published(member));
    let kept: Vec<&str> = kept.iter().map(|member| name(member)).collect();
    let wrong: Vec<String> = published.iter().flat_map(|member| defects(member, &kept)).collect();
    if !wrong.is_empty() {
        return Err(wrong.join("\n"));
    }
    let mut package = cargo(&["package", "--workspace", "--quiet", "--offline", "--allow-dirty"]);
    package.args(kept.iter().flat_map(|name| ["--exclude", name]));
    match verify {
        true => {
            forget_unpacked()?;
            package.env("PYO3_PYTHON", venv::MAIN.ready()?)
        }
        false => package.arg("--no-verify"),
    };
    run(&mut package)?;
    let mut files = Vec::new();
    for member in in_order(published)? {
        let (name, version) = (name(member), member["version"].as_str().unwrap_or_default());
        let file = target().join("package").join(format!("{name}-{version}.crate"));
        let bytes = at(&file, file.metadata())?.len();
        if bytes > MOST_BYTES {
            return Err(format!("{name} takes {bytes} bytes of at most {MOST_BYTES}"));
        }
        files.push(file);
    }
    Ok(files)
}

/// Returns the members in an order in which each follows those that it depends on, also for its tests: the registry
/// takes no package whose dependencies it lacks.
fn in_order(mut members: Vec<&Value>) -> Result<Vec<&Value>> {
    let mut ordered = Vec::new();
    while !members.is_empty() {
        let waiting: Vec<&str> = members.iter().map(|member| name(member)).collect();
        let depends = |member: &&Value| {
            let dependencies = member["dependencies"].as_array().into_iter().flatten();
            dependencies.filter_map(|one| one["name"].as_str()).any(|name| waiting.contains(&name))
        };
        let (later, next): (Vec<_>, Vec<_>) = members.iter().copied().partition(depends);
        if next.is_empty() {
            return Err(format!("{} depend on one another: none can be published first", waiting.join(", ")));
        }
        ordered.extend(next);
        members = later;
    }
    Ok(ordered)
}

/// Removes the packages of this workspace that cargo has unpacked to verify others. It knows them by the place of the
/// workspace and by their version, and would take those of an earlier state for the ones that it has just made.
fn forget_unpacked() -> Result<()> {
    let home = cargo_home();
    let folders = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let begins =
        |path: &Path, with: &str| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(with));
    // A registry without a host, as `cargo package` makes it, has a name that begins so.
    let registries = home.iter().flat_map(|home| folders(&home.join("registry/src"))).filter(|path| begins(path, "-"));
    for package in registries.flat_map(|registry| folders(&registry)).filter(|path| begins(path, "truebridge-")) {
        at(&package, fs::remove_dir_all(&package))?;
    }
    Ok(())
}

/// Returns the members that are published.
pub fn published() -> Result<Vec<Value>> {
    Ok(members()?.into_iter().filter(is_published).collect())
}

fn is_published(member: &Value) -> bool {
    member["publish"].as_array().is_none_or(|registries| !registries.is_empty())
}

/// Returns the members of the workspace, as cargo describes them.
fn members() -> Result<Vec<Value>> {
    let metadata = ask(&mut cargo(&["metadata", "--no-deps", "--offline", "--format-version", "1"]));
    let metadata: Value = serde_json::from_str(&metadata.ok_or("cargo metadata fails")?).map_err(|e| e.to_string())?;
    Ok(metadata["packages"].as_array().cloned().unwrap_or_default())
}

pub fn name(member: &Value) -> &str {
    member["name"].as_str().unwrap_or_default()
}

/// Returns what keeps a member from being published.
fn defects(member: &Value, kept: &[&str]) -> Vec<String> {
    let name = name(member);
    let filled = |value: &Value| match value {
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => (1..=MOST.0).contains(&items.len()),
        _ => false,
    };
    let fields = FIELDS.iter().filter(|field| !filled(&member[**field]));
    let mut wrong: Vec<String> = fields.map(|field| format!("{name} needs the field {field}")).collect();
    let strings = |value: &Value| -> Vec<String> {
        let items = value.as_array().map(Vec::as_slice).unwrap_or_default();
        items.iter().filter_map(Value::as_str).map(String::from).collect()
    };
    let long = strings(&member["keywords"]).into_iter().filter(|keyword| keyword.len() > MOST.1);
    wrong.extend(long.map(|keyword| format!("{name}: the keyword {keyword} is too long")));
    let (features, docs) = (member["features"].as_object(), &member["metadata"]["docs"]["rs"]);
    let documented = strings(&docs["features"]);
    let features = features.into_iter().flatten().map(|(feature, _)| feature);
    let left_out: Vec<_> = features
        .filter(|feature| !documented.contains(feature) && !TOOLKIT.contains(&(name, feature)))
        .map(String::as_str)
        .collect();
    if docs["all-features"] != true && !left_out.is_empty() {
        wrong.push(format!("{name}: docs.rs would leave out {}: set all-features", left_out.join(", ")));
    }
    for dependency in member["dependencies"].as_array().map(Vec::as_slice).unwrap_or_default() {
        let (other, kind) = (dependency["name"].as_str().unwrap_or_default(), dependency["kind"].as_str());
        if kept.contains(&other) && kind != Some("dev") {
            wrong.push(format!("{name} depends on {other}, which is not published"));
        }
    }
    match ask(&mut cargo(&["package", "--list", "--quiet", "--offline", "--allow-dirty", "-p", name])) {
        None => wrong.push(format!("{name}: cargo package --list fails")),
        Some(list) => {
            let missing = FILES.iter().filter(|file| !list.lines().any(|line| line == **file));
            wrong.extend(missing.map(|file| format!("{name} needs the file {file}")));
            let leftover = list.lines().filter(|line| line.starts_with(LEFT_OUT));
            wrong.extend(leftover.map(|file| format!("{name} must leave out {file}: exclude it in its Cargo.toml")));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_package_follows_those_that_it_depends_on() {
        let member = |name: &str, of: &[&str]| {
            let dependencies: Vec<_> = of.iter().map(|name| json!({ "name": name })).collect();
            json!({ "name": name, "dependencies": dependencies })
        };
        let members = [member("c", &["b", "serde"]), member("a", &[]), member("b", &["a"])];
        let ordered = in_order(members.iter().collect()).unwrap();
        assert_eq!(ordered.into_iter().map(name).collect::<Vec<_>>(), ["a", "b", "c"]);
        let circle = [member("a", &["b"]), member("b", &["a"])];
        assert!(in_order(circle.iter().collect()).is_err());
    }
}
