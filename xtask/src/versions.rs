//! Versions of Python and of the frameworks, each in a separate environment: the suite on the CPU, one row a version.

use crate::run::{Result, ask, at, pretty, program, remove, root, target};
use crate::{bundle, venv};
use clap::Parser;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// What is run: environments, each with a Python, what else is installed, and the versions of a package, in turn. One
/// without a package is for its Python.
const ENVIRONMENTS: &str = "xtask/versions.json";

/// Where the rows are kept, of this run and of former ones. The page `docs/versions.md` shows them.
const ROWS: &str = "docs/versions.json";

/// The seed of every run: versions are compared on the same cases.
const SEED: &str = "1";

/// Run the suite on the CPU for each version of Python and of the frameworks that xtask/versions.json names, and write
/// docs/versions.json. Each is installed into an environment that is removed afterwards.
#[derive(Parser)]
#[command(name = "cargo xtask conformance --versions", no_binary_name = true)]
struct Options {
    /// Run only these, such as torch or torch==2.9.0; rows of others are kept.
    #[arg(long)]
    only: Vec<String>,
    /// Cases of each pair.
    #[arg(long, default_value_t = 200)]
    cases: u32,
}

/// Runs the suite for the subjects that the options name, or for all. A version that fails is a row like any other. It
/// fails the command at its end, and so does one that this machine cannot have.
pub fn run(options: &[String]) -> Result<()> {
    let Options { only, cases } = Options::parse_from(options);
    let environments = read(ENVIRONMENTS)?;
    let mut wanted: Vec<(&Value, Vec<String>)> = Vec::new();
    for environment in environments.as_array().into_iter().flatten() {
        let subjects = subjects(environment).into_iter().filter(|subject| chosen(subject, &only)).collect::<Vec<_>>();
        if !subjects.is_empty() {
            wanted.push((environment, subjects));
        }
    }
    let count: usize = wanted.iter().map(|(_, subjects)| subjects.len()).sum();
    if count == 0 {
        return Err(format!("{ENVIRONMENTS} has no {}", only.join(" and no ")));
    }
    let bundle = target().join("bundle");
    bundle::write(&bundle)?;
    let (mut done, mut failed) = (0, Vec::new());
    for (environment, subjects) in wanted {
        let place = target().join(format!("versions-{}", std::process::id()));
        for subject in subjects {
            done += 1;
            let start = Instant::now();
            let said = match ready(environment, &subject, &place) {
                Err(reason) => format!("left out, its row stays: {reason}"),
                Ok(python) => {
                    let row = judge(&python, &subject, &bundle, cases).unwrap_or_else(|reason| failure(&reason));
                    let said = [text(&row, "verdict"), text(&row, "reason")].join(" ");
                    keep(environment, &subject, row)?;
                    said.trim_end().to_owned()
                }
            };
            println!("[{done} of {count}] {subject}: {said} ({:.0} s)", start.elapsed().as_secs_f64());
            if said != "passed" {
                failed.push(subject);
            }
        }
        remove(&place)?;
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("{} did not pass", failed.join(", "))) }
}

/// Returns the rows of all runs.
pub fn rows() -> Result<Value> {
    read(ROWS)
}

/// Returns what an environment is for, as requirements: versions of its package, or its Python.
fn subjects(environment: &Value) -> Vec<String> {
    match environment["package"].as_str() {
        Some(package) => strings(&environment["versions"]).map(|version| format!("{package}=={version}")).collect(),
        None => vec![format!("python=={}", text(environment, "python"))],
    }
}

fn chosen(subject: &str, only: &[String]) -> bool {
    only.is_empty()
        || only.iter().any(|one| subject == one || subject.split_once("==").is_some_and(|(name, _)| name == one))
}

/// Installs a subject and the rest of its environment, and returns the Python that has them.
///
/// # Errors
///
/// The reason why they cannot be had on this machine, which says nothing of the subject.
fn ready(environment: &Value, subject: &str, place: &Path) -> Result<PathBuf> {
    let python = place.join("bin/python");
    if !python.exists() {
        let version = text(environment, "python");
        let found = venv::interpreter(version).ok_or_else(|| format!("no Python {version} was found"))?;
        quiet(program(found, &["-m", "venv"]).arg(place))?;
    }
    let mut install = program(&python, &["-m", "pip", "install", "--quiet", "--no-cache-dir", "--upgrade"]);
    // What the version before has brought is replaced as well.
    install.args(["--upgrade-strategy", "eager"]).args(strings(&environment["with"]));
    quiet(install.args(environment["package"].as_str().map(|_| subject)))?;
    Ok(python)
}

/// Returns the row of a subject: its environment, and the verdict.
///
/// # Errors
///
/// The reason why the suite says nothing of it.
fn judge(python: &Path, subject: &str, bundle: &Path, cases: u32) -> Result<Value> {
    let (name, version) = subject.split_once("==").unwrap_or((subject, ""));
    let report = target().join("versions").join(subject);
    remove(&report)?;
    let mut suite = program(python, &[]);
    // With the fixtures of the bundle, so that failing cases are kept next to the report.
    suite.arg(bundle.join("conformance.py"));
    suite.args(["--device", "cpu", "--seed", SEED, "--cases", &cases.to_string(), "--report"]).arg(&report);
    let passed = quiet(&mut suite);
    let file = report.join("report.json");
    let written = fs::read_to_string(&file).map_err(|_| passed.clone().err().unwrap_or("no report".into()))?;
    let report: Value = serde_json::from_str(&written).map_err(|error| error.to_string())?;
    let mut row = verdict(&report, name, version)?;
    if let (Err(reason), None) = (passed, row["reason"].as_str()) {
        row = failure(&reason);
    }
    Ok(row)
}

/// Returns the row of a report for a version of a package.
///
/// # Errors
///
/// The report is about another version, or has no pair with the package.
fn verdict(report: &Value, name: &str, version: &str) -> Result<Value> {
    let host = &report["host"];
    let ran = if name == "python" { &host["python"] } else { &host["versions"][name] };
    let ran = ran.as_str().unwrap_or_default();
    let same = ran == version || name == "python" && ran.starts_with(&format!("{version}."));
    if !same {
        return Err(format!("the suite saw {name} {ran:?}"));
    }
    let pairs = || report["pairs"].as_array().into_iter().flatten();
    let has = |pair: &&Value| name == "python" || pair["from"] == name || pair["to"] == name;
    let of_it = |pair: &Value| {
        pair["properties"].as_array().is_some_and(|rows| rows.iter().any(|row| row["verdict"] == "passed"))
    };
    if !pairs().filter(has).any(of_it) {
        return Err(format!("no pair with {name} passed anything"));
    }
    let mut failed = Vec::new();
    for pair in pairs() {
        for row in pair["properties"].as_array().into_iter().flatten().filter(|row| row["verdict"] == "failed") {
            failed.push(format!("{} → {}: {}", text(pair, "from"), text(pair, "to"), text(row, "name")));
        }
    }
    let beside: serde_json::Map<String, Value> = host["versions"]
        .as_object()
        .into_iter()
        .flatten()
        // `torch-capsules` is PyTorch by another protocol.
        .filter(|(other, _)| *other != name && !other.contains('-'))
        .map(|(other, version)| (other.clone(), version.clone()))
        .collect();
    let summary = &report["summary"];
    Ok(json!({
        "verdict": if failed.is_empty() { "passed" } else { "failed" },
        "reason": if failed.is_empty() { Value::Null } else { failed.join(", ").into() },
        "pairs": pairs().count(),
        "cases": summary["cases"],
        "python": host["python"],
        "with": beside,
        "host": format!("{}, {} cores, {}", text(host, "cpu"), host["cores"], text(host, "os")),
        "date": text(host, "date").get(..10),
    }))
}

/// Returns the row of a version of which the suite made no report.
fn failure(reason: &str) -> Value {
    let date = ask(&mut program("date", &["-u", "+%F"]));
    json!({ "verdict": "failed", "reason": reason, "pairs": 0, "cases": 0, "with": {}, "host": "", "date": date })
}

/// Puts a row into the file, in place of the former one of this version. The order is that of the environments; a row
/// of a version that they no longer name is dropped.
fn keep(environment: &Value, subject: &str, mut row: Value) -> Result<()> {
    let (name, version) = subject.split_once("==").unwrap_or((subject, ""));
    row["package"] = name.into();
    row["version"] = version.into();
    if row["python"].is_null() {
        row["python"] = environment["python"].clone();
    }
    // Read again for each row: another run may have written in the meantime.
    let rows = read(ROWS)?;
    let environments = read(ENVIRONMENTS)?;
    let of = |row: &Value| format!("{}=={}", text(row, "package"), text(row, "version"));
    let order = environments.as_array().into_iter().flatten().flat_map(subjects);
    let kept: Vec<Value> = order
        .filter_map(|one| {
            if one == subject { Some(row.clone()) } else { rows.as_array()?.iter().find(|row| of(row) == one).cloned() }
        })
        .collect();
    let place = root().join(ROWS);
    at(&place, fs::write(&place, pretty(&kept.into())?))
}

/// Runs a program without showing its output. The error is the last line that it wrote.
fn quiet(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{name} does not start: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stderr, output.stdout].concat();
    let said = String::from_utf8_lossy(&said);
    let mut lines = said.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("[notice]"));
    Err(lines.next_back().map_or_else(|| format!("ended with {}", output.status), str::to_owned))
}

fn read(file: &str) -> Result<Value> {
    let place = root().join(file);
    let text = at(&place, fs::read_to_string(&place))?;
    serde_json::from_str(&text).map_err(|error| format!("{file}: {error}"))
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn strings(value: &Value) -> impl Iterator<Item = &str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(verdict: &str) -> Value {
        json!({
            "host": {
                "date": "2026-11-22T18:21:37Z", "os": "Debian", "cpu": "Xeon", "cores": 2, "python": "3.12.1",
                "versions": { "numpy": "2.5.5", "torch": "2.9.0", "torch-capsules": "2.9.0" },
            },
            "pairs": [
                { "from": "torch", "to": "numpy", "properties": [{ "name": "values", "verdict": "passed" }] },
                { "from": "numpy", "to": "torch", "properties": [{ "name": "life", "verdict": verdict }] },
            ],
            "summary": { "cases": 400 },
        })
    }

    #[test]
    fn a_row_says_what_ran() {
        let row = verdict(&report("passed"), "torch", "2.9.0").unwrap();
        assert_eq!(row["verdict"], "passed");
        assert_eq!(row["with"], json!({ "numpy": "2.5.5" }));
        assert_eq!((&row["date"], &row["pairs"], &row["cases"]), (&json!("2026-11-22"), &json!(2), &json!(400)));
        assert_eq!(verdict(&report("passed"), "python", "3.12").unwrap()["verdict"], "passed");
    }

    #[test]
    fn a_failed_property_is_named() {
        let row = verdict(&report("failed"), "torch", "2.9.0").unwrap();
        assert_eq!((text(&row, "verdict"), text(&row, "reason")), ("failed", "numpy → torch: life"));
    }

    #[test]
    fn another_version_is_no_proof() {
        assert!(verdict(&report("passed"), "torch", "2.9.1").is_err());
        assert!(verdict(&report("passed"), "tensorflow", "2.21.0").is_err());
        assert!(verdict(&report("passed"), "python", "3.1").is_err());
        let mut empty = report("passed");
        empty["pairs"] = json!([]);
        assert!(verdict(&empty, "torch", "2.9.0").is_err());
    }

    #[test]
    fn subjects_are_chosen_by_name_or_version() {
        let environment = json!({ "python": "3.12", "package": "torch", "versions": ["2.9.0", "2.15.0"] });
        assert_eq!(subjects(&environment), ["torch==2.9.0", "torch==2.15.0"]);
        assert_eq!(subjects(&json!({ "python": "3.12" })), ["python==3.12"]);
        assert!(chosen("torch==2.9.0", &[]));
        assert!(chosen("torch==2.9.0", &["torch".into()]) && chosen("torch==2.9.0", &["torch==2.9.0".into()]));
        assert!(!chosen("torch==2.9.0", &["torch==2.9".into()]) && !chosen("torch==2.9.0", &["tor".into()]));
    }
}
