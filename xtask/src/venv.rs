//! The virtual environment that the suite and the Python tests run in.

use crate::run::{Result, ask, at, program, root, run, target};
use std::fs;
use std::path::{Path, PathBuf};

/// Requirements for any machine, and those for a machine with a CUDA device.
const REQUIREMENTS: [&str; 2] = ["xtask/requirements.txt", "xtask/requirements-cuda.txt"];

/// Names under which a Python may be found, the first that works is taken. `$PYTHON` comes before them.
const PYTHONS: [&str; 6] = ["python3", "python3.13", "python3.12", "python3.11", "python3.10", "python3.14"];

/// The Python of the environment, which is made, and completed where the requirements have changed.
pub fn ready() -> Result<PathBuf> {
    let venv = target().join("venv");
    let python = venv.join("bin/python");
    if !works(&python) {
        let found = find().ok_or("no Python 3.10 or later with venv was found: install one, or set PYTHON")?;
        println!("making {} with {found}", venv.display());
        run(program(&found, &["-m", "venv", "--clear"]).arg(&venv))?;
    }
    install(&python, &venv.join("requirements.stamp"))?;
    Ok(python)
}

/// Installs what the requirements name, unless the stamp says that this has been done. What cannot be had for this
/// Python is named and left out.
fn install(python: &Path, stamp: &Path) -> Result<()> {
    let files = &REQUIREMENTS[..if has_cuda() { 2 } else { 1 }];
    let texts = files.iter().map(|file| at(Path::new(file), fs::read_to_string(root().join(file))));
    let wanted = texts.collect::<Result<String>>()?;
    if fs::read_to_string(stamp).is_ok_and(|done| done == wanted) {
        return Ok(());
    }
    let pip = |what: &[&str]| run(program(python, &["-m", "pip", "install", "--quiet"]).args(what));
    println!("installing what {} name", files.join(" and "));
    let together: Vec<&str> = files.iter().flat_map(|file| ["-r", file]).collect();
    if pip(&together).is_ok() {
        return at(stamp, fs::write(stamp, wanted));
    }
    println!("not everything can be had together: trying one by one");
    let left_out: Vec<&str> = requirements(&wanted).filter(|one| pip(&[one]).is_err()).collect();
    println!("left out: {}", left_out.join(", "));
    Ok(())
}

/// The requirements in the text of a requirements file.
fn requirements(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

fn find() -> Option<String> {
    let chosen = std::env::var("PYTHON").ok();
    chosen.into_iter().chain(PYTHONS.map(String::from)).find(|name| works(Path::new(name)))
}

/// Whether this is a Python that can be used. A shim that only stands for a Python is run to see.
fn works(python: &Path) -> bool {
    let script = "import sys, ssl, venv, ensurepip; print(sys.version_info >= (3, 10))";
    ask(&mut program(python, &["-c", script])).is_some_and(|answer| answer == "True")
}

/// Whether there is a CUDA device, as far as can be seen without loading its driver.
fn has_cuda() -> bool {
    let listed = fs::read_dir("/proc/driver/nvidia/gpus").is_ok_and(|mut gpus| gpus.next().is_some());
    listed
        || Path::new("/dev/nvidia0").exists()
        || ask(&mut program("nvidia-smi", &["-L"])).is_some_and(|l| !l.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_no_requirements() {
        let text = "# words\n\na==1\n  b==2; python_version < \"3\"\n";
        assert_eq!(requirements(text).collect::<Vec<_>>(), ["a==1", "b==2; python_version < \"3\""]);
    }

    #[test]
    fn a_program_that_is_no_python_is_skipped() {
        assert!(!works(Path::new("/bin/false")));
        assert!(!works(Path::new("/nowhere/python3")));
    }
}
