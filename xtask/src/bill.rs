//! Software bills of materials, in the format CycloneDX. Of a release: every crate that the published ones are built of,
//! with its version, licence and hash, and what each depends on. Of a wheel: its build, next to maturin's of the
//! crates.

use crate::run::{Result, ask, at, cargo, pretty, program, root};
use crate::version;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Returns the bill of the packages of these names, as text.
pub fn of(published: &[String]) -> Result<String> {
    let arguments = ["metadata", "--all-features", "--offline", "--locked", "--format-version", "1"];
    let metadata = ask(&mut cargo(&arguments)).ok_or("cargo metadata fails")?;
    let metadata: Value = serde_json::from_str(&metadata).map_err(|error| error.to_string())?;
    let lock = root().join("Cargo.lock");
    pretty(&bill(&metadata, &checksums(&at(&lock, fs::read_to_string(&lock))?), published))
}

/// Returns the hashes of the registry's packages, by name and version, which Cargo.lock has.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let package = |entry: &str| {
        let field = |name: &str| {
            let start = format!("{name} = \"");
            entry.lines().find_map(|line| line.strip_prefix(&start)?.strip_suffix('"')).map(str::to_owned)
        };
        Some(((field("name")?, field("version")?), field("checksum")?))
    };
    lock.split("[[package]]").filter_map(package).collect()
}

/// Returns the bill of what cargo describes.
fn bill(metadata: &Value, checksums: &BTreeMap<(String, String), String>, published: &[String]) -> Value {
    let of = |value: &Value, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let packages: BTreeMap<String, &Value> = entries(&metadata["packages"]).map(|one| (of(one, "id"), one)).collect();
    let depends: BTreeMap<String, Vec<String>> =
        entries(&metadata["resolve"]["nodes"]).map(|node| (of(node, "id"), shipped(node))).collect();
    let is_root = |id: &&String| published.contains(&of(packages[*id], "name"));
    let mut waiting: Vec<&String> = packages.keys().filter(is_root).collect();
    let mut reached: BTreeSet<&String> = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if reached.insert(id) {
            waiting.extend(depends.get(id).into_iter().flatten());
        }
    }
    let reference = |id: &String| format!("pkg:cargo/{}@{}", of(packages[id], "name"), of(packages[id], "version"));
    let component = |id: &&String| {
        let (name, version) = (of(packages[*id], "name"), of(packages[*id], "version"));
        let mut component = json!({
            "type": "library", "bom-ref": reference(id), "purl": reference(id), "name": name, "version": version,
            "scope": "required",
        });
        if let Some(license) = packages[*id]["license"].as_str() {
            // The older way of cargo to write a choice.
            component["licenses"] = json!([{ "expression": license.replace('/', " OR ").replace("  OR  ", " OR ") }]);
        }
        if let Some(hash) = checksums.get(&(name, version)) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": hash }]);
        }
        component
    };
    let edges = |id: &&String| {
        let on: BTreeSet<String> = depends.get(*id).into_iter().flatten().map(reference).collect();
        json!({ "ref": reference(id), "dependsOn": on })
    };
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": { "type": "library", "name": "truebridge", "version": version::CURRENT } },
        "components": reached.iter().map(component).collect::<Vec<_>>(),
        "dependencies": reached.iter().map(edges).collect::<Vec<_>>(),
    })
}

/// Returns what a package is built of, without what only its tests need.
fn shipped(node: &Value) -> Vec<String> {
    let is_shipped = |one: &&Value| entries(&one["dep_kinds"]).any(|kind| kind["kind"] != "dev");
    entries(&node["deps"]).filter(is_shipped).filter_map(|one| one["pkg"].as_str()).map(str::to_owned).collect()
}

fn entries(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// The name of the file of a wheel. Installers keep it in `sboms` of the folder of the distribution, as PEP 770 has it.
pub const FILE: &str = "build.cyclonedx.json";

/// Modules of the tools whose versions matter, in addition to the compiler.
const TOOLS: [&str; 2] = ["maturin", "ziglang"];

/// Writes what a wheel says of its build to `place`: the commit, and whether files were changed since; the versions of the compiler and of the
/// tools, which the Python of this environment has; and the hash of Cargo.lock, which pins every crate.
pub fn of_build(python: &Path, place: &Path) -> Result<()> {
    let version = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))";
    let of_module = |name: &str| ask(program(python, &["-c", version]).arg(name));
    let compiler = ask(&mut program("rustc", &["--version"])).map(|said| said.trim_start_matches("rustc ").to_owned());
    let mut tools = vec![("rustc", compiler)];
    tools.extend(TOOLS.map(|tool| (tool, of_module(tool))));
    let tools: Vec<Value> = tools
        .into_iter()
        .map(|(name, version)| json!({ "type": "application", "name": name, "version": version }))
        .collect();
    let digest = "import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())";
    let digest = ask(&mut program(python, &["-c", digest, "Cargo.lock"])).ok_or("Cargo.lock cannot be read")?;
    let mut bill = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "tools": { "components": tools },
            "component": { "type": "library", "name": "truebridge", "version": env!("CARGO_PKG_VERSION") },
        },
        "components": [{
            "type": "file",
            "name": "Cargo.lock",
            "hashes": [{ "alg": "SHA-256", "content": digest }],
        }],
    });
    if let Some(commit) = git(&["rev-parse", "HEAD"]) {
        bill["metadata"]["timestamp"] = git(&["log", "-1", "--format=%cI"]).into();
        let mut pedigree = json!({ "commits": [{ "uid": commit }] });
        if git(&["status", "--porcelain"]).is_none_or(|changed| !changed.is_empty()) {
            pedigree["notes"] = "The working tree had changes.".into();
        }
        bill["metadata"]["component"]["pedigree"] = pedigree;
    }
    at(place, fs::write(place, pretty(&bill)?))
}

/// Returns the time of the commit, in seconds: the time that files of a package get, so that two builds are equal.
pub fn epoch() -> Option<String> {
    git(&["log", "-1", "--format=%ct"])
}

fn git(arguments: &[&str]) -> Option<String> {
    ask(&mut program("git", arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = "version = 4\n\n[[package]]\nname = \"ours\"\nversion = \"0.1.0\"\n\n\
                        [[package]]\nname = \"theirs\"\nversion = \"2.0.0\"\nsource = \"registry\"\nchecksum = \"abc\"\n";

    #[test]
    fn a_bill_names_what_is_built_in_and_no_other_crate() {
        let package = |name: &str, version: &str, license: &str| json!({ "id": format!("{name} {version}"), "name": name, "version": version, "license": license });
        let needs = |pkg: &str, kind: Value| json!({ "pkg": pkg, "dep_kinds": [{ "kind": kind }] });
        let metadata = json!({
            "packages": [package("ours", "0.1.0", "MIT OR Apache-2.0"), package("theirs", "2.0.0", "MIT/Apache-2.0"),
                         package("for-tests", "1.0.0", "MIT"), package("beside", "1.0.0", "MIT")],
            "resolve": { "nodes": [
                { "id": "ours 0.1.0", "deps": [needs("theirs 2.0.0", Value::Null), needs("for-tests 1.0.0", json!("dev"))] },
                { "id": "theirs 2.0.0", "deps": [] },
            ] },
        });
        let bill = bill(&metadata, &checksums(LOCK), &["ours".into()]);
        let names: Vec<_> = entries(&bill["components"]).map(|one| one["purl"].as_str().unwrap()).collect();
        assert_eq!(names, ["pkg:cargo/ours@0.1.0", "pkg:cargo/theirs@2.0.0"]);
        let theirs = &bill["components"][1];
        assert_eq!(theirs["licenses"], json!([{ "expression": "MIT OR Apache-2.0" }]));
        assert_eq!(theirs["hashes"], json!([{ "alg": "SHA-256", "content": "abc" }]));
        assert_eq!(bill["components"][0]["hashes"], Value::Null);
        assert_eq!(bill["dependencies"][0]["dependsOn"], json!(["pkg:cargo/theirs@2.0.0"]));
    }
}
