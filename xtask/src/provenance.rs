//! What a wheel says of its build: a software bill of materials in the format CycloneDX, beside maturin's of the crates.

use crate::run::{Result, ask, at, program};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// The name of the file. Installers keep it in `sboms` of the folder of the distribution, as PEP 770 has it.
pub const FILE: &str = "build.cyclonedx.json";

/// Modules of the tools whose versions matter, beside the compiler.
const TOOLS: [&str; 2] = ["maturin", "ziglang"];

/// Writes the file to `place`: the commit, and whether files were changed since; the versions of the compiler and of the
/// tools, which the Python of this environment has; and the hash of Cargo.lock, which pins every crate.
pub fn write(python: &Path, place: &Path) -> Result<()> {
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
    let text = serde_json::to_string_pretty(&bill).map_err(|error| error.to_string())?;
    at(place, fs::write(place, text + "\n"))
}

/// Returns the time of the commit, in seconds: the time that files of a package get, so that two builds are equal.
pub fn epoch() -> Option<String> {
    git(&["log", "-1", "--format=%ct"])
}

fn git(arguments: &[&str]) -> Option<String> {
    ask(&mut program("git", arguments))
}
