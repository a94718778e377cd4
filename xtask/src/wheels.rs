//! Wheels: built by maturin, and the systems that they run on as auditwheel sees them.

use crate::run::{Result, ask, at, program, run, target};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// The folders of the packages of Python that are built: the package itself, and the example that others start from.
const PACKAGES: [&str; 2] = ["crates/bridge-python", "examples/kernel"];

/// Modules of Python that build a wheel and look into it.
const TOOLS: [&str; 2] = ["maturin", "auditwheel"];

/// Builds the wheel of each package and checks it: one file for all versions of Python, which needs nothing of the system
/// but what `manylinux` allows, and whose name says so.
pub fn check(python: &Path) -> Result<()> {
    let module = |name: &str| program(python, &["-m", name]);
    let missing: Vec<&str> = TOOLS.into_iter().filter(|tool| ask(module(tool).arg("--version")).is_none()).collect();
    if !missing.is_empty() {
        println!("wheels left out: {} is not installed", missing.join(" and "));
        return Ok(());
    }
    let wheels = target().join("wheels");
    for package in PACKAGES {
        let out = wheels.join(package);
        if out.exists() {
            at(&out, fs::remove_dir_all(&out))?;
        }
        let mut build = module("maturin");
        build
            .args(["build", "--release", "--quiet", "--offline", "--manifest-path"])
            .arg(format!("{package}/Cargo.toml"));
        run(build.arg("--interpreter").arg(python).arg("--out").arg(&out))?;
        let wheel = only(&out)?;
        let name = wheel.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let shown = ask(module("auditwheel").args(["show", "--json"]).arg(&wheel));
        let shown = shown.ok_or_else(|| format!("auditwheel cannot read {name}"))?;
        let report: Value = serde_json::from_str(&shown).map_err(|error| format!("auditwheel on {name}: {error}"))?;
        if let Some(defect) = defect(&name, &report) {
            return Err(defect);
        }
        println!("{name}");
    }
    Ok(())
}

/// Returns the file in a folder that holds one.
fn only(folder: &Path) -> Result<PathBuf> {
    let mut files = at(folder, fs::read_dir(folder))?.flatten().map(|file| file.path());
    match (files.next(), files.next()) {
        (Some(file), None) => Ok(file),
        _ => Err(format!("{} does not hold one wheel", folder.display())),
    }
}

/// Returns what is wrong with a wheel of this name, of which auditwheel says this.
fn defect(name: &str, report: &Value) -> Option<String> {
    let tag = report["overall_tag"].as_str().unwrap_or_default();
    let stem = name.strip_suffix(".whl").unwrap_or_default();
    if !tag.starts_with("manylinux") {
        Some(format!("{name} runs on no manylinux system: auditwheel says {tag:?}"))
    } else if !stem.split('-').next_back().is_some_and(|platforms| platforms.split('.').any(|one| one == tag)) {
        Some(format!("{name} runs on {tag}, and its name says another platform"))
    } else if !stem.contains("-abi3-") {
        Some(format!("{name} is for one version of Python only"))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_wheel_says_where_it_runs() {
        let defect = |name, tag| defect(name, &json!({ "overall_tag": tag }));
        assert_eq!(defect("a-1-cp310-abi3-manylinux_2_34_x86_64.whl", "manylinux_2_34_x86_64"), None);
        let two = "a-1-cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl";
        assert_eq!(defect(two, "manylinux_2_17_x86_64"), None);
        assert!(defect("a-1-cp310-abi3-manylinux_2_17_x86_64.whl", "manylinux_2_34_x86_64").is_some());
        assert!(defect("a-1-cp310-abi3-linux_x86_64.whl", "linux_x86_64").is_some());
        assert!(defect("a-1-cp310-cp310-manylinux_2_34_x86_64.whl", "manylinux_2_34_x86_64").is_some());
    }
}
