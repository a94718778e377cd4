//! Instructions of the host paths, counted by callgrind and compared with the kept counts.
//!
//! The time of a call differs from run to run by far more than its instructions. `counts` has only paths of which ten
//! runs of one build, while other programs run, differ by far less than [`BOUND`].

use crate::run::{Result, ask, at, cargo, pretty, program, root, run, target};
use crate::{bundle, venv};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The counts that are kept.
const KEPT: &str = "fixtures/counts.json";

/// The part of a count by which a path may differ.
const BOUND: f64 = 0.02;

/// Arguments of cargo for the paths in Rust and callgrind's requests, and for the package, which takes Python's symbols
/// from the interpreter that loads it.
const RUST: [&str; 5] =
    ["-p", "truebridge", "--features=cuda,dlpack,ipc,ndarray", "--example=counts", "--example=callgrind"];
const PYTHON: [&str; 2] = ["-p", "truebridge-python"];

/// What asks Python for the versions that the counts depend on.
const VERSIONS: &str = "import numpy, platform, torch; \
                        print('python', platform.python_version(), 'numpy', numpy.__version__, 'torch', torch.__version__)";

/// Instructions per call, by the name of the path.
type Counts = BTreeMap<String, f64>;

/// A group of paths: its name, the tools that its counts depend on or why it is left out, and what counts them with
/// this folder for files.
type Group<'a> = (&'static str, Result<String>, &'a dyn Fn(&Path) -> Result<Counts>);

/// Counts both groups, or only Rust's, and compares them with the kept counts, or with `write` replaces those.
pub fn count(rust: bool, write: bool) -> Result<()> {
    let (python, tools) = (venv::MAIN.made()?, tools());
    let with_python = tools.clone().and_then(|tools| Ok(format!("{tools}, {}", versions(&python)?)));
    let groups: [Group<'_>; 2] =
        [("Rust", tools, &of_rust), ("Python", with_python, &|folder| of_python(&python, folder))];
    let groups = groups.into_iter().take(if rust { 1 } else { 2 });
    let (mut kept, mut differences) = (read()?, Vec::new());
    for (name, tools, count) in groups {
        match tools.and_then(|tools| comparable(&kept, name, &tools, write).map(|()| tools)) {
            Err(reason) => println!("left out: {name}: {reason}"),
            Ok(tools) => {
                let counts = count(&fresh(name)?)?;
                let (table, differs) = compare(&counts_of(&kept, name), &counts);
                print!("{name}, instructions of a call:\n{table}");
                differences.extend(differs);
                kept.insert(name.into(), json!({ "tools": tools, "counts": counts }));
            }
        }
    }
    if write {
        return at(KEPT.as_ref(), fs::write(root().join(KEPT), pretty(&kept.into())?));
    }
    match differences.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "compared with {KEPT}: {}. If that is meant, run cargo xtask counts --write, and say why in the commit",
            differences.join(", ")
        )),
    }
}

/// Returns what the counts depend on other than the sources and the locked dependencies. The instruction sets decide
/// which functions copy memory.
fn tools() -> Result<String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("valgrind is asked by a sequence of instructions that exists only for x86-64".into());
    }
    let version = |name: &str, arguments: &[&str]| {
        ask(&mut program(name, arguments)).ok_or_else(|| format!("{name} is not installed"))
    };
    let processor = at("/proc/cpuinfo".as_ref(), fs::read_to_string("/proc/cpuinfo"))?;
    let rustc = version("rustc", &["--version"])?;
    let parts = [
        rustc.split(" (").next().unwrap_or_default().into(),
        version("valgrind", &["--version"])?,
        version("getconf", &["GNU_LIBC_VERSION"])?,
        if processor.contains(" avx2 ") { "avx2" } else { "no avx2" }.into(),
    ];
    Ok(parts.join(", "))
}

fn versions(python: &Path) -> Result<String> {
    ask(&mut program(python, &["-c", VERSIONS])).ok_or_else(|| "PyTorch or NumPy is not installed".into())
}

fn read() -> Result<Map<String, Value>> {
    let text = at(KEPT.as_ref(), fs::read_to_string(root().join(KEPT)))?;
    serde_json::from_str(&text).map_err(|error| format!("{KEPT}: {error}"))
}

/// Refuses a group that was counted with other tools: its counts say nothing here.
fn comparable(kept: &Map<String, Value>, name: &str, tools: &str, write: bool) -> Result<()> {
    match kept.get(name).and_then(|group| group["tools"].as_str()) {
        Some(kept) if kept != tools && !write => Err(format!(
            "the counts are kept for {kept}, and here are {tools}: count the commit before with --write, then this one"
        )),
        _ => Ok(()),
    }
}

fn counts_of(kept: &Map<String, Value>, name: &str) -> Counts {
    let counts = kept.get(name).and_then(|group| group["counts"].as_object());
    let each = counts.into_iter().flatten().filter_map(|(name, count)| Some((name.clone(), count.as_f64()?)));
    each.collect()
}

/// Compares each path. Returns a table, and what differs by more than the bound or is in only one of the two.
fn compare(kept: &Counts, counts: &Counts) -> (String, Vec<String>) {
    let (mut text, mut failed) = (String::new(), Vec::new());
    for (name, count) in counts {
        let part = kept.get(name).map(|kept| count / kept - 1.0);
        let verdict = match part {
            None => "is new",
            Some(part) if part > BOUND => "takes more",
            Some(part) if part < -BOUND => "takes less",
            Some(_) => "",
        };
        let part = part.map_or_else(String::new, |part| format!("{:+.2} %", 100.0 * part));
        text += format!("    {name:<40} {count:>11.1} {part:>9} {verdict}").trim_end();
        text.push('\n');
        if !verdict.is_empty() {
            failed.push(format!("{name} {verdict}"));
        }
    }
    failed.extend(kept.keys().filter(|name| !counts.contains_key(*name)).map(|name| format!("{name} is not counted")));
    (text, failed)
}

/// Makes a folder that only this user can enter, for sockets too. Its name has the same length everywhere, because it
/// is in tickets.
fn fresh(name: &str) -> Result<PathBuf> {
    let folder = std::env::temp_dir().join(format!("truebridge-{name}-{:010}", std::process::id()));
    at(&folder, fs::DirBuilder::new().mode(0o700).create(&folder))?;
    Ok(folder)
}

fn of_rust(out: &Path) -> Result<Counts> {
    build(&RUST)?;
    under_callgrind(out, [target().join("counts/examples/counts").as_path(), out])
}

fn of_python(python: &Path, out: &Path) -> Result<Counts> {
    build(&RUST)?;
    build(&PYTHON)?;
    let (built, package) = (target().join("counts"), target().join("counts/python/truebridge"));
    bundle::copy(&root().join("crates/bridge-python/python/truebridge"), &package)?;
    bundle::copy(&built.join("libbridge_python.so"), &package.join("_core.abi3.so"))?;
    let script = root().join("benches/counts.py");
    under_callgrind(out, [python, Path::new("-P"), &script, &built.join("examples/libcallgrind.so")])
}

fn build(what: &[&str]) -> Result<()> {
    let mut command = cargo(&[&["build", "--quiet", "--profile", "counts"], what].concat());
    run(command.env("PYO3_BUILD_EXTENSION_MODULE", "1").env("PYO3_NO_PYTHON", "1"))
}

/// Runs a program of `counts`, in an environment that is the same everywhere, and returns what it counted.
fn under_callgrind<const N: usize>(out: &Path, arguments: [&Path; N]) -> Result<Counts> {
    let mut command: Command = program("valgrind", &["--tool=callgrind", "--quiet"]);
    command.args(["--instr-atstart=no", "--collect-atstart=no"]);
    command.arg(format!("--callgrind-out-file={}", out.join("out").display())).args(arguments);
    command
        .env_clear()
        .env("PYTHONHASHSEED", "0")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("OMP_NUM_THREADS", "1")
        .env("CUDA_VISIBLE_DEVICES", "");
    let printed = command.env("PYTHONPATH", target().join("counts/python")).output();
    let printed = at(out, printed)?;
    if !printed.status.success() {
        return Err(String::from_utf8_lossy(&printed.stderr).into_owned());
    }
    let lines = String::from_utf8_lossy(&printed.stdout).into_owned();
    let counts = lines.lines().zip(1..).map(|(line, number)| {
        let file = out.join(format!("out.{number}"));
        let (calls, name) = line.split_once(' ').ok_or("a path without a name")?;
        let calls: f64 = calls.parse().map_err(|_| format!("{line}: no number of calls"))?;
        let total = total(&at(&file, fs::read_to_string(&file))?).ok_or_else(|| format!("{name}: no count"))?;
        Ok((name.into(), (10.0 * total / calls).round() / 10.0))
    });
    let counts = counts.collect();
    at(out, fs::remove_dir_all(out))?;
    counts
}

/// Reads the sum of a file of callgrind.
fn total(text: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix("totals: "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(each: &[(&str, f64)]) -> Counts {
        each.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    fn failed(kept: &[(&str, f64)], now: &[(&str, f64)]) -> Vec<String> {
        compare(&counts(kept), &counts(now)).1
    }

    #[test]
    fn a_path_may_differ_by_two_percent() {
        for count in [981.0, 1000.0, 1019.0] {
            assert!(failed(&[("plan", 1000.0)], &[("plan", count)]).is_empty(), "{count}");
        }
        let differs = [(979.0, "plan takes less"), (1021.0, "plan takes more")];
        for (count, verdict) in differs {
            assert_eq!(failed(&[("plan", 1000.0), ("copy", 5.0)], &[("plan", count), ("copy", 5.0)]), [verdict]);
        }
    }

    #[test]
    fn a_path_that_one_side_lacks_is_named() {
        assert_eq!(failed(&[("old", 5.0)], &[]), ["old is not counted"]);
        assert_eq!(failed(&[], &[("copy", 5.0)]), ["copy is new"]);
    }

    #[test]
    fn counts_of_other_tools_are_not_compared() {
        let kept = json!({ "Rust": { "tools": "rustc 1.95.0", "counts": { "plan": 383.1 } } });
        let kept = kept.as_object().unwrap();
        assert_eq!(counts_of(kept, "Rust"), counts(&[("plan", 383.1)]));
        assert!(comparable(kept, "Rust", "rustc 1.95.0", false).is_ok());
        let refused = comparable(kept, "Rust", "rustc 1.96.0", false).unwrap_err();
        assert!(refused.contains("kept for rustc 1.95.0, and here are rustc 1.96.0"), "{refused}");
        assert!(comparable(kept, "Rust", "rustc 1.96.0", true).is_ok(), "they are replaced");
    }

    #[test]
    fn the_sum_is_read() {
        assert_eq!(total("summary: 7\n\ntotals: 383028\n"), Some(383_028.0));
        assert_eq!(total("summary: 7\n"), None);
    }
}
