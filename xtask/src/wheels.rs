//! Wheels: built by maturin out of a source distribution, and looked into by auditwheel. The package's is installed, and
//! runs the README.

use crate::run::{Result, ask, at, cargo_home, program, remove, root, run, target};
use crate::{bill, venv, version, versions};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package, and the example that others start from.
const PACKAGE: &str = "crates/bridge-python";
const EXAMPLE: &str = "examples/kernel";

/// A kind of processor that wheels are built for.
struct Processor {
    /// The systems that its wheels run on: those with this version of glibc or a later one. So do the frameworks' own
    /// wheels.
    platform: &'static str,
    /// The target of Rust where it is not this machine's.
    target: Option<&'static str>,
}

const X86_64: Processor = Processor { platform: "manylinux_2_28_x86_64", target: None };
const AARCH64: Processor = Processor { platform: "manylinux_2_28_aarch64", target: Some("aarch64-unknown-linux-gnu") };

/// The most bytes that the wheel of the package may take.
const LIMIT: u64 = 10 << 20;

/// What the wheel of the package holds: ends of the names of files.
const FILES: [&str; 5] = [
    "truebridge/py.typed",
    ".dist-info/licenses/LICENSE-MIT",
    ".dist-info/licenses/LICENSE-APACHE",
    ".dist-info/sboms/truebridge-python.cyclonedx.json",
    ".dist-info/sboms/build.cyclonedx.json",
];

/// Lines that its metadata have, or such lines begin with.
const METADATA: [&str; 7] = [
    "License-Expression: MIT OR Apache-2.0",
    "License-File: LICENSE-MIT",
    "License-File: LICENSE-APACHE",
    "Requires-Python: >=3.10",
    "Keywords: ",
    "Description-Content-Type: text/markdown",
    "Classifier: Typing :: Typed",
];

/// How the metadata name a version of Python.
const FOR_PYTHON: &str = "Classifier: Programming Language :: Python :: 3.";

/// What is uploaded for Python.
pub struct Made {
    /// The source distribution.
    pub source: PathBuf,
    /// The wheel of the package, built from it.
    pub wheel: PathBuf,
    /// The one for processors of ARM, or why there is none. It is installed nowhere here.
    pub aarch64: Result<PathBuf>,
}

/// Makes what [`make`] makes, unless this machine lacks the tools.
pub fn check() -> Result<()> {
    match venv::WHEELS.ready() {
        Ok(tools) => make(&tools).map(drop),
        Err(reason) => {
            println!("left out: wheels: {reason}");
            Ok(())
        }
    }
}

/// Builds the wheels with the tools of this Python, and checks them: one file for all versions of Python, which needs
/// nothing of the system but what the platform allows. The package's is built only from its source distribution, and
/// installed.
pub fn make(tools: &Path) -> Result<Made> {
    let top = target().join("wheels");
    remove(&top)?;
    let (source, unpacked) = source(tools, &top)?;
    let manifest = unpacked.join(PACKAGE).join("Cargo.toml");
    let wheel = build(tools, &unpacked, &manifest, &top.join(PACKAGE), &X86_64)?;
    complete(tools, &wheel)?;
    build(tools, &unpacked, &root().join(EXAMPLE).join("Cargo.toml"), &top.join(EXAMPLE), &X86_64)?;
    installed(&wheel, &top.join("bare"))?;
    let aarch64 = match has_target(AARCH64.target) {
        false => Err("rustup target add aarch64-unknown-linux-gnu".into()),
        true => {
            let wheel = build(tools, &unpacked, &manifest, &top.join("aarch64"), &AARCH64)?;
            complete(tools, &wheel)?;
            Ok(wheel)
        }
    };
    Ok(Made { source, wheel, aarch64 })
}

/// Returns whether rustup has the standard library of this target.
fn has_target(target: Option<&str>) -> bool {
    let installed = ask(&mut program("rustup", &["target", "list", "--installed"])).unwrap_or_default();
    target.is_none_or(|target| installed.lines().any(|line| line == target))
}

/// Makes the source distribution of the package. Returns it, and the folder that it is unpacked in.
fn source(tools: &Path, top: &Path) -> Result<(PathBuf, PathBuf)> {
    let (out, unpacked) = (top.join("sdist"), top.join("source"));
    let mut sdist = maturin(tools, "sdist");
    run(sdist.arg("--manifest-path").arg(format!("{PACKAGE}/Cargo.toml")).arg("--out").arg(&out))?;
    let sdist = only(&out)?;
    println!("{}", name(&sdist));
    run(program(tools, &["-m", "tarfile", "-e"]).arg(&sdist).arg(&unpacked))?;
    Ok((sdist, only(&unpacked)?))
}

/// Builds a wheel for a processor. The source distribution is unpacked in `unpacked`.
fn build(tools: &Path, unpacked: &Path, manifest: &Path, out: &Path, processor: &Processor) -> Result<PathBuf> {
    at(out, fs::create_dir_all(out))?;
    let place = target().join("wheels").join(bill::FILE);
    bill::of_build(tools, &place)?;
    let mut build = maturin(tools, "build");
    build.args(["--release", "--offline", "--zig", "--compatibility", "manylinux_2_28"]);
    build.args(["--auditwheel", "check", "--quiet", "--sbom-include"]).arg(&place);
    build.arg("--manifest-path").arg(manifest).arg("--interpreter").arg(tools).arg("--out").arg(out);
    processor.target.iter().for_each(|target| _ = build.args(["--target", target]));
    // Messages of panics name the files of the sources. The folders above them are those of one machine. Each wheel has
    // the same flags, so that cargo builds what they share once; the last prefix that fits is replaced.
    let home = cargo_home().unwrap_or_default();
    let remap = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    let flags = [remap(&home, "cargo"), remap(&root(), "."), remap(unpacked, ".")];
    build.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
    run(build.env("CARGO_TARGET_DIR", target()))?;
    let wheel = only(out)?;
    let name = name(&wheel);
    let shown = ask(program(tools, &["-m", "auditwheel", "show", "--json"]).arg(&wheel));
    let shown = shown.ok_or_else(|| format!("auditwheel cannot read {name}"))?;
    let report: Value = serde_json::from_str(&shown).map_err(|error| format!("auditwheel on {name}: {error}"))?;
    match defect(&name, &report, processor.platform) {
        Some(defect) => Err(defect),
        None => Ok(wheel),
    }
}

/// Returns a call of maturin. It finds Zig by the Python, and the files of a package get the time of the commit.
fn maturin(tools: &Path, task: &str) -> Command {
    let mut command = program(tools, &["-m", "maturin", task]);
    command.env("CARGO_ZIGBUILD_PYTHON_PATH", tools);
    bill::epoch().iter().for_each(|epoch| _ = command.env("SOURCE_DATE_EPOCH", epoch));
    command
}

/// Returns the file or folder in a folder that holds one.
fn only(folder: &Path) -> Result<PathBuf> {
    let mut files = at(folder, fs::read_dir(folder))?.flatten().map(|file| file.path());
    match (files.next(), files.next()) {
        (Some(file), None) => Ok(file),
        _ => Err(format!("{} does not hold one file", folder.display())),
    }
}

fn name(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns what is wrong with a wheel of this name for this platform, of which auditwheel says this.
fn defect(name: &str, report: &Value, platform: &str) -> Option<String> {
    let tag = report["sym_tag"].as_str().unwrap_or_default();
    let (overall, external) = (report["overall_tag"].as_str().unwrap_or_default(), &report["external_libs"]);
    let stem = name.strip_suffix(".whl").unwrap_or_default();
    if stem.split('-').next_back() != Some(platform) {
        Some(format!("the name of {name} does not say {platform}"))
    } else if !supports(overall, platform) {
        Some(format!("{name} does not run on {platform}: auditwheel says {overall:?}, by its symbols {tag:?}"))
    } else if external.as_object().is_none_or(|libraries| !libraries.is_empty()) {
        Some(format!("{name} needs other libraries than the system's: {external}"))
    } else if !stem.contains("-abi3-") {
        Some(format!("{name} is for one version of Python only"))
    } else {
        None
    }
}

/// Returns whether what has one tag runs on the systems of another: whether it needs no later glibc.
fn supports(tag: &str, platform: &str) -> bool {
    fn glibc(tag: &str) -> Option<(u32, &str)> {
        let (minor, machine) = tag.strip_prefix("manylinux_2_")?.split_once('_')?;
        Some((minor.parse().ok()?, machine))
    }
    match (glibc(tag), glibc(platform)) {
        (Some((needed, one)), Some((there, other))) => needed <= there && one == other,
        _ => false,
    }
}

/// Checks what is in the wheel of the package: files, metadata, the versions of Python that passed, and the size.
fn complete(tools: &Path, wheel: &Path) -> Result<()> {
    let script = "import json, sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); names = wheel.namelist(); \
                  text = next(wheel.read(name).decode() for name in names if name.endswith('.dist-info/METADATA')); \
                  print(json.dumps({'files': names, 'metadata': text.split('\\n\\n')[0].splitlines()}))";
    let contents = ask(program(tools, &["-c", script]).arg(wheel)).ok_or("the wheel cannot be read")?;
    let contents: Value = serde_json::from_str(&contents).map_err(|error| error.to_string())?;
    let (name, bytes) = (name(wheel), at(wheel, wheel.metadata())?.len());
    let mut lacks = lacks(&contents, &passed(&versions::rows()?));
    if bytes > LIMIT {
        lacks.push(format!("less than {bytes} bytes: it may have {LIMIT}"));
    }
    match lacks.is_empty() {
        true => println!("{name}, {:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        false => return Err(format!("{name} needs\n{}", lacks.join("\n"))),
    }
    Ok(())
}

/// Returns the minor versions of Python that passed the suite.
pub fn passed(rows: &Value) -> Vec<String> {
    let passed = |row: &&Value| row["package"] == "python" && row["verdict"] == "passed";
    let rows = rows.as_array().into_iter().flatten().filter(passed);
    rows.filter_map(|row| row["version"].as_str()?.strip_prefix("3.").map(str::to_owned)).collect()
}

/// Returns what a wheel lacks, of whose contents these are the names of the files and the lines of the metadata.
fn lacks(contents: &Value, pythons: &[String]) -> Vec<String> {
    let of = |key: &str| -> Vec<String> {
        contents[key].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let (files, lines) = (of("files"), of("metadata"));
    let missing = FILES.iter().filter(|end| !files.iter().any(|file| file.ends_with(**end)));
    let mut lacks: Vec<String> = missing.map(|end| format!("the file …{end}")).collect();
    let missing = METADATA.iter().filter(|start| !lines.iter().any(|line| line.starts_with(**start)));
    lacks.extend(missing.map(|start| format!("the metadata {start:?}")));
    let named: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix(FOR_PYTHON)).collect();
    if named != pythons {
        lacks.push(format!("classifiers of the versions of Python that passed: 3.{{{}}}", pythons.join(", ")));
    }
    lacks
}

/// Installs the wheel into an environment with nothing else, where it is imported, has this version, and says what the
/// machine has. Returns the Python of the environment.
pub fn in_bare(python: &Path, wheel: &Path, bare: &Path) -> Result<PathBuf> {
    run(program(python, &["-m", "venv", "--clear"]).arg(bare))?;
    let python = bare.join("bin/python");
    run(program(&python, &["-m", "pip", "install", "--quiet", "--no-index"]).arg(wheel))?;
    let script = "import importlib.metadata as m, truebridge; print(m.version('truebridge'), truebridge.__file__)";
    let said = ask(&mut program(&python, &["-c", script])).unwrap_or_default();
    if !said.starts_with(&format!("{} {}", version::CURRENT, bare.display())) {
        return Err(format!("a bare environment imports not the wheel's package, but {said:?}"));
    }
    let doctor = program(&python, &["-m", "truebridge", "doctor", "--json"]).output();
    let doctor = doctor.map_err(|error| error.to_string())?.stdout;
    serde_json::from_slice::<Value>(&doctor).map_err(|error| format!("doctor without frameworks: {error}"))?;
    Ok(python)
}

/// Installs the wheel into a bare environment, which then sees the frameworks of the main one, and runs the README.
fn installed(wheel: &Path, bare: &Path) -> Result<()> {
    let main = venv::MAIN.ready()?;
    let python = in_bare(&main, wheel, bare)?;
    let folder = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let folder = |python: &Path| ask(&mut program(python, &["-c", folder])).ok_or("no folder of packages");
    let link = PathBuf::from(folder(&python)?).join("frameworks.pth");
    at(&link, fs::write(&link, folder(&main)? + "\n"))?;
    let mut readme = program(&python, &["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "README or installed"]);
    readme.arg(format!("{PACKAGE}/tests/test_pages.py")).env("TRUEBRIDGE_INSTALLED", bare);
    run(readme.env("PYTHONPATH", root().join("conformance/python")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const NAME: &str = "a-1-cp310-abi3-manylinux_2_28_x86_64.whl";

    #[test]
    fn a_wheel_says_where_it_runs() {
        let report = |tag| json!({ "overall_tag": tag, "sym_tag": tag, "external_libs": {} });
        let defect = |name, tag| defect(name, &report(tag), X86_64.platform);
        assert_eq!(defect(NAME, "manylinux_2_28_x86_64"), None);
        assert_eq!(defect(NAME, "manylinux_2_17_x86_64"), None);
        assert!(defect(NAME, "manylinux_2_34_x86_64").is_some());
        assert!(defect(NAME, "manylinux_2_17_aarch64").is_some());
        assert!(defect(NAME, "linux_x86_64").is_some());
        assert!(defect("a-1-cp310-abi3-linux_x86_64.whl", "manylinux_2_28_x86_64").is_some());
        assert!(defect("a-1-cp310-cp310-manylinux_2_28_x86_64.whl", "manylinux_2_28_x86_64").is_some());
    }

    #[test]
    fn a_wheel_brings_its_libraries() {
        let tag = X86_64.platform;
        let report = json!({ "overall_tag": tag, "sym_tag": tag, "external_libs": { "libcuda.so.1": null } });
        assert!(defect(NAME, &report, tag).is_some_and(|defect| defect.contains("libcuda")));
        assert!(defect(NAME, &json!({ "overall_tag": tag, "sym_tag": tag }), tag).is_some());
    }

    #[test]
    fn what_a_wheel_lacks_is_named() {
        let files: Vec<String> = FILES.iter().map(|end| format!("a{end}")).collect();
        let mut lines = METADATA.map(str::to_owned).to_vec();
        lines.push(format!("{FOR_PYTHON}10"));
        let pythons = ["10".to_owned()];
        assert_eq!(lacks(&json!({ "files": files, "metadata": lines }), &pythons), Vec::<String>::new());
        for left_out in 0..files.len() {
            let mut files = files.clone();
            files.remove(left_out);
            assert_eq!(lacks(&json!({ "files": files, "metadata": lines }), &pythons).len(), 1);
        }
        for left_out in 0..lines.len() {
            let mut lines = lines.clone();
            lines.remove(left_out);
            assert_eq!(lacks(&json!({ "files": files, "metadata": lines }), &pythons).len(), 1);
        }
        assert_eq!(lacks(&json!({ "files": files, "metadata": lines }), &[]).len(), 1);
    }

    #[test]
    fn a_python_passed_by_a_row() {
        let rows = json!([
            { "package": "python", "version": "3.10", "verdict": "passed" },
            { "package": "python", "version": "3.13", "verdict": "failed" },
            { "package": "torch", "version": "3.9", "verdict": "passed" },
        ]);
        assert_eq!(passed(&rows), ["10"]);
    }
}
